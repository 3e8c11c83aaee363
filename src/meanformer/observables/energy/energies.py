"""Energies of attention layers: what their flows climb, and how fast."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention import (
    AbstractExponential,
    AbstractInContextMap,
    Linear,
    Perceptron,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Sum,
    Unnormalised,
)
from meanformer.errors import InvalidInput, Overflow, Unsupported, check, is_concrete
from meanformer.flows import Constant, Flow, Trajectory
from meanformer.geometry import Sphere
from meanformer.measures import AbstractMeasure, FourierDensity, TokenCloud, quadrature
from meanformer.numerics.sinkhorn.algorithm import entropic_energy
from meanformer.observables.energy.potentials import units_of
from meanformer.observables.energy.structure import (
    GradientStructure,
    alone,
    factor_in_sum,
    is_gradient_flow,
    terms_of,
)


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
    return _energy(_layer_of(layer)[0], mu)


@functools.singledispatch
def _energy(layer, mu):
    if layer.says_energy:
        return layer.energy(mu)
    raise Unsupported(
        f"{type(layer).__name__} has no known energy; Sinkhorn, Unnormalised, Softmax, "
        "Sigmoid, Linear, Perceptron and their sums may have one, and a map of one's "
        "own with a method `energy`."
    )


@_energy.register(Sinkhorn)
def _of_sinkhorn(layer, mu):
    check(layer.half_steps is None, "the energy of Sinkhorn needs half_steps=None.")
    potentials = layer.potentials(_cloud(mu))
    return entropic_energy(mu.weights, potentials)


@_energy.register(Unnormalised)
@_energy.register(Softmax)
def _of_exponential(layer, mu):
    nodes = _nodes(mu)
    log_mass = log_kernel_mass(layer, mu, nodes.points)
    top = jnp.max(jnp.where(nodes.weights > 0, log_mass, -jnp.inf))
    if is_concrete(top) and float(top) > float(jnp.log(jnp.finfo(top.dtype).max)):
        raise Overflow(
            f"the energy overflows {top.dtype}: its logarithm is about "
            f"{float(top):.6g}; lower beta, or look at Unnormalised with a shift."
        )
    # An absent token may see more than all others: its value must stay finite.
    return _interaction(layer, nodes, jnp.exp(jnp.minimum(log_mass, top)))


def log_kernel_mass(
    layer: AbstractExponential, mu: AbstractMeasure, x: Float[Array, "m d"]
) -> Float[Array, " m"]:
    r"""Return $\log\int e^{\beta y^\top A x - s}\,\mathrm{d}\mu(y)$ at each point."""
    return layer.shifted(mu.log_laplace(layer.tilts(x)))


@_energy.register(Sigmoid)
def _of_sigmoid(layer, mu):
    profile = _ShiftedSoftplus(layer.bias)
    return _interaction(
        layer, mu, _cloud(mu).kernel_mean(_tilts(layer, mu), profile)[0]
    )


@_energy.register(Linear)
def _of_linear(layer, mu):
    check(
        layer.feature_map is None and not layer.normalized,
        "the energy of Linear needs no feature_map and normalized=False.",
    )
    _check_no_bias(layer)
    score, moment = layer.score, mu.second_moment()
    return layer.temperature / 4 * jnp.trace(score @ moment @ score.T @ moment)


@_energy.register(Perceptron)
def _of_perceptron(layer, mu):
    check_sum(layer)
    heights = units_of(layer).potential(_cloud(mu).points)
    return jnp.dot(mu.weights, jnp.where(mu.weights > 0, heights, 0))


@_energy.register(Sum)
def _of_sum(layer, mu):
    terms = terms_of(layer)
    if len(terms) == 1:
        return _energy(terms[0], mu)
    check_sum(layer)
    parts = [_energy(term, mu) for term in terms]
    factors = [factor_in_sum(term).astype(mu.weights.dtype) for term in terms]
    return sum(f * part for f, part in zip(factors[1:], parts[1:], strict=True)) + (
        factors[0] * parts[0]
    )


def check_sum(layer: Sum | Perceptron) -> None:
    """Raise if a sum or perceptron of known parameters has no known energy."""
    if is_known(layer):
        structure = is_gradient_flow(layer)
        if not structure:
            name = type(layer).__name__
            raise Unsupported(f"{name} has no known energy here: {structure.failure}.")


def is_known(layer: AbstractInContextMap) -> bool:
    """Whether the values of all parameters of a map are known here and now."""
    return all(is_concrete(leaf) for leaf in jax.tree.leaves(layer))


class _ShiftedSoftplus(eqx.Module):
    """The integral of the profile of sigmoid attention."""

    bias: Float[Array, ""]

    def __call__(self, score: Array) -> Array:
        return jax.nn.softplus(score + self.bias.astype(score.dtype))


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
    layer, flow = _layer_of(flow)
    structure = _checked_structure(layer, flow)
    return _rate(flow, layer, structure, mu)


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
    layer, flow = _layer_of(flow)
    structure = _checked_structure(layer, flow)
    cloud = trajectory.cloud(0)
    check(
        layer.input_dimension in (None, cloud.dimension),
        f"the flow is of dimension {layer.input_dimension}, the trajectory of "
        f"dimension {cloud.dimension}.",
    )
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
    start = jnp.zeros((), mu.points.dtype)
    velocity = flow.field(start, mu, mu.points, mu.positions)
    squares = jnp.sum(velocity * structure.covector(velocity), axis=1)
    if structure.divides_by_mass:
        squares = squares * jnp.exp(log_kernel_mass(layer, mu, mu.points))
    total = jnp.dot(mu.weights, squares)
    factor = structure.factor.astype(total.dtype)
    return jnp.where(factor == 0, 0, total / jnp.where(factor == 0, 1, factor))


def _layer_of(flow) -> tuple[AbstractInContextMap, Flow]:
    flow = flow if isinstance(flow, Flow) else Flow(flow)
    if not isinstance(flow.velocity, Constant):
        raise Unsupported("the energy of a flow needs parameters that do not change.")
    check(flow.noise is None, "the dissipation identity needs a flow without noise.")
    return alone(flow.velocity.gamma), flow


def _checked_structure(layer, flow: Flow) -> GradientStructure:
    structure = is_gradient_flow(layer)
    if not structure:
        raise InvalidInput(f"this is not a gradient flow: {structure.failure}.")
    if isinstance(flow.space, Sphere) and structure.mobility is not None:
        raise Unsupported("a twisted metric and the projection on a sphere do not mix.")
    return structure


def _interaction(layer, mu, potential: Float[Array, " n"]) -> Array:
    beta = layer.temperature
    if is_concrete(beta):
        check(float(beta) != 0, "beta is 0; the energy needs beta different from 0.")
    _check_no_bias(layer)
    return jnp.dot(mu.weights, jnp.where(mu.weights > 0, potential, 0)) / (2 * beta)


def _check_no_bias(layer) -> None:
    check(layer.query_bias is None, "a layer with query_bias has no known energy.")


def _tilts(layer, mu: TokenCloud) -> Float[Array, "n d"]:
    return layer.tilts(mu.points)


def _nodes(mu: AbstractMeasure) -> TokenCloud:
    """Return tokens to integrate over: their own, or nodes of a density."""
    if isinstance(mu, FourierDensity):
        return quadrature(mu, 4 * mu.modes)
    return _cloud(mu)


def _cloud(mu: AbstractMeasure) -> TokenCloud:
    if not isinstance(mu, TokenCloud):
        raise Unsupported(
            f"the energy of {type(mu).__name__} has no closed form here; use "
            "quadrature(mu, order)."
        )
    return mu
