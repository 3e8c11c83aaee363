"""Flows and networks under a normalisation scheme."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.attention import AbstractInContextMap
from meanformer.attention.abstract import check_map
from meanformer.errors import as_integer, check, check_kind, is_concrete
from meanformer.flows.flow import Flow
from meanformer.flows.layers import checked_step, run_layers
from meanformer.flows.normalisation.schemes import AbstractScheme, NormalisedVelocity
from meanformer.flows.schedule import AbstractSchedule
from meanformer.flows.status import AbstractStop, Snapshot, Status
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.arrays import safe_norm


class Normalised(AbstractSchedule):
    r"""Attention under a normalisation scheme, as the velocity of a flow.

    $$\dot x = g\,\theta + \frac{r}{s}P_\theta A, \qquad x = r\theta,$$
    with $A$ computed on the directions of all tokens. `normalised_flow` puts it on the
    space where it belongs.

    Args:
        attention: the map $A$; any attention, heads, masked or not.
        scheme: where the layer normalises, such as `PreNorm()`.
    """

    attention: AbstractInContextMap
    scheme: AbstractScheme

    def __check_init__(self):
        check_map("attention", self.attention)
        known = "PostNorm(), PreNorm(), PeriNorm(), NGPT(…), MixNorm(…), SqrtScaling()"
        allowed = f"{known} or CustomScheme(…)"
        check_kind("scheme", self.scheme, AbstractScheme, allowed)

    def at(self, depth: Float[Array, ""]) -> NormalisedVelocity:
        """Return the velocity at a depth."""
        return NormalisedVelocity(self.attention, self.scheme, jnp.asarray(depth))

    def kinds(self) -> tuple[AbstractInContextMap, ...]:
        """Return the attention."""
        return (self.attention,)

    def velocity(self, depth, mu, x, positions):
        """Return the velocity of the points."""
        return self.at(depth)(mu, x, positions=positions)

    def terms(self) -> tuple[AbstractSchedule, ...]:
        """Return itself: a normalised sum is not the sum of normalised terms."""
        return (self,)

    @property
    def jumps(self) -> Float[Array, " j"] | None:
        """Where the scheme changes its rule."""
        return self.scheme.jumps

    @property
    def stops(self) -> tuple[AbstractStop, ...]:
        """End a solve where the velocity loses its meaning."""
        return (LostDirection(self),)

    def check(self, mu: TokenCloud) -> None:
        """Raise if a token of positive weight is known to have no velocity."""
        if not (is_concrete(mu.points) and is_concrete(mu.weights)):
            return
        present = np.asarray(mu.weights) > 0
        no_radius = present & (np.asarray(safe_norm(mu.points)) == 0)
        check(
            not no_radius.any(),
            f"token {no_radius.argmax()} is at the origin and has no direction; "
            "normalisation needs tokens other than zero.",
        )
        self.scheme.start.check(mu.points)
        defined = self.at(jnp.zeros(())).defined_at(mu, mu.points, mu.positions)
        lost = present & ~np.asarray(defined)
        check(
            not lost.any(),
            f"{type(self.scheme).__name__} has no meaning at token {lost.argmax()}, "
            "where the attention is zero or the slowness is not positive: move the "
            "tokens off their balance, or normalise by PostNorm or PreNorm.",
        )


class LostDirection(AbstractStop):
    """Stop when a token loses its direction, or the scheme its meaning."""

    schedule: Normalised
    status: ClassVar[PyTree] = Status.undefined

    def __call__(self, snapshot: Snapshot) -> Bool[Array, ""]:
        """Return whether a token of positive weight has no velocity any more."""
        cloud = snapshot.measure
        assert isinstance(cloud, TokenCloud)
        radius = safe_norm(cloud.points)
        near = radius <= jnp.sqrt(jnp.finfo(radius.dtype).eps)
        velocity = self.schedule.at(snapshot.depth)
        near |= ~velocity.defined_at(cloud, cloud.points, cloud.positions)
        return jnp.any(near & (cloud.weights > 0))


def normalised_flow(attention: AbstractInContextMap, scheme: AbstractScheme) -> Flow:
    r"""Return the flow of attention under a normalisation scheme.

    $$\dot\theta_i = \frac{1}{s_i}P_{\theta_i}A_i, \qquad \dot r_i = g_i, \qquad
      x_i = r_i\theta_i .$$

    With $a_i = \langle A_i, \theta_i\rangle$ and $c_i = |A_i|$:

    | scheme | $s_i$ | $g_i$ | gap $1 - \langle\theta_i,\theta_j\rangle$ in the end |
    |---|---|---|---|
    | `PostNorm()` | $1$ | $0$ | $e^{-2t}$ |
    | `PreNorm()` | $r_i$ | $a_i$ | $t^{-2}$ |
    | `PeriNorm()` | $r_ic_i$ | $a_i/c_i$ | $t^{-2}$ |
    | `NGPT(alpha)` | $c_i/\alpha$ | $0$ | $e^{-2\alpha t}$ |
    | `MixNorm(switch)` | $1$, then $r_i$ | $0$, then $a_i$ | $t^{-2}$ |
    | `SqrtScaling()` | $\sqrt{1+t}$ | $0$ | $e^{-4\sqrt t}$ |

    The last column is for softmax attention with $Q = K = V = I$. A solve ends with the
    status `undefined` where a token reaches the origin, or where the attention that a
    scheme divides by vanishes (to rounding, against what a token alone receives), or
    before depth $-1$ under `SqrtScaling()`; such tokens are refused where they are
    known. Steps of fixed size may jump across the origin unnoticed.

    Args:
        attention: the map $A$, computed on directions.
        scheme: where the layer normalises.

    Returns:
        The flow, on the sphere if the scheme keeps the radius at one, else in the
        whole space: `trajectory.points` are then the $r_i\theta_i$.
    """
    schedule = Normalised(attention, scheme)
    return Flow(schedule, space=scheme.space)


class Increments(AbstractSchedule):
    r"""Layers as a velocity whose explicit steps they are: $(\Gamma(x) - x)/h$."""

    layers: AbstractSchedule
    step: Float[Array, ""]

    def at(self, depth: Float[Array, ""]) -> AbstractInContextMap:
        """Return the layer at a depth."""
        return self.layers.at(depth)

    def kinds(self) -> tuple[AbstractInContextMap, ...]:
        """Return the layers."""
        return self.layers.kinds()

    def velocity(self, depth, mu, x, positions):
        """Return what a layer adds to the points, over the step."""
        assert isinstance(mu, TokenCloud)
        moved = self.layers.velocity(depth, mu, x, positions)
        lost = (safe_norm(moved) == 0) & (mu.weights > 0)
        # A token that a layer sends to the origin ends the run.
        moved = jnp.where(lost[:, None], jnp.nan, moved)
        return (moved - x) / self.step.astype(x.dtype)

    def terms(self) -> tuple[AbstractSchedule, ...]:
        """Return itself."""
        return (self,)

    @property
    def jumps(self) -> Float[Array, " j"] | None:
        """Where the next layers take over."""
        return self.layers.jumps


def run_normalised_layers(
    attention: AbstractInContextMap,
    scheme: AbstractScheme,
    mu: TokenCloud,
    count: int,
    *,
    step: float | Float[Array, ""] | None = None,
) -> Trajectory:
    r"""Run the finite residual network of a normalisation scheme.

    Layer $k$ acts at depth $kh$; with the direction $N(x) = x/|x|$ it is

    | scheme | layer |
    |---|---|
    | `PostNorm()` | $N(x + hA[\mu](x))$ |
    | `PreNorm()` | $x + hA[N_\#\mu](N(x))$ |
    | `PeriNorm()` | $x + hN(A[N_\#\mu](N(x)))$ |
    | `NGPT(alpha)` | $N(x + \alpha hN(A[\mu](x)))$ |
    | `SqrtScaling()` | $N(x + hA[\mu](x)/\sqrt{1+kh})$ |

    As $h \to 0$ it tends to `normalised_flow` with an error $O(h)$.

    Args:
        attention: the map $A$.
        scheme: where the layer normalises.
        mu: the tokens that enter.
        count: the number $T$ of layers.
        step: the step $h$; $1/T$ by default, 1 for the usual network.

    Returns:
        The tokens before the first layer and after each one.
    """
    check_cloud("mu", mu)
    schedule = Normalised(attention, scheme)
    schedule.check(mu)
    count = as_integer("count", count, least=1)
    size = checked_step(step, count, mu.points.dtype)
    if is_concrete(size):
        check(bool(size > 0), f"step is {step}; it must be positive.")
    flow = Flow(Increments(scheme.layers(attention, size), size))
    return run_layers(flow, mu, count, step=size)
