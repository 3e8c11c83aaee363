"""Constants of each kind of map on a ball, from the norms of its matrices."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.arrays import matmul

Bound = Float[Array, ""]
CountBound = Callable[[Array], Array]


@dataclass(frozen=True)
class Constants:
    r"""What is known of a map for queries and tokens in a ball; `None` if unknown.

    Attributes:
        speed: bound on $|\Gamma|$.
        in_query: bound on the derivative in the query, $\mathrm{Lip}_x$.
        in_measure: bound in the measure for $W_1$, $\mathrm{Lip}_\mu$.
        by_count: Lipschitz bound as a function of the number of tokens.
        by_count_published: the published form of it, for softmax.
        mean_field_published: the published form of `mean_field`, for softmax.
        lower: a constant that some cloud has at least.
    """

    speed: Bound
    in_query: Bound | None = None
    in_measure: Bound | None = None
    by_count: CountBound | None = None
    by_count_published: CountBound | None = None
    mean_field_published: Bound | None = None
    lower: Bound | None = None

    @property
    def mean_field(self) -> Bound | None:
        r"""The constant $L(R) = \mathrm{Lip}_x + \mathrm{Lip}_\mu$."""
        return total(self.in_query, self.in_measure)


def of_shares(gamma, value, radius, slope, twist, swing) -> Constants:
    """Return the constants of an average of the values."""

    def by_count(count: Array) -> Array:
        square = count * (1 + (slope * radius) ** 2) + (twist * radius**2) ** 2
        return value * jnp.sqrt(3 * square)

    return Constants(
        value * radius + bias_norm(gamma.value_bias),
        value * twist * radius**2,
        value * (1 + 2 * slope * radius) * jnp.exp(swing),
        by_count,
    )


def of_kernel(gamma, radius, profile) -> Constants:
    """Return the constants of a weight that is a function of the score alone."""
    beta = jnp.abs(gamma.temperature)
    twist = beta * spectral_norm(gamma.score)
    slope = twist * radius + beta * bias_norm(gamma.query_bias, gamma.key)
    weight, weight_slope = profile(slope * radius)
    values = spectral_norm(gamma.value) * radius + bias_norm(gamma.value_bias)
    return Constants(
        weight * values,
        weight_slope * twist * radius * values,
        weight * spectral_norm(gamma.value) + weight_slope * slope * values,
    )


def of_sum(parts: Sequence[Constants]) -> Constants:
    """Return the constants of a sum of maps."""

    def over_parts(name: str, add: Callable = total):
        return functools.reduce(add, [getattr(part, name) for part in parts])

    over_counts = functools.partial(of_count, total)
    return Constants(
        over_parts("speed"),
        over_parts("in_query"),
        over_parts("in_measure"),
        over_parts("by_count", over_counts),
        over_parts("by_count_published", over_counts),
        over_parts("mean_field_published"),
    )


def spectral_norm(matrix: Array) -> Bound:
    """Return the largest singular value."""
    return jnp.linalg.norm(matrix, 2)


def bias_norm(bias: Array | None, matrix: Array | None = None) -> Bound | float:
    """Return the length of a bias, by itself or behind a matrix; zero for none."""
    if bias is None:
        return 0.0
    return jnp.linalg.norm(bias if matrix is None else matmul(bias, matrix))


def total(first, second):
    """Return the sum of two bounds, if both are known."""
    return None if first is None or second is None else first + second


def product(first, second):
    """Return the product of two bounds, if both are known."""
    return None if first is None or second is None else first * second


def of_count(combine: Callable, first, second) -> CountBound | None:
    """Return what combines two bounds for each number of tokens, if both are known."""
    if first is None or second is None:
        return None
    return lambda count: combine(first(count), second(count))
