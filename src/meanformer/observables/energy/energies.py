"""Energies of attention layers: what their flows climb, and how fast."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap, Perceptron
from meanformer.attention.exponential import tokens_of
from meanformer.errors import InvalidInput, Unsupported, check, is_concrete
from meanformer.flows import Constant, Flow, Trajectory
from meanformer.geometry import Sphere
from meanformer.measures import AbstractMeasure, TokenCloud
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


def _energy(layer: AbstractInContextMap, mu: AbstractMeasure) -> Float[Array, ""]:
    if isinstance(layer, Perceptron):
        check_sum(layer)
        cloud = tokens_of(mu)
        heights = units_of(layer).potential(cloud.points)
        return jnp.dot(cloud.weights, jnp.where(cloud.weights > 0, heights, 0))
    terms = terms_of(layer)
    if len(terms) == 1:
        return terms[0].energy(mu)
    check_sum(layer)
    parts = jnp.stack([_energy(term, mu) for term in terms])
    factors = jnp.stack([factor_in_sum(term).astype(parts.dtype) for term in terms])
    return jnp.dot(factors, parts)


def check_sum(layer: AbstractInContextMap) -> None:
    """Raise if a sum or perceptron of known parameters has no known energy."""
    if is_known(layer):
        structure = is_gradient_flow(layer)
        if not structure:
            name = type(layer).__name__
            raise Unsupported(f"{name} has no known energy here: {structure.failure}.")


def is_known(layer: AbstractInContextMap) -> bool:
    """Whether the values of all parameters of a map are known here and now."""
    return all(is_concrete(leaf) for leaf in jax.tree.leaves(layer))


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
        squares = squares * jnp.exp(layer.log_kernel_mass(mu, mu.points))
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
