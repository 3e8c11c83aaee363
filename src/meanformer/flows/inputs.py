"""What a flow is given: checked, and brought into one form."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import (
    InvalidInput,
    Unsupported,
    as_float_array,
    check,
    check_finite,
    check_shape,
    is_concrete,
)
from meanformer.flows.flow import Flow
from meanformer.flows.solvers import AbstractIntegrator
from meanformer.flows.status import AbstractStop, EscapeRadius, StepBudget
from meanformer.measures import TokenCloud
from meanformer.typing import ArrayLike


def check_flow(flow: Flow, mu: TokenCloud) -> None:
    """Raise unless this is a flow and a cloud it can move."""
    if not isinstance(flow, Flow):
        raise InvalidInput(f"flow is {type(flow).__name__}; it must be Flow(velocity).")
    if not isinstance(mu, TokenCloud):
        raise Unsupported(
            f"mu is {type(mu).__name__}; a flow moves a TokenCloud or a Gaussian: "
            "TokenCloud(points) for an array; quadrature(mu, order) or "
            "resample(mu, count, key=key) for another measure."
        )
    flow.space.check(mu.points)
    check_dimensions(flow, mu.dimension)
    flow.velocity.check(mu)


def check_dimensions(flow: Flow, dimension: int) -> None:
    """Raise unless the velocity has the dimension of what it moves."""
    for gamma in flow.velocity.kinds():
        check(
            gamma.output_dimension in (None, dimension),
            f"{type(gamma).__name__} returns points of dimension "
            f"{gamma.output_dimension}; a velocity must have that of the tokens, "
            f"{dimension}.",
        )


def check_tolerances(rtol: float, atol: float) -> None:
    """Raise unless both tolerances are positive."""
    check(
        rtol > 0 and atol > 0, f"rtol is {rtol}, atol is {atol}; both must be positive."
    )


def checked_solver(solver: object) -> AbstractIntegrator:
    """Return the solver, or raise if it is none."""
    if not isinstance(solver, AbstractIntegrator):
        raise InvalidInput(
            f"solver is {solver!r}; it must be Adaptive(…), Stiff(…), Switching(…), "
            "FixedStep(…), Splitting(…) or LongDepth(…)."
        )
    return solver


def saved_depths(depth, save, dtype) -> Float[Array, " t"]:
    """Return the depths to save, first and last included, or raise."""
    ends = depth if isinstance(depth, tuple) else (0.0, depth)
    check(len(ends) == 2, f"depth is {depth}; it must be a number or a pair.")
    start, end = (as_float_array("depth", value).astype(dtype) for value in ends)
    check_finite("depth", start)
    check_finite("depth", end)
    if is_concrete(end) and is_concrete(start):
        check(float(start) != float(end), f"depth is {depth}; it must not be zero.")
    if isinstance(save, int):
        check(save >= 2, f"save is {save}; at least both ends are saved: 2 or more.")
        share = jnp.linspace(0, 1, save, dtype=dtype)
        return ((1 - share) * start + share * end).at[-1].set(end)
    return _given_depths(start, end, as_float_array("save", save).astype(dtype))


def _given_depths(start, end, depths: Float[Array, " t"]) -> Float[Array, " t"]:
    check(depths.ndim == 1 and len(depths) >= 2, "save must list two depths or more.")
    if not (is_concrete(depths) and is_concrete(start) and is_concrete(end)):
        return depths
    known = np.asarray(depths)
    steps = np.diff(known)
    check(
        bool((steps > 0).all() or (steps < 0).all()),
        f"save is {known}; its depths must be in order, without repetition.",
    )
    check(
        bool(known[0] == float(start) and known[-1] == float(end)),
        f"save runs from {known[0]} to {known[-1]}; it must run from {start} to {end}.",
    )
    return depths


def checked_probes(
    flow: Flow, mu: TokenCloud, probes: ArrayLike | TokenCloud | None
) -> tuple[Float[Array, "p d"] | None, Float[Array, " p"] | None]:
    """Return the probes' points and places, or raise."""
    if probes is None:
        return None, None
    if isinstance(probes, TokenCloud):
        points, places = probes.points, probes.positions
    else:
        points, places = as_float_array("probes", probes).astype(mu.points.dtype), None
    check_shape("probes", points, (None, mu.dimension))
    check_finite("probes", points)
    flow.space.check(points, "probe")
    if places is None and mu.positions is not None:
        places = jnp.ones((len(points),), mu.points.dtype)
    return points, places


def sorted_stops(
    stop, dtype, power: float = 0.25
) -> tuple[StepBudget, tuple[AbstractStop, ...]]:
    """Return the step budget and the conditions, the solve's own one first.

    Args:
        stop: what the caller asked for.
        dtype: the type of the tokens.
        power: the power of the largest number of the type that nothing may exceed.
    """
    given = stop if isinstance(stop, Sequence) else (stop,)
    for item in given:
        if not isinstance(item, AbstractStop | StepBudget):
            raise InvalidInput(
                f"stop holds {item!r}; it may hold EscapeRadius, SteadyState, StopWhen "
                "and StepBudget."
            )
    budgets = [item for item in given if isinstance(item, StepBudget)]
    own = EscapeRadius(float(jnp.finfo(dtype).max) ** power)
    stops = (own, *[item for item in given if isinstance(item, AbstractStop)])
    return budgets[-1] if budgets else StepBudget(), stops
