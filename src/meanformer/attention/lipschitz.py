"""Local Lipschitz constants: how much a layer amplifies a small change of tokens."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanformer.attention.abstract import (
    AbstractAttention,
    AbstractInContextMap,
    check_map,
)
from meanformer.attention.composition import Composition
from meanformer.attention.jacobian import (
    ScaledJacobian,
    Search,
    check_continuous,
    norm_roots,
    token_field,
    unscaled,
    warn_if_unfinished,
)
from meanformer.errors import Unsupported, is_concrete
from meanformer.measures import AbstractMeasure, TokenCloud
from meanformer.numerics.arrays import cast, widened


class LipschitzReport(eqx.Module):
    r"""A local Lipschitz constant, the move that attains it, and how well it is known.

    Attributes:
        value: the constant $\sigma_1$.
        move: the change of the tokens that is amplified most, of norm one.
        residual: $|\tilde J^\top \tilde J v - \sigma_1^2 v| / \sigma_1^2$.
        gap: $1 - \sigma_2/\sigma_1$, from the second singular value found.
        iterations: steps of the power iteration; 0 for a decomposition.
        converged: whether residual and change are below the tolerance.
    """

    value: Float[Array, ""]
    move: Float[Array, "n d"]
    residual: Float[Array, ""]
    gap: Float[Array, ""]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]

    def __float__(self) -> float:
        return float(self.value)


def local_lipschitz(
    gamma: AbstractInContextMap,
    mu: AbstractMeasure,
    *,
    method: str = "auto",
    norm: str = "weighted",
    tolerance: float = 1e-8,
    vectors: int = 3,
    max_steps: int = 1000,
    seed: int = 0,
) -> Float[Array, ""]:
    r"""Local Lipschitz constant of a map at a token cloud.

    $$\bigl\| D^{1/2} J D^{-1/2} \bigr\|, \qquad J = \frac{\partial}{\partial X}
      \bigl(\Gamma[\mu_X](x_i)\bigr)_i, \qquad D = \mathrm{diag}(w) \otimes I,$$
    the operator norm in $(\sum_i w_i |v_i|^2)^{1/2}$, which is $W_2$ for small moves.
    Tokens of weight zero are left out. With equal weights it is the Frobenius norm.

    Up to 64 coordinates in all, the Jacobian is formed and decomposed. Beyond them a
    power iteration in blocks, locally optimal, on $\tilde J^\top \tilde J$, stops on
    residual and change; if it does not get there it warns (`StoppedEarly`).
    Differentiable in the tokens and in the parameters where the
    largest singular value is simple.

    Args:
        gamma: the map; hardmax, which is not differentiable, is refused.
        mu: the tokens, a `TokenCloud`.
        method: `"power"`, `"svd"` of the whole Jacobian, or by default `"auto"`, the
            latter for small clouds.
        norm: `"weighted"`, or `"frobenius"` for $D = I$ whatever the weights.
        tolerance: of the power iteration, relative; the error of the constant is about
            its square over the gap.
        vectors: size of the block; three to five cope with clustered singular values.
        max_steps: most steps of the power iteration.
        seed: of its random start.

    Returns:
        The constant, a scalar; `lipschitz_report` also tells how well it is known.
        Cost of a step: $O(n^2 d)$ time for each vector, and no array of size $n^2$;
        `"svd"` costs $O(n^3 d^3)$ time and $O(n^2 d^2)$ memory.
    """
    report = lipschitz_report(
        gamma,
        mu,
        method=method,
        norm=norm,
        tolerance=tolerance,
        vectors=vectors,
        max_steps=max_steps,
        seed=seed,
    )
    residual = f"{float(report.residual):.2g}" if is_concrete(report.residual) else ""
    warn_if_unfinished(
        report.converged, f"the Lipschitz constant (residual {residual})"
    )
    return report.value


def lipschitz_report(
    gamma: AbstractInContextMap,
    mu: AbstractMeasure,
    *,
    method: str = "auto",
    norm: str = "weighted",
    tolerance: float = 1e-8,
    vectors: int = 3,
    max_steps: int = 1000,
    seed: int = 0,
) -> LipschitzReport:
    """Local Lipschitz constant with the move that attains it and its accuracy.

    Arguments and cost are those of `local_lipschitz`; it never warns.
    """
    search = Search(method, tolerance, vectors, max_steps, seed)
    dtype = checked_cloud(gamma, mu).points.dtype
    gamma, cloud = widened((gamma, mu))
    # Evaluated once outside of the compiled code, where bad input is told.
    gamma(cloud, cloud.points, positions=cloud.positions)
    gamma = _settled(gamma, cloud)
    return cast(_report(gamma, cloud, norm, search), dtype)


def _settled(gamma: AbstractInContextMap, mu: TokenCloud) -> AbstractInContextMap:
    """Return the map with what its attentions look for at this cloud found."""

    def is_whole(node) -> bool:
        # The later layers of a composition see other clouds.
        return isinstance(node, AbstractAttention | Composition)

    def settle(node):
        return node.settled(mu) if isinstance(node, AbstractAttention) else node

    return jax.tree.map(settle, gamma, is_leaf=is_whole)


def checked_cloud(gamma: AbstractInContextMap, mu: AbstractMeasure) -> TokenCloud:
    """Return the measure, or raise unless the map has a Jacobian at its tokens."""
    check_map("gamma", gamma)
    if not isinstance(mu, TokenCloud):
        raise Unsupported(
            f"mu is {type(mu).__name__}; a local Lipschitz constant is that of a "
            "TokenCloud: use quadrature(mu, order) or a sample."
        )
    check_continuous(gamma)
    return mu


@eqx.filter_jit
def _report(
    gamma: AbstractInContextMap, mu: TokenCloud, norm: str, search: Search
) -> LipschitzReport:
    still_gamma, still_mu = _constant((gamma, mu))
    roots = norm_roots(still_mu, norm)
    field = token_field(still_gamma, still_mu)
    jacobian = ScaledJacobian(field, still_mu.points, roots)
    if search.is_dense(mu.points):
        found = jacobian.decomposed(mu.points)
    else:
        found = search.top(jacobian.normal, mu.points)
    vector = found.vectors[:, 0].reshape(mu.points.shape)
    singular = jnp.sqrt(jnp.maximum(found.values, 0))
    top, second = singular[0], singular[1] if len(singular) > 1 else 0 * singular[0]
    return LipschitzReport(
        _with_derivative((gamma, mu), vector, top, norm=norm),
        unscaled(roots, vector),
        _ratio(found.residual, found.values[0]),
        _ratio(top - second, top),
        found.iterations,
        found.converged,
    )


@eqx.filter_custom_jvp
def _with_derivative(layer, vector, top, *, norm):
    """Return the constant, with the derivative of what the layer makes of a vector."""
    return top


@_with_derivative.def_jvp
def _with_derivative_jvp(primals, tangents, *, norm):
    (layer, vector, top), (moving, _, _) = primals, tangents

    def amplified(layer):
        return _amplification(*layer, norm, vector)

    return top, eqx.filter_jvp(amplified, (layer,), (moving,))[1]


def _amplification(gamma, mu, norm, vector: Float[Array, "n d"]) -> Float[Array, ""]:
    """Return the norm of the image of a vector, which a derivative may hold fixed."""
    roots = norm_roots(mu, norm)
    move = unscaled(roots, vector)
    image = jax.jvp(token_field(gamma, mu), (mu.points,), (move,))[1]
    square = jnp.sum((roots[:, None] * image) ** 2)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def _ratio(part: Float[Array, ""], whole: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 0)


def _constant(tree: PyTree) -> PyTree:
    """Return a tree whose arrays have no derivative."""
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(lax.stop_gradient(arrays), rest)
