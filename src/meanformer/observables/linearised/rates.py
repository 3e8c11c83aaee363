"""The linearised flow of tokens: velocities, rates of growth, clouds at rest.

Tokens far apart pull each other by amounts that differ by hundreds of orders of
magnitude. A zero of the velocities does not mind if each is divided by a number of its
own, so each token is measured by what it feels most. Attention and maps of points on
the sphere are linearised term by term, without the pull of tokens on themselves; all
other flows by automatic differentiation.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractExponential, AbstractInContextMap
from meanformer.attention.pointwise import AbstractPointwise
from meanformer.errors import Overflow, as_number
from meanformer.flows import Flow
from meanformer.geometry import AbstractSpace
from meanformer.measures import TokenCloud
from meanformer.observables.energy import energies
from meanformer.observables.energy.structure import is_gradient_flow, terms_of
from meanformer.observables.linearised import velocity_terms
from meanformer.observables.linearised.symmetry import rotations
from meanformer.observables.linearised.velocity_terms import Attending, Part


class Scaled(NamedTuple):
    """Velocities and their derivative, each row over the exponential of its own."""

    velocity: np.ndarray
    matrix: np.ndarray
    log_rows: np.ndarray

    def over(self, log_rows: np.ndarray) -> np.ndarray:
        """Return the velocities in units of given rows."""
        factors = np.exp(np.minimum(self.log_rows - log_rows, 300))
        return self.velocity * factors[:, None]


def scaled(
    flow: Flow, layer: AbstractInContextMap, cloud: TokenCloud, *, side: int = 0
) -> Scaled:
    """Return the velocities and their derivative in units of their own rows.

    Where tokens move, the derivative of the normalisation of softmax alone is left out:
    it is of the order of their speed. At kinks of a perceptron, `side` chooses the
    smallest ($-1$) or the largest ($1$) of the one-sided derivatives.
    """
    terms = terms_of(layer)
    if not velocity_terms.has_parts(flow.space, terms):
        return _by_differentiation(flow, cloud)
    fixed = [
        velocity_terms.pointwise_part(term, cloud, side=side)
        for term in terms
        if isinstance(term, AbstractPointwise)
    ]
    attending = [
        Attending.of(term, cloud)
        for term in terms
        if isinstance(term, AbstractExponential)
    ]
    log_rows = _log_rows(attending, fixed)
    points, is_exact = velocity_terms.unit_rows(cloud), len(terms) > 1
    parts = [one.part(points, log_rows, is_exact) for one in attending]
    factors = np.exp(np.minimum(-log_rows, 700))[:, None]
    for part in fixed:
        repeated = np.repeat(factors, part.velocity.shape[1], axis=0)
        parts.append(Part(factors * part.velocity, repeated * part.matrix))
    velocity, matrix = (np.sum(one, axis=0) for one in zip(*parts, strict=True))
    return _equilibrated(velocity, matrix, log_rows)


class Linearised(NamedTuple):
    """Velocities and their derivative, over the exponential of `log_unit`."""

    velocity: np.ndarray
    matrix: np.ndarray
    log_unit: float


def linearised(
    flow: Flow,
    layer: AbstractInContextMap,
    cloud: TokenCloud,
    log_masses: np.ndarray,
    *,
    side: int = 0,
) -> Linearised:
    """Linearise a flow, in a basis orthonormal for the masses of the tokens."""
    found = scaled(flow, layer, cloud, side=side)
    unit = float(found.log_rows.max())
    # One, unless numbers would leave the range of those of the points.
    unit = 0.0 if abs(unit) < _log_room(cloud) else unit
    rows = (found.log_rows - unit)[:, None]
    width = found.velocity.shape[1]
    links = (log_masses[:, None] - log_masses[None, :]) / 2 + rows
    links = np.repeat(np.repeat(links, width, 0), width, 1)
    matrix = found.matrix * np.exp(np.minimum(links, 700))
    return Linearised(found.velocity * np.exp(rows), matrix, unit)


class Rates(NamedTuple):
    """Growth rates over the exponential of `log_unit`, and their resolution.

    Attributes:
        values: the rates, the largest first.
        columns: their directions in tangent bases, orthonormal for the masses.
        resolution: how small a rate can be told from zero, where tokens rest.
        drift: by how much more rates may be off because tokens move.
        speed: the largest speed of a token.
        size: the largest entry of the linearised flow.
        log_unit: all these are to be multiplied by its exponential.
        log_masses: logarithms of the masses in the metric of the flow.
    """

    values: np.ndarray
    columns: np.ndarray
    resolution: float
    drift: float
    speed: float
    size: float
    log_unit: float
    log_masses: np.ndarray

    def counts(self, resolution: float) -> tuple[int, int]:
        """Return how many rates are positive, and how many have no sign."""
        index = int(np.sum(self.values > resolution))
        return index, int(np.sum(np.abs(self.values) <= resolution))

    def direction(self, space: AbstractSpace, cloud: TokenCloud) -> np.ndarray:
        """Return the fastest motion of the tokens, the longest vector of length one."""
        if self.columns.size == 0:
            return np.zeros(cloud.points.shape)
        vectors = velocity_terms.tangent_vectors(space, cloud, self.columns[:, 0])
        sizes = np.linalg.norm(vectors, axis=1)
        # Masses may differ by more than floats can hold: in logarithms.
        logs = np.log(np.where(sizes > 0, sizes, 1)) - self.log_masses / 2
        top = logs[sizes > 0].max(initial=-np.inf)
        if top == -np.inf:
            return vectors
        lengths = np.where(sizes > 0, np.exp(np.minimum(logs - top, 0)), 0)
        return vectors * (lengths / np.where(sizes > 0, sizes, 1))[:, None]


def rates_of(
    flow: Flow, layer: AbstractInContextMap, cloud: TokenCloud, *, side: int = 0
) -> Rates:
    """Return the rates of growth of small perturbations of tokens."""
    structure = is_gradient_flow(layer)
    log_masses = _log_metric(layer, structure, cloud)
    velocity, matrix, unit = linearised(flow, layer, cloud, log_masses, side=side)
    eps, terms = float(jnp.finfo(cloud.points.dtype).eps), terms_of(layer)
    is_apart = velocity_terms.has_parts(flow.space, terms)
    steepness = _steepness(terms) if is_apart else 1000.0
    largest = float(np.abs(matrix).max(initial=0))
    # This bounds the norm, without squares that could underflow.
    norm = len(matrix) * largest
    resolution = eps * steepness * norm
    # At inverse temperature zero there is a symmetry, if no energy.
    is_symmetric = np.abs(matrix - matrix.T).max(initial=0) <= resolution
    if (structure and structure.mobility is None) or is_symmetric:
        values, columns = np.linalg.eigh((matrix + matrix.T) / 2)
    else:
        values, columns = map(np.real, np.linalg.eig(matrix))
        # Multiple eigenvalues of such a matrix are known to half the digits.
        resolution = max(resolution, np.sqrt(eps) * norm)
    order = np.argsort(-values, kind="stable")
    speed = float(np.linalg.norm(velocity, axis=1).max())
    drift = steepness * speed if is_apart else 0.0
    sizes = resolution, drift, speed, largest
    return Rates(values[order], columns[:, order], *sizes, unit, log_masses)


def splitting_rates(
    flow: Flow, layer: AbstractInContextMap, cloud: TokenCloud
) -> np.ndarray:
    """Return how fast two halves of each atom part, in their fastest direction."""
    points, weights = (jnp.repeat(x, 2, axis=0) for x in (cloud.points, cloud.weights))
    twins = TokenCloud(points, weights / 2)
    found = scaled(flow, layer, twins)
    width = found.velocity.shape[1]
    blocks = found.matrix.reshape(twins.count, width, twins.count, width)
    every = 2 * np.arange(cloud.count)
    inner = blocks[every, :, every, :] - blocks[every, :, every + 1, :]
    rates = np.linalg.eigvals(inner).real.max(axis=1, initial=-np.inf)
    room = _log_room(cloud)
    return rates * np.exp(np.clip(found.log_rows[every], -room, room))


def _log_metric(layer, structure, tokens: TokenCloud) -> np.ndarray:
    """Return logarithms of masses in the metric of a gradient; zero for others."""
    if not structure:
        return np.zeros(tokens.count)
    log_masses = np.log(np.asarray(tokens.weights, np.float64))
    if structure.divides_by_mass:
        seen = layer.log_kernel_mass(tokens, tokens.points)
        log_masses = log_masses + np.asarray(seen, np.float64)
    return log_masses


def _log_room(cloud: TokenCloud) -> float:
    """Return how large logarithms of rates may be, in the type of the points."""
    return 0.85 * float(np.log(float(jnp.finfo(cloud.points.dtype).max)))


def _by_differentiation(flow: Flow, cloud: TokenCloud) -> Scaled:
    points = np.asarray(cloud.points, np.float64)
    basis = velocity_terms.tangent_basis(flow.space, points)
    field, slopes = (np.asarray(a, np.float64) for a in _derivative(flow, cloud))
    velocity = np.einsum("ida,id->ia", basis, field)
    blocks = np.einsum("ida,idje,jeb->iajb", basis, slopes, basis)
    return _equilibrated(velocity, velocity_terms.flat(blocks), np.zeros(cloud.count))


@eqx.filter_jit
def _derivative(flow: Flow, cloud: TokenCloud) -> tuple[Array, Array]:
    """Return the velocities as a function of all points, and their derivative."""
    start = jnp.zeros((), cloud.points.dtype)

    def field(points: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return flow.field(start, cloud.moved(points), points, cloud.positions)

    return field(cloud.points), jax.jacfwd(field)(cloud.points)


def _log_rows(attending: list[Attending], fixed: list[Part]) -> np.ndarray:
    """Return the logarithm of the largest that each token feels, of any term."""
    logs = [one.log_pulls.max(axis=1) for one in attending]
    with np.errstate(divide="ignore"):
        logs += [np.log(_largest(*part)) for part in fixed]
    top = np.max(logs, axis=0)
    return np.where(np.isfinite(top), top, 0.0)


def _largest(velocity: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return the largest entry of the rows of each token."""
    largest = np.abs(matrix).reshape(len(velocity), -1).max(axis=1, initial=0)
    return np.maximum(largest, np.abs(velocity).max(axis=1, initial=0))


def _equilibrated(velocity, matrix, log_rows: np.ndarray) -> Scaled:
    """Divide each row by its largest entry."""
    largest = _largest(velocity, matrix)
    largest = np.where(largest > 0, largest, 1.0)
    rows = np.repeat(largest, velocity.shape[1])[:, None]
    logs = log_rows + np.log(largest)
    return Scaled(velocity / largest[:, None], matrix / rows, logs)


def _steepness(terms: tuple[AbstractInContextMap, ...]) -> float:
    """Return how many roundings of the points the rates of these terms may be off."""
    tops = [
        np.linalg.norm(np.asarray(term.temperature * term.score, np.float64), 2)
        for term in terms
        if isinstance(term, AbstractExponential)
    ]
    return float(10 * (1 + max(tops, default=0.0)))


def energy_hessian(
    layer: AbstractInContextMap,
    cloud: TokenCloud,
    *,
    space: AbstractSpace | None = None,
) -> Float[Array, "h h"]:
    r"""Hessian of the exponential energy of a layer, in the space of all tokens.

    The Riemannian Hessian on $(\mathbb{S}^{d-1})^n$ with the metric
    $\sum_i w_i|\xi_i|^2$, in an orthonormal basis of the tangent spaces, $d-1$ numbers
    for each token of positive weight. Its eigenvalues do not depend on the basis: at a
    stationary point they are the rates at which the ascent of $E$ leaves it. Rotations
    that commute with $A$ give zeros. On a kink of a perceptron, where there are several
    one-sided Hessians, it is the one with the derivative that JAX gives.

    Args:
        layer: `Softmax` or `Unnormalised` with a symmetric score, whose value does not
            matter; or a perceptron or `Sum` that is a gradient flow.
        cloud: the tokens, of known weights; those of weight zero are absent.
        space: where they live, `Sphere()` by default.

    Returns:
        A symmetric matrix. Cost: $O(n^2d^3)$ time and $O(n^2d^2)$ memory, on the host
        on the sphere: for few tokens.
    """
    space = energies.checked_space(cloud, space)
    cloud = energies.present(cloud)
    ascent = energies.ascent_of(layer)
    log_masses = np.log(np.asarray(cloud.weights, np.float64))
    found = linearised(Flow(ascent, space=space), ascent, cloud, log_masses)
    matrix = found.matrix * _unit(cloud, found.log_unit, found.matrix)
    return jnp.asarray((matrix + matrix.T) / 2, cloud.points.dtype)


class StationaryReport(eqx.Module):
    r"""Whether tokens rest, and what a small push does to them.

    Attributes:
        verdict: the answer in words: "stationary, index 2", "not stationary: ...", or
            "undecided: ..." if rates are too small to have a sign.
        is_stationary: whether no token moves, to the tolerance.
        speed: the largest speed of a token.
        index: how many directions grow: the number of positive eigenvalues; `None` if
            the tokens move or it is undecided.
        nullity: how many rates cannot be told from zero; rotations are among them.
        eigenvalues: growth rates of small perturbations (their real parts, if the flow
            is not a gradient flow), the largest first; empty if the tokens move.
        direction: the perturbation that grows fastest, one tangent vector for each
            token, the longest of length one; zero if the tokens move.
    """

    verdict: str = eqx.field(static=True)
    is_stationary: bool = eqx.field(static=True)
    speed: float = eqx.field(static=True)
    index: int | None = eqx.field(static=True)
    nullity: int | None = eqx.field(static=True)
    eigenvalues: Float[Array, " h"]
    direction: Float[Array, "n d"]


def stationary_report(
    flow: Flow, cloud: TokenCloud, *, tolerance: float | None = None
) -> StationaryReport:
    r"""Tell whether tokens rest under a flow, and in how many directions they would go.

    Antipodal, regular and uniform clouds are stationary saddles: a solver waits there
    until rounding pushes it off. The linearised flow answers instead. Its eigenvalues
    are those of the Hessian of the energy for a gradient flow, divided by the masses
    $Z_i$ for softmax, which changes rates but not signs.

    On the sphere, softmax and unnormalised attention are linearised without the pull of
    tokens on themselves: the rates of two opposite tokens, $e^{-2\beta}$ of that
    pull, are right at any $\beta$. Rates below the rounding of the largest ones have no
    sign. If they are more than the rotations that commute with score and value, which
    are known for symmetric ones, the verdict is "undecided": a slow direction may hide
    there, or one along which the tokens rest for another reason. On a kink of a
    perceptron it is, if the one-sided Hessians have different indices.

    Args:
        flow: a flow whose map does not change with depth, without noise.
        cloud: the tokens, of known values; those of weight zero are absent.
        tolerance: the tokens rest if none is faster than this share of the size of the
            flow, which is the largest vector before projection or the largest entry of
            the linearised flow; by default $10^{-9}$, or a thousand roundings of the
            type of the points if that is more.

    Returns:
        The report. To leave a saddle, move along `direction`, or use `perturbed`. Cost:
        as `energy_hessian`, and the eigenvalues of that matrix.
    """
    layer = energies.checked_map(flow, cloud)
    least = 1000 * float(jnp.finfo(cloud.points.dtype).eps)
    given = max(1e-9, least) if tolerance is None else tolerance
    given = as_number("tolerance", given, "positive", above=0)
    tokens = energies.present(cloud)
    found = rates_of(flow, layer, tokens)
    unit = _unit(tokens, found.log_unit, np.append(found.values, found.size))
    speed = unit * found.speed
    vectors = layer(tokens, tokens.points, positions=tokens.positions)
    longest = float(np.linalg.norm(np.asarray(vectors, np.float64), axis=1).max())
    empty, still = jnp.zeros(0, cloud.points.dtype), jnp.zeros_like(cloud.points)
    if speed > given * max(longest, unit * found.size):
        verdict = f"not stationary: a token moves with speed {speed:.6g}"
        return StationaryReport(verdict, False, speed, None, None, empty, still)
    index, nullity = found.counts(found.resolution + found.drift)
    doubt = _doubt(index, nullity - rotations(layer, tokens))
    if not doubt and velocity_terms.kinks_of(layer, tokens):
        ends = [rates_of(flow, layer, tokens, side=side) for side in (-1, 1)]
        low, high = (one.counts(one.resolution + one.drift)[0] for one in ends)
        if low != high:
            doubt = f"a token sits on a kink of a perceptron, index {low} to {high}"
    verdict = f"undecided: {doubt}" if doubt else f"stationary, index {index}"
    direction = jnp.asarray(found.direction(flow.space, tokens), still.dtype)
    return StationaryReport(
        verdict,
        True,
        speed,
        None if doubt else index,
        nullity,
        jnp.asarray(unit * found.values, cloud.points.dtype),
        still.at[np.asarray(cloud.weights) > 0].set(direction),
    )


def _unit(cloud: TokenCloud, log_unit: float, found: np.ndarray) -> float:
    """Return the unit of what was found, or raise if this would overflow."""
    log_largest = log_unit + float(np.log(max(np.abs(found).max(initial=0), 1e-300)))
    if log_largest > float(np.log(float(jnp.finfo(cloud.points.dtype).max))):
        raise Overflow(
            f"rates of growth overflow: their logarithm is about {log_largest:.6g}; "
            "lower beta, or give Unnormalised a shift."
        )
    return float(np.exp(log_unit))


def _doubt(index: int, unknown: int) -> str:
    """Say why rates do not decide, in words; empty if they do."""
    noun = "rate" if unknown == 1 else "rates"
    return f"{unknown} {noun} below resolution, {index} positive" * (unknown > 0)
