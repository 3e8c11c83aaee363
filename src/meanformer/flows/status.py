"""How a solve ended, and the conditions that may end it early."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.errors import check, check_kind
from meanformer.measures import AbstractMeasure, TokenCloud


class Status(eqx.Enumeration):
    """How a solve ended; the text of each says what to do.

    The members are `reached`, `steady`, `condition_met`, `escaped`,
    `blow_up_suspected`, `step_budget`, `not_finite`, `solver_failed`, `undefined`,
    `unresolved`, `negative`, `diverging` and, of a run on disk, `interrupted`.
    """

    reached = "the depth asked for was reached"
    steady = "all came to rest before the depth asked for"
    condition_met = "a stop condition was met"
    escaped = (
        "a token, a head, or the radius of the Gaussian left the escape radius, beyond "
        "which numbers overflow unless you set another; the flow grows without bound "
        "or blows up: shorten the depth, or rescale"
    )
    blow_up_suspected = (
        "hardly any depth is left for steps that keep the accuracy, so a blow-up in "
        "finite depth is suspected; linear and unnormalised attention do that, and "
        "softmax attention on a Gaussian: stop before this depth"
    )
    step_budget = (
        "the step budget between two saved depths was used up; the flow may be stiff: "
        "take a stiff solver, loosen rtol, save more often, or raise the step budget"
    )
    not_finite = (
        "the velocity or a step was not finite, so the last finite state was kept; "
        "scale the tokens or beta down, or take smaller steps"
    )
    solver_failed = (
        "the implicit solver did not converge; loosen rtol or take an explicit solver"
    )
    undefined = (
        "the velocity lost its meaning: a token reached the origin and has no "
        "direction, or the attention that it is divided by vanished; stop before this "
        "depth, or normalise after the residual instead (post-norm)"
    )
    unresolved = (
        "the density is too sharp for the modes allowed: it is turning into atoms; go "
        "on with tokens (mean_field.evolve, quadrature), or raise most_modes of the "
        "solver Spectral"
    )
    negative = (
        "the density fell below zero by more than rounding, so that its modes do not "
        "suffice; raise most_modes of the solver Spectral, or lower atol"
    )
    diverging = "the risk rose from step to step; take a smaller step"
    interrupted = (
        "the run on disk has not come to its end; resume it, or call again with the "
        "same store"
    )


# The order is that of the codes in files: append only.
_NAMES = (
    "reached",
    "steady",
    "condition_met",
    "escaped",
    "blow_up_suspected",
    "step_budget",
    "not_finite",
    "solver_failed",
    "undefined",
    "unresolved",
    "negative",
    "diverging",
    "interrupted",
)

#: What the advice of a status is called in Python, by the name of the status.
IN_PYTHON = {
    "step_budget": "solver=Stiff(), stop=StepBudget(steps)",
    "solver_failed": "solver=Adaptive()",
    "undefined": "PostNorm()",
}

#: Attributes that tell a reader of a file what the status codes mean.
STATUS_FLAGS = {
    "flag_values": ", ".join(str(code) for code in range(len(_NAMES))),
    "flag_meanings": " ".join(_NAMES),
}


def status_name(status: PyTree) -> str:
    """Return the short name of a status."""
    return next(name for name in _NAMES if bool(getattr(Status, name) == status))


def status_code(status: PyTree) -> int:
    """Return the number that stands for a status in files."""
    return _NAMES.index(status_name(status))


def status_from(code: int) -> PyTree:
    """Return the status that a number in a file stands for."""
    return getattr(Status, _NAMES[code])


class Snapshot(NamedTuple):
    """A moment of a flow for stop conditions, with radius and speed on demand.

    Attributes:
        depth: the depth.
        measure: the tokens, or the Gaussian, there.
        radius: gives how far they reach from the origin.
        speed: gives how fast they move.
    """

    depth: Float[Array, ""]
    measure: AbstractMeasure
    radius: Callable[[], Float[Array, ""]]
    speed: Callable[[], Float[Array, ""]]


# A condition on depth and what moves there, and the status of a solve that it ends.
Condition = tuple[Callable[[Array, Any], Array], PyTree]


def snapshot_of(
    depth: Float[Array, ""], cloud: TokenCloud, velocities: Callable[[], Array]
) -> Snapshot:
    """Return the snapshot of a cloud with these velocities."""

    def speed() -> Float[Array, ""]:
        speeds = jnp.linalg.norm(velocities(), axis=1)
        return jnp.max(jnp.where(cloud.weights > 0, speeds, 0))

    return Snapshot(depth, cloud, cloud.radius, speed)


class AbstractStop(eqx.Module):
    """A condition, looked at after every step, that ends a solve."""

    status: eqx.AbstractClassVar[PyTree]

    @abc.abstractmethod
    def __call__(self, snapshot: Snapshot) -> Bool[Array, ""]:
        """Return whether to stop."""


class EscapeRadius(AbstractStop):
    """Stop when a token of positive weight is farther than `radius` from the origin.

    For a Gaussian: when the root mean square of the distance is larger.

    Args:
        radius: the radius. Every solve also has one of its own, at the fourth root of
            the largest number of the type, beyond which scores overflow.
    """

    radius: float
    status: ClassVar[PyTree] = Status.escaped

    def __check_init__(self):
        check(self.radius > 0, f"radius is {self.radius}; it must be positive.")

    def __call__(self, snapshot: Snapshot) -> Bool[Array, ""]:
        """Return whether a token has escaped."""
        return snapshot.radius() > self.radius


class SteadyState(AbstractStop):
    """Stop when no token of positive weight moves faster than `speed`.

    For a Gaussian: when the root mean square of its velocity is smaller.

    Args:
        speed: the largest speed that counts as rest.
    """

    speed: float = 1e-8
    status: ClassVar[PyTree] = Status.steady

    def __check_init__(self):
        check(self.speed > 0, f"speed is {self.speed}; it must be positive.")

    def __call__(self, snapshot: Snapshot) -> Bool[Array, ""]:
        """Return whether all tokens rest."""
        return snapshot.speed() < self.speed


class StopWhen(AbstractStop):
    """Stop when a function of depth and measure says so.

    Args:
        condition: takes the depth and the `TokenCloud` or `Gaussian` there, returns a
            Boolean scalar; it is traced.
    """

    condition: Callable[[Array, Any], Bool[Array, ""]]
    status: ClassVar[PyTree] = Status.condition_met

    def __check_init__(self):
        allowed = "a function of depth and measure"
        check_kind("condition", self.condition, Callable, allowed)

    def __call__(self, snapshot: Snapshot) -> Bool[Array, ""]:
        """Return what the function says."""
        return self.condition(snapshot.depth, snapshot.measure)


class StepBudget(eqx.Module):
    """The most solver steps between two saved depths, or joins of a merging solve.

    Args:
        count: number of steps, accepted and rejected; 4096 unless given.
    """

    count: int = eqx.field(default=4096, static=True)

    def __check_init__(self):
        check(self.count > 0, f"count is {self.count}; it must be positive.")
