"""All critical points of a flow that a search finds, with their types."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.errors import as_float_array, as_integer, as_key, as_number, check
from meanformer.flows import Flow, SteadyState, solve
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud, UniformSphere
from meanformer.observables.clusters.counting import count_clusters
from meanformer.observables.critical.newton import CriticalPoint, NewtonSearch
from meanformer.observables.energy.energies import checked_map
from meanformer.observables.linearised.rates import rates_of
from meanformer.observables.linearised.symmetry import Symmetry, symmetry_of
from meanformer.observables.linearised.velocity_terms import moved, tangent_vectors
from meanformer.typing import ArrayLike, Key

# Distance and share of the energy up to which two critical points are one; in single
# precision they are known less well.
SAME, SAME_ENERGY = 1e-6, 1e-9
MEETING = 1e-4  # distance up to which atoms of one point are one
NUDGE = 1e-3  # how far a point is moved to see whether it is alone


class CriticalPoints(eqx.Module):
    r"""The critical points that a search found, the highest energy first.

    Attributes:
        points: the points, each one of all its images under symmetries of the flow.
        reached: how many of the flows ended at each.
        visits: how many searches of any kind did.
        continua: the dimension of the set of critical points around each, rotations
            that the flow does not notice left out; 0 for points that are alone.
        failures: how many searches ended nowhere.
        symmetries: the number of isometries in the finite part of the symmetry.
    """

    points: tuple[CriticalPoint, ...]
    reached: Int[np.ndarray, " c"]
    visits: Int[np.ndarray, " c"]
    continua: Int[np.ndarray, " c"]
    failures: int = eqx.field(static=True)
    symmetries: int = eqx.field(static=True)

    def __len__(self) -> int:
        """Return how many points there are."""
        return len(self.points)

    def __iter__(self) -> Iterator[CriticalPoint]:
        """Go through the points."""
        return iter(self.points)

    def __getitem__(self, index: int) -> CriticalPoint:
        """Return one of the points."""
        return self.points[index]

    @property
    def stable(self) -> tuple[CriticalPoint, ...]:
        """The points from which small motions of the atoms come back."""
        return tuple(point for point in self.points if point.is_stable)

    def __str__(self) -> str:
        """Return a table, one line for each point."""
        head = f"{'kind':<20}{'atoms':>6}{'energy':>16}{'index':>7}{'flows':>7}  masses"
        lines, columns = [head], (self.points, self.reached, self.continua)
        for point, reached, size in zip(*columns, strict=True):
            height = "" if point.energy is None else f"{point.energy:.10g}"
            masses = ", ".join(f"{m:.3g}" for m in np.asarray(point.cloud.weights))
            notes = f"; continuum of dimension {size}" * bool(size)
            notes += "; on a kink" * bool(point.kinks)
            lines.append(
                f"{point.kind:<20}{point.cloud.count:>6}{height:>16}"
                f"{point.index:>7}{reached:>7}  {masses}{notes}"
            )
        return "\n".join(lines)


def find_critical_points(
    flow: Flow,
    masses: ArrayLike,
    *,
    key: Key,
    starts: int = 32,
    depth: float = 100.0,
    deflations: int = 8,
    most_steps: int = 100,
    progress: Any = False,
) -> CriticalPoints:
    r"""Search for critical points of a flow on the sphere with atoms of given masses.

    From each of several random starts the flow is followed until it is slow, and tokens
    that met are joined: these searches end at stable states and tell how large their
    basins are. Newton's method from the same starts finds saddles and minima too. Then
    it is started again with the points found so far divided out (deflation: its step
    $\xi$ becomes $\xi/(1 - \langle\nabla\log M, \xi\rangle)$ with $M = \prod_k(1 +
    1/d_k^2)$ for the distances $d_k$ from them), and so is driven to others. Points
    are the same if an isometry that the flow does not notice, and an order of atoms of
    equal mass, takes one to the other; of degenerate points of one energy, such as
    those of a flat region, one is kept.

    No search of this kind is sure to find all: look at `visits`.

    Args:
        flow: a flow on `Sphere()` whose map does not change with depth.
        masses: the masses of the atoms, of total 1; those of mass zero are absent.
            Fewer atoms come from joined ones.
        key: random key of the starts.
        starts: how many starts.
        depth: how far each flow is followed at most; 0 leaves the flows out.
        deflations: how many searches with known points divided out.
        most_steps: how many steps Newton's method may take.
        progress: whether to show a bar.

    Returns:
        The points. Cost: for each start one solve, and steps of $O((nd)^3)$; for few
        atoms.
    """
    layer = checked_map(flow)
    check(
        isinstance(flow.space, Sphere),
        "find_critical_points needs a flow on Sphere(); elsewhere use "
        "newton_critical_point from starts of your own.",
    )
    weights, keys = _checked_masses(masses), jr.split(as_key(key))
    starts = as_integer("starts", starts, least=1)
    dimension = layer.input_dimension or 0
    check(
        dimension >= 2,
        f"the map of the flow has dimension {layer.input_dimension}; it must be 2 or "
        "more, so that atoms can move on the sphere.",
    )
    most_steps = as_integer("most_steps", most_steps, least=1)
    depth = as_number("depth", depth, "a number from 0 on", least=0)
    count = as_integer("deflations", deflations, least=0)
    # As many to deflate as before, so that no other program is compiled.
    first, second = (
        UniformSphere(dimension)
        .sample(starts * len(weights), key=one)
        .reshape(starts, len(weights), dimension)
        .astype(weights.dtype)
        for one in keys
    )
    search = _Search(flow, layer, dimension, most_steps, weights.dtype)
    if depth > 0:
        lasts = _flowed(flow, first, weights, jnp.asarray(depth, first.dtype))
        for points in np.asarray(lasts):
            search.add(TokenCloud(points, weights), is_flow=True)
    shown = np.asarray(first)
    if progress is not False:
        from rich.progress import track

        shown = track(shown, description="critical points")
    for points in shown:
        search.add(TokenCloud(points, weights))
    for points in np.asarray(second)[np.arange(count) % starts]:
        search.add(TokenCloud(points, weights), is_deflated=True)
    return search.result()


class _Search:
    """Points found so far, and how often."""

    def __init__(self, flow: Flow, layer, dimension: int, most_steps: int, dtype):
        eps = float(jnp.finfo(dtype).eps)
        self.walk = NewtonSearch(flow, layer, max(1e-12, 100 * eps), most_steps, 0.3)
        self.same, self.same_energy = max(SAME, eps**0.5), max(SAME_ENERGY, 100 * eps)
        self.symmetry = symmetry_of(flow, layer, dimension)
        self.points: list[CriticalPoint] = []
        self.counts: list[np.ndarray] = []  # flows that ended there, and all searches
        self.failures = 0

    def add(self, start: TokenCloud, *, is_flow=False, is_deflated=False) -> None:
        """Search from a start, and keep what is new."""
        start = _joined(start, 0.05 if is_flow else MEETING)
        known = _Deflation(self.symmetry, self.points, self.same)
        stretch = known if is_deflated else None
        atoms, reason, steps = self.walk.from_here(start, stretch)
        if reason == "converged" and is_deflated:
            atoms, reason, steps = self.walk.from_here(atoms)
        if reason == "converged":
            merged = _joined(atoms, MEETING)
            if merged.count < atoms.count:
                atoms, reason, steps = self.walk.from_here(merged)
                start = atoms
        if reason == "converged":
            self.counts[self._place_of(start, atoms, steps)] += [is_flow, 1]
        else:
            self.failures += 1

    def _place_of(self, start: TokenCloud, atoms: TokenCloud, steps: int) -> int:
        """Return the place of the point that these atoms are, a new one if need be."""
        for place, point in enumerate(self.points):
            if self.symmetry.distance(point.cloud, atoms) < self.same:
                return place
        found = self.walk.described(start, atoms, "converged", steps)
        for place, point in enumerate(self.points):
            if self._is_same(point, found):
                return place
        self.points.append(found)
        self.counts.append(np.zeros(2, int))
        return len(self.points) - 1

    def _is_same(self, first: CriticalPoint, second: CriticalPoint) -> bool:
        """Whether two points lie in a flat set of one energy."""
        are_flat = first.kind == second.kind == "degenerate"
        if not are_flat or first.energy is None or second.energy is None:
            return False
        masses = (np.sort(np.asarray(one.cloud.weights)) for one in (first, second))
        return (
            abs(first.energy - second.energy)
            < self.same_energy * (1 + abs(first.energy))
            and first.index == second.index
            and first.cloud.count == second.cloud.count
            and np.allclose(*masses, atol=1e-9)
        )

    def result(self) -> CriticalPoints:
        """Return what was found, the highest energy first."""
        order = sorted(range(len(self.points)), key=self._rank)
        points = tuple(self.points[k] for k in order)
        counts = np.array([self.counts[k] for k in order], int).reshape(-1, 2)
        return CriticalPoints(
            points,
            *counts.T,
            np.array([self._continuum(point) for point in points], int),
            self.failures,
            len(self.symmetry.elements),
        )

    def _rank(self, place: int) -> tuple[float, int, int]:
        point = self.points[place]
        height = 0.0 if point.energy is None else -round(point.energy, 9)
        return height, point.index or 0, point.cloud.count

    def _continuum(self, point: CriticalPoint) -> int:
        """Return in how many directions there are other critical points nearby."""
        flat = (point.nullity or 0) - point.rotations
        if flat <= 0:
            return 0
        rates = rates_of(self.walk.flow, self.walk.layer, point.cloud)
        kept = np.abs(rates.values) <= rates.resolution
        found = 0
        for column in rates.columns[:, kept].T:
            motion = tangent_vectors(Sphere(), point.cloud, column)
            found += any(self._is_other(point, sign * motion) for sign in (-1, 1))
        return min(found, flat)

    def _is_other(self, point: CriticalPoint, motion: np.ndarray) -> bool:
        """Whether a point moved by a little is near another critical point."""
        step = NUDGE * motion / np.abs(motion).max()
        atoms, reason, _ = self.walk.from_here(moved(Sphere(), point.cloud, step))
        apart = self.symmetry.distance(point.cloud, atoms)
        least = max(NUDGE**2 / 10, self.same / 10)
        return reason == "converged" and apart > least


class _Deflation(NamedTuple):
    """How much longer a step becomes when known points are divided out."""

    symmetry: Symmetry
    known: list[CriticalPoint]
    step: float

    def __call__(self, atoms: TokenCloud, motion: np.ndarray) -> float:
        ahead = moved(Sphere(), atoms, self.step * motion)
        slope = (self._log(ahead) - self._log(atoms)) / self.step
        # The stretch of a deflated step; a pole is passed with a bounded one.
        return float(np.clip(1 / (1 - slope if abs(1 - slope) > 0.1 else 0.1), -5, 5))

    def _log(self, atoms: TokenCloud) -> float:
        distances = [self.symmetry.distance(one.cloud, atoms) for one in self.known]
        return float(np.sum(np.log1p(1 / np.maximum(distances, 1e-8) ** 2)))


def _checked_masses(masses: ArrayLike) -> Float[Array, " n"]:
    """Return the masses of the atoms that are present."""
    weights = as_float_array("masses", masses)
    check(
        weights.ndim == 1 and len(weights) > 0,
        f"masses has shape {weights.shape}; it must be a list of masses, such as "
        "[0.5, 0.5].",
    )
    smallest, total = float(weights.min()), float(weights.sum())
    check(smallest >= 0, f"masses holds {smallest:g}; none may be below 0.")
    check(
        abs(total - 1) <= 1e-6,
        f"masses sum to {total:g}; they must sum to 1: divide them by their sum.",
    )
    return weights[np.asarray(weights) != 0]


def _joined(cloud: TokenCloud, within: float) -> TokenCloud:
    """Join tokens that are near each other to atoms, at their centres."""
    found = count_clusters(cloud, space=Sphere(), threshold=within)
    if found.count == cloud.count:
        return cloud
    return TokenCloud(found.centres, found.masses)


@eqx.filter_jit
def _flowed(flow: Flow, starts: Array, weights: Array, depth: Array) -> Array:
    """Follow the flow from each start until it is slow."""

    def last(points: Float[Array, "n d"]) -> Float[Array, "n d"]:
        cloud, slow = TokenCloud(points, weights), SteadyState(1e-5)
        path = solve(flow, cloud, depth, save=2, rtol=1e-5, atol=1e-8, stop=slow)
        return path.points[-1]

    return jax.lax.map(last, starts)
