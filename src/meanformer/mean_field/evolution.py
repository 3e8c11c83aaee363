"""The mean field on the circle: a density while it is smooth, tokens afterwards."""

import dataclasses
import warnings

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from meanformer import flows
from meanformer.errors import (
    PrecisionWarning,
    StoppedEarly,
    Unsupported,
    as_integer,
    check_kind,
    warn,
)
from meanformer.flows import Flow
from meanformer.flows.dynamics.density import check_circle_flow
from meanformer.flows.dynamics.density_field import turns_with_queries
from meanformer.flows.dynamics.recorder import NoProgress
from meanformer.flows.inputs import saved_depths
from meanformer.flows.trajectories.interpolation import check_in_range
from meanformer.mean_field.panels import carried, refined
from meanformer.measures import FourierDensity, TokenCloud, circle_moments
from meanformer.typing import ArrayLike

# Tolerances finer than so many roundings only cost steps.
ROUNDINGS = 32
# Tokens there may be unless more modes ask for more.
MANY = 1512
# How many tolerances an error may be without a warning.
SLACK = 1e3


class Evolution(eqx.Module):
    """A measure on the circle along depth, as density first and as tokens later.

    Attributes:
        densities: the densities, up to the hand-over or to the end.
        tokens: weighted tokens from the hand-over on; `None` if there was none.
        error: an estimate of what moments of low order lose by the finite number of
            tokens, the largest along depth; zero if there are none.
    """

    densities: flows.DensityTrajectory
    tokens: flows.Trajectory | None
    error: float = eqx.field(static=True)

    def __str__(self) -> str:
        """Return what there is, and from where to where."""
        first, last = float(self.depths[0]), float(self.depths[-1])
        modes = self.densities.moments.shape[1]
        text = f"depth {first:g} to {last:g}: a density with {modes} modes"
        if self.tokens is None:
            return text
        count = len(self.tokens.weights)
        return f"{text} until {float(self.tokens.depths[0]):.6g}, then {count} tokens"

    @property
    def hand_over(self) -> Float[Array, ""] | None:
        """The depth at which tokens took over; `None` if the density lasted."""
        return None if self.tokens is None else self.tokens.depths[0]

    @property
    def depths(self) -> Float[Array, " t"]:
        """The saved depths; that of the hand-over is among them, once."""
        if self.tokens is None:
            return self.densities.depths
        return jnp.concatenate([self.densities.depths, self.tokens.depths[1:]])

    def measure(self, index: int) -> FourierDensity | TokenCloud:
        """Return the measure at a saved depth, by its index."""
        count = len(self.densities)
        index = range(len(self.depths))[index]
        if index < count or self.tokens is None:
            return self.densities.density(index)
        return self.tokens.cloud(index - count + 1)

    def at(self, depth: float | Float[Array, ""]) -> FourierDensity | TokenCloud:
        """Return the measure at any depth in range."""
        depth = jnp.asarray(depth, self.depths.dtype)
        check_in_range(self.depths, depth)
        if self.tokens is None or not bool(_is_beyond(depth, self.densities.depths)):
            return self.densities.at(depth)
        return self.tokens.at(depth)

    def moments(self, modes: int) -> Float[Array, "t k 2"]:
        r"""Return $(\int\cos k\theta, \int\sin k\theta)$ at all saved depths."""
        measures = (self.measure(index) for index in range(len(self.depths)))
        return jnp.stack([circle_moments(mu, modes) for mu in measures])


def evolve(
    flow: Flow,
    density: FourierDensity,
    depth: float | tuple[float, float],
    *,
    save: int | ArrayLike = 11,
    most_modes: int = 256,
    nodes: int | None = None,
    rtol: float = 1e-9,
    atol: float = 1e-11,
    progress: bool = False,
) -> Evolution:
    r"""Follow infinitely many tokens on the circle, through the forming of clusters.

    The density is solved for as long as `most_modes` of its modes suffice; it steepens
    exponentially while clusters form. Then weighted tokens go on, at the nodes of Gauss
    rules on panels of the circle. Panels are halved where clusters part: there the
    places of tokens become a step, and what equispaced tokens get wrong is the mass of
    one of them. So light tokens are on their way between clusters for long:
    `count_modes` counts clusters by mass, where `count_clusters` would see a chain.

    Args:
        flow: a flow on `Sphere()`, without noise if tokens are to take over.
        density: the measure at the first depth.
        depth: as for `solve`.
        save: as for `solve`; the depth of the hand-over is saved too.
        most_modes: modes up to which the density is solved.
        nodes: how many tokens there may be; four for each mode, or 1512, by default.
        rtol: relative tolerance; one that rounding does not allow is loosened.
        atol: absolute tolerance, likewise.
        progress: show a progress bar on standard error.

    Returns:
        The measures along depth, with an estimate of the error; there is a warning if
        it is more than a thousand times `rtol`.
    """
    how = "make one by FourierDensity.from_function, or move tokens by solve"
    check_kind("density", density, FourierDensity, f"a FourierDensity: {how}")
    check_circle_flow(flow)
    most_modes = as_integer("most_modes", most_modes, least=1)
    nodes = max(4 * most_modes, MANY) if nodes is None else nodes
    nodes = as_integer("nodes", nodes, least=1)
    depths = saved_depths(depth, save, density.moments.dtype, flow.velocity.jumps)
    finest = ROUNDINGS * float(jnp.finfo(depths.dtype).eps)
    options = {"rtol": max(rtol, finest), "atol": max(atol, finest)}
    bar = flows.ProgressBar("following the mean field") if progress else NoProgress()
    if turns_with_queries(flow.velocity):
        # So many modes cost less than a program for each of fewer ones.
        density = density.resized(max(most_modes, density.modes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedEarly)
        smooth = flows.solve(
            flow,
            density,
            (float(depths[0]), float(depths[-1])),
            save=depths,
            # Where clusters part there is little mass: the density must be right there.
            solver=flows.Spectral(most_modes=most_modes, tail=options["rtol"]),
            progress=bar,
            **options,
        )
    is_sharp = bool(smooth.status == flows.Status.unresolved)
    if not (is_sharp or bool(smooth.status == flows.Status.reached)):
        warn(smooth.message, StoppedEarly)
    left = depths[_is_beyond(depths, smooth.depths)]
    if not is_sharp or len(left) == 0:
        return Evolution(smooth, None, 0.0)
    if flow.noise is not None:
        raise Unsupported(
            f"with noise no tokens take over, and {most_modes} modes do not suffice: "
            "pass a larger most_modes."
        )
    late = jnp.append(smooth.depths[-1:], left)
    # Tokens, which need not be sharp, are begun with twice the steps of the density.
    length = float(jnp.abs(late[0] - depths[0]))
    options["step"] = 2 * length / int(smooth.accepted_steps[-1])
    panels = refined(flow, smooth.density(-1), nodes, (late[0], late[-1]), **options)
    tokens = carried(flow, panels, late, progress=bar, **options)
    # Those that are absent stand after the others.
    count = panels.masses.size
    tokens = dataclasses.replace(
        tokens,
        points=tokens.points[:, :count],
        velocities=tokens.velocities[:, :count],
        weights=tokens.weights[:count],
    )
    places = np.asarray(tokens.points).reshape(-1, *panels.places.shape)
    error = float(panels.errors(places).sum(1).max())
    if error > SLACK * options["rtol"]:
        warn(
            f"the tokens that took over at depth {float(late[0]):.6g} have moments "
            f"with an estimated error of {error:.2g}; pass more nodes or a larger "
            "most_modes.",
            PrecisionWarning,
        )
    return Evolution(smooth, tokens, error)


def _is_beyond(
    depths: Float[Array, "*batch"], path: Float[Array, " t"]
) -> Bool[Array, "*batch"]:
    """Return which depths lie beyond the last of a path, forward or backward."""
    return jnp.abs(depths - path[0]) > jnp.abs(path[-1] - path[0])
