"""Energies on the sphere: first variation, gradient, small perturbations."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import (
    AbstractExponential,
    AbstractInContextMap,
    Perceptron,
    Sum,
    Unnormalised,
)
from meanformer.errors import (
    InvalidInput,
    Overflow,
    Unsupported,
    as_float_array,
    as_key,
    as_number,
    check,
    check_shape,
    is_concrete,
)
from meanformer.flows import Constant, Flow
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.arrays import matmul
from meanformer.numerics.multiples import agree
from meanformer.observables.energy.energies import check_sum
from meanformer.observables.energy.potentials import units_of
from meanformer.observables.energy.structure import alone, factor_in_sum, terms_of
from meanformer.typing import ArrayLike, Key


def first_variation(
    layer: AbstractInContextMap, mu: TokenCloud, x: ArrayLike
) -> Float[Array, " m"]:
    r"""First variation of the exponential energy of a layer, at any points.

    For $A = A^\top$ and $E = \frac{1}{2\beta}\iint e^{\beta y^\top A x - s}
    \,\mathrm{d}\mu(x)\,\mathrm{d}\mu(y)$ it is
    $$\frac{\delta E}{\delta\mu}(x) = \frac1\beta\int e^{\beta y^\top A x - s}
      \,\mathrm{d}\mu(y),$$
    and $E$ is half its mean over $\mu$. That of a perceptron is its potential $\Phi$;
    of a `Sum` the sum, with the factors of `energy`. At a stationary measure it is
    critical at every atom; at a minimiser over all measures it is smallest on the
    support.

    Args:
        layer: `Softmax` or `Unnormalised` with a symmetric score, whose value does not
            matter; a `Perceptron` that is a gradient; or a `Sum` of them.
        mu: the tokens.
        x: the points, one per row.

    Returns:
        One number for each point. Cost: one sum over pairs.
    """
    check_cloud("mu", mu)
    x = as_float_array("x", x)
    check_shape("x", x, (None, mu.dimension))
    layer = alone(layer)
    if not isinstance(layer, Sum):
        return _variation(layer, mu, x)
    check_sum(layer)
    terms = terms_of(layer)
    parts = [_variation(term, mu, x) for term in terms]
    factors = [factor_in_sum(term).astype(x.dtype) for term in terms]
    return matmul(jnp.stack(parts, axis=1), jnp.stack(factors))


def _variation(
    layer: AbstractInContextMap, mu: TokenCloud, x: Float[Array, "m d"]
) -> Float[Array, " m"]:
    if isinstance(layer, Perceptron):
        check_sum(layer)
        return units_of(layer).potential(x)
    layer = _with_energy(layer)
    if is_concrete(layer.beta):
        check(float(layer.beta) != 0, "beta is 0; the energy needs another beta.")
    beta = layer.temperature
    log_value = layer.log_kernel_mass(mu, x) - jnp.log(jnp.abs(beta))
    ceiling = float(np.log(jnp.finfo(log_value.dtype).max))
    if is_concrete(log_value) and float(jnp.max(log_value, initial=0)) > ceiling:
        raise Overflow(
            f"the first variation overflows {log_value.dtype}; lower beta, or give "
            "Unnormalised a shift."
        )
    return jnp.sign(beta) * jnp.exp(jnp.minimum(log_value, ceiling))


def energy_gradient(
    layer: AbstractInContextMap,
    cloud: TokenCloud,
    *,
    space: AbstractSpace | None = None,
) -> Float[Array, "n d"]:
    r"""Gradient of the exponential energy of a layer, at every token.

    $$\mathrm{grad}_i E = P_{x_i}\int e^{\beta y^\top A x_i - s}\,Ay\,
      \mathrm{d}\mu(y) = \frac{1}{w_i}P_{x_i}\frac{\partial E}{\partial x_i},$$
    the gradient in the metric $\sum_i w_i|\xi_i|^2$ of Wasserstein space: the velocity
    of unnormalised attention with $V = A$. A token of weight zero feels it as a probe.
    A perceptron or a `Sum` that is a gradient flow is itself this gradient.

    Args:
        layer: `Softmax` or `Unnormalised` with a symmetric score, whose value does not
            matter; or a perceptron or `Sum` that is a gradient flow.
        cloud: the tokens.
        space: where they live, `Sphere()` by default.

    Returns:
        One tangent vector for each token. Cost: one sum over pairs.
    """
    space = checked_space(cloud, space)
    start = jnp.zeros((), cloud.points.dtype)
    flow = Flow(ascent_of(layer), space=space)
    return flow.field(start, cloud, cloud.points, cloud.positions)


def perturbed(
    cloud: TokenCloud, size: float, *, key: Key, space: AbstractSpace | None = None
) -> TokenCloud:
    r"""Move every token a little, at random, to leave a saddle.

    $x_i$ goes to the nearest point of the space to $x_i + \varepsilon\xi_i$, with
    independent normal tangent vectors $\xi_i$.

    Args:
        cloud: the tokens.
        size: the number $\varepsilon$, the standard deviation of each coordinate.
        key: random key.
        space: where the tokens live, `Sphere()` by default.
    """
    space = checked_space(cloud, space)
    size = as_number("size", size)
    check(size >= 0, f"size is {size}; it must not be negative.")
    most = float(jnp.sqrt(jnp.finfo(cloud.points.dtype).max)) / 1e3
    check(size <= most, f"size is {size}; it must be at most {most:.3g}.")
    noise = jr.normal(as_key(key), cloud.points.shape, cloud.points.dtype)
    moved = cloud.points + size * space.project(cloud.points, noise)
    return cloud.moved(space.retract(moved))


def _with_energy(layer: AbstractInContextMap) -> AbstractExponential:
    if not isinstance(layer, AbstractExponential):
        raise Unsupported(
            f"layer is {type(layer).__name__}; the exponential energy belongs to "
            "Softmax and Unnormalised."
        )
    if layer.query_bias is not None:
        raise Unsupported("a layer with query_bias has no known energy.")
    score = layer.score
    tolerance = 1000 * float(jnp.finfo(score.dtype).eps)
    if is_concrete(score):
        base = np.asarray(score, np.float64)
        check(
            agree(base, base.T, tolerance),
            "the score A = K^T Q is not symmetric; the energy needs A = A^T.",
        )
    return layer


def ascent_of(layer: AbstractInContextMap) -> AbstractInContextMap:
    """Return the map whose flow climbs the energy in Wasserstein space."""
    layer = alone(layer)
    if isinstance(layer, Perceptron | Sum):
        check_sum(layer)
        return layer
    layer = _with_energy(layer)
    return Unnormalised(
        layer.query,
        layer.key,
        layer.score,
        beta=layer.beta,
        shift=layer.score_shift,
        allow_negative_beta=layer.allow_negative_beta,
    )


def checked_space(cloud: TokenCloud, space: AbstractSpace | None) -> AbstractSpace:
    """Return the space of the tokens, the sphere by default, or raise."""
    check_cloud("cloud", cloud)
    space = Sphere() if space is None else space
    check(
        isinstance(space, Euclidean | Sphere),
        f"space is {space!r}; it must be Sphere() or Euclidean().",
    )
    space.check(cloud.points)
    return space


def checked_map(flow: Flow) -> AbstractInContextMap:
    """Return the map of a flow that does not change with depth and has no noise."""
    check(isinstance(flow, Flow), f"flow is a {type(flow).__name__}; give a Flow.")
    if not isinstance(flow.velocity, Constant) or flow.noise is not None:
        raise Unsupported(
            "a cloud can be stationary only under a flow whose map does not change, "
            "without noise."
        )
    return alone(flow.velocity.gamma)


def check_fits(layer: AbstractInContextMap, cloud: TokenCloud) -> None:
    """Raise unless the tokens have the dimension of the map."""
    check_cloud("cloud", cloud)
    check(
        layer.input_dimension in (None, cloud.dimension),
        f"the flow is of dimension {layer.input_dimension}, the cloud of dimension "
        f"{cloud.dimension}; they must agree.",
    )


def present_indices(cloud: TokenCloud) -> np.ndarray:
    """Return the indices of the tokens of positive weight."""
    if not (is_concrete(cloud.weights) and is_concrete(cloud.points)):
        raise InvalidInput(
            "which tokens are present must be known; call this outside of jit."
        )
    return np.flatnonzero(np.asarray(cloud.weights) > 0)


def present(cloud: TokenCloud) -> TokenCloud:
    """Return the tokens of positive weight."""
    kept = present_indices(cloud)
    positions = None if cloud.positions is None else cloud.positions[kept]
    return TokenCloud(
        cloud.points[kept], cloud.weights[kept], positions=positions, sums=cloud.sums
    )
