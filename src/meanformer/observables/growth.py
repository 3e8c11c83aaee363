r"""The linearised flow of resting tokens: rates of growth, and how well they are known.

On the sphere the pull of a token on itself is normal, and larger than those of others
by up to $e^{2\beta}$: what projection leaves of it is rounding that hides the rates. So
for softmax and unnormalised attention it is left out in closed form.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import (
    AbstractInContextMap,
    Sigmoid,
    Softmax,
    Unnormalised,
)
from meanformer.errors import Overflow
from meanformer.flows import Flow
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.numerics.proportions import agree
from meanformer.observables.energies import log_kernel_mass
from meanformer.observables.structure import is_gradient_flow

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
) -> Linearised:
    """Linearise a flow, in a basis orthonormal for the masses of the tokens.

    Where tokens move, the derivative of the normalisation of softmax is left out: it is
    of the order of their speed.
    """
    is_plain = isinstance(layer, Softmax | Unnormalised) and not _has_bias(layer)
    if isinstance(flow.space, Sphere) and is_plain:
        return _without_self(layer, cloud, log_masses)
    velocity = _field(flow, cloud)(cloud.points)
    vectors = layer(cloud, cloud.points, positions=cloud.positions)
    basis = tangent_basis(flow.space, _rows(cloud))
    derivative = np.asarray(_derivative(flow, cloud), np.float64)
    blocks = np.einsum("ida,idje,jeb->iajb", basis, derivative, basis)
    scaling = np.exp(np.minimum(_halves(log_masses), CEILING))
    matrix = _flat(blocks * scaling[:, None, :, None])
    size = max(largest_length(vectors), np.abs(matrix).max(initial=0))
    rounding = 1000 * max(size, _norm(matrix))
    return Linearised(np.asarray(velocity, np.float64), matrix, size, float(rounding))


def growth(flow: Flow, layer: AbstractInContextMap, tokens: TokenCloud) -> Growth:
    """Return how fast small perturbations of tokens grow, and in which direction."""
    structure = is_gradient_flow(layer)
    log_masses = np.zeros(tokens.count)
    if structure:
        log_masses = np.log(np.asarray(tokens.weights, np.float64))
    if structure.divides_by_mass:
        seen = log_kernel_mass(layer, tokens, tokens.points)
        log_masses = log_masses + np.asarray(seen, np.float64)
    found = linearised(flow, layer, tokens, log_masses)
    eps, matrix = float(jnp.finfo(tokens.points.dtype).eps), found.matrix
    resolution = eps * found.rounding
    if structure and structure.mobility is None:
        rates, columns = np.linalg.eigh((matrix + matrix.T) / 2)
    else:
        rates, columns = map(np.real, np.linalg.eig(matrix))
        # Multiple eigenvalues of such a matrix are known to half the digits.
        resolution = max(resolution, np.sqrt(eps) * _norm(matrix))
    order = np.argsort(-rates, kind="stable")
    direction = _fastest(flow.space, tokens, log_masses, columns[:, order[:1]])
    size = max(found.size, np.abs(matrix).max(initial=0))
    speed = largest_length(found.velocity)
    return Growth(speed, float(size), rates[order], float(resolution), direction)


def rotations(layer: AbstractInContextMap, tokens: TokenCloud) -> int:
    r"""Return how many independent rotations of the tokens the layer does not notice.

    Rotations of each common eigenspace of $\beta A$ and $V$, if both are symmetric and
    commute; of other layers none are known.
    """
    if not isinstance(layer, Softmax | Unnormalised | Sigmoid) or _has_bias(layer):
        return 0
    slack = 1000 * float(jnp.finfo(tokens.points.dtype).eps)
    score, value = (
        np.asarray(matrix, np.float64)
        for matrix in (layer.temperature * layer.score, layer.value)
    )
    for matrix in (score, value):
        if matrix.shape != matrix.T.shape or not agree(matrix, matrix.T, slack):
            return 0
    # A combination that mixes no two pairs of eigenvalues, except by accident.
    levels, columns = np.linalg.eigh(_unit(score) + np.sqrt(2) * _unit(value))
    spaces = np.split(columns, np.flatnonzero(np.diff(levels) > slack) + 1, axis=1)
    if not all(
        _is_eigenspace(_unit(m), s, slack) for m in (score, value) for s in spaces
    ):
        return 0
    points = _rows(tokens)
    least = slack * np.linalg.norm(points, 2)
    ranks = [np.linalg.matrix_rank(points @ space, tol=least) for space in spaces]
    return sum(
        int(rank) * (2 * space.shape[1] - int(rank) - 1) // 2
        for rank, space in zip(ranks, spaces, strict=True)
    )


def tangent_basis(space: AbstractSpace, rows: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the tangent space at each point, as columns."""
    if isinstance(space, Euclidean):
        return np.broadcast_to(np.eye(rows.shape[1]), (len(rows), *[rows.shape[1]] * 2))
    return np.linalg.qr(_unit_rows(rows)[:, :, None], mode="complete")[0][:, :, 1:]


def largest_length(vectors) -> float:
    """Return the length of the longest row."""
    return float(np.linalg.norm(np.asarray(vectors, np.float64), axis=1).max())


def _without_self(
    layer: Softmax | Unnormalised, cloud: TokenCloud, log_masses: np.ndarray
) -> Linearised:
    """Linearise attention on the sphere, with the pull of a token on itself apart."""
    points = _unit_rows(_rows(cloud))
    score = np.asarray(layer.temperature * layer.score, np.float64)
    value = np.asarray(layer.value, np.float64)
    scores = points @ score.T @ points.T
    logs = _log_shares(layer, scores, np.asarray(cloud.weights, np.float64))
    # What the exponentials are multiplied with must have a place too.
    factor = points.size * (1 + np.abs(scores).max()) * (1 + np.abs(value).max())
    ceiling = float(np.log(float(jnp.finfo(cloud.points.dtype).max)) - np.log(factor))
    shares = _exponential(logs, ceiling)
    pairs = _Pairs(points, tangent_basis(Sphere(), points), score, value)
    pulls = pairs.pulls()
    velocity = np.einsum("ij,ija->ia", shares, pulls)
    linked = _exponential(logs + _halves(log_masses), ceiling)
    blocks = pairs.blocks(pulls) * linked[:, None, :, None]
    every = np.arange(len(points))
    blocks[every, :, every, :] = pairs.own_blocks(pulls, shares)
    matrix = _flat(blocks)
    scale = _norm(matrix)
    if pairs.own.any():
        scale = scale + shares.diagonal().max() * np.abs(value).max()
    moving = largest_length(velocity) / float(jnp.finfo(cloud.points.dtype).eps)
    rounding = (1 + np.abs(scores).max()) * 10 * (scale + moving)
    size = largest_length(shares @ points @ value.T)
    return Linearised(velocity, matrix, size, float(rounding))


class _Pairs(NamedTuple):
    """What pairs of tokens on the sphere do to each other, before their weights."""

    points: np.ndarray
    basis: np.ndarray
    score: np.ndarray
    value: np.ndarray

    @property
    def own(self) -> np.ndarray:
        r"""$V - v_{11}I$: it pulls a token by itself as $V$ does; zero for $V = cI$."""
        return self.value - self.value[0, 0] * np.eye(len(self.value))

    def pulls(self) -> np.ndarray:
        """Return the tangent part of the value of each token at each other one."""
        pulls = np.einsum("ida,jd->ija", self.basis, self.points @ self.value.T)
        every = np.arange(len(pulls))
        moved = self.points @ self.own.T
        pulls[every, every] = np.einsum("ida,id->ia", self.basis, moved)
        return pulls

    def blocks(self, pulls: np.ndarray) -> np.ndarray:
        """Return the derivative of each velocity in another token."""
        slopes = np.einsum("jdb,id->ijb", self.basis, self.points @ self.score.T)
        turned = np.einsum("ida,de,jeb->iajb", self.basis, self.value, self.basis)
        return turned + np.einsum("ija,ijb->iajb", pulls, slopes)

    def own_blocks(self, pulls: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Return the derivative of each velocity in its own token, with weights."""
        points, basis, every = self.points, self.basis, np.arange(len(pulls))
        slopes = np.einsum("idb,jd->ijb", basis, points @ self.score)
        slopes[every, every] += np.einsum("idb,id->ib", basis, points @ self.score.T)
        heights = points @ self.value @ points.T
        heights[every, every] = np.sum(points * (points @ self.own), axis=1)
        heights = np.sum(shares * heights, axis=1)
        turned = np.einsum("ida,de,ieb->iab", basis, self.own, basis)
        return (
            np.einsum("ij,ija,ijb->iab", shares, pulls, slopes)
            - heights[:, None, None] * np.eye(basis.shape[2])
            + shares.diagonal()[:, None, None] * turned
        )


def _log_shares(
    layer: Softmax | Unnormalised, scores: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return the logarithms of the weights with which tokens see each other."""
    logs = scores + np.log(weights)
    if isinstance(layer, Softmax):
        return logs - np.logaddexp.reduce(logs, axis=1)[:, None]
    return logs if layer.shift is None else logs - float(layer.shift)


def _exponential(logs: np.ndarray, ceiling: float) -> np.ndarray:
    if logs.max() > ceiling:
        raise Overflow(
            f"rates of growth overflow: their logarithm is about {logs.max():.6g}; "
            "lower beta, or give Unnormalised a shift."
        )
    return np.exp(logs)


def _halves(logs: np.ndarray) -> np.ndarray:
    return (logs[:, None] - logs[None, :]) / 2


def _norm(matrix: np.ndarray) -> float:
    """Bound the norm of a matrix, without squares that could underflow."""
    return float(len(matrix) * np.abs(matrix).max(initial=0))


def _flat(blocks: np.ndarray) -> np.ndarray:
    size = blocks.shape[0] * blocks.shape[1]
    return blocks.reshape(size, size)


def _rows(cloud: TokenCloud) -> np.ndarray:
    return np.asarray(cloud.points, np.float64)


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _unit(matrix: np.ndarray) -> np.ndarray:
    largest = np.abs(matrix).max()
    return matrix / largest if largest > 0 else matrix


def _is_eigenspace(matrix: np.ndarray, space: np.ndarray, slack: float) -> bool:
    image = matrix @ space
    level = np.trace(space.T @ image) / space.shape[1]
    return bool(np.abs(image - level * space).max() <= slack)


def _has_bias(layer: Softmax | Unnormalised | Sigmoid) -> bool:
    return layer.query_bias is not None or layer.value_bias is not None


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
    basis = tangent_basis(space, _rows(tokens))
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
