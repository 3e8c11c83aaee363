"""Derivatives of maps with respect to all tokens, in the norm of their masses."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.attention.abstract import AbstractInContextMap, maps_in
from meanformer.errors import (
    StoppedEarly,
    Unsupported,
    as_number,
    check_choice,
    is_concrete,
    warn,
)
from meanformer.measures import TokenCloud
from meanformer.numerics.arrays import matmul
from meanformer.numerics.eigen import Eigenpairs, largest_eigenpairs, random_block

METHODS = ("auto", "power", "svd")
DENSE_LIMIT = 64
NORMS = ("weighted", "frobenius")

TokenField = Callable[[Float[Array, "n d"]], Float[Array, "n e"]]


class Search(eqx.Module):
    """How the largest singular value is looked for; see `local_lipschitz`."""

    method: str = "auto"
    tolerance: float = 1e-8
    vectors: int = 3
    max_steps: int = 1000
    seed: int = 0

    def __check_init__(self):
        check_choice("method", self.method, METHODS)
        for name in ("tolerance", "vectors", "max_steps"):
            as_number(name, getattr(self, name), "positive", above=0)

    def is_dense(self, points: Float[Array, "n d"]) -> bool:
        """Whether the Jacobian of so many tokens is decomposed as a whole."""
        return self.method == "svd" or (
            self.method == "auto" and points.size <= DENSE_LIMIT
        )

    def top(
        self, operator: Callable[[Array], Array], like: Float[Array, "n d"]
    ) -> Eigenpairs:
        """Return the largest eigenpairs of a symmetric operator on token arrays."""

        def flat(v: Float[Array, " size"]) -> Float[Array, " size"]:
            return operator(v.reshape(like.shape)).reshape(-1)

        start = random_block(like.size, self.vectors, like.dtype, seed=self.seed)
        return largest_eigenpairs(
            flat, start, tolerance=self.tolerance, max_steps=self.max_steps
        )


class ScaledJacobian(eqx.Module):
    r"""The derivative of a field of tokens in the norm of their masses.

    $$\tilde J = D^{1/2} J D^{-1/2},$$
    acting on arrays of the tokens' shape; absent tokens are projected out. Built once
    by linearisation; each product with $\tilde J$ or its transpose then costs about
    one evaluation of the field.

    Args:
        field: the map from all tokens to their velocities or images.
        points: where to differentiate it.
        roots: what `norm_roots` returns.
    """

    roots: Float[Array, " n"]
    derivative: Callable
    points: Float[Array, "n d"]

    def __init__(
        self, field: TokenField, points: Float[Array, "n d"], roots: Float[Array, " n"]
    ):
        self.roots, self.points = roots, points
        _, self.derivative = jax.linearize(field, points)

    def __call__(self, v: Float[Array, "n d"]) -> Float[Array, "n e"]:
        r"""Return $\tilde J v$."""
        return self.roots[:, None] * self.derivative(unscaled(self.roots, v))

    def adjoint(self, u: Float[Array, "n e"]) -> Float[Array, "n d"]:
        r"""Return $\tilde J^\top u$."""
        transpose = jax.linear_transpose(self.derivative, self.points)
        return unscaled(self.roots, transpose(self.roots[:, None] * u)[0])

    def normal(self, v: Float[Array, "n d"]) -> Float[Array, "n d"]:
        r"""Return $\tilde J^\top \tilde J v$."""
        return self.adjoint(self(v))

    def decomposed(self, like: Float[Array, "n d"]) -> Eigenpairs:
        r"""Return the eigenpairs of $\tilde J^\top \tilde J$, from a dense matrix."""
        units = jnp.eye(like.size, dtype=like.dtype).reshape(-1, *like.shape)
        matrix = jax.vmap(self)(units).reshape(like.size, -1).T
        singular, right = jnp.linalg.svd(matrix, full_matrices=False)[1:]
        normal = matmul(matrix.T, matmul(matrix, right[0]))
        residual = jnp.linalg.norm(normal - singular[0] ** 2 * right[0])
        return Eigenpairs(
            singular**2,
            right.T,
            residual,
            singular[0] ** 2,
            jnp.array(0),
            jnp.isfinite(residual),
        )


def norm_roots(mu: TokenCloud, norm: str) -> Float[Array, " n"]:
    r"""Return $\sqrt{w_i}$, or one in the Frobenius norm; zero for absent tokens."""
    check_choice("norm", norm, NORMS)
    present = mu.weights > 0
    masses = jnp.where(present, mu.weights, 1)
    roots = jnp.sqrt(masses if norm == "weighted" else jnp.ones_like(masses))
    return jnp.where(present, roots, 0)


def unscaled(roots: Float[Array, " n"], v: Float[Array, "n d"]) -> Float[Array, "n d"]:
    r"""Return $D^{-1/2} v$, zero for absent tokens."""
    present = roots > 0
    return jnp.where(present, 1 / jnp.where(present, roots, 1), 0)[:, None] * v


def token_field(gamma: AbstractInContextMap, mu: TokenCloud) -> TokenField:
    r"""Return $X \mapsto (\Gamma[\mu_X](x_i))_i$, the map that is differentiated."""
    return lambda points: gamma(mu.moved(points), points, positions=mu.positions)


def check_continuous(tree: PyTree) -> None:
    """Raise if a map, or a flow of maps, contains hardmax."""
    if not all(part.is_continuous for part in maps_in(tree)):
        raise Unsupported(
            "hardmax attention is not continuous, so it has no Lipschitz constant; use "
            "Softmax with a large beta."
        )


def warn_if_unfinished(converged: Bool[Array, "..."], what: str) -> None:
    """Warn if a power iteration, seen from outside of compiled code, did not end."""
    if is_concrete(converged) and not bool(converged.all()):
        warn(
            f"the power iteration for {what} did not converge; raise max_steps or "
            'vectors, or use method="svd", where there is the choice.',
            StoppedEarly,
        )
