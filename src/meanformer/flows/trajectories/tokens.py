"""What a flow leaves behind: the tokens at the saved depths."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from meanformer.errors import is_concrete
from meanformer.flows.dynamics.merging import (
    ATOM_AXES,
    Atoms,
    Merges,
    atom_arrays,
    record_of,
    series,
)
from meanformer.flows.dynamics.state import State
from meanformer.flows.dynamics.sum_statistics import SumSummary, sum_arrays
from meanformer.flows.flow import Flow
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
from meanformer.measures import TokenCloud


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
        depth = jnp.asarray(depth, self.depths.dtype)
        check_in_range(self.depths, depth)
        if len(self) == 1:
            return self.cloud(0)
        points = hermite(place_of(self.depths, depth), self.points, self.velocities)
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
            **sum_arrays(self.sums),
            **by_nodes,
        }

    def to_xarray(self):
        """Return the trajectory as a labelled `xarray.Dataset`."""
        import xarray

        places, axes = {}, ("depth", "token", "coordinate")
        variables: dict[str, tuple] = {
            "points": (axes, np.asarray(self.points)),
            "velocities": (axes, np.asarray(self.velocities)),
            "weights": (("token",), np.asarray(self.weights)),
            "accepted_steps": (("depth",), np.asarray(self.accepted_steps)),
            "rejected_steps": (("depth",), np.asarray(self.rejected_steps)),
        }
        if self.positions is not None:
            places["position"] = (("token",), np.asarray(self.positions))
        if self.probes is not None:
            axes = ("depth", "probe", "coordinate")
            variables["probes"] = (axes, np.asarray(self.probes))
        if self.atoms is not None:
            arrays = atom_arrays(self.atoms)
            for name, array in arrays.items():
                variables[name] = ("depth", *ATOM_AXES[name]), np.asarray(array)
        for name, array in sum_arrays(self.sums).items():
            variables[name] = ("depth",), np.asarray(array)
        coordinates = {"depth": np.asarray(self.depths), **places}
        variables["status"] = (("depth",), status_codes(self), STATUS_FLAGS)
        return xarray.Dataset(variables, coordinates)

    def along_depth(self) -> tuple:
        """Return the arrays that have one entry for every saved depth."""
        return (
            self.depths,
            self.points,
            self.velocities,
            self.probes,
            self.accepted_steps,
            self.rejected_steps,
            self.atoms,
            self.sums,
        )


def as_trajectory(
    flow: Flow, mu: TokenCloud, states: State, velocities: Float[Array, "t n d"]
) -> Trajectory:
    """Return stacked states as a trajectory, cut off where the solve ended.

    Warns if it ended early without having been asked to. Under `jit` nothing is cut.
    """
    trajectory = Trajectory(
        states.depth,
        states.points,
        velocities,
        mu.weights,
        mu.positions,
        states.probes,
        states.status,
        states.accepted_steps,
        states.rejected_steps,
        states.atoms,
        states.sums,
        flow if is_concrete(states.depth) else None,
    )
    return cut_off(trajectory)
