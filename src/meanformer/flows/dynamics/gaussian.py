"""A Gaussian along depth: its mean, and the linear part of the map that moved it."""

from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.affine import check_affine, linearised
from meanformer.errors import Unsupported, check_kind
from meanformer.flows.dynamics.derivatives import Mode
from meanformer.flows.dynamics.driver import State
from meanformer.flows.dynamics.gaussian_errors import (
    ROUNDINGS,
    Carried,
    Clocked,
    relative_controller,
)
from meanformer.flows.dynamics.stretch import (
    AbstractIntegrated,
    Condition,
    Stretch,
    in_clock,
    in_depth,
    term,
)
from meanformer.flows.dynamics.tokens import finite
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import (
    Options,
    Settings,
    check_dimensions,
    checked_solver,
    refuse,
)
from meanformer.flows.schedule import AbstractSchedule, Constant
from meanformer.flows.solvers import Adaptive, LongDepth, Splitting, Switching
from meanformer.flows.status import Snapshot, Status
from meanformer.flows.trajectories.gaussian import GaussianTrajectory
from meanformer.geometry import Euclidean
from meanformer.measures import Gaussian
from meanformer.numerics.arrays import matmul

# Share of the tolerance; where less of the depth is left to a blow-up, it is reached.
RESOLVED = 1e-3
FIRST_STEP = 0.01


NOT_FOR_GAUSSIANS = {
    "probes": "carry points along by the trajectory's transport(depth) instead",
    "merge": "a Gaussian has no tokens that meet",
    "key": "a Gaussian has no noise",
}


class Affine(NamedTuple):
    r"""A velocity $u + L(x - m)$ around the mean $m$: slope $L$ and drift $u$."""

    slope: Float[Array, "d d"]
    drift: Float[Array, " d"]

    def change_of(self, carried: Carried) -> Carried:
        """Return the rate of change of mean and linear part under this velocity."""
        moved = matmul(self.slope, carried.linear)
        return Carried(self.drift, moved, jnp.trace(self.slope))


class GaussianFlow(AbstractIntegrated):
    r"""A Gaussian that a flow moves and keeps one.

    With $\Gamma_t[\mu](x) = u + L(x - m)$ the measure stays Gaussian, and
    $$\dot m = u, \qquad \dot\Phi = L\Phi, \qquad S = \Phi F_0 (\Phi F_0)^\top.$$
    The covariance is positive semi-definite by construction, and its rank is that of
    the factor $F_0$ for ever, since $\Phi$ is invertible.

    Attributes:
        flow: the velocity.
        start: the Gaussian at the start.
        root: the factor $F_0$.
        first_depth: where the Gaussian began.
        settings: steps, tolerances, conditions that end it.
    """

    flow: Flow
    start: Gaussian
    root: Float[Array, "d r"]
    first_depth: Float[Array, ""]
    settings: Settings

    def gaussian(self, carried: Carried) -> Gaussian:
        """Return the Gaussian that was carried to here."""
        return Gaussian(carried.mean, factor=matmul(carried.linear, self.root))

    def velocity(
        self, schedule: AbstractSchedule, depth: Float[Array, ""], carried: Carried
    ) -> Affine:
        """Return the velocity on the Gaussian that was carried to here."""
        mu = self.gaussian(carried)
        return Affine(
            *linearised(lambda x: schedule.velocity(depth, mu, x, None), mu.mean())
        )

    def stretch(self, state: State, end: Float[Array, ""], mode: Mode) -> Stretch:
        """Return what to integrate, in depth or with `LongDepth()` in a clock."""
        if isinstance(self.settings.integrator, LongDepth):
            return self._in_clock(state, end)

        def part(schedule: AbstractSchedule) -> diffrax.ODETerm:
            def field(depth, carried):
                return self.velocity(schedule, depth, carried).change_of(carried)

            return term(field, state, end)

        integrator, schedule = self.settings.integrator, self.flow.velocity
        is_split = isinstance(integrator, Splitting)
        terms = [part(one) for one in (schedule.terms() if is_split else (schedule,))]
        return in_depth(
            state,
            end,
            diffrax.MultiTerm(*terms) if is_split else terms[0],
            self.settings,
            mode,
            self._conditions(),
            controller=relative_controller(
                self.settings, schedule.jumps, self.first_depth, lambda y: y
            ),
        )

    def rates(self, state: State) -> Affine:
        """Return slope and drift of the velocity."""
        found = self.velocity(self.flow.velocity, state.depth, state.moving)
        return jax.tree.map(finite, found)

    def trajectory(self, states: State, rates: Affine) -> GaussianTrajectory:
        """Return the Gaussians along depth."""
        return GaussianTrajectory(
            states.depth,
            *states.moving,
            rates.drift,
            rates.slope,
            self.root,
            states.status,
            states.accepted_steps,
            states.rejected_steps,
        )

    def resumed(self, trajectory: GaussianTrajectory) -> State:
        """Return the map that has carried the Gaussian to the last depth."""
        path = trajectory
        carried = Carried(path.means, path.linear, path.log_volumes)
        return State.at_end_of(path, carried)

    def request(self, start: State) -> dict[str, Any]:
        """Return what a run of a Gaussian was asked for."""
        factor = self.start.factor
        spread = self.start.covariance() if factor is None else factor
        gaussian = (self.start.mean(), spread)
        return {"flow": self.flow, "Gaussian": gaussian, **self.settings.request()}

    def _in_clock(self, state: State, end: Float[Array, ""]) -> Stretch:
        r"""Integrate in the clock $\mathrm{d}s = (|LS|/|S| + 1/T)\,\mathrm{d}t$.

        $T$ is the length of the stretch. The clock is the logarithm of depth where the
        covariance decays algebraically, and that of the depth left before a blow-up.
        """
        span = jnp.where(end == state.depth, 1, end - state.depth)

        def field(s, y: Clocked) -> Clocked:
            found = self.velocity(self.flow.velocity, y.depth, y.carried)
            speed = self._relative_speed(found, y.carried)
            rate = jnp.sign(span) * speed + 1 / span
            change = found.change_of(y.carried)
            return Clocked(jax.tree.map(lambda leaf: leaf / rate, change), 1 / rate)

        def missing(depth, carried):
            rounding = jnp.finfo(end.dtype).eps * jnp.abs(end)
            near = jnp.abs(end - depth) <= ROUNDINGS * rounding
            return jnp.where(near, 0, (end - depth) / span)

        def read(y: Clocked, met):
            return jnp.where(met[0], end, y.depth), y.carried

        return in_clock(
            field,
            Clocked(state.moving, state.depth),
            FIRST_STEP,
            self.settings.integrator.method_for(False),
            relative_controller(
                self.settings, None, self.first_depth, lambda y: y.carried
            ),
            [(missing, None), *self._conditions()],
            lambda y: (y.depth, y.carried),
            read,
        )

    def _conditions(self) -> list[Condition]:
        """Return what ends it early: the own condition first, then those asked for."""

        def blows_up(depth, carried: Carried):
            found = self.velocity(self.flow.velocity, depth, carried)
            speed = self._relative_speed(found, carried)
            # The depth that is left is of the order of one over the speed.
            rounding = ROUNDINGS * jnp.finfo(depth.dtype).eps
            resolved = jnp.maximum(rounding, RESOLVED * self.settings.rtol)
            gone = jnp.abs(depth - self.first_depth)
            return speed * gone * resolved > 1

        own = (blows_up, Status.blow_up_suspected)
        return [own, *self.settings.conditions(self._snapshot)]

    def _snapshot(self, depth: Float[Array, ""], carried: Carried) -> Snapshot:
        mu = self.gaussian(carried)

        def speed() -> Float[Array, ""]:
            found = self.velocity(self.flow.velocity, depth, carried)
            drift, linear, _ = found.change_of(carried)
            spread = matmul(linear, self.root)
            return jnp.sqrt(jnp.sum(drift**2) + jnp.sum(spread**2))

        return Snapshot(depth, mu, lambda: _radius(mu), speed)

    def _relative_speed(self, found: Affine, carried: Carried) -> Float[Array, ""]:
        r"""Return how fast the Gaussian changes, in units of itself.

        For the covariance $|LS|/|S|$; the slope $L$ itself may be large where it does
        not move it. For the mean its speed over the radius.
        """
        factor = matmul(carried.linear, self.root)
        largest = jnp.abs(factor).max(initial=0)
        factor = factor / jnp.where(largest > 0, largest, 1)
        spread = matmul(factor, factor.T)
        size = jnp.linalg.norm(spread)
        moved = jnp.linalg.norm(matmul(found.slope, spread))
        moved = moved / jnp.where(size > 0, size, 1)
        radius = jnp.maximum(jnp.linalg.norm(carried.mean), _radius(self.start))
        travels = jnp.linalg.norm(found.drift) / jnp.where(radius > 0, radius, 1)
        return jnp.maximum(moved, travels)


def first_carried(mu: Gaussian) -> Carried:
    """Return the map that has moved nothing yet."""
    dtype = mu.mean().dtype
    return Carried(mu.mean(), jnp.eye(mu.dimension, dtype=dtype), jnp.zeros((), dtype))


def _radius(mu: Gaussian) -> Float[Array, ""]:
    """Return the root mean square of the distance from the origin."""
    return jnp.sqrt(jnp.sum(mu.mean() ** 2) + jnp.trace(mu.covariance()))


def set_up(
    flow: Flow, mu: Gaussian, options: Options, **others
) -> tuple[GaussianFlow, State, Float[Array, " t"]]:
    """Return a Gaussian that moves, its first state and the depths, or raise."""
    refuse(others, NOT_FOR_GAUSSIANS)
    check_gaussian_flow(flow, mu)
    dtype = mu.mean().dtype
    depths = options.depths(flow, dtype)
    solver = options.solver
    integrator = (
        Adaptive(diffrax.Dopri8()) if solver is None else checked_solver(solver)
    )
    if isinstance(integrator, LongDepth) and not isinstance(flow.velocity, Constant):
        raise Unsupported(
            "the solver LongDepth needs the same map at every depth; take an adaptive "
            "one for a schedule."
        )
    if isinstance(integrator, Switching):
        raise Unsupported(
            "Switching() is for tokens; a Gaussian takes Adaptive(), Stiff() or "
            "LongDepth()."
        )
    # Squares of covariances are formed: they must not overflow.
    settings = options.settings(integrator, dtype, power=1 / 8)
    moved = GaussianFlow(flow, mu, mu.root(), depths[0], settings)
    return moved, State.first(depths[0], first_carried(mu)), depths


def check_gaussian_flow(flow: Flow, mu: Gaussian) -> None:
    """Raise unless this is a flow that keeps the Gaussian one."""
    check_kind("flow", flow, Flow, "Flow(velocity)")
    if not isinstance(flow.space, Euclidean):
        raise Unsupported(
            f"a Gaussian does not live on {type(flow.space).__name__}(); use "
            "Euclidean(), or a TokenCloud."
        )
    if flow.noise is not None:
        raise Unsupported("a Gaussian flows without noise; use a TokenCloud.")
    check_dimensions(flow, mu.dimension)
    for gamma in flow.velocity.kinds():
        check_affine(gamma, mu)
