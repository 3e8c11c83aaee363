"""Energies of attention layers: their slopes, what flows climb them, and how fast."""

from collections.abc import Callable

import equinox as eqx
import jax
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
from meanformer.attention.exponential import tokens_of
from meanformer.errors import (
    Overflow,
    Unsupported,
    as_float_array,
    as_key,
    as_number,
    check,
    check_kind,
    check_shape,
    is_concrete,
)
from meanformer.flows import Constant, Flow, Trajectory
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import AbstractMeasure, TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.arrays import matmul
from meanformer.numerics.multiples import agree
from meanformer.observables.energy.potentials import units_of
from meanformer.observables.energy.structure import (
    GradientStructure,
    checked_structure,
    factor_in_sum,
    is_gradient_flow,
    terms_of,
    unwrapped,
)
from meanformer.typing import ArrayLike, Key


def energy(layer: AbstractInContextMap | Flow, mu: AbstractMeasure) -> Float[Array, ""]:
    r"""Energy that belongs to a kind of attention, whatever its value matrix.

    - Sinkhorn: $E_B = \max_\pi \int y^\top B x\,\mathrm{d}\pi
      - \mathrm{KL}(\pi | \mu\otimes\mu) = -\int (f + g)\,\mathrm{d}\mu$ over the
      couplings of $\mu$ with itself, with the Sinkhorn potentials $f, g$;
    - unnormalised and softmax: $\frac{1}{2\beta}\iint e^{\beta y^\top A x - s}$, with
      the `shift` $s$ of the former;
    - sigmoid: $\frac{1}{2\beta}\iint \log(1 + e^{\beta y^\top A x + b})$;
    - linear: $\frac{\beta}{4}\iint (y^\top A x)^2$;
    - perceptron $\sum_jc_j\sigma(\langle a_j,x\rangle + b_j)a_j$: $\int\sum_jc_jS(
      \langle a_j,x\rangle + b_j)\,\mathrm{d}\mu(x)$ with $S' = \sigma$;
    - a `Sum` of them that is a gradient flow: $\sum_k c_kE_k$, with the factors $c_k$
      of `is_gradient_flow` of each term;
    - a map of one's own: what its method `energy` says,

    the double integrals over $\mathrm{d}\mu(x)\,\mathrm{d}\mu(y)$. `is_gradient_flow`
    tells when the layer moves tokens up or down its energy. `gaussian.energy` is the
    same for Sinkhorn and linear attention, at a Gaussian in closed form.

    Args:
        layer: the attention, perceptron or sum, or a map that says its energy; other
            maps have none. A flow of constant parameters stands for its map.
        mu: a token cloud; for linear attention any measure.

    Returns:
        The energy, a scalar. Cost: one pair sum; for Sinkhorn one solve.
    """
    return _summed(checked_map(_flow_of(layer)), lambda term: _energy(term, mu))


def _summed(
    layer: AbstractInContextMap, of_term: Callable[[AbstractInContextMap], Array]
) -> Array:
    """Return what the only term of a map has, or the sum with the terms' factors."""
    terms = terms_of(layer)
    if len(terms) == 1:
        return of_term(terms[0])
    _check_sum(layer)
    parts = jnp.stack([of_term(term) for term in terms])
    factors = jnp.stack([factor_in_sum(term).astype(parts.dtype) for term in terms])
    return matmul(factors, parts)


def _energy(term: AbstractInContextMap, mu: AbstractMeasure) -> Float[Array, ""]:
    if not isinstance(term, Perceptron):
        return term.energy(mu)
    _check_sum(term)
    cloud = tokens_of(mu)
    heights = units_of(term).potential(cloud.points)
    return jnp.dot(cloud.weights, jnp.where(cloud.weights > 0, heights, 0))


def _check_sum(layer: AbstractInContextMap) -> None:
    """Raise if a sum or perceptron of known parameters has no known energy."""
    if all(is_concrete(leaf) for leaf in jax.tree.leaves(layer)):
        structure = is_gradient_flow(layer)
        if not structure:
            name = type(layer).__name__
            raise Unsupported(f"{name} has no known energy here: {structure.failure}.")


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
    return _summed(layer, lambda term: _variation(term, mu, x))


def _variation(
    layer: AbstractInContextMap, mu: TokenCloud, x: Float[Array, "m d"]
) -> Float[Array, " m"]:
    if isinstance(layer, Perceptron):
        _check_sum(layer)
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
    return _field(Flow(ascent_of(layer), space=space), cloud)


def ascent_of(layer: AbstractInContextMap) -> AbstractInContextMap:
    """Return the map whose flow climbs the energy in Wasserstein space."""
    layer = unwrapped(layer)
    if isinstance(layer, Perceptron | Sum):
        _check_sum(layer)
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


def _with_energy(layer: AbstractInContextMap) -> AbstractExponential:
    if not isinstance(layer, AbstractExponential):
        raise Unsupported(
            f"layer is {type(layer).__name__}; the exponential energy belongs to "
            "Softmax and Unnormalised."
        )
    if layer.query_bias is not None:
        raise Unsupported("a layer with query_bias has no known energy.")
    if is_concrete(layer.score):
        score = np.asarray(layer.score, np.float64)
        check(
            agree(score, score.T, 1000 * float(jnp.finfo(layer.score.dtype).eps)),
            "the score A = K^T Q is not symmetric; the energy needs A = A^T.",
        )
    return layer


def dissipation(flow: Flow | AbstractInContextMap, mu: TokenCloud) -> Float[Array, ""]:
    r"""Rate at which the energy changes along the flow, by the dissipation identity.

    $$\frac{\mathrm{d}E}{\mathrm{d}t} = \frac1c \int |\Gamma[\mu]|^2_{\mathrm{metric}}
      \,\mathrm{d}\mu,$$
    where the layer is the gradient of $cE$ in its metric: $|v|^2$ for Wasserstein,
    $\langle v, P^{-1}v\rangle$ for a twisted one, $Z(x)|v|^2$ for softmax. On the
    sphere the velocity is the tangent one.

    Args:
        flow: a flow of constant parameters that is a gradient flow, or its map.
        mu: the tokens.

    Returns:
        The rate: positive where the energy grows. Cost: one evaluation of the flow.
    """
    flow = _flow_of(flow)
    layer = checked_map(flow)
    return _rate(flow, layer, _untwisted_structure(layer, flow.space), mu)


class EnergyProfile(eqx.Module):
    r"""The energy along a path, with its rate by the dissipation identity.

    Attributes:
        depths: the saved depths.
        energies: the energy at each of them.
        rates: $\mathrm{d}E/\mathrm{d}t$ there, from the identity.
        worst_violation: largest step of the energy against the sign of its rate; zero
            if it is monotone.
    """

    depths: Float[Array, " t"]
    energies: Float[Array, " t"]
    rates: Float[Array, " t"]
    worst_violation: Float[Array, ""]


def energy_profile(flow: Flow, trajectory: Trajectory) -> EnergyProfile:
    """Watch the energy along a solved gradient flow.

    Args:
        flow: the flow, of constant parameters.
        trajectory: its solution.

    Returns:
        Energies, rates, and by how much monotonicity fails at worst.
    """
    flow, cloud = _flow_of(flow), trajectory.cloud(0)
    layer = checked_map(flow, cloud)
    structure = _untwisted_structure(layer, flow.space)
    energies, rates = _along(flow, layer, structure, cloud, trajectory.points)
    forward = jnp.sign(trajectory.depths[-1] - trajectory.depths[0])
    steps = jnp.diff(energies) * forward * jnp.sign(structure.factor)
    return EnergyProfile(trajectory.depths, energies, rates, jnp.max(-steps, initial=0))


@eqx.filter_jit
def _along(flow, layer, structure, cloud, paths):
    def at(points):
        mu = cloud.moved(points)
        return energy(layer, mu), _rate(flow, layer, structure, mu)

    return jax.lax.map(at, paths)


def _rate(flow, layer, structure: GradientStructure, mu: TokenCloud) -> Array:
    velocity = _field(flow, mu)
    squares = jnp.sum(velocity * structure.covector(velocity), axis=1)
    if structure.divides_by_mass:
        squares = squares * jnp.exp(layer.log_kernel_mass(mu, mu.points))
    total = jnp.dot(mu.weights, squares)
    factor = structure.factor.astype(total.dtype)
    return jnp.where(factor == 0, 0, total / jnp.where(factor == 0, 1, factor))


def _field(flow: Flow, cloud: TokenCloud) -> Float[Array, "n d"]:
    start = jnp.zeros((), cloud.points.dtype)
    return flow.field(start, cloud, cloud.points, cloud.positions)


def _untwisted_structure(layer, space: AbstractSpace) -> GradientStructure:
    structure = checked_structure(layer)
    if isinstance(space, Sphere) and structure.mobility is not None:
        raise Unsupported("a twisted metric and the projection on a sphere do not mix.")
    return structure


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
    size = as_number("size", size, "a number from 0 on", least=0)
    most = float(jnp.sqrt(jnp.finfo(cloud.points.dtype).max)) / 1e3
    check(size <= most, f"size is {size}; it must be at most {most:.3g}.")
    noise = jr.normal(as_key(key), cloud.points.shape, cloud.points.dtype)
    moved = cloud.points + size * space.project(cloud.points, noise)
    return cloud.moved(space.retract(moved))


def checked_space(cloud: TokenCloud, space: AbstractSpace | None) -> AbstractSpace:
    """Return the space of the tokens, the sphere by default, or raise."""
    check_cloud("cloud", cloud)
    space = Sphere() if space is None else space
    check_kind("space", space, Euclidean | Sphere, "Sphere() or Euclidean()")
    space.check(cloud.points)
    return space


def _flow_of(flow: Flow | AbstractInContextMap) -> Flow:
    return flow if isinstance(flow, Flow) else Flow(flow)


def checked_map(flow: Flow, cloud: TokenCloud | None = None) -> AbstractInContextMap:
    """Return the map of a flow that does not change with depth and has no noise.

    Raise also if tokens are given that do not have its dimension, or leave its space.
    """
    check(isinstance(flow, Flow), f"flow is a {type(flow).__name__}; give a Flow.")
    if not isinstance(flow.velocity, Constant) or flow.noise is not None:
        raise Unsupported(
            "the flow changes with depth or has noise; energies and clouds at rest are "
            "known for a flow whose map does not change, without noise."
        )
    layer = unwrapped(flow.velocity.gamma)
    if cloud is not None:
        check_cloud("cloud", cloud)
        check(
            layer.input_dimension in (None, cloud.dimension),
            f"the flow is of dimension {layer.input_dimension}, the cloud of dimension "
            f"{cloud.dimension}; they must agree.",
        )
        flow.space.check(cloud.points)
    return layer


def present(cloud: TokenCloud) -> TokenCloud:
    """Return the tokens of positive weight."""
    check(
        is_concrete(cloud.weights) and is_concrete(cloud.points),
        "which tokens are present must be known; call this outside of jit.",
    )
    kept = np.asarray(cloud.weights) > 0
    positions = None if cloud.positions is None else cloud.positions[kept]
    return TokenCloud(
        cloud.points[kept], cloud.weights[kept], positions=positions, sums=cloud.sums
    )
