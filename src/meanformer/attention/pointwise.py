"""Layers that ignore the context: perceptron, norms, any function of a point."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import (
    AbstractInContextMap,
    check_function,
    checked_points,
    number,
    parameter,
)
from meanformer.errors import as_float_array, check, check_shape
from meanformer.measures import AbstractContext
from meanformer.numerics.arrays import matmul, widened
from meanformer.typing import ArrayLike, Places


class AbstractPointwise(AbstractInContextMap):
    """A map that treats every point alike, whatever the context."""

    @abc.abstractmethod
    def apply(self, x: Float[Array, "m d"]) -> Float[Array, "m e"]:
        """Return the image of each point."""

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m e"]:
        """Return the image of each point; half precision is computed in single."""
        x = checked_points(self, x)
        wide, points = widened((self, x))
        return wide.apply(points).astype(x.dtype)


class Perceptron(AbstractPointwise):
    r"""A two-layer perceptron: $x \mapsto U_2\,\sigma(U_1 x + b_1) + b_2$.

    Args:
        weights_in: the matrix $U_1$, of shape (p, d).
        bias_in: the vector $b_1$, of shape (p,).
        weights_out: the matrix $U_2$, of shape (e, p).
        bias_out: the vector $b_2$, of shape (e,); none by default.
        activation: the function $\sigma$, applied to each entry; by default
            `jax.nn.gelu`, the GELU of GPT-2 with a hyperbolic tangent. That with the
            error function is `functools.partial(jax.nn.gelu, approximate=False)`.
            For none at all there is `Perceptron.affine(matrix, shift)`.
    """

    weights_in: Float[Array, "_p _d"] = parameter("weights_in")
    bias_in: Float[Array, " _p"] = parameter("bias_in")
    weights_out: Float[Array, "_e _p"] = parameter("weights_out")
    bias_out: Float[Array, " _e"] | None = parameter("bias_out", default=None)
    activation: Callable[[Array], Array] = eqx.field(
        default=jax.nn.gelu, kw_only=True, static=True
    )

    def __check_init__(self):
        check_function("activation", self.activation)
        check_shape("weights_in", self.weights_in, (None, None))
        width = self.weights_in.shape[0]
        check_shape("bias_in", self.bias_in, (width,))
        check_shape("weights_out", self.weights_out, (None, width))
        if self.bias_out is not None:
            check_shape("bias_out", self.bias_out, self.weights_out.shape[:1])

    @classmethod
    def affine(cls, matrix: ArrayLike, shift: ArrayLike | None = None) -> "Perceptron":
        r"""Return the perceptron without activation: $x \mapsto Ux + b$.

        A Gaussian stays one under it.

        Args:
            matrix: the matrix $U$, of shape (e, d).
            shift: the vector $b$, of shape (e,); none by default.
        """
        weights = as_float_array("matrix", matrix)
        check_shape("matrix", weights, (None, None))
        if shift is None:
            bias = jnp.zeros(weights.shape[:1], weights.dtype)
        else:
            bias = as_float_array("shift", shift)
            check_shape("shift", bias, weights.shape[:1])
        out = jnp.eye(len(weights), dtype=weights.dtype)
        return cls(weights, bias, out, activation=jax.nn.identity)

    @property
    def input_dimension(self) -> int:
        """Dimension of the points it takes."""
        return self.weights_in.shape[1]

    @property
    def output_dimension(self) -> int:
        """Dimension of the points it returns."""
        return self.weights_out.shape[0]

    def apply(self, x: Float[Array, "m d"]) -> Float[Array, "m e"]:
        """Return the perceptron's value at each point."""
        hidden = self.activation(matmul(x, self.weights_in.T) + self.bias_in[None])
        image = matmul(hidden, self.weights_out.T)
        return image if self.bias_out is None else image + self.bias_out[None]


class PointMap(AbstractPointwise):
    """Any function of points as a map that ignores the context.

    Args:
        function: takes points (m, d) and returns points (m, e).
        takes: the dimension $d$; any by default.
        returns: the dimension $e$; the same as $d$ by default.
    """

    function: Callable[[Array], Array]
    takes: int | None = eqx.field(default=None, kw_only=True, static=True)
    returns: int | None = eqx.field(default=None, kw_only=True, static=True)

    def __check_init__(self):
        check_function("function", self.function)

    @property
    def input_dimension(self) -> int | None:
        """Dimension of the points it takes."""
        return self.takes

    @property
    def output_dimension(self) -> int | None:
        """Dimension of the points it returns."""
        return self.takes if self.returns is None else self.returns

    def apply(self, x: Float[Array, "m d"]) -> Float[Array, "m e"]:
        """Return the function's value."""
        return self.function(x)


class AbstractNorm(AbstractPointwise):
    r"""A normalisation with scale and shift, finite at the origin.

    Args:
        scale: factors, one per coordinate or one for all; 1 by default.
        shift: an offset, one per coordinate or one for all; 0 by default.
        epsilon: added under the square root, so that the origin goes to the shift with
            a finite derivative.
    """

    scale: Float[Array, "..."] = parameter("scale", default=1.0)
    shift: Float[Array, "..."] = parameter("shift", default=0.0)
    epsilon: float = number("epsilon", default=1e-5, kw_only=True)

    def __check_init__(self):
        for name in ("scale", "shift"):
            check(
                getattr(self, name).ndim <= 1,
                f"{name} has shape {getattr(self, name).shape}; it must be a number or "
                "a vector.",
            )
        check(self.epsilon > 0, f"epsilon is {self.epsilon}; it must be positive.")
        lengths = {s.size for s in (self.scale, self.shift) if s.ndim == 1}
        check(
            len(lengths) <= 1,
            f"scale has shape {self.scale.shape}, shift has shape {self.shift.shape}; "
            "vectors must agree in length.",
        )

    @property
    def input_dimension(self) -> int | None:
        """Dimension of scale or shift, where they are vectors."""
        return next((s.size for s in (self.scale, self.shift) if s.ndim == 1), None)

    @abc.abstractmethod
    def normalise(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """Return the points before scale and shift."""

    def apply(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """Return the normalised, scaled and shifted points."""
        scale, shift = self.scale.astype(x.dtype), self.shift.astype(x.dtype)
        scale, shift = jnp.atleast_2d(scale), jnp.atleast_2d(shift)
        return scale * self.normalise(x) + shift


class LayerNorm(AbstractNorm):
    """Centre each point, divide by the standard deviation of its coordinates."""

    def normalise(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """Return the standardised coordinates."""
        scaled, epsilon = _scaled_down(x, self.epsilon)
        centred = scaled - scaled.mean(axis=1, keepdims=True)
        # Once more, for the rounding of a mean much larger than what is left.
        centred -= centred.mean(axis=1, keepdims=True)
        return _divided(centred, (centred**2).mean(axis=1), epsilon)


class RMSNorm(AbstractNorm):
    """Divide each point by the root mean square of its coordinates."""

    def normalise(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """Return the coordinates over their root mean square."""
        scaled, epsilon = _scaled_down(x, self.epsilon)
        return _divided(scaled, (scaled**2).mean(axis=1), epsilon)


class UnitNorm(AbstractNorm):
    r"""Divide each point by its Euclidean length: $\theta_1 x/|x| + \theta_2$."""

    def normalise(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """Return the points on the unit sphere."""
        scaled, epsilon = _scaled_down(x, self.epsilon)
        return _divided(scaled, (scaled**2).sum(axis=1), epsilon)


def _scaled_down(
    x: Float[Array, "m d"], epsilon: float
) -> tuple[Float[Array, "m d"], Float[Array, " m"]]:
    """Return large points and epsilon over a scale, so that squares stay in range.

    The scale is a power of two, which rounds nothing, and drops out of the quotient.
    """
    largest = jnp.maximum(jax.lax.stop_gradient(jnp.abs(x).max(axis=1)), 1)
    lowest = int(jnp.finfo(x.dtype).minexp)
    exponents = jnp.maximum(1 - jnp.frexp(largest)[1], lowest)
    inverse = jnp.ldexp(jnp.ones_like(largest), exponents)
    return x * inverse[:, None], epsilon * inverse * inverse


def _divided(
    x: Float[Array, "m d"], square: Float[Array, " m"], epsilon: Float[Array, " m"]
) -> Float[Array, "m d"]:
    return x * jax.lax.rsqrt(square + epsilon)[:, None]
