"""A priori constants: what is known of a map on a ball before it is computed."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractInContextMap, parameter_dtype
from meanformer.attention.adversarial import adversarial_cloud, lower_bound
from meanformer.attention.constants import Constants
from meanformer.attention.softmax import Softmax
from meanformer.errors import Overflow, Unsupported, as_integer, as_number, is_concrete
from meanformer.measures import TokenCloud
from meanformer.measures.checks import checked_weights
from meanformer.typing import ArrayLike

Bound = Float[Array, ""]


class LipschitzBounds(eqx.Module):
    r"""Bounds on the Lipschitz constant of a map over all clouds in a ball.

    Constants that are not known for this kind of map, or too large for the
    floating-point type, are `None`.

    Attributes:
        by_count: upper bound that grows like $\sqrt n$.
        by_count_published: its published form, for softmax.
        mean_field: upper bound $L(R)$ that does not depend on $n$.
        mean_field_loose: its looser published form, for softmax.
        in_query: bound on the derivative in the query, $\mathrm{Lip}_x$.
        in_measure: bound in the measure for $W_1$, $\mathrm{Lip}_\mu$.
        lower: some cloud in the ball has at least this constant; not known for
            softmax while the radius is traced.
        lower_cloud: that cloud.
    """

    by_count: Bound | None
    by_count_published: Bound | None
    mean_field: Bound | None
    mean_field_loose: Bound | None
    in_query: Bound | None
    in_measure: Bound | None
    lower: Bound | None
    lower_cloud: TokenCloud | None

    @property
    def upper(self) -> Bound | None:
        """The smaller of the upper bounds; `None` if there is none."""
        known = [
            bound for bound in (self.by_count, self.mean_field) if bound is not None
        ]
        return jnp.stack(known).min() if known else None


def lipschitz_bounds(
    gamma: AbstractInContextMap,
    radius: float | Float[Array, ""],
    count: int,
    *,
    weights: ArrayLike | None = None,
    order: float = 2.0,
) -> LipschitzBounds:
    r"""Bounds on the Lipschitz constant over all clouds of a size in a ball.

    For softmax, with $a = |A|$ and $n$ equal weights,
    $$\mathrm{Lip} \le \sqrt3\,|V|\bigl(\beta^2 a^2 R^4 (n+1) + n\bigr)^{1/2}, \qquad
      \mathrm{Lip} \le L(R) = |V|\bigl[\beta a R^2
      + (1 + 2\beta a R^2)\,e^{2\beta a R^2}\bigr].$$
    The published first bound has $4n + 1$ instead of $n + 1$, the published second one
    $(1 + 3\beta a R^2)e^{2\beta aR^2}$ as its factor of $|V|$ [CAP24]. If
    $V = cI$ and $A$ has real eigenvalues, then for some cloud
    $$\mathrm{Lip} \ge \frac{|c|\sqrt{n-1}}{1 + (n-1)\,e^{-2\beta R^2 \gamma}}, \qquad
      \gamma = \max(-\lambda_{\min}, \lambda_{\max}/8).$$

    The constants of the other kinds, and of sums, heads, masks, residuals and
    compositions, are derived in the same way (`constants`). Behind a mask $L(R)$ is for
    the distance $d_p$, and its second term has Hardy's factor $p/(p-1)$. Sinkhorn has
    the lower bound $|V|$, from its translation identity, and no known upper bound.

    Args:
        gamma: the map; a kind without any known bound is refused.
        radius: the radius $R$ of the ball.
        count: the number $n$ of tokens.
        weights: their masses, equal by default; the norm is weighted, and in the
            first bound $n$ becomes $1/\min w$ (with $n$ it would fail).
        order: the order $p$ of $d_p$, for masks.

    Returns:
        All bounds; `upper` is the smaller of the upper ones.
    """
    count = as_integer("count", count, least=1)
    known = constants(gamma, radius, order)
    if known.in_query is None:
        raise Unsupported(
            f"{type(gamma).__name__} is not continuous: it has no Lipschitz bound."
        )
    effective = _effective_count(known.in_query, count, weights)
    lower, cloud = _lower(known.lower, gamma, radius, count, weights)
    return LipschitzBounds(
        _finite(_evaluated(known.by_count, effective)),
        _finite(_evaluated(known.by_count_published, effective)),
        _finite(known.mean_field),
        _finite(known.mean_field_published),
        _finite(known.in_query),
        _finite(known.in_measure),
        lower,
        cloud,
    )


def stability_constant(
    gamma: AbstractInContextMap,
    radius: float | Float[Array, ""],
    *,
    order: float = 2.0,
) -> Float[Array, ""]:
    r"""The constant $L(R)$ of the stability of a map in Wasserstein distance.

    $$\bigl\|\Gamma[\mu](x) - \Gamma[\nu](y)\bigr\|_{L^p(\pi)} \le L(R)\,
      \|x - y\|_{L^p(\pi)}, \qquad L(R) = \mathrm{Lip}_x + \mathrm{Lip}_\mu,$$
    for any coupling $\pi$ of measures in the ball of radius $R$; `lipschitz_bounds` has
    the formulas. Differentiable in the parameters.

    Args:
        gamma: the map; Sinkhorn, whose constant is not known, is refused.
        radius: the radius $R$.
        order: the order $p$; it matters for masked maps only.
    """
    constant = constants(gamma, radius, order).mean_field
    if constant is None:
        raise Unsupported(
            f"no stability constant of {type(gamma).__name__} is known; measure it "
            "with local_lipschitz or maximise_lipschitz."
        )
    return _in_range("L(R)", constant, gamma, radius)


def speed_bound(
    gamma: AbstractInContextMap, radius: float | Float[Array, ""]
) -> Float[Array, ""]:
    r"""Bound on $|\Gamma[\mu](x)|$ for $x$ and $\mu$ in the ball of a radius.

    It is $|V|R$ for every kind that averages values with total mass at most one
    (softmax, L2, Sinkhorn, sigmoid, hardmax, masked or not), $\sum_h |W_h V_h| R$ with
    several heads, $\beta|V||A|R^3$ for linear attention. Sums add up.

    Args:
        gamma: the map.
        radius: the radius $R$.
    """
    return _in_range("the speed", constants(gamma, radius).speed, gamma, radius)


def constants(
    gamma: AbstractInContextMap,
    radius: float | Float[Array, ""],
    order: float = 2.0,
) -> Constants:
    r"""Return the constants of a map on the ball of a radius.

    A row-normalised kind with score $s(x,y)$ is determined by bounds $\tau$ on
    $|\partial_y s|$, $\chi$ on $|\partial_x\partial_y s|$ and $\omega$ on the
    oscillation of $s(x,\cdot)$:
    $$\mathrm{Lip}_x \le |V|\chi R^2, \qquad
      \mathrm{Lip}_\mu \le |V|(1 + 2\tau R)e^{\omega}, \qquad
      \mathrm{Lip} \le \sqrt3\,|V|\bigl(n(1 + \tau^2R^2) + \chi^2R^4\bigr)^{1/2}.$$
    Softmax has $\tau = \beta a R$, $\chi = \beta a$, $\omega = 2\beta aR^2$; L2 has
    $\tau = 2\beta|K|(|Q|+|K|)R$, $\chi = 2\beta a$, $\omega = \beta(|Q|+|K|)^2R^2$. The
    kinds $\int \varphi(s)\,Vy\,\mathrm{d}\mu(y)$ have
    $\mathrm{Lip}_x \le |V|\,|\varphi'|\,\chi R^2$ and
    $\mathrm{Lip}_\mu \le |V|(|\varphi| + |\varphi'|\tau R)$.

    Args:
        gamma: the map.
        radius: the radius of the ball.
        order: the order $p$ of the distance $d_p$, for masked maps.
    """
    order = as_number("order", order, "at least 1", least=1)
    if is_concrete(radius):
        as_number("radius", radius, "finite and >= 0", least=0, below=np.inf)
    radius = jnp.asarray(radius, parameter_dtype(gamma))
    return gamma.ball_constants(radius, order)


def _in_range(
    name: str, constant: Array, gamma: AbstractInContextMap, radius
) -> Float[Array, ""]:
    if is_concrete(constant) and not np.isfinite(constant):
        raise Overflow(
            f"{name} of {type(gamma).__name__} at radius {float(radius):.6g} is too "
            f"large for {constant.dtype}; use a smaller radius or beta."
        )
    return constant


def _effective_count(like: Array, count: int, weights) -> Array:
    if weights is None:
        return jnp.asarray(count, like.dtype)
    masses = checked_weights(
        jnp.zeros((count, 1), like.dtype), weights, normalize=False
    )
    return 1 / jnp.min(jnp.where(masses > 0, masses, jnp.inf))


def _evaluated(bound: Callable[[Array], Array] | None, count: Array) -> Array | None:
    return None if bound is None else bound(count)


def _finite(bound: Array | None) -> Array | None:
    if bound is None or not is_concrete(bound) or np.isfinite(bound):
        return bound
    return None


def _lower(known: Bound | None, gamma, radius, count: int, weights):
    """Return the bound and the cloud known for softmax, else what its kind says."""
    is_softmax = isinstance(gamma, Softmax) and weights is None and count >= 2
    if not (is_softmax and is_concrete(radius)):
        return known, None
    bound = lower_bound(gamma, radius, count)
    return bound, None if bound is None else adversarial_cloud(gamma, count, radius)
