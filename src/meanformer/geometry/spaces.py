"""Where tokens live: projection of velocities, retraction of points, distance."""

import abc

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import check, is_concrete
from meanformer.numerics.arrays import safe_norm, unit_rows

SPHERE_TOLERANCE = 1e-4
Points = Float[Array, "m d"]


class AbstractSpace(eqx.Module):
    """A set of points with tangent spaces, seen from the space it is embedded in."""

    @abc.abstractmethod
    def project(self, x: Points, velocity: Points) -> Points:
        """Return the tangent part of a velocity at each point."""

    @abc.abstractmethod
    def retract(self, x: Points) -> Points:
        """Return the nearest point of the space."""

    @abc.abstractmethod
    def distance(self, x: Points, y: Points) -> Float[Array, " m"]:
        """Return the distance within the space, row by row."""

    @abc.abstractmethod
    def chord(self, distance: Float[Array, ""]) -> Float[Array, ""]:
        """Return how far apart points at this distance are in the space around."""

    @abc.abstractmethod
    def check(self, points: Float[Array, "n d"], name: str = "token") -> None:
        """Raise if the points, called so in the message, do not lie in the space."""


class Euclidean(AbstractSpace):
    r"""The whole of $\mathbb{R}^d$."""

    def project(self, x: Points, velocity: Points) -> Points:
        """Return the velocity unchanged."""
        return velocity

    def retract(self, x: Points) -> Points:
        """Return the points unchanged."""
        return x

    def distance(self, x: Points, y: Points) -> Float[Array, " m"]:
        """Return the Euclidean distance."""
        return safe_norm(x - y)

    def chord(self, distance: Float[Array, ""]) -> Float[Array, ""]:
        """Return the distance itself."""
        return distance

    def check(self, points: Float[Array, "n d"], name: str = "token") -> None:
        """Accept all points."""


class Sphere(AbstractSpace):
    r"""The unit sphere $\mathbb{S}^{d-1}$: layer normalisation in continuous depth."""

    def project(self, x: Points, velocity: Points) -> Points:
        r"""Return $(I - xx^\top)v$ at the unit vector in the direction of `x`."""
        unit = self.retract(x)
        return velocity - jnp.sum(unit * velocity, axis=1, keepdims=True) * unit

    def retract(self, x: Points) -> Points:
        r"""Return $x/|x|$.

        The origin has no nearest point: it is refused if it is known, and stays where
        it is if its value is traced.
        """
        if is_concrete(x):
            is_zero = (np.asarray(x, np.float64) == 0).all(axis=1)
            check(
                not is_zero.any(),
                f"row {is_zero.argmax()} of x is zero; a point must be nonzero to be "
                "brought back to the sphere.",
            )
        return unit_rows(x)

    def distance(self, x: Points, y: Points) -> Float[Array, " m"]:
        r"""Return the angle $2\,\mathrm{atan2}(|x-y|, |x+y|)$, exact at any size.

        Its derivative is zero where it has none: at equal and at opposite points.
        """
        apart, together = safe_norm(x - y), safe_norm(x + y)
        return 2 * jnp.arctan2(apart, together)

    def chord(self, distance: Float[Array, ""]) -> Float[Array, ""]:
        r"""Return $2\sin(\varphi/2)$ for the angle $\varphi$, at most $\pi$."""
        return 2 * jnp.sin(jnp.minimum(distance, jnp.pi) / 2)

    def check(self, points: Float[Array, "n d"], name: str = "token") -> None:
        """Raise if a point is not a unit vector."""
        if not is_concrete(points) or len(points) == 0:
            return
        norms = np.linalg.norm(np.asarray(points, np.float64), axis=1)
        worst = int(np.abs(norms - 1).argmax())
        check(
            abs(norms[worst] - 1) <= SPHERE_TOLERANCE,
            f"{name} {worst} has norm {norms[worst]:.6g}; on the sphere every {name} "
            "must have norm 1: divide the points by their norms first.",
        )
