"""Separated groups: far enough apart to wait for a depth exponential in beta."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import Unnormalised
from meanformer.attention.log_domain import scaled_velocity
from meanformer.errors import as_number
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.observables.clusters.counting import Clusters, count_clusters

_scaled = jax.jit(scaled_velocity)


class Separation(eqx.Module):
    r"""Whether the groups of a cloud on the sphere are separated, and by how much.

    Attributes:
        holds: the verdict: `radius` is at most `epsilon`, and `value` at least
            `needed`. A lone group has nothing to be separated from.
        verdict: the same in words.
        clusters: the groups.
        radius: the largest angle $r$ from a token to the mean of its group.
        separation: the smallest angle $s$ between means of groups; `None` for one
            group.
        epsilon: the radius $\varepsilon$ that is allowed.
        value: $\beta(1 - \cos(s - 2\varepsilon))$; `None` for one group.
        needed: $\log n + m$, with the number $n$ of different points and the margin
            $m$.
        log_gradient: logarithm of the length of the gradient of the energy, in units of
            $e^\beta$; `None` if it is zero, or no more than what rounding makes of the
            scores, as from $\beta = 10^7$ on.
        log_group_gradient: the same with every group at its mean, which is what is
            exponentially small.
    """

    holds: bool = eqx.field(static=True)
    verdict: str = eqx.field(static=True)
    clusters: Clusters
    radius: float = eqx.field(static=True)
    separation: float | None = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    value: float | None = eqx.field(static=True)
    needed: float = eqx.field(static=True)
    log_gradient: float | None = eqx.field(static=True)
    log_group_gradient: float | None = eqx.field(static=True)


def separation(
    cloud: TokenCloud,
    beta: float | Float[Array, ""],
    *,
    epsilon: float | None = None,
    margin: float = 5.0,
    threshold: float | str | None = None,
) -> Separation:
    r"""Tell whether tokens on the sphere form groups that will wait.

    Groups of radius $r$ whose means are $s$ apart are called separated if
    $$r \le \varepsilon \quad\text{and}\quad
      \beta\,(1 - \cos(s - 2\varepsilon)) \ge \log n + m.$$
    Then, of $n$ equal masses, each pays at most the share $e^{-m}$ of its attention to
    other groups, and one of mass $w$ at most $e^{-m}/(nw)$. A working definition of
    this library, in the spirit of [GKPR24], not theirs word for word. There the
    gradient of the energy is of the order of $r$, and once the groups are points of the
    order of $e^{-\beta(1-\cos s)}$, in units of $e^\beta$: they tighten fast, and
    wait.

    Args:
        cloud: the tokens, unit vectors; those of weight zero are absent. Tokens at
            exactly one point count once.
        beta: the inverse temperature, positive.
        epsilon: the radius allowed, $\tfrac12\beta^{-1/2}$ by default.
        margin: the number $m$.
        threshold: how groups are found; as for `count_clusters`.

    Returns:
        The report. Cost: $O(n^2 d)$ time and memory, on the host; not under `jit`.
    """
    beta = as_number("beta", beta, "positive and finite", above=0, below=np.inf)
    margin = as_number("margin", margin, "finite", above=-np.inf, below=np.inf)
    chosen = 0.5 / np.sqrt(beta) if epsilon is None else epsilon
    epsilon = as_number("epsilon", chosen, "zero or more", least=0)
    groups = count_clusters(cloud, space=Sphere(), beta=beta, threshold=threshold)
    points = np.asarray(cloud.points)[np.asarray(cloud.weights) > 0]
    needed = float(np.log(len(np.unique(points, axis=0))) + margin)
    radius = float(jnp.max(groups.radii))
    apart = float(jnp.min(groups.separations)) if groups.separations.size else None
    value = None
    if apart is not None:
        value = float(2 * beta * np.sin(max(apart - 2 * epsilon, 0) / 2) ** 2)
    verdict, holds = f"separated: {len(groups.masses)} groups", True
    if len(groups.masses) == 1:
        verdict = "one group, with nothing to be separated from"
    if radius > epsilon:
        verdict = f"not separated: the radius {radius:.6g} exceeds {epsilon:.6g}"
        holds = False
    elif value is not None and value < needed:
        verdict = f"not separated: beta (1 - cos) is {value:.6g}, below {needed:.6g}"
        holds = False
    return Separation(
        holds,
        verdict,
        groups,
        radius,
        apart,
        epsilon,
        value,
        needed,
        _log_gradient(cloud, beta),
        _log_gradient(TokenCloud(groups.centres, groups.masses), beta),
    )


def _log_gradient(cloud: TokenCloud, beta: float) -> float | None:
    r"""Return $\log(e^{-\beta}|\mathrm{grad} E|)$ in the metric of Wasserstein."""
    dtype = cloud.points.dtype
    eye = jnp.eye(cloud.dimension, dtype=dtype)
    layer = Unnormalised(eye, eye, eye, beta=beta, shift=beta)
    found = _scaled(layer, Sphere().retract(cloud.points), cloud.weights)
    square = float(cloud.weights @ jnp.sum(found.velocities**2, axis=1))
    return float(found.log_scale) + math.log(square) / 2 if square > 0 else None
