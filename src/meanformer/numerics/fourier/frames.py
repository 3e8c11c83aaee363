"""Frames: coordinates in which the exponential of the score is a convolution."""

import abc
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, ScalarLike

from meanformer.numerics.arrays import matmul
from meanformer.numerics.fourier.levels import CIRCLE, GAUSSIAN, Level
from meanformer.numerics.fourier.transforms import (
    circle_convolution,
    circle_modes,
    gaussian_convolution,
    gaussian_modes,
)
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.tiles import only_moving


class AbstractFrame(eqx.Module):
    r"""A way to write the exponential of the score as a convolution.

    $$e^{s_{ij}} = e^{q_i}\, G(a_i - z_j)\, e^{t_j}, \qquad 0 \le G \le 1.$$
    """

    queries: eqx.AbstractVar[Float[Array, "m k"]]
    tokens: eqx.AbstractVar[Float[Array, "n k"]]
    log_queries: eqx.AbstractVar[Float[Array, " m"]]
    log_tokens: eqx.AbstractVar[Float[Array, " n"]]

    @abc.abstractmethod
    def needed_modes(self, accuracy: ScalarLike) -> Float[Array, ""]:
        """Return how many modes per axis an accuracy needs."""

    @abc.abstractmethod
    def defect(self) -> Float[Array, ""]:
        """Return how far the convolution is from the score, as an exponent."""

    @abc.abstractmethod
    def is_like(self, other: Any) -> Bool[Array, ""]:
        """Whether another frame of this kind has the same centres and scales."""

    @abc.abstractmethod
    def convolve(
        self, columns: Float[Array, "c n"], level: Level
    ) -> Float[Array, "c m"]:
        r"""Return $\sum_j G(a_i - z_j) c_j$ for each column."""

    @abc.abstractmethod
    def convolve_moving(
        self, pairs: Pairs, columns: Float[Array, "c n"], level: Level
    ) -> Float[Array, "c m"]:
        """Return the same, with the derivative in queries and tokens, too."""


class GaussianFrame(AbstractFrame):
    r"""The square completed, in scaled coordinates around two centres.

    With centres $u_0$, $c$ and scales $\sigma$ along the axes, $a = \sigma(u - u_0)$
    and $z = (y - c)/\sigma$,
    $$\langle u, y\rangle = \langle u, c\rangle + \tfrac12|a|^2
      + \langle u_0, y - c\rangle + \tfrac12|z|^2 - \tfrac12|a - z|^2.$$

    The scales make queries and tokens equally wide, which needs the fewest modes. For
    queries $u = \beta x$ at the tokens it is $\sigma = \beta^{-1/2}$.
    """

    queries: Float[Array, "m k"]
    tokens: Float[Array, "n k"]
    log_queries: Float[Array, " m"]
    log_tokens: Float[Array, " n"]
    spans: Float[Array, " k"]
    centre: Float[Array, " k"]

    def needed_modes(self, accuracy: ScalarLike) -> Float[Array, ""]:
        """Return how many modes per axis an accuracy needs."""
        return gaussian_modes(self.spans, accuracy)

    def defect(self) -> Float[Array, ""]:
        """Return zero: the square is completed exactly."""
        return jnp.zeros_like(self.spans[0])

    def is_like(self, other: "GaussianFrame") -> Bool[Array, ""]:
        """Whether the boxes are the same."""
        return jnp.all(self.spans == other.spans) & jnp.all(self.centre == other.centre)

    def convolve(
        self, columns: Float[Array, "c n"], level: Level
    ) -> Float[Array, "c m"]:
        """Convolve with the standard Gaussian."""
        return gaussian_convolution(
            self.queries, self.tokens, columns, self.spans, level
        )

    def convolve_moving(
        self, pairs: Pairs, columns: Float[Array, "c n"], level: Level
    ) -> Float[Array, "c m"]:
        """Convolve with the standard Gaussian, whose coordinates move."""
        return self.convolve(columns, level)


class CircleFrame(AbstractFrame):
    r"""Angles, where queries and tokens lie on circles around the origin.

    $$\langle u, y\rangle = \rho\cos(a - z), \qquad \rho = |u||y|.$$
    """

    queries: Float[Array, "m 1"]
    tokens: Float[Array, "n 1"]
    log_queries: Float[Array, " m"]
    log_tokens: Float[Array, " n"]
    concentration: Float[Array, ""]
    spread: Float[Array, ""]

    def needed_modes(self, accuracy: ScalarLike) -> Float[Array, ""]:
        """Return how many modes an accuracy needs."""
        return circle_modes(self.concentration, accuracy)

    def defect(self) -> Float[Array, ""]:
        """Return how far the products of the radii spread."""
        return self.spread

    def is_like(self, other: "CircleFrame") -> Bool[Array, ""]:
        """Whether the radii are the same."""
        return (self.spread == other.spread) & (
            self.concentration == other.concentration
        )

    def convolve(
        self, columns: Float[Array, "c n"], level: Level
    ) -> Float[Array, "c m"]:
        """Convolve with the exponential of the cosine."""
        return circle_convolution(
            self.queries, self.tokens, columns, self.concentration, level
        )

    def convolve_moving(
        self, pairs: Pairs, columns: Float[Array, "c n"], level: Level
    ) -> Float[Array, "c m"]:
        """Convolve with the exponential of the cosine, as a function of the plane."""
        return convolve_on_circle(
            level, self.concentration, pairs.tilts, pairs.points, columns
        )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def convolve_on_circle(
    level: Level,
    concentration: Float[Array, ""],
    tilts: Float[Array, "m 2"],
    points: Float[Array, "n 2"],
    columns: Float[Array, "c n"],
) -> Float[Array, "c m"]:
    r"""Return $\sum_j c_j e^{\langle u_i, y_j\rangle - \rho}$ for points on circles.

    Its derivative,
    $$\sum_j e^{\langle u_i, y_j\rangle - \rho}\bigl(\dot c_j
      + c_j\langle \dot u_i, y_j\rangle + c_j\langle u_i, \dot y_j\rangle\bigr),$$
    leads off the circle, and is made of such sums again.
    """
    places = fixed_angles(tilts), fixed_angles(points)
    return circle_convolution(*places, columns, concentration, level)


@jax.custom_jvp
def fixed_angles(points: Float[Array, "n 2"]) -> Float[Array, "n 1"]:
    """Return the angles, which must not be differentiated: radii move as well."""
    return angles(points)


@partial(fixed_angles.defjvp, symbolic_zeros=True)
def fixed_angles_jvp(primals, tangents):
    """Refuse: this is the derivative of a backward pass, which knows angles only."""
    value, (moving,) = fixed_angles(primals[0]), only_moving(tangents)
    if moving is not None:
        # Not at once: other branches of the program may be the ones that run.
        value = eqx.error_if(
            value,
            jnp.any(moving != 0),
            "fast sums on the circle have no derivative of their gradient; use "
            "sums=Blocked(), or jax.jvp of jax.jvp.",
        )
    return value, jnp.zeros_like(value)


def convolve_on_circle_jvp(level, primals, tangents):
    """Differentiate in what moves; the concentration is that of the queries."""
    concentration, tilts, points, columns = primals
    _, moving_tilts, moving_points, moving_columns = only_moving(tangents)

    def convolve(columns):
        return convolve_on_circle(level, concentration, tilts, points, columns)

    value = convolve(columns)
    moved = jnp.zeros_like(value)
    if moving_columns is not None:
        moved += convolve(moving_columns)
    if moving_tilts is not None:
        moved += contracted(moving_tilts, convolve(outer(points, columns)))
    if moving_points is not None:
        moved += contracted(tilts, convolve(outer(moving_points, columns)))
    return value, moved


convolve_on_circle.defjvp(convolve_on_circle_jvp, symbolic_zeros=True)


def frames_of(pairs: Pairs, counted: Bool[Array, " n"]) -> dict[str, AbstractFrame]:
    """Return the frames that the dimension of the pairs allows.

    Args:
        pairs: queries and tokens.
        counted: the tokens that matter; the others may be put anywhere.
    """
    frames: dict[str, AbstractFrame] = {GAUSSIAN: gaussian_frame(pairs, counted)}
    if pairs.tilts.shape[1] == 2:
        frames[CIRCLE] = circle_frame(pairs, counted)
    return frames


def gaussian_frame(pairs: Pairs, counted: Bool[Array, " n"]) -> GaussianFrame:
    """Return centres and scales from the boxes around queries and tokens.

    They are constant for differentiation: the result does not depend on them.
    """
    everyone = jnp.ones(len(pairs.tilts), bool)
    tilt, tilt_width = box(lax.stop_gradient(pairs.tilts), everyone)
    centre, width = box(lax.stop_gradient(pairs.points), counted)
    # An axis along which one side is a point has no part in the score.
    is_flat = (width == 0) | (tilt_width == 0)
    scales = jnp.sqrt(jnp.where(is_flat, 1, width) / jnp.where(is_flat, 1, tilt_width))
    inverses = jnp.where(is_flat, 0, 1 / scales)
    scales = jnp.where(is_flat, 0, scales)

    points = jnp.where(counted[:, None], pairs.points - centre[None, :], 0)
    queries = scales[None, :] * (pairs.tilts - tilt[None, :])
    tokens = inverses[None, :] * points
    log_tokens = matmul(points, tilt) + jnp.sum(tokens**2, axis=1) / 2
    if pairs.offsets is not None:
        log_tokens = log_tokens + jnp.where(counted, pairs.offsets, 0)
    log_queries = matmul(pairs.tilts, centre) + jnp.sum(queries**2, axis=1) / 2
    spans = (scales * tilt_width + inverses * width) / 2
    return GaussianFrame(queries, tokens, log_queries, log_tokens, spans, centre)


def circle_frame(pairs: Pairs, counted: Bool[Array, " n"]) -> CircleFrame:
    """Return angles, and how far the products of the radii spread."""
    radii = lax.stop_gradient(jnp.linalg.norm(pairs.tilts, axis=1))
    token_radii = lax.stop_gradient(jnp.linalg.norm(pairs.points, axis=1))
    smallest = radii.min() * jnp.where(counted, token_radii, jnp.inf).min()
    largest = radii.max() * jnp.where(counted, token_radii, 0).max()
    concentration = (smallest + largest) / 2
    log_tokens = jnp.zeros(len(counted), radii.dtype)
    if pairs.offsets is not None:
        log_tokens = jnp.where(counted, pairs.offsets, 0)
    return CircleFrame(
        lax.stop_gradient(angles(pairs.tilts)),
        lax.stop_gradient(angles(pairs.points)),
        jnp.broadcast_to(concentration, (len(pairs.tilts),)),
        log_tokens,
        concentration,
        largest - smallest,
    )


def outer(
    points: Float[Array, "n k"], columns: Float[Array, "c n"]
) -> Float[Array, "kc n"]:
    """Return all products of a coordinate and a column."""
    products = points.T[:, None, :] * columns[None, :, :]
    return products.reshape(-1, len(points))


def contracted(
    tilts: Float[Array, "m k"], sums: Float[Array, "kc m"]
) -> Float[Array, "c m"]:
    """Sum over coordinates the products with what `outer` became."""
    apart = sums.reshape(tilts.shape[1], -1, len(tilts))
    return jnp.sum(tilts.T[:, None, :] * apart, axis=0)


def angles(points: Float[Array, "n 2"]) -> Float[Array, "n 1"]:
    """Return the angle of each point as the only coordinate."""
    return jnp.arctan2(points[:, 1], points[:, 0])[:, None]


def box(
    points: Float[Array, "n k"], counted: Bool[Array, " n"]
) -> tuple[Float[Array, " k"], Float[Array, " k"]]:
    """Return centre and width of the smallest box around the counted points."""
    seen = counted[:, None]
    low = jnp.where(seen, points, jnp.inf).min(axis=0)
    high = jnp.where(seen, points, -jnp.inf).max(axis=0)
    is_empty = ~(low <= high)
    return (
        jnp.where(is_empty, 0, low / 2 + high / 2),
        jnp.where(is_empty, 0, high - low),
    )
