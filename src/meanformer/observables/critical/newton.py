"""Newton's method for critical points, and the type and stability of each."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.errors import InvalidInput, Overflow, as_integer, as_number
from meanformer.flows import Flow
from meanformer.measures import TokenCloud
from meanformer.observables.energy import energies
from meanformer.observables.energy.structure import is_gradient_flow
from meanformer.observables.linearised import rates, velocity_terms
from meanformer.observables.linearised.symmetry import rotations

UNMOVED = 1e-11  # of the largest singular value; modes below are not moved
HALVINGS = 12
_Reached = tuple[TokenCloud, rates.Scaled]


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
        note = "" if self.is_converged else f" ({self.reason})"
        return f"{self.kind}: {atoms}, {height}{note}"


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
    layer = energies.checked_map(flow, cloud)
    energies.checked_space(cloud, flow.space)
    eps = float(jnp.finfo(cloud.points.dtype).eps)
    given = 1e-12 if tolerance is None else tolerance
    given = as_number("tolerance", given, "positive", above=0)
    longest = as_number("largest_step", largest_step, "positive", above=0)
    most = as_integer("most_steps", most_steps, least=0)
    walk = NewtonSearch(flow, layer, max(given, 100 * eps), most, longest)
    atoms = energies.present(cloud)
    return walk.described(atoms, *walk.from_here(atoms))


class NewtonSearch(eqx.Module):
    """Newton's method for a flow, and when it stops."""

    flow: Flow
    layer: AbstractInContextMap
    tolerance: float = eqx.field(static=True)
    most_steps: int = eqx.field(static=True)
    largest_step: float = eqx.field(static=True)

    def from_here(self, atoms: TokenCloud, stretch=None) -> tuple[TokenCloud, str, int]:
        """Step until the atoms rest; `stretch` may lengthen steps, to deflate."""
        state = rates.scaled(self.flow, self.layer, atoms)
        for step in range(self.most_steps):
            if self._rests(state):
                return atoms, "converged", step
            motion = self._motion(atoms, state)
            if stretch is None:
                reached = self._searched(atoms, state, motion)
            else:
                reached = self._stepped(atoms, stretch(atoms, motion) * motion)
            if reached is None:
                return atoms, "stalled: no step lowers the velocities", step
            atoms, state = reached
        if self._rests(state):
            return atoms, "converged", self.most_steps
        return atoms, f"not converged after {self.most_steps} steps", self.most_steps

    def _rests(self, state: rates.Scaled) -> bool:
        return bool(np.abs(state.velocity).max(initial=0) <= self.tolerance)

    def _motion(self, atoms: TokenCloud, state: rates.Scaled) -> np.ndarray:
        """Return the step of Newton's method, not longer than the largest."""
        step = -np.linalg.pinv(state.matrix, rcond=UNMOVED) @ state.velocity.ravel()
        motion = velocity_terms.tangent_vectors(self.flow.space, atoms, step)
        length = np.linalg.norm(motion, axis=1).max(initial=0)
        return motion * min(1.0, self.largest_step / max(length, 1e-300))

    def _stepped(self, atoms: TokenCloud, motion: np.ndarray) -> _Reached:
        """Return the atoms after a step, and their velocities there."""
        ahead = velocity_terms.moved(self.flow.space, atoms, motion)
        return ahead, rates.scaled(self.flow, self.layer, ahead)

    def _searched(self, atoms: TokenCloud, state, motion) -> _Reached | None:
        """Step along a motion, halved until the velocities fall, or doubled."""
        size, share = np.linalg.norm(state.velocity), 1.0
        for _ in range(HALVINGS):
            reached = self._stepped(atoms, share * motion)
            after = np.linalg.norm(reached[1].over(state.log_rows))
            if self._rests(reached[1]) or after <= (1 - 1e-4 * share) * size:
                break
            share = share / 2
        else:
            return None
        if share < 1 or after <= 0.1 * size:
            return reached
        # The step was too short, as it is where pulls are exponential.
        length = np.linalg.norm(motion, axis=1).max()
        while 2 * share * length <= self.largest_step:
            share = 2 * share
            farther = self._stepped(atoms, share * motion)
            before, after = after, np.linalg.norm(farther[1].over(state.log_rows))
            if after >= before:
                break
            reached = farther
        return reached

    def described(
        self, start: TokenCloud, atoms: TokenCloud, reason: str, steps: int
    ) -> CriticalPoint:
        """Return what is known about the place where a search ended."""
        flow, layer = self.flow, self.layer
        dtype, is_converged = atoms.points.dtype, reason == "converged"
        found, free = rates.rates_of(flow, layer, atoms), rotations(layer, atoms)
        kinks = velocity_terms.kinks_of(layer, atoms)
        index, nullity = found.counts(found.resolution)
        both = (index, index)
        if kinks and is_converged:
            ends = [rates.rates_of(flow, layer, atoms, side=side) for side in (-1, 1)]
            sides = [end.counts(end.resolution) for end in ends]
            both = sides[0][0], sides[1][0]
            nullity = max(nullity, sides[0][1], sides[1][1])
        kind = "not critical"
        if is_converged:
            is_open = nullity > free or both[0] != both[1]
            signed = len(found.values) - nullity
            kind = "degenerate" if is_open else _kind(layer, index, signed)
        return CriticalPoint(
            atoms,
            is_converged,
            reason,
            kind,
            _energy(layer, atoms),
            index if is_converged else None,
            both if is_converged else None,
            nullity if is_converged else None,
            free,
            jnp.asarray(found.values, dtype),
            found.log_unit,
            jnp.asarray(found.direction(flow.space, atoms), dtype),
            jnp.asarray(rates.splitting_rates(flow, layer, atoms), dtype),
            kinks,
            float(jnp.max(flow.space.distance(start.points, atoms.points))),
            float(np.abs(rates.scaled(flow, layer, atoms).velocity).max(initial=0)),
            steps,
        )


def _kind(layer: AbstractInContextMap, index: int, signed: int) -> str:
    """Name a point of so many growing directions, of those whose rates have a sign."""
    direction = is_gradient_flow(layer).direction
    if direction == "none":
        return "stable" if index == 0 else f"unstable of index {index}"
    ends = ("maximum", "minimum") if direction == "ascent" else ("minimum", "maximum")
    if index == 0:
        return ends[0]
    return ends[1] if index == signed else f"saddle of index {index}"


def _energy(layer: AbstractInContextMap, atoms: TokenCloud) -> float | None:
    try:
        return float(energies.energy(layer, atoms))
    except (InvalidInput, Overflow):
        return None
