"""Energies on the sphere: first variation, gradient, Hessian, stationary clouds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap, Softmax, Unnormalised
from meanformer.errors import (
    InvalidInput,
    Overflow,
    Unsupported,
    as_float_array,
    as_number,
    check,
    is_concrete,
)
from meanformer.flows import Constant, Flow
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.proportions import agree
from meanformer.observables.energies import log_kernel_mass
from meanformer.observables.structure import is_gradient_flow
from meanformer.typing import ArrayLike, Key


def first_variation(
    layer: AbstractInContextMap, mu: TokenCloud, x: ArrayLike
) -> Float[Array, " m"]:
    r"""First variation of the exponential energy of a layer, at any points.

    For $A = A^\top$ and $E = \frac{1}{2\beta}\iint e^{\beta y^\top A x - s}
    \,\mathrm{d}\mu(x)\,\mathrm{d}\mu(y)$ it is
    $$\frac{\delta E}{\delta\mu}(x) = \frac1\beta\int e^{\beta y^\top A x - s}
      \,\mathrm{d}\mu(y),$$
    and $E$ is half its mean over $\mu$. At a stationary measure it is critical at every
    atom; at a minimiser over all measures it is smallest on the support.

    Args:
        layer: `Softmax` or `Unnormalised` with a symmetric score; the value does not
            matter.
        mu: the tokens.
        x: the points, one per row.

    Returns:
        One number for each point. Cost: one sum over pairs.
    """
    layer = _with_energy(layer)
    check_cloud("mu", mu)
    if is_concrete(layer.beta):
        check(float(layer.beta) != 0, "beta is 0; the energy needs another beta.")
    log_mass = log_kernel_mass(layer, mu, as_float_array("x", x))
    ceiling = float(np.log(jnp.finfo(log_mass.dtype).max))
    if is_concrete(log_mass) and float(jnp.max(log_mass, initial=0)) > ceiling:
        raise Overflow(
            f"the first variation overflows {log_mass.dtype}; lower beta, or give "
            "Unnormalised a shift."
        )
    return jnp.exp(jnp.minimum(log_mass, ceiling)) / layer.temperature


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

    Args:
        layer: `Softmax` or `Unnormalised` with a symmetric score; the value does not
            matter.
        cloud: the tokens.
        space: where they live, `Sphere()` by default.

    Returns:
        One tangent vector for each token. Cost: one sum over pairs.
    """
    space = _checked_space(cloud, space)
    return _field(Flow(_ascent(layer), space=space), cloud)(cloud.points)


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
    that commute with $A$ give zeros.

    Args:
        layer: `Softmax` or `Unnormalised` with a symmetric score; the value does not
            matter.
        cloud: the tokens, of known weights; those of weight zero are absent.
        space: where they live, `Sphere()` by default.

    Returns:
        A symmetric matrix. Cost: $n(d-1)$ derivatives of a sum over pairs, $O(n^2d^2)$
        memory: for few tokens.
    """
    space = _checked_space(cloud, space)
    cloud = _present(cloud)
    flow = Flow(_ascent(layer), space=space)
    matrix = _linearised(flow, cloud, cloud.weights)
    return (matrix + matrix.T) / 2


class StationaryReport(eqx.Module):
    r"""Whether tokens rest, and what a small push does to them.

    Attributes:
        verdict: the answer in words, such as "stationary, index 2".
        is_stationary: whether no token moves, to the tolerance.
        speed: the largest speed of a token.
        index: how many directions grow: the number of positive eigenvalues; `None` if
            the tokens move.
        nullity: how many neither grow nor shrink; rotations are among them.
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
    flow: Flow, cloud: TokenCloud, *, tolerance: float = 1e-9
) -> StationaryReport:
    r"""Tell whether tokens rest under a flow, and in how many directions they would go.

    Antipodal, regular and uniform clouds are stationary saddles: a solver waits there
    until rounding pushes it off. The linearised flow answers instead. Its eigenvalues
    are those of the Hessian of the energy for a gradient flow, divided by the masses
    $Z_i$ for softmax, which changes rates but not signs.

    Args:
        flow: a flow whose map does not change with depth, without noise.
        cloud: the tokens, of known values; those of weight zero are absent.
        tolerance: the tokens rest if none is faster than this share of the size of the
            flow, which is the largest vector before projection or the largest entry of
            the linearised flow; eigenvalues below this share of it are zero.

    Returns:
        The report. To leave a saddle, move along `direction`, or use `perturbed`. Cost:
        as `energy_hessian`.
    """
    layer, tolerance = _checked_flow(flow), as_number("tolerance", tolerance)
    check(tolerance > 0, f"tolerance is {tolerance}; it must be positive.")
    check_cloud("cloud", cloud)
    flow.space.check(cloud.points)
    kept, tokens = _indices(cloud), _present(cloud)
    speed = float(_speed(_field(flow, tokens)(tokens.points)))
    rates, direction, size = _growth(flow, layer, tokens)
    empty, still = jnp.zeros(0, cloud.points.dtype), jnp.zeros_like(cloud.points)
    if speed > tolerance * size:
        verdict = f"not stationary: a token moves with speed {speed:.6g}"
        return StationaryReport(verdict, False, speed, None, None, empty, still)
    index = int(np.sum(rates > tolerance * size))
    return StationaryReport(
        f"stationary, index {index}",
        True,
        speed,
        index,
        int(np.sum(np.abs(rates) <= tolerance * size)),
        jnp.asarray(rates, cloud.points.dtype),
        still.at[kept].set(jnp.asarray(direction, still.dtype)),
    )


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
    noise = jr.normal(key, cloud.points.shape, cloud.points.dtype)
    moved = cloud.points + size * space.project(cloud.points, noise)
    return cloud.moved(space.retract(moved))


def _with_energy(layer: AbstractInContextMap) -> Softmax | Unnormalised:
    if not isinstance(layer, Softmax | Unnormalised):
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


def _ascent(layer: AbstractInContextMap) -> Unnormalised:
    """Return the map whose flow climbs the energy in Wasserstein space."""
    layer = _with_energy(layer)
    return Unnormalised(
        layer.query,
        layer.key,
        layer.score,
        beta=layer.beta,
        shift=layer.shift if isinstance(layer, Unnormalised) else None,
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


def _checked_flow(flow: Flow) -> AbstractInContextMap:
    check(isinstance(flow, Flow), f"flow is a {type(flow).__name__}; give a Flow.")
    if not isinstance(flow.velocity, Constant) or flow.noise is not None:
        raise Unsupported(
            "a cloud can be stationary only under a flow whose map does not change, "
            "without noise."
        )
    return flow.velocity.gamma


def _indices(cloud: TokenCloud) -> np.ndarray:
    if not (is_concrete(cloud.weights) and is_concrete(cloud.points)):
        raise InvalidInput(
            "which tokens are present must be known; call this outside of jit."
        )
    return np.flatnonzero(np.asarray(cloud.weights) > 0)


def _present(cloud: TokenCloud) -> TokenCloud:
    """Return the tokens of positive weight."""
    kept = _indices(cloud)
    positions = None if cloud.positions is None else cloud.positions[kept]
    return TokenCloud(
        cloud.points[kept], cloud.weights[kept], positions=positions, sums=cloud.sums
    )


def _field(flow: Flow, cloud: TokenCloud):
    """Return the velocities of the tokens as a function of all their points."""
    start = jnp.zeros((), cloud.points.dtype)

    def field(points: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return flow.field(start, cloud.moved(points), points, cloud.positions)

    return field


def _speed(vectors: Float[Array, "n d"]) -> Float[Array, ""]:
    return jnp.max(jnp.linalg.norm(vectors, axis=1))


def _linearised(
    flow: Flow, cloud: TokenCloud, masses: Float[Array, " n"]
) -> Float[Array, "h h"]:
    """Return the derivative of the velocities in a basis orthonormal for the masses."""
    basis = _tangent_basis(flow.space, cloud.points)
    derivative = _derivative(flow, cloud)
    blocks = jnp.einsum("ida,idje,jeb->iajb", basis, derivative, basis)
    roots = jnp.sqrt(masses)
    scaled = blocks * (roots[:, None] / roots[None, :])[:, None, :, None]
    size = basis.shape[0] * basis.shape[2]
    return scaled.reshape(size, size)


@eqx.filter_jit
def _derivative(flow: Flow, cloud: TokenCloud) -> Float[Array, "n d n d"]:
    return jax.jacfwd(_field(flow, cloud))(cloud.points)


def _tangent_basis(
    space: AbstractSpace, points: Float[Array, "n d"]
) -> Float[Array, "n d a"]:
    if isinstance(space, Euclidean):
        identity = jnp.eye(points.shape[1], dtype=points.dtype)
        return jnp.broadcast_to(identity[None], (len(points), *identity.shape))
    complete = jnp.linalg.qr(space.retract(points)[:, :, None], mode="complete")[0]
    return complete[:, :, 1:]


def _growth(
    flow: Flow, layer: AbstractInContextMap, tokens: TokenCloud
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return rates of growth, the largest first, the fastest direction, and a size."""
    masses, structure = tokens.weights, is_gradient_flow(layer)
    if structure and structure.divides_by_mass:
        seen = log_kernel_mass(layer, tokens, tokens.points)
        masses = masses * jnp.exp(seen - seen.max())
    matrix = np.asarray(_linearised(flow, tokens, masses), np.float64)
    vectors = layer(tokens, tokens.points, positions=tokens.positions)
    size = max(float(_speed(vectors)), float(np.abs(matrix).max(initial=0)))
    if structure and structure.mobility is None:
        rates, columns = np.linalg.eigh((matrix + matrix.T) / 2)
    else:
        rates, columns = map(np.real, np.linalg.eig(matrix))
    order = np.argsort(-rates, kind="stable")
    return rates[order], _fastest(flow, tokens, masses, columns[:, order[:1]]), size


def _fastest(
    flow: Flow, tokens: TokenCloud, masses: Float[Array, " n"], column: np.ndarray
) -> np.ndarray:
    """Return a column in the basis as one vector for each token, the longest one."""
    if column.size == 0:
        return np.zeros(tokens.points.shape)
    basis = np.asarray(_tangent_basis(flow.space, tokens.points))
    parts = column.reshape(len(basis), -1) / np.sqrt(masses)[:, None]
    vectors = np.einsum("nda,na->nd", basis, parts)
    longest = np.linalg.norm(vectors, axis=1).max()
    return vectors / (longest if longest > 0 else 1)
