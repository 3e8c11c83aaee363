"""Energies on the sphere: first variation, gradient, Hessian, stationary clouds."""

import equinox as eqx
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
from meanformer.numerics.matrices import matmul
from meanformer.numerics.multiples import agree
from meanformer.observables.energy.energies import check_sum
from meanformer.observables.energy.potentials import units_of
from meanformer.observables.energy.structure import alone, factor_in_sum, terms_of
from meanformer.observables.linearised.rates import linearised, rates_of
from meanformer.observables.linearised.symmetry import rotations
from meanformer.observables.linearised.velocity_terms import (
    kinks_of,
    largest_length,
)
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
    space = _checked_space(cloud, space)
    start = jnp.zeros((), cloud.points.dtype)
    flow = Flow(_ascent(layer), space=space)
    return flow.field(start, cloud, cloud.points, cloud.positions)


def energy_hessian(
    layer: AbstractInContextMap,
    cloud: TokenCloud,
    *,
    space: AbstractSpace | None = None,
) -> Float[Array, "h h"]:
    r"""Hessian of the exponential energy of a layer, in the space of all tokens.

    The Riemannian Hessian on $(\mathbb{S}^{d-1})^n$ with the metric
    $\sum_i w_i|\xi_i|^2$, in an orthonormal basis of the tangent spaces, $d-1$ numbers
    for each token of positive weight. Its eigenvalues do not depend on the basis: at a
    stationary point they are the rates at which the ascent of $E$ leaves it. Rotations
    that commute with $A$ give zeros. On a kink of a perceptron, where there are several
    one-sided Hessians, it is the one with the derivative that JAX gives.

    Args:
        layer: `Softmax` or `Unnormalised` with a symmetric score, whose value does not
            matter; or a perceptron or `Sum` that is a gradient flow.
        cloud: the tokens, of known weights; those of weight zero are absent.
        space: where they live, `Sphere()` by default.

    Returns:
        A symmetric matrix. Cost: $O(n^2d^3)$ time and $O(n^2d^2)$ memory, on the host
        on the sphere: for few tokens.
    """
    space = _checked_space(cloud, space)
    cloud = present(cloud)
    ascent = _ascent(layer)
    log_masses = np.log(np.asarray(cloud.weights, np.float64))
    found = linearised(Flow(ascent, space=space), ascent, cloud, log_masses)
    matrix = found.matrix * _unit(cloud, found.log_unit, found.matrix)
    return jnp.asarray((matrix + matrix.T) / 2, cloud.points.dtype)


class StationaryReport(eqx.Module):
    r"""Whether tokens rest, and what a small push does to them.

    Attributes:
        verdict: the answer in words: "stationary, index 2", "not stationary: ...", or
            "undecided: ..." if rates are too small to have a sign.
        is_stationary: whether no token moves, to the tolerance.
        speed: the largest speed of a token.
        index: how many directions grow: the number of positive eigenvalues; `None` if
            the tokens move or it is undecided.
        nullity: how many rates cannot be told from zero; rotations are among them.
        eigenvalues: growth rates of small perturbations (their real parts, if the flow
            is not a gradient flow), the largest first; empty if the tokens move.
        direction: the perturbation that grows fastest, one tangent vector for each
            token, the longest of length one; zero if the tokens move.
    """

    verdict: str = eqx.field(static=True)
    is_stationary: bool = eqx.field(static=True)
    speed: float = eqx.field(static=True)
    index: int | None = eqx.field(static=True)
    nullity: int | None = eqx.field(static=True)
    eigenvalues: Float[Array, " h"]
    direction: Float[Array, "n d"]


def stationary_report(
    flow: Flow, cloud: TokenCloud, *, tolerance: float | None = None
) -> StationaryReport:
    r"""Tell whether tokens rest under a flow, and in how many directions they would go.

    Antipodal, regular and uniform clouds are stationary saddles: a solver waits there
    until rounding pushes it off. The linearised flow answers instead. Its eigenvalues
    are those of the Hessian of the energy for a gradient flow, divided by the masses
    $Z_i$ for softmax, which changes rates but not signs.

    On the sphere, softmax and unnormalised attention are linearised without the pull of
    tokens on themselves: the rates of two opposite tokens, $e^{-2\beta}$ of that
    pull, are right at any $\beta$. Rates below the rounding of the largest ones have no
    sign. If they are more than the rotations that commute with score and value, which
    are known for symmetric ones, the verdict is "undecided": a slow direction may hide
    there, or one along which the tokens rest for another reason. On a kink of a
    perceptron it is, if the one-sided Hessians have different indices.

    Args:
        flow: a flow whose map does not change with depth, without noise.
        cloud: the tokens, of known values; those of weight zero are absent.
        tolerance: the tokens rest if none is faster than this share of the size of the
            flow, which is the largest vector before projection or the largest entry of
            the linearised flow; by default $10^{-9}$, or a thousand roundings of the
            type of the points if that is more.

    Returns:
        The report. To leave a saddle, move along `direction`, or use `perturbed`. Cost:
        as `energy_hessian`, and the eigenvalues of that matrix.
    """
    layer = checked_map(flow)
    check_cloud("cloud", cloud)
    least = 1000 * float(jnp.finfo(cloud.points.dtype).eps)
    given = max(1e-9, least) if tolerance is None else as_number("tolerance", tolerance)
    check(given > 0, f"tolerance is {given}; it must be positive.")
    check_fits(layer, cloud)
    flow.space.check(cloud.points)
    kept, tokens = _indices(cloud), present(cloud)
    found = rates_of(flow, layer, tokens)
    unit = _unit(tokens, found.log_unit, np.append(found.values, found.size))
    speed = unit * found.speed
    vectors = layer(tokens, tokens.points, positions=tokens.positions)
    empty, still = jnp.zeros(0, cloud.points.dtype), jnp.zeros_like(cloud.points)
    if speed > given * max(largest_length(vectors), unit * found.size):
        verdict = f"not stationary: a token moves with speed {speed:.6g}"
        return StationaryReport(verdict, False, speed, None, None, empty, still)
    index, nullity = found.counts(found.resolution + found.drift)
    verdict, is_decided = _verdict(index, nullity - rotations(layer, tokens))
    if is_decided and kinks_of(terms_of(layer), tokens):
        ends = [rates_of(flow, layer, tokens, side=side) for side in (-1, 1)]
        sides = [one.counts(one.resolution + one.drift)[0] for one in ends]
        if sides[0] != sides[1]:
            is_decided = False
            verdict = (
                "undecided: a token sits on a kink of a perceptron, index "
                f"{sides[0]} to {sides[1]}"
            )
    direction = found.direction(flow.space, tokens)
    return StationaryReport(
        verdict,
        True,
        speed,
        index if is_decided else None,
        nullity,
        jnp.asarray(unit * found.values, cloud.points.dtype),
        still.at[kept].set(jnp.asarray(direction, still.dtype)),
    )


def _unit(cloud: TokenCloud, log_unit: float, found: np.ndarray) -> float:
    """Return the unit of what was found, or raise if this would overflow."""
    log_largest = log_unit + float(np.log(max(np.abs(found).max(initial=0), 1e-300)))
    if log_largest > float(np.log(float(jnp.finfo(cloud.points.dtype).max))):
        raise Overflow(
            f"rates of growth overflow: their logarithm is about {log_largest:.6g}; "
            "lower beta, or give Unnormalised a shift."
        )
    return float(np.exp(log_unit))


def _verdict(index: int, unknown: int) -> tuple[str, bool]:
    if unknown <= 0:
        return f"stationary, index {index}", True
    noun = "rate" if unknown == 1 else "rates"
    return f"undecided: {unknown} {noun} below resolution, {index} positive", False


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
    space = _checked_space(cloud, space)
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


def _ascent(layer: AbstractInContextMap) -> AbstractInContextMap:
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


def _checked_space(cloud: TokenCloud, space: AbstractSpace | None) -> AbstractSpace:
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


def _indices(cloud: TokenCloud) -> np.ndarray:
    if not (is_concrete(cloud.weights) and is_concrete(cloud.points)):
        raise InvalidInput(
            "which tokens are present must be known; call this outside of jit."
        )
    return np.flatnonzero(np.asarray(cloud.weights) > 0)


def present(cloud: TokenCloud) -> TokenCloud:
    """Return the tokens of positive weight."""
    kept = _indices(cloud)
    positions = None if cloud.positions is None else cloud.positions[kept]
    return TokenCloud(
        cloud.points[kept], cloud.weights[kept], positions=positions, sums=cloud.sums
    )
