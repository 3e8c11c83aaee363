"""Transport that keeps the place of every token in the sequence."""

from typing import SupportsFloat

import jax
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.cloud import AbstractWeightedCloud, TokenCloud
from meanformer.measures.transport.atoms import (
    Atoms,
    atoms_of,
    check_clouds,
    check_comparable,
    checked_order,
)
from meanformer.measures.transport.exact import exact_distance
from meanformer.numerics.arrays import widened


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
    order = checked_order(order)
    sides = widened((_placed("mu", mu), _placed("nu", nu)))
    return exact_distance(*sides, order).astype(mu.mean().dtype)


def _placed(name: str, cloud: AbstractWeightedCloud) -> Atoms:
    if not isinstance(cloud, TokenCloud) or cloud.positions is None:
        raise InvalidInput(
            f"{name} has no positions; give them as TokenCloud(points, positions=…), "
            "or use wasserstein."
        )
    return atoms_of(cloud, jax.lax.stop_gradient(cloud.positions))
