"""Solving a flow for many clouds, in one compiled program."""

import dataclasses
from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Shaped

from meanformer.errors import InvalidInput, as_key, check
from meanformer.flows.dynamics.driver import State, visit_all
from meanformer.flows.dynamics.joining import MergingTokens
from meanformer.flows.dynamics.merging import Merge
from meanformer.flows.dynamics.tokens import Points, TokenRates, Tokens
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import Options, check_flow
from meanformer.flows.solve import Depth, Stops, tokens_set_up
from meanformer.flows.solvers import AbstractIntegrator
from meanformer.flows.trajectories.abstract import cut_off
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.measures import TokenCloud, pad
from meanformer.measures.cloud import check_cloud
from meanformer.typing import ArrayLike, Key


def solve_many(
    flow: Flow,
    clouds: Iterable[TokenCloud],
    depth: Depth,
    *,
    save: int | ArrayLike = 11,
    solver: AbstractIntegrator | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-9,
    merge: Merge | float | None = None,
    stop: Stops = (),
    key: Key | None = None,
) -> list[Trajectory]:
    r"""Flow many token clouds through depth, each with its own steps.

    The same as `[solve(flow, cloud, depth, …) for cloud in clouds]`, but compiled once
    for clouds of all sizes, and without the overhead of a call for each of them.
    Under `jax.vmap` of `solve` every member would take as many steps as the slowest.
    Differentiable as `solve` is.

    Args:
        flow: the flow.
        clouds: the token clouds, of one dimension and type. Those with fewer tokens
            than the largest are filled up with tokens of weight zero, which are absent
            and left out of the result.
        depth: as for `solve`; likewise `save`, `solver`, `rtol`, `atol`, `merge` and
            `stop`.
        save: see there.
        solver: see there.
        rtol: see there.
        atol: see there.
        merge: see there.
        stop: see there.
        key: random key, for a flow with noise only; split, one for each cloud.

    Returns:
        The trajectories, in the order of the clouds. Cost: that of solving for the
        largest cloud, times the number of clouds.
    """
    given = _checked(flow, clouds)
    count = max(cloud.count for cloud in given)
    padded = [cloud if cloud.count == count else pad(cloud, count) for cloud in given]
    keys = None if key is None else jr.split(as_key(key), len(given))
    options = Options(depth, save, solver, rtol, atol, stop)
    dynamics, state, depths = tokens_set_up(
        flow, padded[0], options, probes=None, merge=merge, key=key
    )
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *padded)
    found = _visited(dynamics, state, depths, stacked, keys)
    return [
        cut_off(
            dynamics.of(cloud, None).trajectory(*_member(found, index, cloud.count))
        )
        for index, cloud in enumerate(given)
    ]


@eqx.filter_jit
def _visited(
    dynamics: Tokens | MergingTokens,
    state: State,
    depths: Float[Array, " t"],
    clouds: TokenCloud,
    keys: Shaped[Array, "b *k"] | None,
):
    def visited(member):
        cloud, key = member
        own = dynamics.of(cloud, key)
        start = dataclasses.replace(state, moving=Points(cloud.points, None))
        return visit_all(own, start, depths)

    return jax.lax.map(visited, (clouds, keys))


def _member(found: tuple[State, TokenRates], index: int, count: int):
    """Return what belongs to one cloud, without the tokens that filled it up."""

    def own(leaf):
        # What is more than a series along depth has the tokens as its second axis.
        is_filled = leaf.ndim > 2 and leaf.shape[2] > count
        return leaf[index, :, :count] if is_filled else leaf[index]

    return jax.tree.map(own, found)


def _checked(flow: Flow, clouds: Iterable[TokenCloud]) -> list[TokenCloud]:
    if isinstance(clouds, TokenCloud) or not isinstance(clouds, Iterable):
        raise InvalidInput(
            f"clouds is a {type(clouds).__name__}; it must be a list of token clouds: "
            "[TokenCloud(points) for points in batch]."
        )
    given = list(clouds)
    check(len(given) > 0, "clouds is empty; at least one cloud is needed.")
    for cloud in given:
        check_cloud("one of the clouds", cloud)
        check_flow(flow, cloud)
    kinds = {
        (cloud.dimension, str(cloud.points.dtype), cloud.positions is None, cloud.sums)
        for cloud in given
    }
    check(
        len(kinds) == 1,
        "the clouds differ in dimension, type, sums, or in having positions; solve for "
        "those that agree.",
    )
    return given
