r"""Velocities of a map on the sphere and their derivatives, term by term.

On the sphere the pull of a token on itself is normal, and larger than those of others
by up to $e^{2\beta}$: what projection leaves of it is rounding that hides the rates. So
for softmax and unnormalised attention it is left out in closed form.
"""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractExponential, AbstractInContextMap, Perceptron
from meanformer.attention.pointwise import AbstractPointwise
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.observables.energy.potentials import kink_sides

STEP = 1e-6  # how far to its side the slope is read


class Part(NamedTuple):
    """Velocities of one term of a map and their derivative, in tangent bases."""

    velocity: np.ndarray
    matrix: np.ndarray


def has_parts(space: AbstractSpace, terms: tuple[AbstractInContextMap, ...]) -> bool:
    """Whether all terms can be linearised on their own, without self-pull."""
    return isinstance(space, Sphere) and all(
        isinstance(term, AbstractPointwise) or is_plain(term) for term in terms
    )


def is_plain(layer: AbstractInContextMap) -> bool:
    """Whether a layer is softmax or unnormalised attention without bias."""
    if not isinstance(layer, AbstractExponential):
        return False
    return layer.query_bias is None and layer.value_bias is None


def attention_part(
    layer: AbstractExponential,
    cloud: TokenCloud,
    log_rows: np.ndarray,
    *,
    is_exact: bool,
) -> Part:
    """Linearise attention on the sphere, with the pull of a token on itself apart.

    Rows are divided by given exponentials. Without `is_exact` the derivative of the
    normalisation of softmax is left out; it is of the order of the velocity.
    """
    points = unit_rows(cloud)
    pairs = Pairs.of(layer, points)
    logs = log_shares(layer, cloud) - log_rows[:, None]
    if not pairs.own.any():
        np.fill_diagonal(logs, -np.inf)
    shares = np.exp(logs)
    pulls = pairs.pulls()
    velocity = np.einsum("ij,ija->ia", shares, pulls)
    blocks = pairs.blocks(pulls) * shares[:, None, :, None]
    every = np.arange(len(points))
    blocks[every, :, every, :] = pairs.own_blocks(pulls, shares)
    if is_exact and layer.is_normalised:
        blocks -= pairs.normalisation(velocity, layer, cloud)
    return Part(velocity, flat(blocks))


def pointwise_part(
    layer: AbstractPointwise, cloud: TokenCloud, *, side: int = 0
) -> Part:
    """Linearise a map of points on the sphere.

    At a kink of the activation of a perceptron the slope is that of the smaller Hessian
    for `side` $-1$, and that of the larger one for $1$.
    """
    points = unit_rows(cloud)
    basis = tangent_basis(Sphere(), points)
    vectors, slopes = _with_slopes(layer, cloud, points)
    if side and isinstance(layer, Perceptron):
        slopes = slopes + _jumps(layer, points, side)
    heights = np.sum(points * vectors, axis=1)
    blocks = np.einsum("ida,ide,ieb->iab", basis, slopes, basis)
    blocks = blocks - heights[:, None, None] * np.eye(basis.shape[2])
    count, width = len(points), basis.shape[2]
    matrix = np.zeros((count, width, count, width))
    matrix[np.arange(count), :, np.arange(count), :] = blocks
    velocity = np.einsum("ida,id->ia", basis, vectors)
    if isinstance(layer, Perceptron):
        velocity, matrix = (_without_noise(layer, part) for part in (velocity, matrix))
    return Part(velocity, flat(matrix))


class Pairs(NamedTuple):
    """What pairs of tokens on the sphere do to each other, before their weights."""

    points: np.ndarray
    basis: np.ndarray
    score: np.ndarray
    value: np.ndarray

    @classmethod
    def of(cls, layer: AbstractExponential, points: np.ndarray) -> "Pairs":
        """Return the pairs of points under an attention."""
        return cls(points, tangent_basis(Sphere(), points), *on_host(layer))

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

    def slopes(self) -> np.ndarray:
        """Return the derivative of each score in the token that is seen."""
        return np.einsum("jdb,id->ijb", self.basis, self.points @ self.score.T)

    def own_slopes(self) -> np.ndarray:
        """Return the derivative of each score in the token that sees."""
        every = np.arange(len(self.points))
        slopes = np.einsum("idb,jd->ijb", self.basis, self.points @ self.score)
        slopes[every, every] += self.slopes()[every, every]
        return slopes

    def blocks(self, pulls: np.ndarray) -> np.ndarray:
        """Return the derivative of each velocity in another token."""
        turned = np.einsum("ida,de,jeb->iajb", self.basis, self.value, self.basis)
        return turned + np.einsum("ija,ijb->iajb", pulls, self.slopes())

    def own_blocks(self, pulls: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Return the derivative of each velocity in its own token, with weights."""
        points, basis, every = self.points, self.basis, np.arange(len(pulls))
        heights = points @ self.value @ points.T
        heights[every, every] = np.sum(points * (points @ self.own), axis=1)
        heights = np.sum(shares * heights, axis=1)
        turned = np.einsum("ida,de,ieb->iab", basis, self.own, basis)
        return (
            np.einsum("ij,ija,ijb->iab", shares, pulls, self.own_slopes())
            - heights[:, None, None] * np.eye(basis.shape[2])
            + shares.diagonal()[:, None, None] * turned
        )

    def normalisation(
        self, velocity: np.ndarray, layer: AbstractExponential, cloud: TokenCloud
    ) -> np.ndarray:
        """Return velocities times the derivatives of the logarithms of the masses."""
        shares = np.exp(log_shares(layer, cloud))
        changes = shares[:, :, None] * self.slopes()
        every = np.arange(len(self.points))
        changes[every, every] = np.einsum("ij,ijb->ib", shares, self.own_slopes())
        return velocity[:, :, None, None] * changes[:, None]


def log_shares(layer: AbstractExponential, cloud: TokenCloud) -> np.ndarray:
    """Return the logarithms of the weights with which tokens see each other."""
    points = unit_rows(cloud)
    score, _ = on_host(layer)
    logs = points @ score.T @ points.T + np.log(np.asarray(cloud.weights, np.float64))
    if layer.is_normalised:
        return logs - np.logaddexp.reduce(logs, axis=1)[:, None]
    return logs - layer.shift_number


def tangent_basis(space: AbstractSpace, rows: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the tangent space at each point, as columns."""
    if isinstance(space, Euclidean):
        return np.broadcast_to(np.eye(rows.shape[1]), (len(rows), *[rows.shape[1]] * 2))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return np.linalg.qr(unit[:, :, None], mode="complete")[0][:, :, 1:]


def largest_length(vectors) -> float:
    """Return the length of the longest row."""
    return float(np.linalg.norm(np.asarray(vectors, np.float64), axis=1).max())


def halves(logs: np.ndarray) -> np.ndarray:
    """Return half the differences of logarithms, of each pair."""
    return (logs[:, None] - logs[None, :]) / 2


def norm(matrix: np.ndarray) -> float:
    """Bound the norm of a matrix, without squares that could underflow."""
    return float(len(matrix) * np.abs(matrix).max(initial=0))


def flat(blocks: np.ndarray) -> np.ndarray:
    """Return blocks as one matrix."""
    size = blocks.shape[0] * blocks.shape[1]
    return blocks.reshape(size, size)


def unit_rows(cloud: TokenCloud) -> np.ndarray:
    """Return the points in double precision, on the sphere."""
    rows = np.asarray(cloud.points, np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _without_noise(layer: Perceptron, values: np.ndarray) -> np.ndarray:
    """Set to zero what is below the rounding of the weights, as in flat regions."""
    rows, _, columns, _ = on_host(layer)
    inside, outside = (np.linalg.norm(array, axis=1) for array in (rows, columns))
    eps = float(jnp.finfo(layer.weights_in.dtype).eps)
    return np.where(np.abs(values) <= 8 * eps * float(inside @ outside), 0.0, values)


def _with_slopes(
    layer: AbstractPointwise, cloud: TokenCloud, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the map's value at each point, and its derivative there."""
    if isinstance(layer, Perceptron):
        rows, biases, columns, constant = on_host(layer)
        arguments = jnp.asarray(points @ rows.T + biases, layer.weights_in.dtype)
        hidden, slopes = (
            np.asarray(array, np.float64)
            for array in _activated(layer.activation, arguments)
        )
        return hidden @ columns + constant, np.einsum(
            "ip,pd,pe->ide", slopes, columns, rows
        )
    moved = cloud.moved(jnp.asarray(points, cloud.points.dtype))
    vectors, slopes = _differentiated(layer, moved)
    return np.asarray(vectors, np.float64), np.asarray(slopes, np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _activated(activation, arguments: Float[Array, "n p"]):
    """Return an activation and its derivative."""
    return jax.jvp(activation, (arguments,), (jnp.ones_like(arguments),))


@eqx.filter_jit
def _differentiated(
    layer: AbstractPointwise, cloud: TokenCloud
) -> tuple[Float[Array, "n d"], Float[Array, "n d d"]]:
    def at(point: Float[Array, " d"]) -> Float[Array, " d"]:
        return layer(cloud, point[None])[0]

    return layer(cloud, cloud.points), jax.vmap(jax.jacfwd(at))(cloud.points)


class _Held:
    """A map that equals only itself, to remember what was computed of it."""

    def __init__(self, layer: AbstractInContextMap):
        self.layer = layer

    def __hash__(self) -> int:
        return id(self.layer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.layer is other.layer


def on_host(layer: AbstractInContextMap) -> tuple[np.ndarray, ...]:
    r"""Return the parameters in double precision, remembered for maps used lately.

    Of attention $\beta A$ and $V$; of a perceptron rows, biases, columns and constant.
    """
    return _on_host(_Held(layer))


@functools.lru_cache(maxsize=32)
def _on_host(held: _Held) -> tuple[np.ndarray, ...]:
    layer = held.layer
    if isinstance(layer, Perceptron):
        constant = jnp.zeros(()) if layer.bias_out is None else layer.bias_out
        arrays = layer.weights_in, layer.bias_in, layer.weights_out.T, constant
    else:
        assert isinstance(layer, AbstractExponential)
        arrays = layer.temperature * layer.score, layer.value
    return tuple(np.asarray(array, np.float64) for array in arrays)


def kinks_of(
    terms: tuple[AbstractInContextMap, ...], cloud: TokenCloud
) -> tuple[tuple[int, int], ...]:
    """Return pairs of a token and a unit of a perceptron whose kink it sits on.

    Units of several perceptrons are counted one after another.
    """
    found, before = [], 0
    for term in terms:
        if isinstance(term, Perceptron):
            at_kink = kink_sides(term, np.asarray(cloud.points, np.float64))
            places = [] if at_kink is None else np.argwhere(at_kink)
            found += [(int(token), before + int(unit)) for token, unit in places]
            before += len(term.weights_in)
    return tuple(found)


def _jumps(layer: Perceptron, points: np.ndarray, side: int) -> np.ndarray:
    """Return what the slopes at kinks lack, on the given side."""
    at_kink = kink_sides(layer, points)
    rows, biases, columns, _ = on_host(layer)
    if at_kink is None or not at_kink.any():
        return np.zeros((len(points), points.shape[1], points.shape[1]))
    arguments = points @ rows.T + biases
    here, low, high = (
        _unit_slopes(layer, arguments + shift) for shift in (0.0, -STEP, STEP)
    )
    strength = np.sign(np.sum(rows * columns, axis=1))[None]
    is_high = (high - low) * strength * side > 0
    jumps = np.where(at_kink, np.where(is_high, high, low) - here, 0)
    return np.einsum("ip,pd,pe->ide", jumps, columns, rows)


def _unit_slopes(layer: Perceptron, arguments: np.ndarray) -> np.ndarray:
    typed = jnp.asarray(arguments, layer.weights_in.dtype)
    return np.asarray(_activated(layer.activation, typed)[1], np.float64)
