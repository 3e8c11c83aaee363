"""Solving a flow: tokens from one depth to another, saved on the way."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import (
    InvalidInput,
    QuadratureWarning,
    as_key,
    check,
    is_concrete,
    warn,
)
from meanformer.flows.dynamics import density, gaussian
from meanformer.flows.dynamics.clock import check_long_depth
from meanformer.flows.dynamics.driver import State, drive
from meanformer.flows.dynamics.joining import MergingTokens
from meanformer.flows.dynamics.merging import (
    Merge,
    as_merge,
    check_mergeable,
    initial_atoms,
)
from meanformer.flows.dynamics.recorder import AbstractProgress, AbstractRecorder
from meanformer.flows.dynamics.tokens import Points, Tokens
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import (
    Options,
    check_attainable,
    check_flow,
    checked_probes,
    checked_solver,
    is_forward,
)
from meanformer.flows.solvers import (
    AbstractAdaptive,
    AbstractIntegrator,
    Adaptive,
    LongDepth,
    Spectral,
)
from meanformer.flows.status import AbstractStop, StepBudget
from meanformer.flows.trajectories.density import DensityTrajectory
from meanformer.flows.trajectories.gaussian import GaussianTrajectory
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.measures import (
    AbstractMeasure,
    FourierDensity,
    Gaussian,
    Mixture,
    TokenCloud,
    UniformBall,
    UniformBox,
    UniformSphere,
    wasserstein,
)
from meanformer.measures.quadrature import quadratures_within
from meanformer.typing import ArrayLike, Key

# Nodes of the quadrature of a measure without tokens, at most.
NODES = 500
Stops = AbstractStop | StepBudget | Sequence[AbstractStop | StepBudget]
Number = float | Float[Array, ""]
Depth = Number | tuple[Number, Number]


@overload
def solve(
    flow: Flow,
    mu: TokenCloud | Mixture | UniformBall | UniformBox | UniformSphere,
    depth: Depth,
    *,
    save: int | ArrayLike = ...,
    solver: AbstractIntegrator | None = ...,
    rtol: float = ...,
    atol: float = ...,
    probes: ArrayLike | TokenCloud | None = ...,
    merge: Merge | float | None = ...,
    stop: Stops = ...,
    key: Key | None = ...,
    progress: bool | AbstractProgress = ...,
    store: AbstractRecorder | None = ...,
) -> Trajectory: ...


@overload
def solve(
    flow: Flow,
    mu: Gaussian,
    depth: Depth,
    *,
    save: int | ArrayLike = ...,
    solver: AbstractIntegrator | None = ...,
    rtol: float = ...,
    atol: float = ...,
    stop: Stops = ...,
    progress: bool | AbstractProgress = ...,
    store: AbstractRecorder | None = ...,
) -> GaussianTrajectory: ...


@overload
def solve(
    flow: Flow,
    mu: FourierDensity,
    depth: Depth,
    *,
    save: int | ArrayLike = ...,
    solver: AbstractIntegrator | Spectral | None = ...,
    rtol: float = ...,
    atol: float = ...,
    stop: Stops = ...,
    progress: bool | AbstractProgress = ...,
    store: AbstractRecorder | None = ...,
) -> DensityTrajectory: ...


def solve(
    flow: Flow,
    mu: AbstractMeasure,
    depth: Depth,
    *,
    save: int | ArrayLike = 11,
    solver: AbstractIntegrator | Spectral | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-9,
    probes: ArrayLike | TokenCloud | None = None,
    merge: Merge | float | None = None,
    stop: Stops = (),
    key: Key | None = None,
    progress: bool | AbstractProgress = False,
    store: AbstractRecorder | None = None,
) -> Trajectory | GaussianTrajectory | DensityTrajectory:
    r"""Flow a token cloud, a Gaussian, or a density on the circle, through depth.

    Each stretch between two saved depths is integrated on its own, so what is saved is
    on the path and a run can restart from any of them. The error of a step is the
    largest over tokens of positive weight and probes. Differentiable forward and
    backward (the backward pass keeps checkpoints, not steps; second derivatives take
    long to compile), and usable under `jit` and `vmap`. Derivatives hold the steps
    fixed, and so the depth of the end where a solve ends early; with noise they hold
    the normal numbers that were drawn.

    Never raises because of the flow's behaviour: a solve that cannot reach the depth
    ends with the last good state, a `status` that says why, and a warning
    (`StoppedEarly`) unless it came to rest or met a condition of yours. Under `jit`
    nothing is cut off: the states after the end repeat the last one.

    A `Gaussian` flows exactly, without tokens, where the velocity is affine on it:
    softmax, L2, Sinkhorn and linear attention, heads and sums of them, perceptrons
    without activation. What is integrated are its mean and the matrix $\Phi$ of the
    affine map that carries it, so that the covariance $\Phi S_0\Phi^\top$ is positive
    semi-definite and of constant rank by construction, and so that every eigenvalue of
    it is accurate relatively. Other maps are refused with the reason.

    A `FourierDensity` flows on `Sphere()`, the circle, by the continuity equation of
    its moments, with noise the Fokker-Planck equation: infinitely many tokens, without
    the chance of a sample. Modes are added as they are needed (`Spectral`).

    Any other measure with a `quadrature`, a `Mixture` or `UniformBox` for instance,
    flows as the cloud of its nodes, at most 500. It is solved twice, with half as many
    nodes too: `statistics["quadrature_error"]` is the distance of both clouds in mean
    and covariance at each saved depth (the Wasserstein distance between Gaussians of
    these moments, which that between the clouds exceeds), and a warning
    (`QuadratureWarning`) tells the largest. Pass `quadrature(mu, order)` to choose.

    Args:
        flow: the flow.
        mu: the tokens at the first depth, a Gaussian, or a density on the circle; or
            any measure that has a quadrature.
        depth: the last depth (the first is 0; negative runs backward), or a pair of
            first and last depth.
        save: how many equally spaced depths to save, both ends included; or the
            depths themselves, in order. Both ends are saved also where they are not
            listed; only under `jit`, where depths are traced, they must be. A depth
            at which a schedule jumps, to rounding, is that very depth.
        solver: `Adaptive()` (the default; of order 8 for a Gaussian), `Stiff()`,
            `FixedStep(h)`, `Splitting(h)`, `LongDepth()`; `Spectral()` for a density.
        rtol: relative tolerance of the adaptive solvers.
        atol: absolute tolerance of the adaptive solvers.
        probes: points carried along without being part of the measure; a `TokenCloud`
            to give them positions (at the end of the sequence otherwise).
        merge: join tokens that have met: `Merge(distance)`, or the distance. Such a
            solve has no derivative. `LongDepth()` always merges.
        stop: conditions that end the solve, and `StepBudget(count)`.
        key: random key, for a flow with noise only.
        progress: show a progress bar on standard error; or an object to report to.
        store: where to write the trajectory while it is computed,
            `storage.RunStore(folder)`; a run that is there already is continued.

    Returns:
        The trajectory. Cost for each evaluation of the velocity: that of its sums for
        a cloud, $O(n^2 d)$ where they are exact; $O(d^3)$ for a Gaussian;
        $O(K\log K)$ for a density of $K$ modes where scores depend on angles alone,
        $O(K^2)$ otherwise.
    """
    others = {"probes": probes, "merge": merge, "key": key}
    if isinstance(mu, AbstractMeasure) and not isinstance(mu, FLOWING):
        given = dict(save=save, solver=solver, rtol=rtol, atol=atol, stop=stop)
        given |= {"progress": progress, **others}
        return _by_quadrature(mu, partial(solve, flow, depth=depth, **given), store)
    options = Options(depth, save, solver, rtol, atol, stop)
    if isinstance(mu, FourierDensity):
        dynamics, *start = density.set_up(flow, mu, options, **others)
        return drive(dynamics, *start, progress, store, dynamics.refined).trimmed()
    set_up = gaussian.set_up if isinstance(mu, Gaussian) else tokens_set_up
    return drive(*set_up(flow, mu, options, **others), progress, store)


FLOWING = (TokenCloud, Gaussian, FourierDensity)


def tokens_set_up(
    flow: Flow, mu: TokenCloud, options: Options, *, probes, merge, key
) -> tuple[Any, State, Float[Array, " t"]]:
    """Return tokens, their first state and the depths of a solve, or raise."""
    check_flow(flow, mu)
    dtype = mu.points.dtype
    depths = options.depths(flow, dtype)
    solver = options.solver
    integrator = Adaptive() if solver is None else checked_solver(solver)
    if isinstance(integrator, AbstractAdaptive) and merge is None:
        check_attainable(options.rtol, dtype)
    if (flow.noise is None) != (key is None):
        raise InvalidInput(
            "a flow with noise needs key=jax.random.key(seed)."
            if key is None
            else "key is given but the flow has no noise; leave it out."
        )
    check(
        flow.noise is None or is_forward(depths),
        f"depth is {options.depth}; a flow with noise has no way back: run it forward.",
    )
    key = None if key is None else as_key(key)
    passive, places = checked_probes(flow, mu, probes)
    is_long = isinstance(integrator, LongDepth)
    if is_long:
        check_long_depth(flow, passive is not None)
    settings = options.settings(integrator, dtype, flow.velocity.stops)
    tokens = Tokens(flow, mu, places, settings, key)
    points = Points(mu.points, passive)
    if merge is None and not is_long:
        return tokens, State.first(depths[0], points), depths
    merging = as_merge(merge, dtype)
    check_mergeable(mu, flow.noise is not None, is_forward(depths))
    atoms = initial_atoms(depths[0], mu.points, is_long)
    state = State.first(depths[0], points, atoms)
    return MergingTokens(tokens, merging), state, depths


def _by_quadrature(
    mu: AbstractMeasure,
    solve: Callable[..., Trajectory],
    store: AbstractRecorder | None,
) -> Trajectory:
    """Flow the finest quadrature of few nodes, and tell how far a coarser one is.

    Args:
        mu: the measure.
        solve: flows a cloud, the keyword argument `mu`.
        store: where to write the trajectory of the finer one.
    """
    fine, coarse = quadratures_within(mu, NODES)
    path, rough = solve(mu=fine, store=store), solve(mu=coarse)
    error = _moment_distances(path, rough)
    largest = error.max()
    if is_concrete(largest):
        warn(
            f"a {type(mu).__name__} flows as {fine.count} tokens, the nodes of its "
            f"quadrature; the flow of {coarse.count} nodes is up to "
            f"{float(largest):.2g} away in mean and covariance: pass "
            "quadrature(mu, order) for other nodes.",
            QuadratureWarning,
        )
    return dataclasses.replace(path, quadrature_error=error)


def _moment_distances(path: Trajectory, other: Trajectory) -> Float[Array, " t"]:
    """Return the distance between Gaussians of the same moments at each depth."""
    # One may have ended before the other: then its end is compared.
    same = jnp.minimum(jnp.arange(len(path)), len(other) - 1)
    series = ("mean", "covariance")
    here = [path.statistics[name] for name in series]
    there = [other.statistics[name][same] for name in series]

    def distance(mean, covariance, other_mean, other_covariance):
        return wasserstein(
            Gaussian(mean, covariance), Gaussian(other_mean, other_covariance)
        )

    return jax.vmap(distance)(*here, *there)
