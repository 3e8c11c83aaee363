"""Trajectories of Gaussians: the Gaussian at each saved depth."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from meanformer.errors import is_concrete
from meanformer.flows.status import Status
from meanformer.flows.trajectories.abstract import AbstractTrajectory
from meanformer.flows.trajectories.interpolation import at_depth
from meanformer.measures import AffineMap, Gaussian
from meanformer.numerics.arrays import matmul


class GaussianTrajectory(AbstractTrajectory):
    r"""Gaussians along depth, and the affine maps that carry the first to each.

    $$x \mapsto m(t) + \Phi(t)(x - m(0)), \qquad S(t) = F(t)F(t)^\top, \quad
      F(t) = \Phi(t)F(0).$$

    Attributes:
        depths: the saved depths, from the first on.
        means: the mean at each of them.
        linear: the matrices $\Phi$.
        log_volumes: $\log|\det\Phi|$, also where $\Phi$ is singular to rounding.
        drifts: the velocities of the means.
        slopes: the matrices $L$ of the velocity $\dot m + L(x - m)$.
        root: the factor $F(0)$ of the first covariance.
        status: how the solve ended.
        accepted_steps: steps taken up to each saved depth.
        rejected_steps: steps tried and refused up to each saved depth.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "depth": ("depth",),
        "means": ("depth", "coordinate"),
        "covariances": ("depth", "coordinate", "other"),
        "linear": ("depth", "coordinate", "other"),
        "log_volumes": ("depth",),
        "drifts": ("depth", "coordinate"),
        "slopes": ("depth", "coordinate", "other"),
        "root": ("coordinate", "column"),
        "accepted_steps": ("depth",),
        "rejected_steps": ("depth",),
    }
    UNMOVED: ClassVar[tuple[str, ...]] = ("root",)

    depths: Float[Array, " t"]
    means: Float[Array, "t d"]
    linear: Float[Array, "t d d"]
    log_volumes: Float[Array, " t"]
    drifts: Float[Array, "t d"]
    slopes: Float[Array, "t d d"]
    root: Float[Array, "d r"]
    status: PyTree
    accepted_steps: Int[Array, " t"]
    rejected_steps: Int[Array, " t"]

    @property
    def factors(self) -> Float[Array, "t d r"]:
        r"""The factors $F$ of the covariances $FF^\top$."""
        return matmul(self.linear, self.root)

    @property
    def covariances(self) -> Float[Array, "t d d"]:
        """The covariances, positive semi-definite by construction."""
        return jax.vmap(lambda factor: matmul(factor, factor.T))(self.factors)

    @property
    def blow_up(self) -> Float[Array, ""] | None:
        """Estimate of the depth of a blow-up; `None` if the solve met none.

        The solve ends where less depth is left than a thousandth of the tolerance.
        """
        is_known = is_concrete(self.depths)
        blows_up = is_known and bool(self.status == Status.blow_up_suspected)
        return self.depths[-1] if blows_up else None

    def gaussian(self, index: int) -> Gaussian:
        """Return the Gaussian at a saved depth, by its index."""
        return Gaussian(self.means[index], factor=self.factors[index])

    def at(self, depth: float | Float[Array, ""]) -> Gaussian:
        """Return the Gaussian at any depth in range.

        At a saved depth it is the saved one; between two of them mean and map are
        interpolated cubically, of fourth order in their distance.
        """
        mean, linear = self._carried_to(depth)
        return Gaussian(mean, factor=matmul(linear, self.root))

    def transport(self, depth: float | Float[Array, ""]) -> AffineMap:
        """Return the map that carries points from the first depth to another.

        Push a sample of the first Gaussian forward by it to follow single tokens.
        """
        mean, linear = self._carried_to(depth)
        return AffineMap(linear, mean - matmul(linear, self.means[0]))

    @property
    def statistics(self) -> dict[str, Array]:
        r"""Series along the saved depths: steps, trace, eigenvalues, speed.

        `log_volume` is the logarithm of the factor by which volumes have grown, half
        the change of $\log\det S$; `speed` is the root mean square of the velocity, at
        least the speed in the Wasserstein distance; `participation_ratio`, between one
        and the rank, is $(\operatorname{tr}S)^2/\operatorname{tr}S^2$. Eigenvalues
        below some $10^{-26}$ of the largest are lost in the rounding of $\Phi$; the
        product of all is not: it is in `log_volume`.
        """
        factors = self.factors
        singular = jnp.linalg.svd(factors, compute_uv=False)
        speeds = jnp.sum(matmul(self.slopes, factors) ** 2, axis=(1, 2))
        return {
            "accepted_steps": self.accepted_steps,
            "rejected_steps": self.rejected_steps,
            "trace": jnp.sum(singular**2, axis=1),
            "eigenvalues": singular**2,
            "participation_ratio": _participation(singular),
            "log_volume": self.log_volumes,
            "speed": jnp.sqrt(jnp.sum(self.drifts**2, axis=1) + speeds),
        }

    def columns(self) -> dict[str, Any]:
        """Return the arrays by their names in files, covariances among them."""
        arrays = {"covariances": self.covariances, "root": self.root}
        return arrays | {
            "depth" if name == "depths" else name: array
            for name, array in self.along_depth().items()
            if name != "status"
        }

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Array], status: PyTree
    ) -> "GaussianTrajectory":
        """Return the trajectory that arrays of a file stand for."""
        first = ("depth", "means", "linear", "log_volumes", "drifts", "slopes", "root")
        steps = (columns["accepted_steps"], columns["rejected_steps"])
        return cls(*(columns[name] for name in first), status, *steps)

    def _carried_to(
        self, depth: float | Float[Array, ""]
    ) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
        moving = matmul(self.slopes, self.linear)
        return (
            at_depth(self.depths, depth, self.means, self.drifts),
            at_depth(self.depths, depth, self.linear, moving),
        )


def _participation(singular: Float[Array, "t r"]) -> Float[Array, " t"]:
    """Return the participation ratio, from singular values of factors."""
    largest = jnp.max(singular, axis=1, keepdims=True, initial=0)
    shares = (singular / jnp.where(largest > 0, largest, 1)) ** 2
    squares = jnp.sum(shares**2, axis=1)
    return jnp.sum(shares, axis=1) ** 2 / jnp.where(squares > 0, squares, 1)
