"""Attention with a perceptron block, as a flow on the sphere."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from meanformer.attention import AbstractInContextMap, Perceptron, Sum
from meanformer.errors import as_float_array, check, check_shape
from meanformer.flows import Flow
from meanformer.geometry import Sphere
from meanformer.observables.energy.potentials import activation_named
from meanformer.typing import ArrayLike


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
    if isinstance(attention, AbstractInContextMap):
        size = attention.input_dimension
        check(
            size in (None, rows.shape[1]),
            f"directions holds vectors of dimension {rows.shape[1]}, and attention is "
            f"of dimension {size}; they must agree.",
        )
    factors = as_float_array("strengths", strengths).astype(rows.dtype)
    if factors.ndim == 0:
        factors = jnp.full(len(rows), factors)
    check_shape("strengths", factors, (len(rows),))
    offsets = jnp.zeros(len(rows), rows.dtype)
    if biases is not None:
        offsets = as_float_array("biases", biases).astype(rows.dtype)
    check_shape("biases", offsets, (len(rows),))
    block = Perceptron(
        rows,
        offsets,
        factors[None, :] * rows.T,
        activation=activation_named(activation),
    )
    gamma = block if attention is None else Sum([attention, block])
    return Flow(gamma, space=Sphere())
