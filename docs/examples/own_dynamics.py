"""Tokens with inertia: attention accelerates them, friction slows them down."""

import jax.numpy as jnp

import meanformer as mf
from meanformer import flows


class Inertia(flows.AbstractIntegrated):
    r"""Tokens that move by $\ddot x_i = \Gamma[\mu](x_i) - \gamma\dot x_i$."""

    flow: mf.Flow
    cloud: mf.TokenCloud
    friction: float
    settings: flows.Settings

    def field(self, depth, moving):
        """Say how places and velocities change."""
        points, velocities = moving
        pull = self.flow.field(depth, self.cloud.moved(points), points)
        return velocities, pull - self.friction * velocities

    def stretch(self, state, end, mode):
        """Say what is integrated between two saved depths."""
        equation = flows.term(self.field, state, end)
        return flows.in_depth(state, end, equation, self.settings, mode)

    def rates(self, state):
        """Say what is saved beside a state."""
        return state.moving[1]

    def trajectory(self, states, rates):
        """Put what was saved into a trajectory."""
        steps = (states.accepted_steps, states.rejected_steps)
        given = (states.depth, states.moving[0], rates, self.cloud.weights)
        return mf.Trajectory(*given, None, None, states.status, *steps)

    def resumed(self, path):
        """Take what moves out of it again, to go on from."""
        return flows.State.at_end_of(path, (path.points, path.velocities))

    def request(self, start):
        """Say what tells one run from another."""
        asked = {"flow": self.flow, "tokens": self.cloud, "friction": self.friction}
        return asked | self.settings.request()


def solve_with_inertia(flow, cloud, depths, *, friction, store=None):
    """Flow tokens that start at rest; `store` as for `solve`."""
    settings = flows.Settings(mf.Adaptive(), rtol=1e-6, atol=1e-9, max_steps=4096)
    tokens = Inertia(flow, cloud, friction, settings)
    rest = (cloud.points, jnp.zeros_like(cloud.points))
    start = flows.State.first(depths[0], rest)
    return flows.drive(tokens, start, depths, store=store)


cloud = mf.TokenCloud([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
attraction = mf.Softmax(jnp.eye(2), jnp.eye(2), -jnp.eye(2))
path = solve_with_inertia(mf.Flow(attraction), cloud, jnp.arange(5.0), friction=0.5)
