"""Trajectories of densities on the circle: the density at each saved depth."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from meanformer.errors import is_concrete
from meanformer.flows.trajectories.abstract import AbstractTrajectory
from meanformer.flows.trajectories.interpolation import at_depth
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
        modes: how many modes there were at each of them; the others are zero. `None`
            in files from before they were told.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "depth": ("depth",),
        "degree": ("degree",),
        "part": ("part",),
        "moments": ("depth", "degree", "part"),
        "rates": ("depth", "degree", "part"),
        "accepted_steps": ("depth",),
        "rejected_steps": ("depth",),
        "modes": ("depth",),
    }
    UNMOVED: ClassVar[tuple[str, ...]] = ()

    depths: Float[Array, " t"]
    moments: Float[Array, "t k 2"]
    rates: Float[Array, "t k 2"]
    status: PyTree
    accepted_steps: Int[Array, " t"]
    rejected_steps: Int[Array, " t"]
    modes: Int[Array, " t"] | None = None

    def density(self, index: int) -> FourierDensity:
        """Return the density at a saved depth, by its index."""
        return FourierDensity(self.moments[index])

    def at(self, depth: float | Float[Array, ""]) -> FourierDensity:
        """Return the density at any depth in range.

        At a saved depth it is the saved one; between two of them the moments are
        interpolated cubically, of fourth order in their distance.
        """
        return FourierDensity(at_depth(self.depths, depth, self.moments, self.rates))

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

    def columns(self) -> dict[str, Any]:
        """Return the arrays by their names in files, with labels of the moments."""
        return {
            "degree": np.arange(1, self.moments.shape[1] + 1),
            "part": np.array(["cos", "sin"]),
            "depth": self.depths,
            "moments": self.moments,
            "rates": self.rates,
            "accepted_steps": self.accepted_steps,
            "rejected_steps": self.rejected_steps,
            "modes": self.modes,
        }

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Array], status: PyTree
    ) -> "DensityTrajectory":
        """Return the trajectory that arrays of a file stand for."""
        first = (columns[name] for name in ("depth", "moments", "rates"))
        steps = (columns["accepted_steps"], columns["rejected_steps"])
        return cls(*first, status, *steps, columns.get("modes"))

    def trimmed(self) -> "DensityTrajectory":
        """Return the same with as many modes as there are at the depth with most."""
        if self.modes is None or not is_concrete(self.modes):
            return self
        most = int(self.modes.max())
        moments, rates = self.moments[:, :most], self.rates[:, :most]
        return dataclasses.replace(self, moments=moments, rates=rates)
