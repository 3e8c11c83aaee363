"""Wasserstein distances: one front door to all methods."""

from collections.abc import Callable, Sequence
from typing import SupportsFloat, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, ScalarLike

from meanformer.errors import (
    InvalidInput,
    QuadratureWarning,
    Unsupported,
    check,
    check_choice,
    is_concrete,
    warn,
)
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.cloud import AbstractWeightedCloud, TokenCloud
from meanformer.measures.gaussian import Gaussian
from meanformer.measures.mixture import check_measures
from meanformer.measures.quadrature import quadratures_within
from meanformer.measures.transport.atoms import (
    Coupling,
    atoms_of,
    check_clouds,
    check_comparable,
    checked_order,
)
from meanformer.measures.transport.bures import bures_distance
from meanformer.measures.transport.entropic import sinkhorn_distance
from meanformer.measures.transport.exact import exact_coupling, exact_distance
from meanformer.measures.transport.line import (
    line_distance,
    monotone_coupling,
    sliced_distance,
    unit_directions,
)
from meanformer.numerics.arrays import widened
from meanformer.typing import ArrayLike, Key

METHODS = ("exact", "sinkhorn", "sliced")
NODES = 1000


def wasserstein(
    mu: AbstractMeasure,
    nu: AbstractMeasure,
    *,
    order: SupportsFloat = 2,
    method: str = "exact",
    epsilon: ScalarLike | None = None,
    directions: SupportsIndex | ArrayLike | None = None,
    key: Key | None = None,
) -> Float[Array, ""]:
    r"""Wasserstein distance between two measures, not squared.

    $$W_p(\mu, \nu) = \Bigl(\min_{\pi \in \Pi(\mu,\nu)} \int |x - y|^p
      \,\mathrm{d}\pi\Bigr)^{1/p}.$$

    | method | returns | needs | cost |
    |---|---|---|---|
    | `"exact"` | $W_p$ | POT, if weights differ | $O(n^3)$, see below |
    | `"sinkhorn"` | $\sqrt{S_\varepsilon}$ | order 2 | $O(n^2 d)$ a round |
    | `"sliced"` | root mean of $W_p^p$ on lines | a key | $O(L n \log n)$ |

    Exact distances on the line cost a sort, those of Gaussians (order 2) the roots of
    two matrices, all others a network simplex or an assignment problem, up to 4000
    tokens: a second at 2000. Sinkhorn's is a smoothed distance, see
    `sinkhorn_divergence`; the sliced one is smaller than $W_p$, for a translation by a
    factor of about $\sqrt d$ at order 2.

    Where a measure is not a cloud, and not both are Gaussians, the nodes of a
    quadrature stand for it, at most 1000; a warning (`QuadratureWarning`) tells the
    error, the difference from the distance with half as many nodes. For large
    dimensions pass samples instead.

    Positions of tokens play no role (see `conditional_wasserstein`), and tokens of
    weight zero are absent. Differentiable in the points and, as a subgradient, in the
    weights (first order); at distance zero the derivative is zero. Works under `jit`,
    where the exact plan is found by a callback to the host.

    Args:
        mu: a measure: best a token cloud or a Gaussian.
        nu: another one in the same space, best of the same kind; clouds may have
            different numbers of tokens.
        order: the order $p \ge 1$.
        method: `"exact"`, `"sinkhorn"` or `"sliced"`.
        epsilon: temperature of `"sinkhorn"`, in units of squared distance; by default a
            twentieth of the mean squared distance between points of the two clouds.
        directions: for `"sliced"`, how many directions to draw (256 by default), or the
            directions themselves, one per row.
        key: random key of the directions drawn, required to draw them.

    Returns:
        The distance, a scalar.
    """
    check_comparable(mu, nu)
    order = checked_order(order)
    _check_method(method, order, epsilon, directions, key)
    dtype = mu.mean().dtype
    mu, nu = widened((mu, nu))
    if isinstance(mu, Gaussian) and isinstance(nu, Gaussian):
        if order != 2 or method != "exact":
            raise Unsupported(
                f"between Gaussians order is {order:g} and method {method!r}; only "
                'order 2 with method="exact" has a closed form: use '
                "quadrature(measure, order)."
            )
        return bures_distance(mu, nu).astype(dtype)

    def distance(mu: TokenCloud, nu: TokenCloud) -> Float[Array, ""]:
        if method == "sinkhorn":
            return sinkhorn_distance(mu, nu, epsilon).astype(dtype)
        sides = atoms_of(mu), atoms_of(nu)
        if method == "sliced":
            lines = unit_directions(directions, sides[0], key)
            return sliced_distance(*sides, lines, order).astype(dtype)
        solve = line_distance if mu.dimension == 1 else exact_distance
        return solve(*sides, order).astype(dtype)

    if all(isinstance(one, AbstractWeightedCloud) for one in (mu, nu)):
        return distance(mu, nu)
    return _by_quadrature(mu, nu, distance)


def _by_quadrature(mu: AbstractMeasure, nu: AbstractMeasure, distance: Callable):
    """Return the distance between nodes of measures, with a warning of its error."""
    (fine, coarse), (other, rough) = (quadratures_within(m, NODES) for m in (mu, nu))
    found = distance(fine, other)
    error = abs(found - distance(coarse, rough))
    if is_concrete(error):
        warn(
            f"the distance between a {type(mu).__name__} and a {type(nu).__name__} is "
            f"that between {fine.count} and {other.count} tokens, the nodes of "
            f"quadratures; it differs by {float(error):.2g} from that between "
            f"{coarse.count} and {rough.count}: pass quadrature(measure, order) for "
            "other nodes.",
            QuadratureWarning,
        )
    return found


def pairwise_wasserstein(
    measures: Sequence[AbstractMeasure],
    *,
    order: SupportsFloat = 2,
    method: str = "exact",
    epsilon: ScalarLike | None = None,
    directions: SupportsIndex | ArrayLike | None = None,
    key: Key | None = None,
) -> Float[Array, "b b"]:
    """Matrix of Wasserstein distances between all pairs of measures.

    Args:
        measures: clouds, of any numbers of tokens, Gaussians or others, in one space.
        order: see `wasserstein`.
        method: see `wasserstein`.
        epsilon: see `wasserstein`.
        directions: see `wasserstein`; all pairs see the same directions.
        key: see `wasserstein`.

    Returns:
        A symmetric matrix with zero diagonal. Cost: one distance for each pair.
    """
    check_measures("measures", measures)
    count = len(measures)
    rows, columns = np.triu_indices(count, 1)
    options = dict(
        order=order, method=method, epsilon=epsilon, directions=directions, key=key
    )
    distances = [
        wasserstein(measures[i], measures[j], **options)
        for i, j in zip(rows, columns, strict=True)
    ]
    matrix = jnp.zeros((count, count), measures[0].mean().dtype)
    if distances:
        matrix = matrix.at[rows, columns].set(jnp.stack(distances))
    return matrix + matrix.T


def conditional_wasserstein(
    mu: AbstractMeasure, nu: AbstractMeasure, *, order: SupportsFloat = 2
) -> Float[Array, ""]:
    r"""Distance of clouds with positions, which no mass may leave.

    $$d_p(\mu, \nu) = \Bigl(\int_0^1 W_p(\mu_s, \nu_s)^p
      \,\mathrm{d}\theta(s)\Bigr)^{1/p},$$
    where $\theta$ is the common law of the positions and $\mu_s$ the law of the tokens
    at position $s$; it is not smaller than $W_p$. For different laws of positions the
    distance is infinite, which is refused here as a mistake. Positions are compared
    exactly.

    Args:
        mu: a token cloud with positions.
        nu: a token cloud with positions, in the same space.
        order: the order $p \ge 1$.

    Returns:
        The distance, not squared, differentiable as `wasserstein` is. Cost: one exact
        transport for each position that several tokens share.
    """
    check_clouds(mu, nu)
    check_comparable(mu, nu)
    order, sides = checked_order(order), []
    for name, cloud in (("mu", mu), ("nu", nu)):
        if not isinstance(cloud, TokenCloud) or cloud.positions is None:
            raise InvalidInput(
                f"{name} has no positions; give them as TokenCloud(points, "
                "positions=…), or use wasserstein."
            )
        sides.append(atoms_of(cloud, jax.lax.stop_gradient(cloud.positions)))
    return exact_distance(*widened(sides), order).astype(mu.mean().dtype)


def transport_plan(
    mu: AbstractMeasure, nu: AbstractMeasure, *, order: SupportsFloat = 2
) -> Coupling:
    r"""Optimal plan between token clouds, as a list of moves.

    Args:
        mu: a token cloud.
        nu: a token cloud in the same space.
        order: the order $p \ge 1$ of the cost.

    Returns:
        The plan: `masses[s]` goes from token `rows[s]` of `mu` to token `columns[s]` of
        `nu`; `.matrix()` is the dense array. Masses of half precision become single.
        Costs and limits are those of
        `wasserstein` with `method="exact"`.
    """
    check_comparable(mu, nu)
    order = checked_order(order)
    check_clouds(mu, nu)
    source, target = widened((atoms_of(mu), atoms_of(nu)))
    if mu.dimension == 1:
        return monotone_coupling(source, target)
    return exact_coupling(source, target, order)


def _check_method(method: str, order: float, epsilon, directions, key) -> None:
    check_choice("method", method, METHODS)
    check(
        epsilon is None or method == "sinkhorn",
        f'epsilon is given with method={method!r}; it belongs to method="sinkhorn".',
    )
    check(
        (directions is None and key is None) or method == "sliced",
        f"directions or key is given with method={method!r}; they belong to "
        'method="sliced".',
    )
    if method == "sinkhorn" and order != 2:
        raise Unsupported(
            f'order is {order:g}; method="sinkhorn" has the squared distance as its '
            'cost, so order must be 2: use method="exact" or "sliced".'
        )
