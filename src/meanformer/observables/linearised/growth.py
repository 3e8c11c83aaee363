"""The linearised flow of resting tokens: rates of growth, and how well they are known.

Attention and maps of points on the sphere are linearised term by term, without the pull
of tokens on themselves; all other flows by automatic differentiation.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap, Softmax, Unnormalised
from meanformer.flows import Flow
from meanformer.geometry import AbstractSpace
from meanformer.measures import TokenCloud
from meanformer.observables.energy.energies import log_kernel_mass
from meanformer.observables.energy.structure import alone, is_gradient_flow, terms_of
from meanformer.observables.linearised.velocity_terms import (
    Part,
    attention_part,
    flat,
    halves,
    has_parts,
    largest_length,
    norm,
    pointwise_part,
    tangent_basis,
)

CEILING = float(np.log(np.finfo(np.float64).max))


class Linearised(NamedTuple):
    """Velocities, their derivative in an orthonormal basis, and sizes to compare with.

    `size` is that of the vectors before projection; `rounding` says how far entries of
    the matrix may be off, in units of the relative rounding of the points.
    """

    velocity: np.ndarray
    matrix: np.ndarray
    size: float
    rounding: float


class Growth(NamedTuple):
    """Rates, the largest first, how small a rate can be told from zero, and more."""

    speed: float
    size: float
    rates: np.ndarray
    resolution: float
    direction: np.ndarray


def linearised(
    flow: Flow,
    layer: AbstractInContextMap,
    cloud: TokenCloud,
    log_masses: np.ndarray,
    *,
    side: int = 0,
) -> Linearised:
    """Linearise a flow, in a basis orthonormal for the masses of the tokens.

    Where tokens move, the derivative of the normalisation of softmax alone is left out:
    it is of the order of their speed. At kinks of a perceptron, `side` chooses the
    smallest ($-1$) or the largest ($1$) of the one-sided derivatives.
    """
    terms = terms_of(layer)
    if has_parts(flow.space, terms):
        is_exact = len(terms) > 1
        parts = parts_of(terms, cloud, log_masses, is_exact=is_exact, side=side)
        return _combined(parts, float(jnp.finfo(cloud.points.dtype).eps))
    velocity = _field(flow, cloud)(cloud.points)
    vectors = layer(cloud, cloud.points, positions=cloud.positions)
    matrix = derivative_matrix(flow, cloud, log_masses)
    size = max(largest_length(vectors), np.abs(matrix).max(initial=0))
    rounding = 1000 * max(size, norm(matrix))
    return Linearised(np.asarray(velocity, np.float64), matrix, size, float(rounding))


def parts_of(
    terms: tuple[AbstractInContextMap, ...],
    cloud: TokenCloud,
    log_masses: np.ndarray,
    *,
    is_exact: bool,
    side: int = 0,
    log_rows: np.ndarray | None = None,
) -> list[Part]:
    """Linearise each term; rows of attention may be divided by exponentials."""
    return [
        attention_part(term, cloud, log_masses, is_exact=is_exact, log_rows=log_rows)
        if isinstance(term, Softmax | Unnormalised)
        else pointwise_part(term, cloud, side=side)
        for term in terms
    ]


def derivative_matrix(
    flow: Flow, cloud: TokenCloud, log_masses: np.ndarray
) -> np.ndarray:
    """Return the derivative of the velocities, by automatic differentiation."""
    basis = tangent_basis(flow.space, np.asarray(cloud.points, np.float64))
    derivative = np.asarray(_derivative(flow, cloud), np.float64)
    blocks = np.einsum("ida,idje,jeb->iajb", basis, derivative, basis)
    scaling = np.exp(np.minimum(halves(log_masses), CEILING))
    return flat(blocks * scaling[:, None, :, None])


def growth(
    flow: Flow, layer: AbstractInContextMap, tokens: TokenCloud, *, side: int = 0
) -> Growth:
    """Return how fast small perturbations of tokens grow, and in which direction."""
    layer = alone(layer)
    structure = is_gradient_flow(layer)
    log_masses = metric_of(layer, tokens)
    found = linearised(flow, layer, tokens, log_masses, side=side)
    eps, matrix = float(jnp.finfo(tokens.points.dtype).eps), found.matrix
    resolution = eps * found.rounding
    if structure and structure.mobility is None:
        rates, columns = np.linalg.eigh((matrix + matrix.T) / 2)
    else:
        rates, columns = map(np.real, np.linalg.eig(matrix))
        # Multiple eigenvalues of such a matrix are known to half the digits.
        resolution = max(resolution, np.sqrt(eps) * norm(matrix))
    order = np.argsort(-rates, kind="stable")
    direction = _fastest(flow.space, tokens, log_masses, columns[:, order[:1]])
    size = max(found.size, np.abs(matrix).max(initial=0))
    speed = largest_length(found.velocity)
    return Growth(speed, float(size), rates[order], float(resolution), direction)


def metric_of(layer: AbstractInContextMap, tokens: TokenCloud) -> np.ndarray:
    """Return the logarithms of the masses in the metric of which a layer is a gradient.

    Zero for layers that are none.
    """
    layer = alone(layer)
    structure = is_gradient_flow(layer)
    if not structure:
        return np.zeros(tokens.count)
    log_masses = np.log(np.asarray(tokens.weights, np.float64))
    if structure.divides_by_mass:
        seen = log_kernel_mass(layer, tokens, tokens.points)
        log_masses = log_masses + np.asarray(seen, np.float64)
    return log_masses


def _combined(parts: list[Part], eps: float) -> Linearised:
    velocity = sum(part.velocity for part in parts)
    moving = largest_length(velocity) / eps
    rounding = sum(part.rounding for part in parts)
    rounding = rounding + max(part.steepness for part in parts) * moving
    size = sum(part.size for part in parts)
    return Linearised(velocity, sum(part.matrix for part in parts), size, rounding)


def _field(flow: Flow, cloud: TokenCloud):
    """Return the velocities of the tokens as a function of all their points."""
    start = jnp.zeros((), cloud.points.dtype)

    def field(points: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return flow.field(start, cloud.moved(points), points, cloud.positions)

    return field


@eqx.filter_jit
def _derivative(flow: Flow, cloud: TokenCloud) -> Float[Array, "n d n d"]:
    return jax.jacfwd(_field(flow, cloud))(cloud.points)


def _fastest(
    space: AbstractSpace, tokens: TokenCloud, log_masses: np.ndarray, column: np.ndarray
) -> np.ndarray:
    """Return a column in the basis as one vector for each token, the longest one."""
    if column.size == 0:
        return np.zeros(tokens.points.shape)
    basis = tangent_basis(space, np.asarray(tokens.points, np.float64))
    parts = column.reshape(len(basis), -1)
    vectors = np.einsum("nda,na->nd", basis, parts)
    sizes = np.linalg.norm(vectors, axis=1)
    # Masses may differ by more than floats can hold: in logarithms, from the longest.
    logs = np.log(np.where(sizes > 0, sizes, 1)) - log_masses / 2
    top = logs[sizes > 0].max(initial=-np.inf)
    if top == -np.inf:
        return vectors
    lengths = np.where(sizes > 0, np.exp(np.minimum(logs - top, 0)), 0)
    return vectors * (lengths / np.where(sizes > 0, sizes, 1))[:, None]
