"""More tokens at the end of a causal sequence, without running the others again."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput, check, is_concrete
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import check_flow
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.measures import TokenCloud

# Relative to the largest velocity; the weights of the longer sequence round otherwise.
SAME = 1e-5


def append_tokens(flow: Flow, path: Trajectory, mu: TokenCloud) -> Trajectory:
    r"""Run the last tokens of a longer sequence through layers known for the others.

    Behind a causal mask earlier tokens never see later ones, so `run_layers` on the
    longer sequence moves them as before: only the new tokens are computed, in the
    context that the saved layers are. It is what a cache of keys and values does in a
    language model.

    Args:
        flow: the flow of the run; all its maps masked and normalised by row.
        path: what `run_layers` returned for the first $n$ tokens.
        mu: the longer sequence with positions, those $n$ tokens first.

    Returns:
        What `run_layers` would return for `mu`. Cost for $k$ new tokens: $O(k(n+k)d)$
        a layer instead of $O((n+k)^2 d)$.
    """
    check_flow(flow, mu)
    check(
        mu.positions is not None and path.positions is not None,
        "append_tokens needs positions, on mu and on the path; see in_order.",
    )
    _check_prefix(path, mu)
    check(flow.noise is None, "append_tokens follows layers, which have no noise.")
    points, velocities, drift, misstep = _run(flow, path, mu)
    if is_concrete(drift):
        check(
            float(misstep) <= SAME,
            "the path does not consist of residual layers; append_tokens goes on from "
            "what run_layers returned, not from solve.",
        )
        check(
            float(drift) <= SAME,
            f"the new tokens change the velocity of an earlier one, by {drift:.2g} of "
            "the largest: append_tokens needs maps that are masked, causal and "
            "normalised by row, and the path of run_layers for the same flow.",
        )
    known = len(path.weights)
    return Trajectory(
        path.depths,
        jnp.concatenate([path.points, points[:, known:]], axis=1),
        jnp.concatenate([path.velocities, velocities[:, 1:]], axis=1),
        mu.weights,
        mu.positions,
        None,
        path.status,
        path.accepted_steps,
        path.rejected_steps,
        flow=path.flow,
    )


@eqx.filter_jit
def _run(flow: Flow, path: Trajectory, mu: TokenCloud):
    """Follow the new tokens; watch the latest of the others, which must not notice."""
    known = len(path.weights)
    places = jnp.asarray(mu.positions)
    latest = jnp.argmax(places[:known])
    seen_from = jnp.concatenate([places[latest, None], places[known:]])

    def layer(new: Float[Array, "k d"], saved):
        depth, old, moving = saved
        cloud = mu.moved(jnp.concatenate([old, new]))
        queries = jnp.concatenate([old[latest, None], new])
        velocity = flow.field(depth, cloud, queries, seen_from)
        drift = jnp.abs(velocity[0] - moving[latest]).max()
        moved = flow.space.retract(new + step * velocity[1:])
        return moved, (cloud.points, velocity, drift)

    def misstep(old, moving, after):
        return jnp.abs(flow.space.retract(old + step * moving) - after).max()

    # All layers have the step of the first; later depths are products, rounded.
    step = jnp.sum(jnp.diff(path.depths[:2]))
    saved = path.depths, path.points, path.velocities
    _, (points, velocities, drift) = jax.lax.scan(layer, mu.points[known:], saved)
    missteps = jax.vmap(misstep)(
        path.points[:-1], path.velocities[:-1], path.points[1:]
    )
    largest = jnp.abs(path.velocities).max()
    unit = jnp.where(largest > 0, largest, 1)
    return points, velocities, drift.max() / unit, missteps.max() / unit


def _check_prefix(path: Trajectory, mu: TokenCloud) -> None:
    known = len(path.weights)
    check(
        mu.count > known,
        f"mu has {mu.count} tokens and the path {known}; there is nothing to append.",
    )
    first = (mu.points[:known], path.points[0])
    if all(map(is_concrete, first)) and not np.array_equal(*first):
        raise InvalidInput(
            f"the first {known} tokens of mu are not those the path starts from; give "
            "the old tokens first, then the new ones."
        )
