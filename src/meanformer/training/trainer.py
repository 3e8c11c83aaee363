"""Training: the front door to flows and steps of heads."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import (
    ConflictingTargets,
    InvalidInput,
    as_doubles,
    as_key,
    as_number,
    check,
    warn,
)
from meanformer.flows import (
    AbstractProgress,
    AbstractRecorder,
    Adaptive,
    FixedStep,
    StepBudget,
    drive,
)
from meanformer.flows.inputs import Options, check_tolerances, saved_depths
from meanformer.flows.solvers import AbstractIntegrator
from meanformer.flows.status import AbstractStop, status_name
from meanformer.training.data import Dataset, Loss, squared_error
from meanformer.training.descent import Descent, GradientDescent, GradientFlow
from meanformer.training.gradients import AbstractEngine, Problem, check_finite
from meanformer.training.runs import TrainingRun
from meanformer.training.transformer import MeanFieldTransformer
from meanformer.typing import ArrayLike, Key


def train(
    model: MeanFieldTransformer,
    data: Dataset,
    time: float,
    *,
    solver: AbstractIntegrator | GradientDescent | None = None,
    save: int | ArrayLike = 11,
    rtol: float = 1e-6,
    atol: float = 1e-9,
    loss: Loss = squared_error,
    decay: float = 0.0,
    speeds: tuple[float, float] = (1.0, 1.0),
    engine: AbstractEngine | None = None,
    stop: AbstractStop | StepBudget | Sequence[AbstractStop | StepBudget] = (),
    key: Key | None = None,
    progress: bool | AbstractProgress = False,
    store: AbstractRecorder | None = None,
) -> TrainingRun:
    r"""Train a transformer by the gradient flow of its heads, each at its depth.

    $$\partial_t\nu_t(s, \cdot) = \nabla_\theta\!\cdot\bigl(\nu_t(s, \cdot)\,G_s\bigr),
      \qquad \dot\theta = -G_s(\theta),$$
    the gradient flow of the risk for the distance `cot_distance`, in mean-field time:
    no rate depends on the number of layers or heads. Along it
    $\dot R = -|\nabla R|^2$, and $QQ^\top - KK^\top$ of every head stays.

    Stop conditions see heads as they see tokens: `flows.SteadyState(speed)` looks at
    $|\nabla R|$, `flows.EscapeRadius(radius)` at the largest entry of a head,
    `StopWhen(f)` at time and the measure of heads.

    Args:
        model: the transformer at the start.
        data: contexts, queries and targets.
        time: how long, in mean-field time.
        solver: `Adaptive()` (the default), `FixedStep(h)` of classical Runge-Kutta, or
            `GradientDescent(step)`, also in batches or with an optimiser of optax.
        save: how many equally spaced times to save, or the times themselves; descent
            saves where a step ends next to them.
        rtol: relative tolerance of adaptive steps.
        atol: absolute tolerance of adaptive steps.
        loss: takes the `End` of one context and its target.
        decay: the factor $\lambda$ of the penalty $\tfrac\lambda2\int|\theta|^2$.
        speeds: factors of the velocities of queries and keys, and of all the rest.
        engine: the way to the gradient, as for `gradient`.
        stop: conditions that end it, and `StepBudget(count)`.
        key: random key, for batches only.
        progress: show a progress bar with the risk; or an object to report to.
        store: where to write the run while it is computed, `storage.RunStore(folder)`;
            one that is there already is continued, to identical numbers.

    Returns:
        The run. Its `status` says how it ended. It is `diverging` where steps of plain
        descent raise the risk three times in turn, or others raise it a millionfold;
        then the run ends where the risk began to rise. Equal contexts with unequal
        targets are told by the warning `errors.ConflictingTargets`.
    """
    problem, dtype = Problem(model, data, loss, decay, engine), data.tokens.dtype
    time = as_number("time", time, "a positive number", above=0, below=math.inf)
    solver = Adaptive() if solver is None else solver
    check_tolerances(rtol, atol)
    times = saved_depths(time, save, dtype, None)
    factors = _checked_speeds(speeds)
    _warn_of_conflicts(data, loss)
    options = Options(time, save, solver, rtol, atol, stop)
    if isinstance(solver, GradientDescent):
        times = times_of_steps(times, solver.step)
        # An array: one program serves all steps.
        rule = dataclasses.replace(solver, step=jnp.asarray(solver.step, dtype))
        settings = options.settings(FixedStep(solver.step), dtype)
        batches = _checked_key(key, solver, len(data))
        steps = Descent(problem, factors, rule, settings, batches)
        return _sound(drive(steps, steps.first(times[0]), times, progress, store))
    if not isinstance(solver, Adaptive | FixedStep):
        raise InvalidInput(
            f"solver is {solver!r}; it must be Adaptive(…), FixedStep(h), or "
            "GradientDescent(step), which takes an optimiser of optax."
        )
    _checked_key(key, None, len(data))
    flow = GradientFlow(problem, factors, options.settings(solver, dtype))
    return _sound(drive(flow, flow.first(times[0]), times, progress, store))


def _checked_key(key: Any, rule: GradientDescent | None, count: int) -> Key | None:
    """Return the key of the batches, or raise if there is none, or one too many."""
    batch = None if rule is None else rule.batch
    if batch is None:
        told = "key is for batches, GradientDescent(step, batch=…); leave it out."
        check(key is None, told)
        return None
    check(batch <= count, f"batch is {batch}; there are {count} contexts.")
    check(key is not None, "batches need key=jax.random.key(seed).")
    return as_key(key)


def _sound(run: TrainingRun) -> TrainingRun:
    """Cut a run off where its risk is least, if it diverged, or ceases to be finite."""
    check_finite("risk at the start", run.risks[0])
    end = int(np.isfinite(run.risks).argmin()) or len(run)
    has_blown_up = status_name(run.status) in ("diverging", "not_finite", "escaped")
    if has_blown_up and not run.risks[-1] <= run.risks[0]:
        end = int(np.argmin(run.risks[:end])) + 1
    if end == len(run):
        return run
    kept = {
        name: jax.tree.map(lambda leaf: leaf[:end], value)
        for name, value in run.along_depth().items()
        if name != "status"
    }
    return dataclasses.replace(run, **kept)


def _checked_speeds(speeds: Sequence[float]) -> tuple[float, float]:
    """Return the two factors, or raise."""
    factors = as_doubles("speeds", speeds)
    check(
        factors.shape == (2,) and bool(((factors >= 0) & (factors < np.inf)).all()),
        f"speeds is {speeds!r}; it must be two numbers >= 0, of scores and of values.",
    )
    return float(factors[0]), float(factors[1])


def _warn_of_conflicts(data: Dataset, loss: Loss) -> None:
    """Warn where equal contexts have unequal targets, with the risk that they leave."""
    shape = data.queries.shape
    if loss is not squared_error or 0 in shape or np.shape(data.targets) != shape:
        return
    floor = data.conflict_floor()
    if floor > 0:
        warn(
            "equal contexts with equal queries have different targets, so that the "
            f"risk cannot fall below {floor:.6g}; injectivity_report(data) names them.",
            ConflictingTargets,
        )


def times_of_steps(times: Float[Array, " t"], step: float) -> Float[Array, " u"]:
    """Return the ends of steps next to the saved times; the last time must be one."""
    counts = (times - times[0]) / step
    whole = jnp.round(counts)
    check(
        bool(abs(counts[-1] - whole[-1]) <= 1e-6 * whole[-1]) and bool(whole[-1] >= 1),
        f"the time is {float(times[-1])}, the step {step}; times must be multiples of "
        f"the step, such as {max(1, int(whole[-1])) * step:.6g}.",
    )
    return times[0] + step * jnp.unique(whole)
