"""Wasserstein distances: one front door to all methods."""

from collections.abc import Sequence
from typing import SupportsFloat, SupportsIndex

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, ScalarLike

from meanformer.errors import InvalidInput, Unsupported, check
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.gaussian import Gaussian
from meanformer.measures.mixture import check_measures
from meanformer.measures.transport.atoms import (
    atoms_of,
    check_clouds,
    check_comparable,
    checked_order,
)
from meanformer.measures.transport.bures import bures_distance
from meanformer.measures.transport.coupling import Coupling
from meanformer.measures.transport.entropic import sinkhorn_distance
from meanformer.measures.transport.exact import exact_coupling, exact_distance
from meanformer.measures.transport.line import line_distance, monotone_coupling
from meanformer.measures.transport.sliced import sliced_distance, unit_directions
from meanformer.numerics.precision import widened
from meanformer.typing import ArrayLike, Key

METHODS = ("exact", "sinkhorn", "sliced")


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

    Positions of tokens play no role (see `conditional_wasserstein`), and tokens of
    weight zero are absent. Differentiable in the points and, as a subgradient, in the
    weights (first order); at distance zero the derivative is zero. Works under `jit`,
    where the exact plan is found by a callback to the host.

    Args:
        mu: a token cloud or a Gaussian.
        nu: a measure of the same kind in the same space; the clouds may have different
            numbers of tokens.
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
        return _gaussian_distance(mu, nu, order, method).astype(dtype)
    check_clouds(mu, nu)
    if method == "sinkhorn":
        return sinkhorn_distance(mu, nu, epsilon).astype(dtype)
    source, target = atoms_of(mu), atoms_of(nu)
    if method == "sliced":
        lines = unit_directions(directions, source, key)
        return sliced_distance(source, target, lines, order).astype(dtype)
    solve = line_distance if mu.dimension == 1 else exact_distance
    return solve(source, target, order).astype(dtype)


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
        measures: clouds, of any numbers of tokens, or Gaussians; all in one space.
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


def _gaussian_distance(
    mu: Gaussian, nu: Gaussian, order: float, method: str
) -> Float[Array, ""]:
    if order != 2 or method != "exact":
        raise Unsupported(
            f"between Gaussians order is {order:g} and method {method!r}; only order 2 "
            'with method="exact" has a closed form: use quadrature(measure, order).'
        )
    return bures_distance(mu, nu)


def _check_method(method: str, order: float, epsilon, directions, key) -> None:
    if method not in METHODS:
        raise InvalidInput(f"method is {method!r}; it must be one of {METHODS}.")
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
