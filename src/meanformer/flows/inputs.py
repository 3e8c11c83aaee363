"""Checks of the arguments of `solve`, and the settings made from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import (
    InvalidInput,
    Unsupported,
    as_float_array,
    check,
    check_finite,
    check_kind,
    check_shape,
    is_concrete,
)
from meanformer.flows.flow import Flow
from meanformer.flows.solvers import AbstractIntegrator
from meanformer.flows.status import (
    AbstractStop,
    Condition,
    EscapeRadius,
    Snapshot,
    StepBudget,
)
from meanformer.measures import TokenCloud
from meanformer.typing import ArrayLike

# A solver goes to the end of a stretch from 100 roundings before it, across a jump.
ROUNDINGS = 128


class Settings(eqx.Module):
    """Settings of a solve: solver, tolerances and conditions that end it.

    Attributes:
        integrator: how steps are taken.
        stops: conditions that end it.
        rtol: relative tolerance.
        atol: absolute tolerance.
        max_steps: most steps between two saved depths.
    """

    integrator: AbstractIntegrator
    stops: tuple[AbstractStop, ...] = ()
    rtol: float | Float[Array, ""] = 1e-6
    atol: float | Float[Array, ""] = 1e-9
    max_steps: int = eqx.field(default=StepBudget.count, static=True)

    def request(self) -> dict[str, Any]:
        """Return what a solve was asked for, by the words for it."""
        return {
            "solver": self.integrator,
            "tolerances": (self.rtol, self.atol),
            "stop conditions": (self.stops, self.max_steps),
        }

    def conditions(self, snapshot: Callable[[Array, Any], Snapshot]) -> list[Condition]:
        """Return the stops as conditions on depth and what moves.

        Args:
            snapshot: takes both, returns what stops may look at.
        """

        def condition(stop: AbstractStop) -> Condition:
            return lambda depth, moving: stop(snapshot(depth, moving)), stop.status

        return [condition(stop) for stop in self.stops]


class Options(NamedTuple):
    """The options of `solve` that every measure has."""

    depth: Any
    save: Any
    solver: Any
    rtol: Any
    atol: Any
    stop: Any

    def settings(
        self,
        integrator: AbstractIntegrator,
        dtype: jnp.dtype,
        stops: tuple[AbstractStop, ...] = (),
        power: float = 0.25,
    ) -> Settings:
        """Return them as a solve uses them, its own stop condition first.

        Args:
            integrator: how steps are taken.
            dtype: the type of what moves.
            stops: the conditions of the velocity itself, which come last.
            power: the power of the largest number of the type that nothing may exceed.
        """
        budget, given = sorted_stops(self.stop, dtype, power)
        rtol, atol = (jnp.asarray(tol, dtype) for tol in (self.rtol, self.atol))
        steps, all_stops = integrator.prepared(dtype), (*given, *stops)
        return Settings(steps, all_stops, rtol, atol, budget.count)

    def depths(self, flow: Flow, dtype: jnp.dtype) -> Float[Array, " t"]:
        """Return the depths to save, or raise; also for tolerances that are none."""
        check_tolerances(self.rtol, self.atol)
        return saved_depths(self.depth, self.save, dtype, flow.velocity.jumps)


def check_flow(flow: Flow, mu: TokenCloud) -> None:
    """Raise unless this is a flow and a cloud it can move."""
    check_kind("flow", flow, Flow, "Flow(velocity)")
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
    """Raise unless both tolerances are positive numbers."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        as_float_array(name, value)
    check(
        rtol > 0 and atol > 0, f"rtol is {rtol}, atol is {atol}; both must be positive."
    )


def check_attainable(rtol: float, dtype: jnp.dtype) -> None:
    """Raise if a relative tolerance is finer than the numbers themselves."""
    eps = float(jnp.finfo(dtype).eps)
    if is_concrete(rtol):
        check(
            float(rtol) >= eps,
            f"rtol is {float(rtol):g}, but {jnp.dtype(dtype).name} resolves no more "
            f"than {eps:.2g}; ask for less"
            + (", or give float64 tokens." if dtype == jnp.float32 else "."),
        )


def checked_solver(solver: object) -> AbstractIntegrator:
    """Return the solver, or raise if it is none."""
    method = solver if isinstance(solver, type) else type(solver)
    if issubclass(method, diffrax.AbstractSolver):
        is_implicit = issubclass(method, diffrax.AbstractImplicitSolver)
        is_adaptive = issubclass(method, diffrax.AbstractAdaptiveSolver)
        kind = "Stiff" if is_implicit else "Adaptive" if is_adaptive else "FixedStep"
        step = "h, " if kind == "FixedStep" else ""
        raise InvalidInput(
            f"solver is {method.__name__} of diffrax; say how its steps are chosen: "
            f"solver={kind}({step}{method.__name__}())."
        )
    known = "Adaptive(…), Stiff(…), Switching(…), FixedStep(…), Splitting(…)"
    check_kind("solver", solver, AbstractIntegrator, f"{known} or LongDepth(…)")
    return cast(AbstractIntegrator, solver)


def saved_depths(depth, save, dtype, jumps) -> Float[Array, " t"]:
    """Return the depths to save, first and last included, or raise.

    Args:
        depth: the last depth, or the first and the last.
        save: how many, or which ones.
        dtype: the type of what moves.
        jumps: where the velocity jumps, or `None`.
    """
    ends = depth if isinstance(depth, tuple) else (0.0, depth)
    check(len(ends) == 2, f"depth is {depth}; it must be a number or a pair.")
    start, end = (as_float_array("depth", value).astype(dtype) for value in ends)
    check(
        start.ndim == end.ndim == 0,
        f"depth is {depth}; it must be a number, or a pair (first, last); save=… takes "
        "depths in between.",
    )
    check_finite("depth", start)
    check_finite("depth", end)
    if is_concrete(end) and is_concrete(start):
        check(float(start) != float(end), f"depth is {depth}; it must not be zero.")
    if isinstance(save, int):
        check(save >= 2, f"save is {save}; at least both ends are saved: 2 or more.")
        share = jnp.linspace(0, 1, save, dtype=dtype)
        depths = (1 - share) * start + share * end
    else:
        given = as_float_array("save", save).astype(dtype)
        depths = _given_depths(start, end, given)
    return put_on_jumps(depths, jumps)


def _given_depths(start, end, depths: Float[Array, " t"]) -> Float[Array, " t"]:
    check(
        depths.ndim == 1,
        f"save is {depths}; it must be a number of depths, or a list of them.",
    )
    if not (is_concrete(depths) and is_concrete(start) and is_concrete(end)):
        check(len(depths) >= 2, "under jit save must list both ends.")
        return depths
    known, first, last = (np.asarray(part) for part in (depths, start, end))
    low, high = sorted((first, last))
    check(
        bool(((known >= low) & (known <= high)).all()),
        f"save is {known}; it must lie between {first} and {last}.",
    )
    before, after = ([one] if one not in known else [] for one in (first, last))
    known = np.concatenate([before, known, after]).astype(known.dtype)
    check(
        bool((np.diff(known) * np.sign(last - first) > 0).all()),
        f"save is {np.asarray(depths)}; its depths must be in order from {first} to "
        f"{last}, without repetition.",
    )
    return jnp.asarray(known)


def layer_depths(flow: Flow, count: int, step: Float[Array, ""]) -> Float[Array, " t"]:
    """Return the depths before the first of so many layers, and after each one."""
    depths = step * jnp.arange(count + 1).astype(step.dtype)
    return put_on_jumps(depths, flow.velocity.jumps)


def followed(depths: Float[Array, " t"]) -> tuple[Array, Array]:
    """Return the depth after each layer, and whether there is such a layer.

    After the last one there is a velocity to tell, but no step: in one loop with the
    layers it is not compiled a second time.
    """
    later = jnp.append(depths[1:], depths[-1:])
    return later, jnp.arange(len(depths)) < len(depths) - 1


def put_on_jumps(
    depths: Float[Array, " t"], jumps: Float[Array, " j"] | None
) -> Float[Array, " t"]:
    """Return depths in order, those that meet a jump to rounding exactly on it.

    Computed in another way, a depth differs by roundings of itself, or of as many
    equal gaps as there are: it may have been counted from the other end.
    """
    if jumps is None or jnp.size(jumps) == 0:
        return depths
    return _put_on(depths, jnp.asarray(jumps, depths.dtype))


@jax.jit
def _put_on(
    depths: Float[Array, " t"], jumps: Float[Array, " j"]
) -> Float[Array, " t"]:
    known, jumps = jax.lax.stop_gradient((depths, jumps))
    nearest = jumps[jnp.argmin(jnp.abs(known[:, None] - jumps[None]), axis=1)]
    gaps = jnp.abs(jnp.diff(known))
    narrow = jnp.minimum(jnp.append(gaps[:1], gaps), jnp.append(gaps, gaps[-1:]))
    rounding = jnp.finfo(known.dtype).eps
    rounding = rounding * jnp.maximum(jnp.abs(known), len(gaps) * narrow)
    # Many roundings of a large depth may be a good part of the stretch beside it.
    reach = jnp.clip(narrow / 64, 2 * rounding, ROUNDINGS * rounding)
    meets = jnp.abs(nearest - known) <= reach
    # The derivative in a depth is kept.
    return depths + jnp.where(meets, nearest - known, 0)


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


def refuse(options: Mapping[str, object], reasons: Mapping[str, str]) -> None:
    """Raise if an option was given that is for token clouds only."""
    for name, value in options.items():
        if value is not None:
            raise InvalidInput(f"{name} is for token clouds: {reasons[name]}.")


def is_forward(depths: Float[Array, " t"]) -> bool:
    """Whether depths increase, as far as that is known."""
    return not is_concrete(depths) or bool(depths[-1] > depths[0])
