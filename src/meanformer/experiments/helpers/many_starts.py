"""The ends of one flow from many starts, as experiments share them."""

from functools import partial

import jax

import meanformer as mf


@partial(jax.jit, static_argnames="tolerances")
def last_points(flow, starts, weights, depth, tolerances):
    """Follow clouds one by one until they rest, or to a depth; return their points.

    Args:
        flow: the flow of all of them.
        starts: the points of each cloud at depth zero.
        weights: the masses, the same in all clouds.
        depth: the largest depth.
        tolerances: relative and absolute tolerance, and the speed at which it rests.
    """
    rtol, atol, speed = tolerances

    def last(points):
        cloud, rest = mf.TokenCloud(points, weights), mf.flows.SteadyState(speed)
        options = {"save": 2, "rtol": rtol, "atol": atol, "stop": rest}
        return mf.solve(flow, cloud, depth, **options).points[-1]

    return jax.lax.map(last, starts)
