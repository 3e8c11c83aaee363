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
from meanformer.observables.energy.potentials import on_kinks
from meanformer.observables.energy.structure import terms_of

SIDE_STEP = 1e-6  # how far to its side the slope is read


class Part(NamedTuple):
    """Velocities of one term of a map and their derivative, in tangent bases."""

    velocity: np.ndarray
    matrix: np.ndarray


def has_parts(space: AbstractSpace, terms: tuple[AbstractInContextMap, ...]) -> bool:
    """Whether all terms can be linearised on their own, without self-pull."""
    return isinstance(space, Sphere) and all(
        isinstance(term, AbstractPointwise)
        or isinstance(term, AbstractExponential)
        and term.query_bias is None
        and term.value_bias is None
        for term in terms
    )


class Attending(NamedTuple):
    r"""Score, value and attention weights among tokens, in double precision.

    Attributes:
        score: the matrix $\beta A$.
        value: the matrix $V$.
        log_shares: logarithms of the weights with which tokens see each other.
        is_normalised: whether these weights are shares of a total.
    """

    score: np.ndarray
    value: np.ndarray
    log_shares: np.ndarray
    is_normalised: bool

    @classmethod
    def of(cls, layer: AbstractExponential, cloud: TokenCloud) -> "Attending":
        """Return the score, value and attention weights of a layer at a cloud."""
        points, masses = unit_rows(cloud), np.asarray(cloud.weights, np.float64)
        score = np.asarray(layer.temperature * layer.score, np.float64)
        logs = points @ score.T @ points.T + np.log(masses)
        shift = layer.shift_number
        if layer.is_normalised:
            shift = np.logaddexp.reduce(logs, axis=1)[:, None]
        value = np.asarray(layer.value, np.float64)
        return cls(score, value, logs - shift, layer.is_normalised)

    @property
    def own_value(self) -> np.ndarray:
        r"""$V - v_{11}I$: it pulls a token by itself as $V$ does; zero for $V = cI$."""
        return self.value - self.value[0, 0] * np.eye(len(self.value))

    @property
    def log_pulls(self) -> np.ndarray:
        """The same logarithms, without that of oneself if its pull is zero."""
        logs = self.log_shares.copy()
        if not self.own_value.any():
            np.fill_diagonal(logs, -np.inf)
        return logs

    def part(self, points: np.ndarray, log_rows: np.ndarray, is_exact: bool) -> Part:
        """Linearise attention at these tokens, with their pull on themselves apart.

        Rows are divided by given exponentials. Unless it is exact, the derivative of
        the normalisation of softmax is left out; it is of the order of the velocity.
        """
        basis, every = tangent_basis(Sphere(), points), np.arange(len(points))
        shares = np.exp(self.log_pulls - log_rows[:, None])
        values = np.repeat((points @ self.value.T)[None], len(points), axis=0)
        values[every, every] = points @ self.own_value.T
        pulls = np.einsum("ida,ijd->ija", basis, values)
        velocity = np.einsum("ij,ija->ia", shares, pulls)
        # Derivatives of scores in the token that is seen, and in the one that sees.
        seen = np.einsum("jdb,id->ijb", basis, points @ self.score.T)
        seeing = np.einsum("idb,jd->ijb", basis, points @ self.score)
        seeing[every, every] += seen[every, every]
        # The derivative of each velocity in another token, and in its own.
        blocks = np.einsum("ida,de,jeb->iajb", basis, self.value, basis)
        blocks = blocks + np.einsum("ija,ijb->iajb", pulls, seen)
        blocks = blocks * shares[:, None, :, None]
        heights = np.einsum("ij,id,ijd->i", shares, points, values)
        turned = np.einsum("ida,de,ieb->iab", basis, self.own_value, basis)
        blocks[every, :, every, :] = (
            np.einsum("ij,ija,ijb->iab", shares, pulls, seeing)
            - heights[:, None, None] * np.eye(basis.shape[2])
            + shares.diagonal()[:, None, None] * turned
        )
        if is_exact and self.is_normalised:
            masses = np.exp(self.log_shares)
            changes = masses[:, :, None] * seen
            changes[every, every] = np.einsum("ij,ijb->ib", masses, seeing)
            blocks -= velocity[:, :, None, None] * changes[:, None]
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
    if isinstance(layer, Perceptron):
        vectors, slopes, noise = _of_perceptron(layer, points, side)
    else:
        there = cloud.moved(jnp.asarray(points, cloud.points.dtype))
        found = _differentiated(layer, there)
        vectors, slopes = (np.asarray(array, np.float64) for array in found)
        noise = 0.0
    heights = np.sum(points * vectors, axis=1)
    blocks = np.einsum("ida,ide,ieb->iab", basis, slopes, basis)
    blocks = blocks - heights[:, None, None] * np.eye(basis.shape[2])
    count, width = len(points), basis.shape[2]
    matrix = np.zeros((count, width, count, width))
    matrix[np.arange(count), :, np.arange(count), :] = blocks
    velocity = np.einsum("ida,id->ia", basis, vectors)
    # What is below rounding, as in flat regions, is zero.
    velocity, matrix = (np.where(np.abs(x) <= noise, 0, x) for x in (velocity, matrix))
    return Part(velocity, flat(matrix))


def _of_perceptron(layer: Perceptron, points: np.ndarray, side: int):
    """Return values, derivatives, and the noise that rounding of the weights makes."""
    rows, biases, columns = (
        np.asarray(array, np.float64)
        for array in (layer.weights_in, layer.bias_in, layer.weights_out.T)
    )
    arguments = points @ rows.T + biases
    hidden, slopes = _activated(layer, arguments)
    at_kink = on_kinks(layer, points)
    if side and at_kink.any():
        sides = arguments - SIDE_STEP, arguments + SIDE_STEP
        low, high = (_activated(layer, shifted)[1] for shifted in sides)
        strength = np.sign(np.sum(rows * columns, axis=1))[None]
        is_high = (high - low) * strength * side > 0
        slopes = np.where(at_kink, np.where(is_high, high, low), slopes)
    vectors = hidden @ columns
    if layer.bias_out is not None:
        vectors = vectors + np.asarray(layer.bias_out, np.float64)
    inside, outside = (np.linalg.norm(array, axis=1) for array in (rows, columns))
    noise = 8 * float(jnp.finfo(layer.weights_in.dtype).eps) * float(inside @ outside)
    return vectors, np.einsum("ip,pd,pe->ide", slopes, columns, rows), noise


def _activated(layer: Perceptron, arguments: np.ndarray) -> list[np.ndarray]:
    """Return the activation of each argument and its derivative there."""
    typed = jnp.asarray(arguments, layer.weights_in.dtype)
    pair = _with_derivative(layer.activation, typed)
    return [np.asarray(array, np.float64) for array in pair]


@functools.partial(jax.jit, static_argnums=0)
def _with_derivative(activation, arguments: Float[Array, "n p"]):
    return jax.jvp(activation, (arguments,), (jnp.ones_like(arguments),))


@eqx.filter_jit
def _differentiated(layer: AbstractPointwise, cloud: TokenCloud):
    def at(point: Float[Array, " d"]) -> Float[Array, " d"]:
        return layer(cloud, point[None])[0]

    return layer(cloud, cloud.points), jax.vmap(jax.jacfwd(at))(cloud.points)


def tangent_basis(space: AbstractSpace, rows: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the tangent space at each point, as columns."""
    if isinstance(space, Euclidean):
        return np.broadcast_to(np.eye(rows.shape[1]), (len(rows), *[rows.shape[1]] * 2))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return np.linalg.qr(unit[:, :, None], mode="complete")[0][:, :, 1:]


def tangent_vectors(
    space: AbstractSpace, cloud: TokenCloud, coordinates: np.ndarray
) -> np.ndarray:
    """Return tangent vectors at the tokens, given in the bases there."""
    basis = tangent_basis(space, np.asarray(cloud.points, np.float64))
    return np.einsum("nda,na->nd", basis, coordinates.reshape(len(basis), -1))


def moved(space: AbstractSpace, cloud: TokenCloud, motion: np.ndarray) -> TokenCloud:
    """Return tokens moved, and brought back to the space; on the host."""
    points = np.asarray(cloud.points, np.float64) + motion
    if isinstance(space, Sphere):
        points = points / np.linalg.norm(points, axis=1, keepdims=True)
    return cloud.moved(jnp.asarray(points, cloud.points.dtype))


def flat(blocks: np.ndarray) -> np.ndarray:
    """Return blocks as one matrix."""
    size = blocks.shape[0] * blocks.shape[1]
    return blocks.reshape(size, size)


def unit_rows(cloud: TokenCloud) -> np.ndarray:
    """Return the points in double precision, on the sphere."""
    rows = np.asarray(cloud.points, np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def kinks_of(
    layer: AbstractInContextMap, cloud: TokenCloud
) -> tuple[tuple[int, int], ...]:
    """Return pairs of a token and a unit of the perceptrons whose kink it sits on."""
    points = np.asarray(cloud.points, np.float64)
    blocks = [term for term in terms_of(layer) if isinstance(term, Perceptron)]
    sits = [np.zeros((len(points), 0)), *(on_kinks(block, points) for block in blocks)]
    pairs = np.argwhere(np.concatenate(sits, axis=1))
    return tuple((int(token), int(unit)) for token, unit in pairs)
