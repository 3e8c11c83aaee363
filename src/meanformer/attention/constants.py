"""Constants of each kind of map on a ball, from the norms of its matrices."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractAttention, AbstractInContextMap
from meanformer.attention.composition import Composition, MultiHead, Residual, Sum
from meanformer.attention.kernels import Hardmax, Linear, Sigmoid, Unnormalised
from meanformer.attention.masked import Masked
from meanformer.attention.masks import AbstractMask, StrictCausal
from meanformer.attention.sinkhorn import Sinkhorn
from meanformer.attention.softmax import L2, Softmax
from meanformer.errors import (
    Unsupported,
    as_number,
    check,
    is_concrete,
)
from meanformer.numerics.matrices import matmul

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
    """

    speed: Bound
    in_query: Bound | None = None
    in_measure: Bound | None = None
    by_count: CountBound | None = None
    by_count_published: CountBound | None = None
    mean_field_published: Bound | None = None

    @property
    def mean_field(self) -> Bound | None:
        r"""The constant $L(R) = \mathrm{Lip}_x + \mathrm{Lip}_\mu$."""
        return _sum(self.in_query, self.in_measure)


def constants(
    gamma: AbstractInContextMap,
    radius: float | Float[Array, ""],
    order: float = 2.0,
) -> Constants:
    r"""Return the constants of a map on the ball of a radius.

    A row-normalised kind with score $s(x,y)$ is determined by bounds $\tau$ on
    $|\partial_y s|$, $\chi$ on $|\partial_x\partial_y s|$ and $\omega$ on the
    oscillation of $s(x,\cdot)$:
    $$\mathrm{Lip}_x \le |V|\chi R^2, \qquad
      \mathrm{Lip}_\mu \le |V|(1 + 2\tau R)e^{\omega}, \qquad
      \mathrm{Lip} \le \sqrt3\,|V|\bigl(n(1 + \tau^2R^2) + \chi^2R^4\bigr)^{1/2}.$$
    Softmax has $\tau = \beta a R$, $\chi = \beta a$, $\omega = 2\beta aR^2$; L2 has
    $\tau = 2\beta|K|(|Q|+|K|)R$, $\chi = 2\beta a$, $\omega = \beta(|Q|+|K|)^2R^2$. The
    kinds $\int \varphi(s)\,Vy\,\mathrm{d}\mu(y)$ have
    $\mathrm{Lip}_x \le |V|\,|\varphi'|\,\chi R^2$ and
    $\mathrm{Lip}_\mu \le |V|(|\varphi| + |\varphi'|\tau R)$.

    Args:
        gamma: the map.
        radius: the radius of the ball.
        order: the order $p$ of the distance $d_p$, for masked maps.
    """
    order = as_number("order", order)
    check(order >= 1, f"order is {order}; it must be at least 1.")
    if is_concrete(radius):
        value = as_number("radius", radius)
        check(0 <= value < jnp.inf, f"radius is {value}; it must be finite and >= 0.")
    radius = jnp.asarray(radius, parameter_dtype(gamma))
    return _constants(gamma, radius, order)


def parameter_dtype(gamma: AbstractInContextMap) -> jnp.dtype:
    """Return the floating-point type of a map's parameters."""
    leaves = jax.tree.leaves(eqx.filter(gamma, eqx.is_inexact_array))
    matrices = [leaf for leaf in leaves if leaf.ndim == 2]
    return jnp.result_type(*(matrices or [float]))


@functools.singledispatch
def _constants(gamma, radius, order) -> Constants:
    raise Unsupported(f"no a priori bound is known for {type(gamma).__name__}.")


@_constants.register(Softmax)
def _of_softmax(gamma, radius, order):
    beta, value = jnp.abs(gamma.temperature), _size(gamma.value)
    twist = beta * _size(gamma.score)
    slope = twist * radius + beta * _bias(gamma.query_bias, gamma.key)
    known = _row_normalised(gamma, value, radius, slope, twist, 2 * slope * radius)
    if gamma.query_bias is not None:
        return known
    strength = twist * radius**2

    def published(count: Array) -> Array:
        return value * jnp.sqrt(3 * (strength**2 * (4 * count + 1) + count))

    loose = value * (1 + 3 * strength) * jnp.exp(2 * strength)
    return replace(known, by_count_published=published, mean_field_published=loose)


@_constants.register(L2)
def _of_l2(gamma, radius, order):
    value, key = gamma.value, _size(gamma.key)
    if gamma.value_map == "kim":
        value = matmul(value, gamma.score) / jnp.sqrt(len(gamma.key)).astype(
            value.dtype
        )
    sharpness = jnp.abs(gamma.sharpness)
    reach = (_size(gamma.query) + key) * radius + _bias(gamma.query_bias)
    slope, twist = sharpness * key * reach, sharpness * _size(gamma.score)
    swing = sharpness * reach**2 / 2
    return _row_normalised(gamma, _size(value), radius, slope, twist, swing)


@_constants.register(Sinkhorn)
def _of_sinkhorn(gamma, radius, order):
    if gamma.end_on == "column":
        raise Unsupported(
            'no a priori bound is known for Sinkhorn with end_on="column".'
        )
    value = _size(gamma.value)
    speed = value * radius + _bias(gamma.value_bias)
    return Constants(speed, value * _size(gamma.form) * radius**2)


@_constants.register(Hardmax)
def _of_hardmax(gamma, radius, order):
    return Constants(_size(gamma.value) * radius + _bias(gamma.value_bias))


@_constants.register(Linear)
def _of_linear(gamma, radius, order):
    if gamma.feature_map is not None or gamma.normalized:
        raise Unsupported(
            "no a priori bound is known for Linear with a feature map or normalised."
        )
    return _kernel(gamma, radius, lambda score: (score, 1.0))


@_constants.register(Unnormalised)
def _of_unnormalised(gamma, radius, order):
    def largest(score):
        kernel = jnp.exp(gamma.shifted(score))
        return kernel, kernel

    return _kernel(gamma, radius, largest)


@_constants.register(Sigmoid)
def _of_sigmoid(gamma, radius, order):
    return _kernel(gamma, radius, lambda score: (1.0, 0.25))


@_constants.register(Masked)
def _of_masked(gamma, radius, order):
    inner = gamma.attention
    if isinstance(inner, MultiHead):
        heads = [
            eqx.tree_at(lambda g: g.attention, gamma, head) for head in inner.heads
        ]
        return _constants(MultiHead(heads, inner.outputs), radius, order)
    known = _constants(inner, radius, order)
    if not (isinstance(inner, Softmax | L2) or gamma.divide):
        return known
    in_measure = _product(hardy_factor(gamma.mask, order), known.in_measure)
    return replace(known, in_measure=in_measure, mean_field_published=None)


@_constants.register(MultiHead)
def _of_heads(gamma, radius, order):
    heads = gamma.heads
    if gamma.outputs is not None:
        heads = [_after(*pair) for pair in zip(gamma.outputs, heads, strict=True)]
    return _added([_constants(head, radius, order) for head in heads])


@_constants.register(Sum)
def _of_sum(gamma, radius, order):
    return _added([_constants(term, radius, order) for term in gamma.maps])


@_constants.register(Residual)
def _of_residual(gamma, radius, order):
    moved = _constants(gamma.gamma, radius, order)
    step = jnp.abs(jnp.asarray(gamma.step, radius.dtype))
    one = jnp.ones_like(radius)
    identity = Constants(radius, one, 0 * one, jnp.ones_like)
    scaled = Constants(
        step * moved.speed,
        _product(step, moved.in_query),
        _product(step, moved.in_measure),
        _of_count(_product, lambda _: step, moved.by_count),
    )
    return _added([identity, scaled])


@_constants.register(Composition)
def _of_composition(gamma, radius, order):
    first, *rest = gamma.layers
    known = _constants(first, radius, order)
    for layer in rest:
        last = _constants(layer, known.speed, order)
        through = _product(last.in_query, known.in_measure)
        known = Constants(
            last.speed,
            _product(last.in_query, known.in_query),
            _sum(through, _product(last.in_measure, known.mean_field)),
            _of_count(_product, last.by_count, known.by_count),
        )
    return known


def hardy_factor(mask: AbstractMask, order: float) -> float | None:
    r"""Return $p/(p-1)$, the norm of the running mean on $L^p$; `None` if infinite.

    Once places that see each other are joined, what a query sees is a stretch that ends
    with its own place; the average over it is at most the one-sided maximal function,
    whose norm this is, for any masses. A strict mask leaves the query's own mass out,
    and then no constant holds for all masses.
    """
    if isinstance(mask, StrictCausal) or order == 1:
        return None
    return order / (order - 1)


def _row_normalised(gamma, value, radius, slope, twist, swing) -> Constants:
    def by_count(count: Array) -> Array:
        square = count * (1 + (slope * radius) ** 2) + (twist * radius**2) ** 2
        return value * jnp.sqrt(3 * square)

    return Constants(
        value * radius + _bias(gamma.value_bias),
        value * twist * radius**2,
        value * (1 + 2 * slope * radius) * jnp.exp(swing),
        by_count,
    )


def _kernel(gamma, radius, profile) -> Constants:
    """Constants of a weight that is a function of the score alone."""
    beta = jnp.abs(gamma.temperature)
    twist = beta * _size(gamma.score)
    slope = twist * radius + beta * _bias(gamma.query_bias, gamma.key)
    weight, weight_slope = profile(slope * radius)
    values = _size(gamma.value) * radius + _bias(gamma.value_bias)
    return Constants(
        weight * values,
        weight_slope * twist * radius * values,
        weight * _size(gamma.value) + weight_slope * slope * values,
    )


def _added(parts: Sequence[Constants]) -> Constants:
    """Constants of a sum of maps."""

    def total(name: str, add: Callable = _sum):
        return functools.reduce(add, [getattr(part, name) for part in parts])

    over_counts = functools.partial(_of_count, _sum)
    return Constants(
        total("speed"),
        total("in_query"),
        total("in_measure"),
        total("by_count", over_counts),
        total("by_count_published", over_counts),
        total("mean_field_published"),
    )


def _after(output: Array, head: AbstractInContextMap) -> AbstractInContextMap:
    """Return a head with its output matrix taken into its values."""
    if isinstance(head, Masked):
        return replace(head, attention=_after(output, head.attention))
    if not isinstance(head, AbstractAttention):
        raise Unsupported(
            f"no a priori bound is known for a {type(head).__name__} head."
        )
    bias = None if head.value_bias is None else matmul(output, head.value_bias)
    return replace(head, value=matmul(output, head.value), value_bias=bias)


def _size(matrix: Array) -> Bound:
    return jnp.linalg.norm(matrix, 2)


def _bias(bias: Array | None, matrix: Array | None = None) -> Bound | float:
    if bias is None:
        return 0.0
    return jnp.linalg.norm(bias if matrix is None else matmul(bias, matrix))


def _sum(first, second):
    return None if first is None or second is None else first + second


def _product(first, second):
    return None if first is None or second is None else first * second


def _of_count(combine: Callable, first, second) -> CountBound | None:
    if first is None or second is None:
        return None
    return lambda count: combine(first(count), second(count))
