"""Newton's method for tokens that rest, and what is known about such a point."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.errors import (
    InvalidInput,
    Overflow,
    as_integer,
    as_number,
    check,
)
from meanformer.flows import Flow
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.observables.energy.energies import energy
from meanformer.observables.energy.sphere import check_fits, checked_map, present
from meanformer.observables.energy.structure import is_gradient_flow, terms_of
from meanformer.observables.linearised.rates import (
    Scaled,
    rates_of,
    scaled,
    splitting_rates,
)
from meanformer.observables.linearised.symmetry import rotations
from meanformer.observables.linearised.velocity_terms import kinks_of, tangent_basis

NULL = 1e-11  # share of the largest singular value below which a mode is not moved
HALVINGS = 12


class CriticalPoint(eqx.Module):
    r"""Atoms that rest under a flow, or the place where the search for them ended.

    Attributes:
        cloud: the atoms with their masses.
        is_converged: whether they rest, to the tolerance.
        reason: how the search ended, in words.
        kind: "maximum", "minimum", "saddle of index 2" or "degenerate" for the energy
            of a gradient flow; "stable" or "unstable of index 2" for others. Among
            atoms, rotations apart: two opposite ones on the circle are a minimum.
        energy: the energy, `None` where it has none.
        index: how many directions grow under the flow; `None` if it did not converge.
        index_range: the smallest and largest index of the one-sided Hessians, equal
            unless an atom sits on a kink of a perceptron.
        nullity: how many rates cannot be told from zero; at a kink, on any side.
        rotations: how many of those are rotations that the flow does not notice.
        eigenvalues: growth rates of small motions of the atoms, the largest first.
        log_unit: the rates are to be multiplied by its exponential; 0 unless they would
            leave the range of floats.
        direction: the motion that grows fastest, the longest vector of length one.
        splitting: how fast the halves of each atom would part: negative where it holds
            together, so that tokens that make it up stay one.
        kinks: pairs of an atom and a unit of a perceptron whose kink it sits on.
        distance: how far the farthest atom is from where it started.
        residual: the largest velocity left, in units of what its token feels.
        steps: how many steps were taken.
    """

    cloud: TokenCloud
    is_converged: bool = eqx.field(static=True)
    reason: str = eqx.field(static=True)
    kind: str = eqx.field(static=True)
    energy: float | None = eqx.field(static=True)
    index: int | None = eqx.field(static=True)
    index_range: tuple[int, int] | None = eqx.field(static=True)
    nullity: int | None = eqx.field(static=True)
    rotations: int = eqx.field(static=True)
    eigenvalues: Float[Array, " h"]
    log_unit: float = eqx.field(static=True)
    direction: Float[Array, "n d"]
    splitting: Float[Array, " n"]
    kinks: tuple[tuple[int, int], ...] = eqx.field(static=True)
    distance: float = eqx.field(static=True)
    residual: float = eqx.field(static=True)
    steps: int = eqx.field(static=True)

    @property
    def is_stable(self) -> bool:
        """Whether small motions of the atoms die out, but for rotations."""
        return self.index == 0 and self.kind in ("maximum", "minimum", "stable")

    @property
    def holds_together(self) -> bool:
        """Whether no atom splits, so that the state is stable for its tokens too."""
        return bool(np.all(np.asarray(self.splitting) < 0))

    def __str__(self) -> str:
        """Say what it is in one line."""
        height = "no energy" if self.energy is None else f"energy {self.energy:.10g}"
        atoms = f"{self.cloud.count} atom" + "s" * (self.cloud.count != 1)
        return f"{self.kind}: {atoms}, {height}" + (
            "" if self.is_converged else f" ({self.reason})"
        )


def newton_critical_point(
    flow: Flow,
    cloud: TokenCloud,
    *,
    tolerance: float | None = None,
    most_steps: int = 200,
    largest_step: float = 0.3,
) -> CriticalPoint:
    r"""Move atoms to where they rest, by Newton's method, with their masses kept.

    Newton's equation $J\xi = -v$ for the velocities $v$ and their Riemannian derivative
    $J$ is divided, row by row, by what each atom feels most, so that exponentially weak
    pulls are as good as strong ones; on the sphere the pull on oneself is left out in
    closed form. Zero modes, such as rotations, are not moved (pseudo-inverse). Long
    steps are cut, and halved until the velocities fall; short ones are doubled as long
    as they do. It finds maxima, saddles and minima alike, near where it starts;
    `find_critical_points` looks for all.

    Args:
        flow: a flow on `Sphere()` or `Euclidean()` whose map does not change with
            depth, without noise.
        cloud: where to start; tokens of weight zero are absent. Tokens that have met
            should be one atom, see `merge`: else their inner modes count.
        tolerance: the atoms rest if no velocity is larger than this share of what the
            atom feels, by default $10^{-12}$, or a hundred roundings.
        most_steps: give up after so many steps.
        largest_step: the farthest that an atom moves in one step.

    Returns:
        The critical point with its type. It is the caller's to look at `is_converged`
        and `distance`. Cost: for each step $O(n^2d^2 + (nd)^3)$ on the host.
    """
    layer = checked_map(flow)
    check_fits(layer, cloud)
    check(
        isinstance(flow.space, Euclidean | Sphere),
        f"space is {flow.space!r}; it must be Sphere() or Euclidean().",
    )
    flow.space.check(cloud.points)
    eps = float(jnp.finfo(cloud.points.dtype).eps)
    given = 1e-12 if tolerance is None else as_number("tolerance", tolerance)
    check(given > 0, f"tolerance is {given}; it must be positive.")
    longest = as_number("largest_step", largest_step)
    check(longest > 0, f"largest_step is {longest}; it must be positive.")
    most = as_integer("most_steps", most_steps, least=0)
    walk = NewtonSearch(flow, layer, max(given, 100 * eps), most, longest)
    atoms = present(cloud)
    ended, reason, steps = walk.from_here(atoms)
    return described(walk, atoms, ended, reason, steps)


class NewtonSearch(eqx.Module):
    """Newton's method for a flow, and when it stops."""

    flow: Flow
    layer: AbstractInContextMap
    tolerance: float = eqx.field(static=True)
    most_steps: int = eqx.field(static=True)
    largest_step: float = eqx.field(static=True)

    def from_here(self, atoms: TokenCloud, stretch=None) -> tuple[TokenCloud, str, int]:
        """Step until the atoms rest; `stretch` may lengthen steps, to deflate."""
        state = scaled(self.flow, self.layer, atoms)
        for step in range(self.most_steps):
            if np.abs(state.velocity).max(initial=0) <= self.tolerance:
                return atoms, "converged", step
            basis = tangent_basis(self.flow.space, np.asarray(atoms.points, np.float64))
            motion = np.einsum("ida,ia->id", basis, self._motion(state))
            factor = 1.0 if stretch is None else stretch(atoms, motion)
            is_free = stretch is not None
            reached = self._moved(atoms, state, factor * motion, is_free)
            if reached is None:
                return atoms, "stalled: no step lowers the velocities", step
            atoms, state = reached
        if np.abs(state.velocity).max(initial=0) <= self.tolerance:
            return atoms, "converged", self.most_steps
        return atoms, f"not converged after {self.most_steps} steps", self.most_steps

    def _motion(self, state: Scaled) -> np.ndarray:
        count, width = state.velocity.shape
        inverse = np.linalg.pinv(state.matrix, rcond=NULL)
        motion = -(inverse @ state.velocity.ravel()).reshape(count, width)
        length = np.linalg.norm(motion, axis=1).max(initial=0)
        return motion * min(1.0, self.largest_step / max(length, 1e-300))

    def _moved(
        self, atoms: TokenCloud, state: Scaled, motion: np.ndarray, is_free: bool
    ) -> tuple[TokenCloud, Scaled] | None:
        before = np.linalg.norm(state.velocity)
        share = 1.0
        for _ in range(HALVINGS):
            next_atoms = moved(self.flow.space, atoms, share * motion)
            found = scaled(self.flow, self.layer, next_atoms)
            after = np.linalg.norm(found.over(state.log_rows))
            small = np.abs(found.velocity).max(initial=0) <= self.tolerance
            if is_free or small or after <= (1 - 1e-4 * share) * before:
                is_slow = share == 1 and after > 0.1 * before and not is_free
                farther = (motion, after) if is_slow else None
                return self._farther(atoms, state, (next_atoms, found), farther)
            share = share / 2
        return None

    def _farther(self, atoms: TokenCloud, state: Scaled, reached, farther):
        """Double a step that was too short, as it is where pulls are exponential."""
        if farther is None:
            return reached
        motion, before = farther
        longer = 2 * motion
        if np.linalg.norm(longer, axis=1).max() > self.largest_step:
            return reached
        next_atoms = moved(self.flow.space, atoms, longer)
        found = scaled(self.flow, self.layer, next_atoms)
        after = np.linalg.norm(found.over(state.log_rows))
        if after >= before:
            return reached
        return self._farther(atoms, state, (next_atoms, found), (longer, after))


def moved(space: AbstractSpace, atoms: TokenCloud, motion: np.ndarray) -> TokenCloud:
    """Return atoms moved, and brought back to the space; on the host."""
    points = np.asarray(atoms.points, np.float64) + motion
    if isinstance(space, Sphere):
        points = points / np.linalg.norm(points, axis=1, keepdims=True)
    return atoms.moved(jnp.asarray(points, atoms.points.dtype))


def described(
    walk: NewtonSearch, start: TokenCloud, atoms: TokenCloud, reason: str, steps: int
) -> CriticalPoint:
    """Return what is known about the place where a search ended."""
    flow, layer = walk.flow, walk.layer
    dtype, is_converged = atoms.points.dtype, reason == "converged"
    state = scaled(flow, layer, atoms)
    distance = float(jnp.max(flow.space.distance(start.points, atoms.points)))
    rates = rates_of(flow, layer, atoms)
    free, kinks = rotations(layer, atoms), kinks_of(terms_of(layer), atoms)
    index, nullity = rates.counts(rates.resolution)
    both = (index, index)
    if kinks and is_converged:
        ends = [rates_of(flow, layer, atoms, side=side) for side in (-1, 1)]
        sides = [found.counts(found.resolution) for found in ends]
        both = sides[0][0], sides[1][0]
        nullity = max(nullity, sides[0][1], sides[1][1])
    is_open = nullity > free or both[0] != both[1]
    return CriticalPoint(
        atoms,
        is_converged,
        reason,
        _kind(layer, index, len(rates.values) - nullity, is_open, is_converged),
        _energy(layer, atoms),
        index if is_converged else None,
        both if is_converged else None,
        nullity if is_converged else None,
        free,
        jnp.asarray(rates.values, dtype),
        rates.log_unit,
        jnp.asarray(rates.direction(flow.space, atoms), dtype),
        jnp.asarray(splitting_rates(flow, layer, atoms), dtype),
        kinks,
        distance,
        float(np.abs(state.velocity).max(initial=0)),
        steps,
    )


def _kind(
    layer: AbstractInContextMap,
    index: int,
    signed: int,
    is_open: bool,
    is_converged: bool,
) -> str:
    if not is_converged:
        return "not critical"
    if is_open:
        return "degenerate"
    direction = is_gradient_flow(layer).direction
    if direction == "none":
        return "stable" if index == 0 else f"unstable of index {index}"
    ends = ("maximum", "minimum") if direction == "ascent" else ("minimum", "maximum")
    if index == 0:
        return ends[0]
    return ends[1] if index == signed else f"saddle of index {index}"


def _energy(layer: AbstractInContextMap, atoms: TokenCloud) -> float | None:
    try:
        return float(energy(layer, atoms))
    except (InvalidInput, Overflow):
        return None
