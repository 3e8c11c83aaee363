"""Perceptrons that are gradients, and the functions of a point that they climb."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap, Perceptron, Sum
from meanformer.errors import (
    Unsupported,
    as_float_array,
    check,
    check_choice,
    check_shape,
    is_concrete,
)
from meanformer.flows import Flow
from meanformer.geometry import Sphere
from meanformer.numerics.arrays import matmul
from meanformer.typing import ArrayLike

KINK_WIDTH = 1e-9  # how near to a kink a point sits on it, in double precision


class IntegratedActivation(eqx.Module):
    r"""An activation that comes with its antiderivative.

    A perceptron needs a function $S$ with $S' = \sigma$ to have an energy. For `relu`,
    `leaky_relu`, `elu`, `tanh`, `hard_tanh`, `sigmoid`, `soft_sign`, `identity`,
    `sin`, `exp` and the exact `gelu` it is known; for another activation give it here.

    Args:
        function: the activation $\sigma$, a function of an array.
        antiderivative: the function $S$.
        kinks: the places where $\sigma'$ jumps.
        steepest: a bound of $|\sigma'|$; without it, global extremes on the circle come
            without a certificate.
    """

    function: Callable[[Array], Array] = eqx.field(static=True)
    antiderivative: Callable[[Array], Array] = eqx.field(static=True)
    kinks: tuple[float, ...] = eqx.field(static=True, default=(), kw_only=True)
    steepest: float | None = eqx.field(static=True, default=None, kw_only=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the activation of each entry."""
        return self.function(x)


def _half_square(x: Array) -> Array:
    return x * x / 2


def _elu_integral(x: Array) -> Array:
    low = jnp.minimum(x, 0)
    return jnp.where(x > 0, _half_square(x), jnp.expm1(low) - low)


def _log_cosh(x: Array) -> Array:
    size = jnp.abs(x)
    return size + jax.nn.softplus(-2 * size) - float(np.log(2))


def _hard_tanh_integral(x: Array) -> Array:
    inside = jnp.clip(x, -1, 1)
    return jnp.where(jnp.abs(x) < 1, _half_square(inside), jnp.abs(x) - 0.5)


def _gelu_integral(x: Array) -> Array:
    below = jax.scipy.stats.norm.cdf(x)
    return ((x * x - 1) * below + x * jax.scipy.stats.norm.pdf(x)) / 2


_gentle = functools.partial(IntegratedActivation, steepest=1.0)
_KNOWN = {
    "relu": _gentle(jax.nn.relu, lambda x: jax.nn.relu(x) ** 2 / 2, kinks=(0.0,)),
    "leaky_relu": _gentle(
        jax.nn.leaky_relu,
        lambda x: jnp.where(x > 0, 1, 0.01).astype(x.dtype) * _half_square(x),
        kinks=(0.0,),
    ),
    "elu": _gentle(jax.nn.elu, _elu_integral),
    "tanh": _gentle(jnp.tanh, _log_cosh),
    "hard_tanh": _gentle(jax.nn.hard_tanh, _hard_tanh_integral, kinks=(-1.0, 1.0)),
    "sigmoid": IntegratedActivation(jax.nn.sigmoid, jax.nn.softplus, steepest=0.25),
    "soft_sign": _gentle(
        jax.nn.soft_sign, lambda x: jnp.abs(x) - jnp.log1p(jnp.abs(x))
    ),
    "identity": _gentle(jax.nn.identity, _half_square),
    "sin": _gentle(jnp.sin, lambda x: -jnp.cos(x)),
    "exp": IntegratedActivation(jnp.exp, jnp.exp),
    "gelu": IntegratedActivation(
        functools.partial(jax.nn.gelu, approximate=False), _gelu_integral, steepest=1.2
    ),
}


def activation_named(name: str | Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return the activation of this name, or the function that was given."""
    if not isinstance(name, str):
        return name
    otherwise = ", a function, or an IntegratedActivation, which has an energy too"
    check_choice("activation", name, _KNOWN, otherwise)
    return _KNOWN[name] if name == "gelu" else _KNOWN[name].function


def integrated(activation: Callable[[Array], Array]) -> IntegratedActivation | None:
    """Return an activation with its antiderivative, if that is known."""
    if isinstance(activation, IntegratedActivation):
        return activation
    if isinstance(activation, functools.partial):
        is_exact = activation.keywords == {"approximate": False}
        plain = activation.func is jax.nn.gelu and not activation.args
        return _KNOWN["gelu"] if plain and is_exact else None
    known = _KNOWN.values()
    return next((one for one in known if one.function is activation), None)


def perceptron_flow(
    attention: AbstractInContextMap | None,
    directions: ArrayLike,
    strengths: ArrayLike,
    biases: ArrayLike | None = None,
    *,
    activation: str | Callable[[Array], Array] = "relu",
) -> Flow:
    r"""Flow on the sphere of attention and a perceptron that is a gradient.

    $$\dot x = P_x\Bigl(\Gamma[\mu](x) + \sum_j c_j\,\sigma(\langle a_j, x\rangle + b_j)
      \,a_j\Bigr).$$
    With unnormalised attention of $V = A = A^\top$ it climbs
    $$E(\mu) = \frac{1}{2\beta}\iint e^{\beta\langle x, Ay\rangle}\,\mathrm{d}\mu(x)\,
      \mathrm{d}\mu(y) + \int\Phi\,\mathrm{d}\mu, \qquad
      \Phi(x) = \sum_jc_jS(\langle a_j,x\rangle + b_j), \quad S' = \sigma,$$
    the setting of [AGR26]. With softmax there is no known energy.

    Args:
        attention: the map $\Gamma$, such as `identity_attention("unnormalised", 2,
            beta)`; `None` for the perceptron alone.
        directions: the vectors $a_j$, one per row.
        strengths: the numbers $c_j$, or one for all; negative ones repel.
        biases: the numbers $b_j$; zero by default.
        activation: the function $\sigma$, or the name of one with a known
            antiderivative: "relu", "tanh", "sigmoid", "gelu" (the exact one), ...
    """
    rows = as_float_array("directions", directions)
    check(
        rows.ndim == 2 and len(rows) > 0,
        f"directions has shape {rows.shape}; it must hold one vector per row.",
    )
    count, dimension = rows.shape
    if isinstance(attention, AbstractInContextMap):
        size = attention.input_dimension
        check(
            size in (None, dimension),
            f"directions holds vectors of dimension {dimension}, and attention is "
            f"of dimension {size}; they must agree.",
        )
    factors = as_float_array("strengths", strengths).astype(rows.dtype)
    factors = factors if factors.ndim else jnp.full(count, factors)
    check_shape("strengths", factors, (count,))
    offsets = as_float_array("biases", jnp.zeros(count) if biases is None else biases)
    check_shape("biases", offsets, (count,))
    weights = rows, offsets.astype(rows.dtype), factors[None, :] * rows.T
    block = Perceptron(*weights, activation=activation_named(activation))
    gamma = block if attention is None else Sum([attention, block])
    return Flow(gamma, space=Sphere())


class Units(NamedTuple):
    r"""A perceptron as a gradient.

    $$x \mapsto \sum_j c_j\sigma(\langle a_j,x\rangle + b_j)a_j + \ell + Mx.$$
    """

    activation: IntegratedActivation
    directions: Float[Array, "p d"]
    biases: Float[Array, " p"]
    strengths: Float[Array, " p"]
    constant: Float[Array, " d"]
    matrix: Float[Array, "d d"] | None

    def potential(self, x: Float[Array, "m d"]) -> Float[Array, " m"]:
        r"""Return the potential at each point.

        $$\Phi(x) = \sum_jc_jS(\langle a_j,x\rangle + b_j) + \langle\ell,x\rangle +
          \tfrac12\langle x,Mx\rangle.$$
        """
        arguments = matmul(x, self.directions.T) + self.biases[None]
        heights = self.activation.antiderivative(arguments)
        value = matmul(heights, self.strengths) + matmul(x, self.constant)
        if self.matrix is not None:
            value = value + jnp.sum(x * matmul(x, self.matrix), axis=1) / 2
        return value


def units_of(layer: Perceptron) -> Units:
    """Return a perceptron as a gradient; whether it is one is asked elsewhere."""
    activation = integrated(layer.activation)
    if activation is None:
        raise Unsupported(
            f"the antiderivative of {_name(layer.activation)} is not known, so the "
            "perceptron has no known energy; give activation="
            "IntegratedActivation(function, antiderivative)."
        )
    constant = layer.bias_out
    if constant is None:
        constant = jnp.zeros(layer.weights_in.shape[1], layer.weights_out.dtype)
    if activation.function is jax.nn.identity:
        constant = constant + matmul(layer.weights_out, layer.bias_in)
        matrix = matmul(layer.weights_out, layer.weights_in)
        none = layer.weights_in[:0], layer.bias_in[:0], layer.bias_in[:0]
        return Units(activation, *none, constant, (matrix + matrix.T) / 2)
    squares = jnp.sum(layer.weights_in**2, axis=1)
    along = jnp.sum(layer.weights_out.T * layer.weights_in, axis=1)
    is_zero = squares == 0
    strengths = jnp.where(is_zero, 0, along / jnp.where(is_zero, 1, squares))
    fixed = jnp.where(is_zero, activation(layer.bias_in), 0)
    constant = constant + matmul(layer.weights_out, fixed)
    inputs = layer.weights_in, layer.bias_in
    return Units(activation, *inputs, strengths, constant, None)


def why_no_gradient(layer: Perceptron, tolerance: float | None) -> str:
    r"""Say why a perceptron is not known to be a gradient; empty if it is one.

    It is one if each column of the output weights is parallel to its row $a_j$ of the
    input weights, units of equal $a_j, b_j$ taken together; for the identity as
    activation if $U_2U_1$ is symmetric. Units with $a_j = 0$ are constant.
    """
    if layer.weights_out.shape[0] != layer.weights_in.shape[1]:
        return f"it takes points to vectors of {layer.weights_out.shape[0]} coordinates"
    activation = integrated(layer.activation)
    if activation is None:
        return f"the antiderivative of {_name(layer.activation)} is not known"
    if tolerance is None:
        tolerance = 1000 * float(jnp.finfo(layer.weights_in.dtype).eps)
    rows, columns, biases = (
        np.asarray(array, np.float64)
        for array in (layer.weights_in, layer.weights_out.T, layer.bias_in)
    )
    largest = np.abs(columns).max(initial=0)
    if activation.function is jax.nn.identity:
        product = columns.T @ rows
        apart = np.abs(product - product.T).max()
        is_gradient = apart <= tolerance * max(np.abs(product).max(), 1e-300)
        return "" if is_gradient else "the product of its weights is not symmetric"
    units = np.concatenate([rows, biases[:, None]], axis=1)
    labels = np.unique(units, axis=0, return_inverse=True)[1].ravel()
    for kind in range(labels.max(initial=-1) + 1):
        group = np.flatnonzero(labels == kind)
        row, column = rows[group[0]], columns[group].sum(axis=0)
        square = row @ row
        if square == 0:
            continue
        apart = np.abs(column - (column @ row / square) * row).max()
        if apart > tolerance * largest:
            return (
                f"column {group[0]} of weights_out is not parallel to row {group[0]} "
                "of weights_in"
            )
    return ""


def on_kinks(layer: Perceptron, points: np.ndarray) -> np.ndarray:
    """Return which points sit on a kink of which units, as a matrix."""
    activation = integrated(layer.activation)
    if activation is None or not activation.kinks or not is_concrete(layer.weights_in):
        return np.zeros((len(points), len(layer.weights_in)), bool)
    rows = np.asarray(layer.weights_in, np.float64)
    arguments = points @ rows.T + np.asarray(layer.bias_in, np.float64)
    gaps = np.abs(arguments[:, :, None] - np.asarray(activation.kinks)).min(axis=2)
    lengths = np.linalg.norm(rows, axis=1)
    tolerance = max(KINK_WIDTH, 10 * float(jnp.finfo(layer.weights_in.dtype).eps))
    return (gaps <= tolerance * np.maximum(lengths, 1e-300)) & (lengths > 0)


def _name(activation) -> str:
    return getattr(activation, "__name__", type(activation).__name__)
