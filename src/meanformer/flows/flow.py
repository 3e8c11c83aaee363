"""A flow: an in-context map that moves the measure it sees, with depth as time."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import as_float_array, check, check_kind, check_shape
from meanformer.flows.schedule import AbstractSchedule, as_schedule
from meanformer.geometry import AbstractSpace, Euclidean
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.typing import ArrayLike, Places


class Flow(eqx.Module):
    r"""Tokens moved by a map of their own measure.

    $$\dot x_i(t) = P_{x_i}\,\Gamma_t[\mu_t](x_i), \qquad
      \mu_t = \sum_i w_i\,\delta_{x_i(t)},$$
    the infinite-depth limit of residual layers $x + h\,\Gamma[\mu](x)$. With noise,
    $\mathrm{d}x_i = P_{x_i}(\Gamma\,\mathrm{d}t + \sigma \circ \mathrm{d}B_i)$, in the
    sense of Stratonovich, with independent Brownian motions.

    Args:
        velocity: the map $\Gamma$, a `Schedule` of maps, or a function from depth to
            a map.
        space: where the tokens live; $P_x$ projects on its tangent space.
        noise: the strength $\sigma$ of the noise; none by default.
    """

    velocity: AbstractSchedule = eqx.field(converter=as_schedule)
    space: AbstractSpace = eqx.field(default=Euclidean(), kw_only=True)
    noise: float | Float[Array, ""] | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        check_kind("space", self.space, AbstractSpace, "a space, such as Sphere()")
        check(
            self.noise is None or jnp.ndim(self.noise) == 0,
            "noise must be one number, the strength of the Brownian motion.",
        )

    def velocity_at(
        self,
        cloud: TokenCloud,
        x: ArrayLike | None = None,
        *,
        depth: float | Float[Array, ""] = 0.0,
        positions: ArrayLike | None = None,
    ) -> Float[Array, "m d"]:
        r"""Return how fast the tokens of a cloud move, or any points among them.

        Args:
            cloud: the tokens that are seen.
            x: the points $x$ at which to take $P_x\Gamma_t[\mu](x)$; the tokens
                themselves by default.
            depth: the depth $t$, for a flow that changes with it.
            positions: the places of the points in the sequence, for masks; by default
                those of the tokens, or the end of it for points of your own.
        """
        check_cloud("cloud", cloud)
        dtype = cloud.points.dtype
        places = None if positions is None else as_float_array("positions", positions)
        if x is None:
            points, places = cloud.points, cloud.positions if places is None else places
        else:
            points = as_float_array("x", x).astype(dtype)
            check_shape("x", points, (None, cloud.dimension))
        if places is None and cloud.positions is not None:
            places = jnp.ones((len(points),), dtype)
        self.space.check(points)
        place = as_float_array("depth", depth).astype(dtype)
        return self.field(place, cloud, points, places)

    def field(
        self,
        depth: Float[Array, ""],
        cloud: TokenCloud,
        x: Float[Array, "m d"],
        positions: Places = None,
    ) -> Float[Array, "m d"]:
        """Return the velocity of any points in the measure of a cloud at a depth.

        Points off the space are first retracted.
        """
        return self.velocity.field(self.space, depth, cloud, x, positions)
