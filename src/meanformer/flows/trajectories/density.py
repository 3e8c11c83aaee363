"""What a flow of a density leaves behind: the densities at the saved depths."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from meanformer.flows.dynamics.density_field import DensityState
from meanformer.flows.status import STATUS_FLAGS
from meanformer.flows.trajectories.abstract import (
    AbstractTrajectory,
    cut_off,
    status_codes,
)
from meanformer.flows.trajectories.interpolation import (
    check_in_range,
    hermite,
    place_of,
)
from meanformer.measures import FourierDensity
from meanformer.numerics.special.trigonometric import on_grid


class DensityTrajectory(AbstractTrajectory):
    r"""Densities on the circle along depth.

    Attributes:
        depths: the saved depths, from the first on.
        moments: $(\int\cos k\theta, \int\sin k\theta)$ at each of them, $k = 1, \dots$
        rates: how fast the moments change there.
        status: how the solve ended.
        accepted_steps: steps taken up to each saved depth.
        rejected_steps: steps tried and refused up to each saved depth.
    """

    depths: Float[Array, " t"]
    moments: Float[Array, "t k 2"]
    rates: Float[Array, "t k 2"]
    status: PyTree
    accepted_steps: Int[Array, " t"]
    rejected_steps: Int[Array, " t"]

    def density(self, index: int) -> FourierDensity:
        """Return the density at a saved depth, by its index."""
        return FourierDensity(self.moments[index])

    def at(self, depth: float | Float[Array, ""]) -> FourierDensity:
        """Return the density at any depth in range.

        At a saved depth it is the saved one; between two of them the moments are
        interpolated cubically, of fourth order in their distance.
        """
        depth = jnp.asarray(depth, self.depths.dtype)
        check_in_range(self.depths, depth)
        if len(self) == 1:
            return self.density(0)
        place = place_of(self.depths, depth)
        return FourierDensity(hermite(place, self.moments, self.rates))

    def on_grid(self, count: int) -> Float[Array, "t n"]:
        """Return all densities at equispaced angles, from zero on.

        Args:
            count: how many angles, more than twice the number of modes.
        """
        return jax.vmap(lambda moments: on_grid(moments, count))(self.moments)

    @property
    def statistics(self) -> dict[str, Array]:
        r"""Series along the saved depths: steps, mass, smallest value, tail.

        `mass` is the sum of the density over nodes times their distance; `smallest` the
        least value on the nodes, negative by rounding or where modes lack; `tail` the
        largest coefficient in the last third.
        """
        values = self.on_grid(2 * self.moments.shape[1] + 2)
        return {
            "accepted_steps": self.accepted_steps,
            "rejected_steps": self.rejected_steps,
            "mass": 2 * np.pi * jnp.mean(values, axis=1),
            "smallest": jnp.min(values, axis=1),
            "tail": jax.vmap(lambda m: FourierDensity(m).tail())(self.moments),
        }

    def to_xarray(self):
        """Return the trajectory as a labelled `xarray.Dataset`."""
        import xarray

        axes = ("depth", "degree", "part")
        variables: dict[str, tuple] = {
            "moments": (axes, np.asarray(self.moments)),
            "rates": (axes, np.asarray(self.rates)),
            "accepted_steps": (("depth",), np.asarray(self.accepted_steps)),
            "rejected_steps": (("depth",), np.asarray(self.rejected_steps)),
            "status": (("depth",), status_codes(self), STATUS_FLAGS),
        }
        labels = {
            "depth": np.asarray(self.depths),
            "degree": np.arange(1, self.moments.shape[1] + 1),
            "part": ["cos", "sin"],
        }
        return xarray.Dataset(variables, labels)

    def along_depth(self) -> tuple:
        """Return the arrays that have one entry for every saved depth."""
        return (
            self.depths,
            self.moments,
            self.rates,
            self.accepted_steps,
            self.rejected_steps,
        )


def as_density_trajectory(
    visited: tuple[DensityState, Float[Array, "t k 2"]],
) -> DensityTrajectory:
    """Return stacked states as a trajectory, cut off where the solve ended."""
    states, rates = visited
    trajectory = DensityTrajectory(
        states.depth,
        states.moments,
        rates,
        states.status,
        states.accepted_steps,
        states.rejected_steps,
    )
    return cut_off(trajectory)
