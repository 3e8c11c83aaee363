"""The linearised flow of tokens: velocities, their derivative, rates of growth.

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
from meanformer.flows import Flow
from meanformer.geometry import AbstractSpace
from meanformer.measures import TokenCloud
from meanformer.observables.energy.structure import alone, is_gradient_flow, terms_of
from meanformer.observables.linearised.velocity_terms import (
    Pairs,
    Part,
    attention_part,
    flat,
    halves,
    has_parts,
    largest_length,
    log_shares,
    norm,
    pointwise_part,
    tangent_basis,
    unit_rows,
)


class Scaled(NamedTuple):
    """Velocities and their derivative, each row over the exponential of its own."""

    velocity: np.ndarray
    matrix: np.ndarray
    log_rows: np.ndarray

    def over(self, log_rows: np.ndarray) -> np.ndarray:
        """Return the velocities in units of given rows."""
        return (
            self.velocity * np.exp(np.minimum(self.log_rows - log_rows, 300))[:, None]
        )


def scaled(
    flow: Flow, layer: AbstractInContextMap, cloud: TokenCloud, *, side: int = 0
) -> Scaled:
    """Return the velocities and their derivative in units of their own rows.

    Where tokens move, the derivative of the normalisation of softmax alone is left out:
    it is of the order of their speed. At kinks of a perceptron, `side` chooses the
    smallest ($-1$) or the largest ($1$) of the one-sided derivatives.
    """
    terms = terms_of(layer)
    if not has_parts(flow.space, terms):
        return _by_differentiation(flow, cloud)
    fixed = [
        pointwise_part(term, cloud, side=side)
        for term in terms
        if isinstance(term, AbstractPointwise)
    ]
    log_rows = _log_rows(terms, cloud, fixed)
    parts = [
        attention_part(term, cloud, log_rows, is_exact=len(terms) > 1)
        for term in terms
        if isinstance(term, AbstractExponential)
    ]
    factors = np.exp(np.minimum(-log_rows, 700))[:, None]
    for part in fixed:
        repeated = np.repeat(factors, part.velocity.shape[1], axis=0)
        parts.append(Part(factors * part.velocity, repeated * part.matrix))
    velocity, matrix = (np.sum(one, axis=0) for one in zip(*parts, strict=True))
    return _equilibrated(velocity, matrix, log_rows)


class Linearised(NamedTuple):
    """Velocities and their derivative, over the exponential of `log_unit`.

    That is zero unless they would leave the range of the numbers of the points.
    """

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
    unit = 0.0 if abs(unit) < _log_room(cloud) else unit
    rows = (found.log_rows - unit)[:, None]
    width = found.velocity.shape[1]
    links = np.repeat(np.repeat(halves(log_masses) + rows, width, 0), width, 1)
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
        basis = tangent_basis(space, np.asarray(cloud.points, np.float64))
        parts = self.columns[:, 0].reshape(len(basis), -1)
        vectors = np.einsum("nda,na->nd", basis, parts)
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
    log_masses = metric_of(layer, cloud)
    velocity, matrix, unit = linearised(flow, layer, cloud, log_masses, side=side)
    eps, speed = float(jnp.finfo(cloud.points.dtype).eps), largest_length(velocity)
    terms = terms_of(layer)
    is_apart = has_parts(flow.space, terms)
    steepness = _steepness(terms) if is_apart else 1000.0
    resolution = eps * steepness * norm(matrix)
    structure = is_gradient_flow(layer)
    # At inverse temperature zero there is a symmetry, if no energy.
    is_symmetric = np.abs(matrix - matrix.T).max(initial=0) <= resolution
    if (structure and structure.mobility is None) or is_symmetric:
        values, columns = np.linalg.eigh((matrix + matrix.T) / 2)
    else:
        values, columns = map(np.real, np.linalg.eig(matrix))
        # Multiple eigenvalues of such a matrix are known to half the digits.
        resolution = max(resolution, np.sqrt(eps) * norm(matrix))
    order = np.argsort(-values, kind="stable")
    return Rates(
        values[order],
        columns[:, order],
        resolution,
        steepness * speed if is_apart else 0.0,
        speed,
        float(np.abs(matrix).max(initial=0)),
        unit,
        log_masses,
    )


def splitting_rates(
    flow: Flow, layer: AbstractInContextMap, cloud: TokenCloud
) -> np.ndarray:
    """Return how fast two halves of each atom part, in their fastest direction."""
    twins = TokenCloud(
        jnp.repeat(cloud.points, 2, axis=0), jnp.repeat(cloud.weights / 2, 2)
    )
    found = scaled(flow, layer, twins)
    width = found.velocity.shape[1]
    blocks = found.matrix.reshape(twins.count, width, twins.count, width)
    every = 2 * np.arange(cloud.count)
    inner = blocks[every, :, every, :] - blocks[every, :, every + 1, :]
    rates = np.linalg.eigvals(inner).real.max(axis=1, initial=-np.inf)
    room = _log_room(cloud)
    return rates * np.exp(np.clip(found.log_rows[every], -room, room))


def metric_of(layer: AbstractInContextMap, tokens: TokenCloud) -> np.ndarray:
    """Return the logarithms of the masses in the metric of which a layer is a gradient.

    Zero for layers that are none.
    """
    layer = alone(layer)
    structure = is_gradient_flow(layer)
    if not structure:
        return np.zeros(tokens.count)
    log_masses = np.log(np.asarray(tokens.weights, np.float64))
    if structure.divides_by_mass and isinstance(layer, AbstractExponential):
        seen = layer.log_kernel_mass(tokens, tokens.points)
        log_masses = log_masses + np.asarray(seen, np.float64)
    return log_masses


def _log_room(cloud: TokenCloud) -> float:
    """Return how large logarithms of rates may be, in the type of the points."""
    return 0.85 * float(np.log(float(jnp.finfo(cloud.points.dtype).max)))


def _by_differentiation(flow: Flow, cloud: TokenCloud) -> Scaled:
    basis = tangent_basis(flow.space, np.asarray(cloud.points, np.float64))
    field, slopes = (np.asarray(a, np.float64) for a in _derivative(flow, cloud))
    velocity = np.einsum("ida,id->ia", basis, field)
    matrix = flat(np.einsum("ida,idje,jeb->iajb", basis, slopes, basis))
    return _equilibrated(velocity, matrix, np.zeros(cloud.count))


@eqx.filter_jit
def _derivative(
    flow: Flow, cloud: TokenCloud
) -> tuple[Float[Array, "n d"], Float[Array, "n d n d"]]:
    """Return the velocities as a function of all points, and their derivative."""
    start = jnp.zeros((), cloud.points.dtype)

    def field(points: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return flow.field(start, cloud.moved(points), points, cloud.positions)

    return field(cloud.points), jax.jacfwd(field)(cloud.points)


def _log_rows(terms, cloud: TokenCloud, fixed) -> np.ndarray:
    """Return the logarithm of the largest that each token feels, of any term."""
    logs = [np.full(cloud.count, -np.inf)]
    for term in terms:
        if isinstance(term, AbstractExponential):
            seen = log_shares(term, cloud)
            if not Pairs.of(term, unit_rows(cloud)).own.any():
                np.fill_diagonal(seen, -np.inf)
            logs.append(seen.max(axis=1))
    for part in fixed:
        rows = np.abs(part.matrix).reshape(cloud.count, -1).max(axis=1, initial=0)
        sizes = np.maximum(rows, np.abs(part.velocity).max(axis=1, initial=0))
        with np.errstate(divide="ignore"):
            logs.append(np.log(sizes))
    top = np.max(logs, axis=0)
    return np.where(np.isfinite(top), top, 0.0)


def _equilibrated(
    velocity: np.ndarray, matrix: np.ndarray, log_rows: np.ndarray
) -> Scaled:
    """Divide each row by its largest entry."""
    count, width = velocity.shape
    largest = np.abs(matrix).reshape(count, -1).max(axis=1, initial=0)
    largest = np.maximum(largest, np.abs(velocity).max(axis=1, initial=0))
    largest = np.where(largest > 0, largest, 1.0)
    return Scaled(
        velocity / largest[:, None],
        matrix / np.repeat(largest, width)[:, None],
        log_rows + np.log(largest),
    )


def _steepness(terms: tuple[AbstractInContextMap, ...]) -> float:
    """Return how many roundings of the points the rates of these terms may be off."""
    tops = [
        np.linalg.norm(np.asarray(term.temperature * term.score, np.float64), 2)
        for term in terms
        if isinstance(term, AbstractExponential)
    ]
    return float(10 * (1 + max(tops, default=0.0)))
