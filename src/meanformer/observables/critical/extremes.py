"""Measures of extreme energy, with certificates, and peaks of potentials."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.attention import AbstractInContextMap, Perceptron, Sum
from meanformer.errors import (
    Overflow,
    Unsupported,
    as_integer,
    as_key,
    as_number,
    check,
)
from meanformer.flows import Flow
from meanformer.geometry import Sphere
from meanformer.geometry.circle import on_circle
from meanformer.measures import TokenCloud, UniformSphere
from meanformer.observables.critical.landscape import (
    Landscape,
    circle_minimum,
    landscape_of,
    simplex_minimum,
    with_room,
)
from meanformer.observables.energy.energies import checked_map, energy, first_variation
from meanformer.observables.energy.structure import dtype_of, terms_of
from meanformer.observables.linearised import velocity_terms
from meanformer.typing import Key

SAMPLES = 1024
REFINED_STARTS = 6
DESCENT_STEPS = 40
SAME_PEAK = 1e-6  # distance up to which two peaks are one
# How far a point is pushed off a valley, and what counts as bending upwards.
PUSH, UPWARDS = 1e-3, 1e-4


class Extremum(eqx.Module):
    r"""A measure of extreme energy.

    Attributes:
        cloud: its atoms.
        energy: its energy.
        gap: no measure is better by more than this; a proof on the circle, up to an
            estimate of rounding that is part of it; on other spheres as good as the
            search for extremes of the first variation.
        is_certified: whether the gap is proven.
        verdict: how it was found, in words.
        steps: how many atoms were added on the way.
    """

    cloud: TokenCloud
    energy: float = eqx.field(static=True)
    gap: float = eqx.field(static=True)
    is_certified: bool = eqx.field(static=True)
    verdict: str = eqx.field(static=True)
    steps: int = eqx.field(static=True)


def energy_maximiser(
    flow: Flow,
    *,
    key: Key | None = None,
    tolerance: float = 1e-10,
    most_steps: int = 200,
) -> Extremum:
    r"""Return a measure of largest energy on the sphere.

    With a positive semi-definite score the energy is convex in the measure (the kernel
    $e^{\beta\langle x, Ay\rangle}$ is positive semi-definite), so a single point is a
    maximiser: one where $\frac{1}{2\beta}e^{\beta\langle x,Ax\rangle} + \Phi(x)$ is
    largest, a maximiser of $\Phi$ for $A = I$. It is found by bisection with bounds
    on the circle, and from many starts on other spheres. There is no certificate by
    the first variation: it is largest at the atoms of many states that are no
    maximiser. If the energy is concave, the problem is that of `energy_minimiser`.

    Args:
        flow: a gradient flow on `Sphere()`, such as that of `perceptron_flow`.
        key: random key of the starts, needed beyond the circle.
        tolerance: largest gap, relative to 1 plus the size of the energy; not less than
            rounding allows.
        most_steps: how many atoms may be added, where the energy is concave.
    """
    return _extreme(flow, 1, key, tolerance, most_steps)


def energy_minimiser(
    flow: Flow,
    *,
    key: Key | None = None,
    tolerance: float = 1e-6,
    most_steps: int = 200,
) -> Extremum:
    r"""Return a measure of smallest energy on the sphere.

    Where the energy is convex in the measure, by fully corrective conditional
    gradients: add an atom where the first variation $W$ is smallest, find the best
    masses of all atoms, repeat. Convexity gives
    $$E(\mu) - \min E \le \int W\,\mathrm{d}\mu - \min W,$$
    which is the `gap`. Where it is concave, a single point is a minimiser.

    Args:
        flow: a gradient flow on `Sphere()`, such as that of `perceptron_flow` or
            `matrix_energy_flow`; whether it climbs or descends does not matter.
        key: random key of the search for the smallest $W$, needed beyond the circle.
        tolerance: largest gap, relative to 1 plus the size of the energy; not less than
            rounding allows.
        most_steps: give up after so many atoms.
    """
    return _extreme(flow, -1, key, tolerance, most_steps)


def _extreme(flow: Flow, sign: int, key, tolerance: float, most_steps: int) -> Extremum:
    layer = checked_map(flow)
    if not isinstance(flow.space, Sphere):
        raise Unsupported("energies have extremes over measures on Sphere() only.")
    landscape = landscape_of(layer)
    check(
        landscape.dimension >= 2,
        f"the flow is of dimension {landscape.dimension}; it must be 2 or more, so "
        "that the sphere is connected.",
    )
    check(
        landscape.dimension == 2 or key is not None,
        "beyond the circle the search starts at random: give a key.",
    )
    key = None if key is None else as_key(key)
    tolerance = as_number("tolerance", tolerance, "positive", above=0)
    most = as_integer("most_steps", most_steps, least=1)
    seeker = _Seeker(landscape, key, tolerance)
    if landscape.convexity * sign >= 0:
        return seeker.single(sign)
    return seeker.spread(sign, most)


class _Seeker:
    """A search for extremes of one landscape."""

    def __init__(self, landscape: Landscape, key, tolerance: float):
        self.landscape = landscape
        self.tolerance = max(tolerance, 10 * landscape.rounding)
        if landscape.dimension > 2:
            sphere = UniformSphere(landscape.dimension)
            drawn = sphere.sample(SAMPLES, key=jr.fold_in(key, 0))
            self.samples = np.asarray(drawn, np.float64)

    def single(self, sign: int) -> Extremum:
        """Return the single point of extreme energy."""
        view = Objective(self.landscape.layer, None, -sign)
        size = 1 + abs(float(view.heights(np.eye(self.landscape.dimension))[0]))
        bend = self.landscape.single_curvature()
        point, bound = self._least(view, bend, self.tolerance * size)
        value = float(-sign * view.heights(point[None])[0])
        gap, way = 0.0, "search from samples"
        if bound is not None:
            gap, way = max(-sign * value - bound, 0.0), "bisection with bounds"
        cloud, verdict = self._cloud(point[None], np.ones(1)), f"one point, by {way}"
        return Extremum(cloud, value, gap, bound is not None, verdict, 1)

    def spread(self, sign: int, most_steps: int) -> Extremum:
        """Return the measure of extreme energy, by conditional gradients."""
        atoms, masses = np.eye(self.landscape.dimension)[:1], np.ones(1)
        best = None
        for step in range(1, most_steps + 1):
            point, found = self._looked_at(atoms, masses, -sign, step)
            best = found if best is None or found.gap < best.gap else best
            if found.gap <= self.tolerance * (1 + abs(found.energy)):
                return found
            atoms = np.concatenate([atoms, point[None]])
            kernel, heights = self.landscape.quadratic(atoms)
            start = np.append(masses, 0.0)
            masses = simplex_minimum(-sign * kernel, -sign * heights, start)
            kept = masses > 1e-14
            atoms, masses = atoms[kept], masses[kept] / masses[kept].sum()
        assert best is not None
        return best

    def _looked_at(self, atoms, masses, factor: int, step: int):
        """Return where the first variation is best, and what the measure is worth."""
        points = with_room(atoms)
        absent = np.zeros(len(points) - len(atoms))
        padded = self._cloud(points, np.concatenate([masses, absent]))
        view = Objective(self.landscape.layer, padded, factor)
        kernel, heights = self.landscape.quadratic(atoms)
        value = float(masses @ kernel @ masses / 2 + masses @ heights)
        fine = self.tolerance * (1 + abs(value)) / 10
        bend = self.landscape.curvature(atoms, masses)
        point, bound = self._least(view, bend, fine)
        least = float(view.heights(point[None])[0]) if bound is None else bound
        gap = max(float(masses @ view.heights(atoms)) - least, 0.0)
        how = bound is not None, "conditional gradients", step
        return point, Extremum(self._cloud(atoms, masses), value, gap, *how)

    def _least(self, view: "Objective", bend: float, tolerance: float):
        """Return where a view is smallest, and a proven bound."""
        if self.landscape.dimension == 2:
            found = circle_minimum(
                lambda angles: view.heights(on_circle(angles)),
                bend if np.isfinite(bend) else None,
                tolerance=tolerance,
            )
            point = on_circle(np.array(found.angle))
            if found.bound is None:
                return point, None
            return point, found.bound - self.landscape.rounding * found.size
        order = np.argsort(view.heights(self.samples))[:REFINED_STARTS]
        starts = jnp.asarray(self.samples[order], self.landscape.dtype)
        ends = np.asarray(refined(view, starts))
        return ends[int(np.argmin(view.heights(ends)))], None

    def _cloud(self, atoms: np.ndarray, masses: np.ndarray) -> TokenCloud:
        dtype = self.landscape.dtype
        return TokenCloud(jnp.asarray(atoms, dtype), jnp.asarray(masses, dtype))


class Objective(eqx.Module):
    """A function to minimise: first variation, or energy of one atom, with a sign."""

    layer: AbstractInContextMap
    cloud: TokenCloud | None
    factor: int

    def heights(self, points: np.ndarray) -> np.ndarray:
        """Return its values at points, in batches of one size."""
        dtype = dtype_of(self.layer)
        parts = with_room(points, SAMPLES).reshape(-1, SAMPLES, points.shape[1])
        rows = [self.at(jnp.asarray(part, dtype)) for part in parts]
        heights = np.concatenate([np.asarray(row, np.float64) for row in rows])
        # A first variation that overflows comes back as the largest number.
        if not np.abs(heights).max() < 0.9 * float(jnp.finfo(dtype).max):
            advice = "lower beta, or give Unnormalised a shift"
            raise Overflow(f"the energy overflows; {advice}.")
        return heights[: len(points)]

    @eqx.filter_jit
    def at(self, points: Float[Array, "m d"]) -> Float[Array, " m"]:
        """Return its values at points."""
        if self.cloud is not None:
            return self.factor * first_variation(self.layer, self.cloud, points)
        one = jnp.ones(1, points.dtype)

        def single(point: Float[Array, " d"]) -> Float[Array, ""]:
            return energy(self.layer, TokenCloud(point[None], one))

        return self.factor * jax.vmap(single)(points)


@eqx.filter_jit
def refined(view: Objective, starts: Float[Array, "m d"]) -> Float[Array, "m d"]:
    """Descend from each start by damped Newton steps on the sphere."""

    def height(vector: Float[Array, " d"]) -> Float[Array, ""]:
        return view.at((vector / jnp.linalg.norm(vector))[None])[0]

    def step(_, carry):
        point, damping = carry
        slope, bends = jax.grad(height)(point), jax.hessian(height)(point)
        lift = jnp.maximum(-jnp.linalg.eigvalsh(bends)[0], 0) + damping
        identity = jnp.eye(len(point), dtype=point.dtype)
        ahead = point - jnp.linalg.solve(bends + lift * identity, slope)
        ahead = ahead / jnp.linalg.norm(ahead)
        is_lower = height(ahead) <= height(point)
        damping = jnp.where(is_lower, damping / 8, damping * 8)
        return jnp.where(is_lower, ahead, point), jnp.maximum(damping, 1e-10)

    def walk(start: Float[Array, " d"]) -> Float[Array, " d"]:
        damping = jnp.asarray(0.1, start.dtype)
        return jax.lax.fori_loop(0, DESCENT_STEPS, step, (start, damping))[0]

    return jax.lax.map(walk, starts)


class Localisation(eqx.Module):
    r"""Peaks of the potential near which atoms sit.

    Attributes:
        peaks: the local maxima of $\Phi$ that were reached, one per row.
        labels: the peak of each atom.
        distances: how far each atom is from it.
        radius: the largest of these distances, of atoms that have a mass.
    """

    peaks: Float[Array, "k d"]
    labels: Int[np.ndarray, " n"]
    distances: Float[Array, " n"]
    radius: float = eqx.field(static=True)


def localisation(flow: Flow, cloud: TokenCloud) -> Localisation:
    r"""Climb the potential of a perceptron from each atom, to the peak it belongs to.

    By damped Newton steps on the sphere, off valleys and saddles by a small push; in a
    flat region an atom stays where it is.

    Args:
        flow: a flow on `Sphere()` with a perceptron that is a gradient.
        cloud: the atoms.
    """
    layer = checked_map(flow, cloud)
    blocks = [term for term in terms_of(layer) if isinstance(term, Perceptron)]
    if not blocks or not isinstance(flow.space, Sphere):
        raise Unsupported("localisation needs a flow on Sphere() with a perceptron.")
    view = Objective(blocks[0] if len(blocks) == 1 else Sum(blocks), cloud, -1)
    ends = refined(view, cloud.points)
    pushed = _pushed(blocks, cloud.moved(ends))
    if pushed is not None:
        ends = refined(view, pushed)
    eps = float(jnp.finfo(cloud.points.dtype).eps)
    together = max(SAME_PEAK, 10 * eps**0.5)
    labels, peaks = np.zeros(cloud.count, int), []
    for atom, end in enumerate(np.asarray(ends, np.float64)):
        near = [np.linalg.norm(end - peak) < together for peak in peaks]
        labels[atom] = near.index(True) if True in near else len(peaks)
        peaks += [] if True in near else [end]
    reached = jnp.asarray(np.stack(peaks), cloud.points.dtype)
    distances = Sphere().distance(cloud.points, reached[labels])
    radius = float(jnp.max(jnp.where(cloud.weights > 0, distances, 0)))
    return Localisation(reached, labels, distances, radius)


def _pushed(blocks: list[Perceptron], cloud: TokenCloud) -> Float[Array, "n d"] | None:
    """Move points at which the potential bends upwards along that direction."""
    count, width, every = cloud.count, cloud.dimension - 1, np.arange(cloud.count)
    bends = sum(velocity_terms.pointwise_part(block, cloud).matrix for block in blocks)
    bends = np.asarray(bends).reshape(count, width, count, width)[every, :, every, :]
    levels, columns = np.linalg.eigh((bends + bends.transpose(0, 2, 1)) / 2)
    rises = levels[:, -1] > UPWARDS * np.abs(levels).max(initial=1e-300)
    if not rises.any():
        return None
    motions = velocity_terms.tangent_vectors(Sphere(), cloud, columns[:, :, -1])
    push = np.where(rises, PUSH, 0.0)[:, None]
    return velocity_terms.moved(Sphere(), cloud, push * motions).points
