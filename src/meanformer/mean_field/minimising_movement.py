r"""Steepest ascent in Wasserstein space by implicit steps, in one dimension.

Where attention is the Wasserstein gradient of its energy, the mean field is the limit
of minimising movements [JKO98]: the next measure maximises
$cE(\nu) - \tfrac{1}{2\tau}W_2^2(\nu, \mu)$. On the line and on the circle $W_2$ is the
distance of quantile functions, so that a step is a smooth problem for the quantiles,
solved by Newton's method.
"""

from typing import SupportsIndex, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from meanformer.errors import InvalidInput, Unsupported, as_integer, as_number, check
from meanformer.flows import Constant, Flow
from meanformer.flows.inputs import check_flow
from meanformer.geometry import Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.numerics.arrays import unit_rows
from meanformer.observables import energy, is_gradient_flow

NEWTON_STEPS = 60
HALVINGS = 40


class MinimisingMovement(eqx.Module):
    r"""Measures that follow each other by implicit steps up their energy.

    Attributes:
        depths: $0, \tau, 2\tau, \dots$
        points: the tokens at each of them.
        weights: their masses.
        energies: the energy that is climbed, $cE$.
        distances: the distance $W_2$ of each measure to the one before.
        newton_steps: how many steps of Newton's method each took.
    """

    depths: Float[Array, " t"]
    points: Float[Array, "t n d"]
    weights: Float[Array, " n"]
    energies: Float[Array, " t"]
    distances: Float[Array, " s"]
    newton_steps: Int[Array, " s"]

    def __str__(self) -> str:
        """Return how far it went and how much the energy rose."""
        return (
            f"{len(self.distances)} steps to depth {float(self.depths[-1]):g}: energy "
            f"{float(self.energies[0]):.10g} to {float(self.energies[-1]):.10g}"
        )

    def cloud(self, index: int) -> TokenCloud:
        """Return the measure after so many steps."""
        return TokenCloud(self.points[index], self.weights)


def minimising_movement(
    flow: Flow, mu: TokenCloud, step: ScalarLike, count: SupportsIndex
) -> MinimisingMovement:
    r"""Climb the energy of a flow by implicit steps in Wasserstein space.

    Each step maximises, over the positions $q$ of the tokens on the line, or over their
    lifted angles on the circle,
    $$cE(q) - \frac{1}{2\tau}\sum_i w_i|q_i - p_i|^2,$$
    which is $cE - W_2^2/(2\tau)$ since the order of the tokens is kept. The result
    tends to the flow with an error of order $\tau$, but the energy rises at every step,
    by at least $W_2^2/(2\tau)$, however large $\tau$ is: also where tokens have
    gathered in clusters, and explicit steps would have to be small.

    Args:
        flow: a flow on `Sphere()` in dimension 2 or on `Euclidean()` in dimension 1,
            that is the Wasserstein gradient flow of its energy (`is_gradient_flow`):
            unnormalised attention with $A = A^\top$ and $V = cA$, for instance. Softmax
            is none.
        mu: the tokens, those of `circle_nodes` for a density; without weight they stay
            where they are.
        step: the step $\tau > 0$. The problem must have one solution near the tokens:
            where they spread at a rate $\lambda > 0$, that needs $\tau\lambda < 1$.
        count: how many steps.

    Returns:
        The measures. Cost: $O(n^3)$ for a step of Newton's method; not under `jit`.
    """
    chart = _Chart(flow, mu)
    tau = as_number("step", step, "positive and finite", above=0, below=np.inf)
    count = as_integer("count", count, least=1)
    place, rows = chart.coordinates(mu.points), []
    first = place
    for index in range(count):
        place, *row, is_done = _step(chart, place, jnp.asarray(tau, place.dtype))
        _check_step(chart, place, bool(is_done), tau, index)
        rows.append((place, *row))
    places, distances, iterations = map(jnp.stack, zip(*rows, strict=True))
    path = jnp.concatenate([first[None], places])
    return MinimisingMovement(
        tau * jnp.arange(count + 1, dtype=path.dtype),
        jax.vmap(chart.points)(path),
        mu.weights,
        jax.lax.map(chart.energy, path),
        distances,
        iterations,
    )


class _Chart(eqx.Module):
    """A gradient flow in one coordinate: the angle on the circle, or the line's own."""

    flow: Flow
    cloud: TokenCloud
    factor: Float[Array, ""]

    def __init__(self, flow: Flow, cloud: TokenCloud):
        check_flow(flow, cloud)
        if not isinstance(flow.velocity, Constant) or flow.noise is not None:
            raise Unsupported(
                "minimising movements are for a flow whose map does not change, "
                "without noise."
            )
        fits = (isinstance(flow.space, Sphere) and cloud.dimension == 2) or (
            isinstance(flow.space, Euclidean) and cloud.dimension == 1
        )
        check(
            fits,
            f"the flow is on {type(flow.space).__name__}() in dimension "
            f"{cloud.dimension}; minimising movements are for the circle, Sphere() in "
            "dimension 2, and for the line, Euclidean() in dimension 1.",
        )
        structure = is_gradient_flow(flow.velocity.gamma)
        if not structure.is_wasserstein:
            reason = structure.failure or f"its metric is {structure.metric}"
            raise InvalidInput(
                f"the flow is not a Wasserstein gradient flow: {reason}; Unnormalised "
                "attention with V = c A, A symmetric, is one."
            )
        self.flow, self.cloud, self.factor = flow, cloud, structure.factor

    @property
    def is_circle(self) -> bool:
        return isinstance(self.flow.space, Sphere)

    def coordinates(self, points: Float[Array, "n d"]) -> Float[Array, " n"]:
        if self.is_circle:
            return jnp.arctan2(points[:, 1], points[:, 0])
        return points[:, 0]

    def points(self, places: Float[Array, " n"]) -> Float[Array, "n d"]:
        if self.is_circle:
            return jnp.stack([jnp.cos(places), jnp.sin(places)], axis=1)
        return places[:, None]

    def energy(self, places: Float[Array, " n"]) -> Float[Array, ""]:
        layer = cast(Constant, self.flow.velocity).gamma
        return self.factor * energy(layer, self.cloud.moved(self.points(places)))

    def velocity(self, places: Float[Array, " n"]) -> Float[Array, " n"]:
        cloud = self.cloud.moved(self.points(places))
        field = self.flow.field(
            jnp.zeros((), places.dtype), cloud, cloud.points, cloud.positions
        )
        if not self.is_circle:
            return field[:, 0]
        x, y = unit_rows(cloud.points).T
        return x * field[:, 1] - y * field[:, 0]


@eqx.filter_jit
def _step(
    chart: _Chart, before: Float[Array, " n"], tau: Float[Array, ""]
) -> tuple[Float[Array, " n"], Float[Array, ""], Int[Array, ""], Bool[Array, ""]]:
    """Return the next places, the distance to them, Newton's steps, and success."""
    masses = chart.cloud.weights
    is_present = masses > 0
    resolution = 16 * jnp.finfo(before.dtype).eps * (1 + jnp.max(jnp.abs(before)))

    def loss(places):
        way = jnp.sum(masses * (places - before) ** 2) / (2 * tau)
        return way - chart.energy(places)

    def direction(places):
        slopes = (places - before) / tau - chart.velocity(places)
        slopes = jnp.where(is_present, slopes, 0)
        spread = jnp.where(is_present[:, None], jax.jacfwd(chart.velocity)(places), 0)
        bend = jnp.eye(len(places), dtype=tau.dtype) / tau - spread
        newton = jnp.linalg.solve(bend, slopes)
        # Where the loss bends down, Newton's step may go uphill; the slope does not.
        is_downhill = jnp.sum(masses * newton * slopes) >= 0
        return -jnp.where(is_downhill, newton, tau * slopes)

    def shortened(places, move):
        start = loss(places)
        slack = 64 * jnp.finfo(start.dtype).eps * (jnp.abs(start) + 1)

        def is_worse(share):
            worse = ~(loss(places + share * move) <= start + slack)
            return worse & (share > 0.5**HALVINGS)

        whole = jnp.ones((), places.dtype)
        return jax.lax.while_loop(is_worse, lambda share: share / 2, whole) * move

    def advance(state):
        places, _, steps = state
        move = shortened(places, direction(places))
        return places + move, jnp.max(jnp.abs(move)), steps + 1

    def is_moving(state):
        return (state[1] > resolution) & (state[2] < NEWTON_STEPS)

    start = before, jnp.asarray(jnp.inf, before.dtype), jnp.zeros((), int)
    after, last, steps = jax.lax.while_loop(is_moving, advance, start)
    distance = jnp.sqrt(jnp.sum(masses * (after - before) ** 2))
    return after, distance, steps, last <= 1e4 * resolution


def _check_step(
    chart: _Chart, after: Float[Array, " n"], is_done: bool, tau: float, index: int
) -> None:
    """Raise unless the step has converged and kept the order of the tokens."""
    first = np.asarray(chart.coordinates(chart.cloud.points))
    order = np.argsort(first, kind="stable")
    order = order[np.asarray(chart.cloud.weights)[order] > 0]
    gaps = np.diff(np.asarray(after)[order])
    around = 2 * np.pi - gaps.sum() if chart.is_circle else 0.0
    slack = 1e4 * float(jnp.finfo(after.dtype).eps)
    check(
        is_done and bool((gaps >= -slack).all()) and around >= -slack,
        f"step {index + 1} of size {tau:.6g} has no solution near the tokens that "
        "keeps their order; take smaller steps.",
    )
