"""How a run is solved, as a file describes it: depths, steps, merging, stops."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer import flows
from meanformer.errors import as_number, check
from meanformer.measures import AbstractMeasure, FourierDensity
from meanformer.storage.config.sections import MUST, Section, is_number, shown

MOST_DEPTHS = 10**6
# Steps of a given size, and of a size that is chosen along the way.
EQUAL_STEPS = {
    "fixed": flows.FixedStep,
    "lie": functools.partial(flows.Splitting, order=1),
    "strang": functools.partial(flows.Splitting, order=2),
}
CHOSEN_STEPS = {
    "adaptive": lambda: None,  # what the measure has by default
    "stiff": flows.Stiff,
    "switching": flows.Switching,
    "long-depth": flows.LongDepth,
}
STOPS = {
    "escape_radius": (flows.EscapeRadius, float),
    "steady_speed": (flows.SteadyState, float),
    "step_budget": (flows.StepBudget, int),
}


def options_of(section: Section, measure: AbstractMeasure) -> dict[str, Any]:
    """Return tolerances, solver and merging, as options of `solve`."""
    options = {
        "rtol": section.take("rtol", float, 1e-6, positive=True),
        "atol": section.take("atol", float, 1e-9, positive=True),
        "solver": _solver(section),
        "merge": _merge(section),
    }
    if isinstance(measure, FourierDensity):
        usual = flows.Spectral.most_modes
        modes = section.take("most_modes", int, usual, positive=True)
        options["solver"] = flows.Spectral(modes, integrator=options["solver"])
    return options


def saved_depths(section: Section) -> Float[Array, " t"]:
    """Return the saved depths, equally or logarithmically spaced."""
    depth = section.take("depth", float, MUST)
    every = section.take("save_every", float)
    per_decade = section.take("saves_per_decade", int, positive=True)
    first = section.take("first_depth", float, positive=True)
    if per_decade is None:
        check(first is None, "solve.first_depth needs solve.saves_per_decade.")
        return depth_grid(depth, depth / 10 if every is None else every)
    check(every is None, "solve has both save_every and saves_per_decade.")
    return decade_grid(depth, 1.0 if first is None else first, per_decade)


def depth_grid(depth: float, every: float) -> Float[Array, " t"]:
    """Return the depths 0, h, 2h, … up to `depth`, which must be one of them.

    A longer run has the same depths and more, which is what makes it an extension.
    """
    as_number("solve.depth", depth, "positive and finite", above=0, below=np.inf)
    check(
        depth / MOST_DEPTHS <= every <= depth,
        f"solve.save_every is {every}; it must be at least the depth, {depth}, divided "
        f"by {MOST_DEPTHS}, and at most the depth.",
    )
    count, below = round(depth / every), int(np.floor(depth / every))
    check(
        abs(depth / every - count) <= 1e-9 * count,
        f"solve.depth is {depth:.12g}; it must be a multiple of solve.save_every, "
        f"{every:.12g}: the nearest are {below * every:.12g} and "
        f"{(below + 1) * every:.12g}.",
    )
    return every * jnp.arange(count + 1, dtype=float)


def decade_grid(depth: float, first: float, per_decade: int) -> Float[Array, " t"]:
    """Return 0 and `first` times powers of ten, `depth` the last of them."""
    check(
        first < depth < np.inf,
        f"solve.depth is {depth}; it must be finite and larger than solve.first_depth, "
        f"{first}.",
    )
    steps = per_decade * float(np.log10(depth / first))
    count = round(steps)
    check(count < MOST_DEPTHS, f"solve.saves_per_decade is {per_decade}; too many.")
    below, above = (
        first * 10 ** (end / per_decade) for end in (np.floor(steps), np.ceil(steps))
    )
    check(
        abs(steps - count) <= 1e-9 * max(count, 1),
        f"solve.depth is {depth:.12g}; with {per_decade} saves per decade from "
        f"{first:.12g} the nearest are {below:.12g} and {above:.12g}.",
    )
    return jnp.asarray(
        np.append(0.0, first * 10.0 ** (np.arange(count + 1) / per_decade))
    )


def _solver(section: Section) -> flows.AbstractIntegrator | None:
    """Return how steps are taken; `None` for those that the measure has by default."""
    name = section.choose("solver", CHOSEN_STEPS | EQUAL_STEPS, "adaptive")
    step = section.take("step", float, positive=True)
    needs_step = name in EQUAL_STEPS
    check(
        needs_step == (step is not None),
        f"solve.solver is {name}; solve.step must {'' if needs_step else 'not '}be "
        "given with it.",
    )
    return EQUAL_STEPS[name](step) if needs_step else CHOSEN_STEPS[name]()


def _merge(section: Section) -> flows.Merge | None:
    """Return how tokens are joined: not, at the usual distance, or at a given one."""
    value = section.take("merge")
    if value is None or isinstance(value, bool):
        return flows.Merge() if value else None
    check(
        is_number(value) and value > 0,
        f"solve.merge is {shown(value)}; it must be true, false, or a positive "
        "distance.",
    )
    return flows.Merge(float(value))


def stops_of(
    section: Section,
) -> tuple[flows.AbstractStop | flows.StepBudget, ...]:
    """Return the conditions that end a run early."""
    given = {
        name: section.take(name, kind, positive=True)
        for name, (_, kind) in STOPS.items()
    }
    return tuple(
        STOPS[name][0](value) for name, value in given.items() if value is not None
    )
