"""Trajectories of token clouds: the tokens at the saved depths."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from meanformer.errors import as_float_array, check_finite
from meanformer.flows.flow import Flow
from meanformer.flows.trajectories.abstract import (
    AbstractTrajectory,
    arrays_of,
    part_from,
)
from meanformer.flows.trajectories.atoms import (
    ATOM_AXES,
    Atoms,
    Merges,
    record_of,
    series,
)
from meanformer.flows.trajectories.interpolation import at_depth
from meanformer.measures import TokenCloud
from meanformer.numerics.fourier.report import SUM_NAMES, SumSummary


class Trajectory(AbstractTrajectory):
    """Tokens along depth, with the status of the solve that made them.

    Attributes:
        depths: the saved depths, from the first on.
        points: the tokens at each of them.
        velocities: their velocities there.
        weights: the masses, which never change.
        positions: the places in the sequence, which never change; or `None`.
        probes: passive points carried along; or `None`.
        status: how the solve ended.
        accepted_steps: steps taken up to each saved depth.
        rejected_steps: steps tried and refused up to each saved depth.
        atoms: which tokens had joined at each saved depth; `None` without `merge`.
        sums: how accurate fast sums were at each saved depth; `None` without them.
        flow: the flow that made it, where its numbers are known here and now; `None`
            under `jit` and for a trajectory read from a file, unless from a run that
            a configuration describes.
        quadrature_error: how far coarser nodes are in mean and covariance, where the
            tokens are those of a quadrature that `solve` chose; `None` otherwise.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "depth": ("depth",),
        "points": ("depth", "token", "coordinate"),
        "velocities": ("depth", "token", "coordinate"),
        "weights": ("token",),
        "position": ("token",),
        "probes": ("depth", "probe", "coordinate"),
        "accepted_steps": ("depth",),
        "rejected_steps": ("depth",),
        **{name: ("depth", *axes) for name, axes in ATOM_AXES.items()},
        **dict.fromkeys(SUM_NAMES, ("depth",)),
    }
    UNMOVED: ClassVar[tuple[str, ...]] = ("weights", "positions", "flow")

    depths: Float[Array, " t"]
    points: Float[Array, "t n d"]
    velocities: Float[Array, "t n d"]
    weights: Float[Array, " n"]
    positions: Float[Array, " n"] | None
    probes: Float[Array, "t p d"] | None
    status: PyTree
    accepted_steps: Int[Array, " t"]
    rejected_steps: Int[Array, " t"]
    atoms: Atoms | None = None
    sums: SumSummary | None = None
    flow: Flow | None = None
    quadrature_error: Float[Array, " t"] | None = None

    def cloud(self, index: int) -> TokenCloud:
        """Return the token cloud at a saved depth, by its index."""
        return TokenCloud(self.points[index], self.weights, positions=self.positions)

    def at(self, depth: float | Float[Array, ""]) -> TokenCloud:
        """Return the token cloud at any depth in range.

        At a saved depth it is the saved one; between two of them a cubic interpolation
        with the saved velocities, of fourth order in their distance. Where depths are
        far apart, as with `LongDepth`, save those that you look at instead.
        """
        points = at_depth(self.depths, depth, self.points, self.velocities)
        return TokenCloud(points, self.weights, positions=self.positions)

    @property
    def merges(self) -> Merges | None:
        """The joins up to the last saved depth, in order; `None` without `merge`."""
        if self.atoms is None:
            return None
        return record_of(jax.tree.map(lambda leaf: leaf[-1], self.atoms))

    @property
    def statistics(self) -> dict[str, Array]:
        """Series along the saved depths: steps, radius, speed, mean, covariance.

        With `merge` also `atom_count`, the number of atoms; `merge_error`, the sum of
        the distances in $W_2$ by which joins moved the measure; for few tokens
        `log10_merge_bound`, the logarithm of these distances carried along the path by
        the rate at which infinitesimal perturbations of the atoms grow (see
        `growth_factor`): a bound in the limit of small distances, by a trapezoidal sum
        over the steps; the smallest number of the type before the first join. With
        `LongDepth` also `arc_length`.

        Where sums were fast also `sum_bound` and `sum_error`, the largest bound on
        their relative errors and the largest error seen on random samples;
        `patched_queries`, how many single queries were summed exactly; `exact_sums`,
        how many sums were, because fast ones would have been inaccurate. Where `solve`
        chose a quadrature also `quadrature_error`.
        """
        clouds = jax.vmap(lambda points: TokenCloud(points, self.weights))(self.points)
        speeds = jnp.linalg.norm(self.velocities, axis=2)
        present = (self.weights > 0)[None, :]
        merging = {} if self.atoms is None else series(self.atoms, self.weights)
        error = self.quadrature_error
        by_nodes = {} if error is None else {"quadrature_error": error}
        return {
            "accepted_steps": self.accepted_steps,
            "rejected_steps": self.rejected_steps,
            "radius": jax.vmap(TokenCloud.radius)(clouds),
            "speed": jnp.where(present, speeds, 0).max(axis=1),
            "mean": jax.vmap(TokenCloud.mean)(clouds),
            "covariance": jax.vmap(TokenCloud.covariance)(clouds),
            **merging,
            **arrays_of(self.sums, SUM_NAMES),
            **by_nodes,
        }

    def columns(self) -> dict[str, Any]:
        """Return the arrays by their names in files."""
        return {
            "depth": self.depths,
            "points": self.points,
            "velocities": self.velocities,
            "weights": self.weights,
            "position": self.positions,
            "probes": self.probes,
            "accepted_steps": self.accepted_steps,
            "rejected_steps": self.rejected_steps,
            **arrays_of(self.atoms, ATOM_AXES),
            **arrays_of(self.sums, SUM_NAMES),
        }

    @classmethod
    def from_columns(cls, columns: Mapping[str, Array], status: PyTree) -> "Trajectory":
        """Return the trajectory that arrays of a file stand for, without its flow."""
        for name in ("points", "velocities"):
            check_finite(name, as_float_array(name, columns[name]))
        return cls(
            columns["depth"],
            columns["points"],
            columns["velocities"],
            columns["weights"],
            columns.get("position"),
            columns.get("probes"),
            status,
            columns["accepted_steps"],
            columns["rejected_steps"],
            part_from(Atoms, ATOM_AXES, columns),
            part_from(SumSummary, SUM_NAMES, columns),
        )
