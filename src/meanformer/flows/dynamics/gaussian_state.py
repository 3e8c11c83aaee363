"""A Gaussian along depth: its mean, and the linear part of the map that moved it."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanformer.attention.affine import check_affine, linearised
from meanformer.flows.dynamics.state import all_finite
from meanformer.flows.flow import Flow
from meanformer.flows.schedule import AbstractSchedule
from meanformer.flows.solvers import AbstractIntegrator
from meanformer.flows.status import AbstractStop, Status
from meanformer.measures import Gaussian
from meanformer.numerics.matrices import matmul


class Carried(NamedTuple):
    r"""The map $x \mapsto m + \Phi(x - m_0)$ that has carried a Gaussian so far.

    Attributes:
        mean: the mean $m$.
        linear: the matrix $\Phi$.
        log_volume: $\log\det\Phi$, which is right where $\Phi$ is singular to rounding.
    """

    mean: Float[Array, " d"]
    linear: Float[Array, "d d"]
    log_volume: Float[Array, ""]


class GaussianState(eqx.Module):
    """Everything that changes along depth; a solve can restart from it alone."""

    depth: Float[Array, ""]
    carried: Carried
    status: PyTree
    accepted_steps: Int[Array, ""]
    rejected_steps: Int[Array, ""]

    def is_finite(self) -> Bool[Array, ""]:
        """Return whether every number is finite."""
        return all_finite((self.depth, self.carried))


class GaussianProblem(eqx.Module):
    r"""Everything that stays the same along depth.

    With $\Gamma_t[\mu](x) = u + L(x - m)$ the measure stays Gaussian, and
    $$\dot m = u, \qquad \dot\Phi = L\Phi, \qquad S = \Phi F_0 (\Phi F_0)^\top.$$
    The covariance is positive semi-definite by construction, and its rank is that of
    the factor $F_0$ for ever, since $\Phi$ is invertible.

    Attributes:
        flow: the velocity.
        root: the factor $F_0$.
        first_depth: where the Gaussian began.
        first_radius: the root mean square of the distance from the origin there.
        integrator: how steps are taken.
        stops: conditions that end the solve.
        rtol: relative tolerance.
        atol: absolute tolerance.
        max_steps: most steps between two saved depths.
    """

    flow: Flow
    root: Float[Array, "d r"]
    first_depth: Float[Array, ""]
    first_radius: Float[Array, ""]
    integrator: AbstractIntegrator
    stops: tuple[AbstractStop, ...]
    rtol: float | Float[Array, ""]
    atol: float | Float[Array, ""]
    max_steps: int = eqx.field(static=True)

    def gaussian(self, carried: Carried) -> Gaussian:
        """Return the Gaussian that was carried to here."""
        factor = matmul(carried.linear, self.root)
        return Gaussian(carried.mean, factor=factor)

    def slope_and_drift(
        self, schedule: AbstractSchedule, depth: Float[Array, ""], carried: Carried
    ) -> tuple[Float[Array, "d d"], Float[Array, " d"]]:
        """Return the slope of the velocity and its value at the mean."""
        mu = self.gaussian(carried)
        return linearised(lambda x: schedule.velocity(depth, mu, x, None), mu.mean())

    def velocity(
        self, schedule: AbstractSchedule, depth: Float[Array, ""], carried: Carried
    ) -> Carried:
        """Return how mean and linear part change."""
        return self.moving(*self.slope_and_drift(schedule, depth, carried), carried)

    def relative_speed(
        self, slope: Float[Array, "d d"], drift: Float[Array, " d"], carried: Carried
    ) -> Float[Array, ""]:
        r"""Return how fast the Gaussian changes, in units of itself.

        For the covariance $|LS|/|S|$; the slope $L$ itself may be large where it does
        not move it. For the mean its speed over the radius.
        """
        factor = matmul(carried.linear, self.root)
        largest = jnp.abs(factor).max(initial=0)
        factor = factor / jnp.where(largest > 0, largest, 1)
        spread = matmul(factor, factor.T)
        size = jnp.linalg.norm(spread)
        moved = jnp.linalg.norm(matmul(slope, spread)) / jnp.where(size > 0, size, 1)
        radius = jnp.maximum(jnp.linalg.norm(carried.mean), self.first_radius)
        travels = jnp.linalg.norm(drift) / jnp.where(radius > 0, radius, 1)
        return jnp.maximum(moved, travels)

    @staticmethod
    def moving(
        slope: Float[Array, "d d"], drift: Float[Array, " d"], carried: Carried
    ) -> Carried:
        """Return how mean and linear part change under a slope and a drift."""
        return Carried(drift, matmul(slope, carried.linear), jnp.trace(slope))


def first_state(depth: Float[Array, ""], mu: Gaussian) -> GaussianState:
    """Return the state at the first depth, where nothing has moved."""
    identity = jnp.eye(mu.dimension, dtype=mu.mean().dtype)
    none = jnp.zeros((), jnp.result_type(int))
    carried = Carried(mu.mean(), identity, jnp.zeros_like(depth))
    return GaussianState(depth, carried, Status.reached, none, none)


def check_closed(flow: Flow, mu: Gaussian) -> None:
    """Raise, with the reason, unless the flow keeps this Gaussian one."""
    for gamma in flow.velocity.kinds():
        check_affine(gamma, mu)
