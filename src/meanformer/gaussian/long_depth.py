"""Following a covariance over many decades of depth."""

import dataclasses
from typing import NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, PyTree

from meanformer.attention import AbstractInContextMap
from meanformer.attention.affine import slope_and_drift
from meanformer.errors import PrecisionWarning, as_number, check, warn
from meanformer.flows import GaussianTrajectory, LongDepth, State, Status
from meanformer.flows.dynamics.stretch import in_clock, run_stretch
from meanformer.flows.solvers import RescaledErrors
from meanformer.flows.status import status_name
from meanformer.gaussian import exponents, velocity
from meanformer.gaussian.explicit import explicit_limit
from meanformer.gaussian.exponents import ENDINGS, UNFINISHED, LongRun
from meanformer.gaussian.velocity import affine_velocity, centred, quiet_solve
from meanformer.measures import Gaussian
from meanformer.numerics.arrays import cast, matmul

# Share of the depth; where less is left to a blow-up, it is reached.
RESOLVED = 1e-9
# Saved depths of a flow, a dozen to a decade.
SAVED = 120
# Roundings of the covariance in its slope.
ROUNDINGS = 16
# Where rounding is a larger share of the slope, the run ends.
COARSE = 1e-5
# Logarithm of the largest trace.
LARGEST = 175.0
# Newton's method ends with an update so small: it converges quadratically, so that what
# is left is rounding. Rounding in the slope, which may be nearly COARSE, stays below.
NEWTON = 3e-6


def limit_of(
    gamma: AbstractInContextMap,
    mu: Gaussian,
    *,
    depth: float = 1e6,
    rtol: float = 1e-9,
    max_steps: int = 4096,
) -> LongRun:
    r"""Follow a covariance over many decades of depth.

    What is integrated is $S = N\Delta N^\top$ with a unit triangular $N$ and the
    logarithms of the pivots $\Delta$: with $LN = NW$ and, for $i < j$,
    $X_{ij} = W_{ij}$, $X_{ji} = -W_{ij}\Delta_j/\Delta_i$, $X_{ii} = W_{ii}$,
    $$\dot N = LN - NX, \qquad \tfrac{\mathrm{d}}{\mathrm{d}t}\log\Delta_i = 2X_{ii}.$$
    So eigenvalues of every size are accurate relatively, and nothing turns that the
    covariance does not turn. The steps are implicit, in a clock that runs with $N$ and
    $\log\Delta$: neither a limit that is reached exponentially, nor one that is
    reached like $1/t$, nor a blow-up takes many steps. A covariance that turns for ever
    does. It is done twice, first with the eigenvectors at depth zero as axes, then
    with those at the end. The run ends where the slope cancels down to rounding. The
    limit is that of the closed form where there is one: softmax with $V = vI$.

    Where the covariance depends on the mean (linear attention) the flow of `solve` is
    taken instead, which follows every turn.

    Args:
        gamma: the velocity, the same at all depths.
        mu: the Gaussian at depth zero.
        depth: how far, in units of the time in which it moves at first.
        rtol: tolerance of the integration, of every eigenvalue.
        max_steps: most steps; where they are used up, the flow of `solve` goes on.
    """
    velocity.check_map(gamma)
    velocity.check_gaussian(mu)
    as_number("depth", depth, "at least 1000", least=1e3)
    check(bool(jnp.any(mu.covariance() != 0)), "the covariance is zero, and stays so.")
    run = _followed(*in_double(gamma, mu), depth, rtol, max_steps)
    return dataclasses.replace(run, limit_factor=explicit_limit(gamma, mu))


def _followed(
    gamma: AbstractInContextMap, mu: Gaussian, depth: float, rtol: float, max_steps: int
) -> LongRun:
    unit = first_time(gamma, mu)
    if mean_matters(gamma, mu):
        return growth_along(long_flow(gamma, mu, depth * unit, rtol))
    numbers = [jnp.asarray(number) for number in (unit, depth * unit, rtol)]
    root = np.asarray(mu.root())

    def followed(axes: np.ndarray) -> LongRun:
        factored = _first_factored(root, axes)
        found = _follow(gamma, jnp.asarray(axes), factored, *numbers, max_steps)
        return _read(axes, *map(np.asarray, found[:3]), found[3])

    run = followed(followed(_range_of(root)[1]).vectors)
    if run.ending != UNFINISHED or run.grows_exponentially:
        return run
    # It may turn: the flow of factors follows that.
    still = centred(factor=mu.root())
    other = growth_along(long_flow(gamma, still, depth * unit, rtol))
    return run if other.depths[-1] < run.depths[-1] else other


def in_double(
    gamma: AbstractInContextMap, mu: Gaussian
) -> tuple[AbstractInContextMap, Gaussian]:
    """Return map and Gaussian in double precision; warn if JAX does not allow it."""
    wide = jnp.result_type(float)
    if jnp.finfo(wide).bits < 64:
        warn(
            "long runs need double precision, and may stay undecided without it: set "
            'jax.config.update("jax_enable_x64", True).',
            PrecisionWarning,
        )
    return cast((gamma, mu), wide)


def mean_matters(gamma: AbstractInContextMap, mu: Gaussian) -> bool:
    """Whether the slope depends on the mean, and this is not zero for ever."""
    resting = centred(mu.covariance())
    drift = slope_and_drift(gamma, resting)[1]
    first = affine_velocity(gamma, resting)[0]
    size = ROUNDINGS**2 * jnp.finfo(first.dtype).eps * jnp.linalg.norm(first)
    for mean in (mu.mean(), mu.mean() + drift):
        slope = affine_velocity(gamma, Gaussian(mean, mu.covariance()))[0]
        if bool(jnp.linalg.norm(slope - first) > size):
            return True
    return False


def long_flow(
    gamma: AbstractInContextMap, mu: Gaussian, depth: float, rtol: float
) -> GaussianTrajectory:
    """Follow the factors of a covariance far, saving a dozen depths to a decade."""
    depths = np.concatenate([[0.0], np.geomspace(1e-9 * depth, depth, SAVED)])
    return quiet_solve(gamma, mu, depth, save=depths, solver=LongDepth(), rtol=rtol)


def growth_along(trajectory: GaussianTrajectory) -> LongRun:
    """Read off a solved flow how its eigenvalues grow and decay.

    The last three decades of its depths should be saved densely.

    Args:
        trajectory: what `solve` returned, best with `LongDepth()`.
    """
    depths = np.asarray(trajectory.depths)
    check(
        len(depths) > 2 and bool(depths[-1] > depths[0] >= 0),
        "growth is read off depths from 0 on, of which at least three are saved.",
    )
    ending = ENDINGS.get(status_name(trajectory.status), UNFINISHED)
    factors = np.asarray(trajectory.factors, np.float64)
    spectra = [exponents.spectrum_of(factor) for factor in factors]
    if factors.shape[1] == factors.shape[2]:
        volumes = 2 * np.asarray(trajectory.log_volumes, np.float64)
        log_det = spectra[0].logs.sum()
        spectra = [
            exponents.completed(spectrum, log_det + volume)
            for spectrum, volume in zip(spectra, volumes, strict=True)
        ]
    return exponents.run_of(depths, ending, spectra)


def first_time(gamma: AbstractInContextMap, mu: Gaussian) -> float:
    """Return the time in which the covariance moves at first; one if it rests."""
    size = float(jnp.linalg.norm(affine_velocity(gamma, mu)[0]))
    return 1 / size if size > 0 else 1.0


class _Factored(NamedTuple):
    r"""The unknowns: triangular factor, logarithms of pivots, logarithm of depth.

    Attributes:
        lower: the matrix $N$ of shape (d, r), its upper square unit triangular.
        log_pivots: the logarithms of the pivots $\Delta$.
        log_depth: $\log(1 + t/t_0)$ for the depth $t$ and a unit $t_0$.
    """

    lower: Float[Array, "d r"]
    log_pivots: Float[Array, " r"]
    log_depth: Float[Array, ""]

    def factor(self) -> Float[Array, "d r"]:
        """Return the factor of the covariance along the axes."""
        return self.lower * jnp.exp(self.log_pivots / 2)[None, :]

    def log_trace(self) -> Float[Array, ""]:
        """Return the logarithm of the trace."""
        return logsumexp(self.log_pivots, b=jnp.sum(self.lower**2, axis=0))


def _first_factored(root: np.ndarray, axes: np.ndarray) -> _Factored:
    """Return a covariance in these axes, as far as its rank goes."""
    rank = _range_of(root)[0]
    vectors, singular, _ = np.linalg.svd(root, full_matrices=False)
    along = axes.T @ (vectors[:, :rank] * singular[:rank])
    lower = np.linalg.qr(along.T)[1].T
    pivots = np.diag(lower)
    log_pivots = 2 * np.log(np.abs(pivots))
    return _Factored(*map(jnp.asarray, (lower / pivots[None, :], log_pivots, 0.0)))


def _range_of(root: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the rank of a factor, and the axes of its covariance."""
    vectors, singular, _ = np.linalg.svd(root)
    rounding = max(root.shape) * np.finfo(root.dtype).eps
    return int(np.sum(singular > rounding * singular[0])), vectors


@eqx.filter_jit
def _follow(
    gamma: AbstractInContextMap,
    axes: Float[Array, "d d"],
    first: _Factored,
    unit: Float[Array, ""],
    end: Float[Array, ""],
    rtol: Float[Array, ""],
    max_steps: int,
) -> tuple[Float[Array, " s"], Float[Array, "s d r"], Float[Array, "s r"], PyTree]:
    """Return depths, $N$ and the logarithms of pivots at every step; and why it ended.

    After the last step they are infinite.
    """

    def slope_at(factor: Float[Array, "d r"]) -> Float[Array, "d d"]:
        slope = affine_velocity(gamma, centred(factor=matmul(axes, factor)))[0]
        return matmul(axes.T, matmul(slope, axes))

    def change(factored: _Factored) -> tuple[Array, Array]:
        """Return the velocities of $N$ and of the logarithms of the pivots."""
        rank = factored.lower.shape[1]
        moved = matmul(slope_at(factored.factor()), factored.lower)
        inner = solve_triangular(
            factored.lower[:rank], moved[:rank], lower=True, unit_diagonal=True
        )
        upper = jnp.triu(inner, 1)
        ratios = jnp.subtract.outer(factored.log_pivots, factored.log_pivots)
        below = jnp.tril(jnp.exp(jnp.minimum(ratios, LARGEST)) * upper.T, -1)
        turning = upper - below + jnp.diag(jnp.diag(inner))
        moved = moved - matmul(factored.lower, turning)
        # The upper square stays unit triangular.
        moved = moved.at[:rank].set(jnp.tril(moved[:rank], -1))
        return moved, 2 * jnp.diag(inner)

    def rate_of(moved: Array, growth: Array) -> Float[Array, ""]:
        return jnp.sqrt(jnp.sum(moved**2) + jnp.sum(growth**2) + 1 / end**2)

    def field(s, factored: _Factored) -> _Factored:
        moved, growth = change(factored)
        rate = rate_of(moved, growth)
        depth = jnp.exp(-factored.log_depth) / (unit * rate)
        return _Factored(moved / rate, growth / rate, depth)

    def depth_of(factored: _Factored) -> Float[Array, ""]:
        return unit * jnp.expm1(factored.log_depth)

    def rounding_of(factored: _Factored) -> Float[Array, ""]:
        """Return what rounding of the covariance does to its slope."""
        size = jnp.exp(factored.log_trace() / 2) / jnp.sqrt(len(axes))
        full = jnp.linalg.norm(slope_at(size * jnp.eye(len(axes))))
        return ROUNDINGS * jnp.finfo(axes.dtype).eps * full

    def rescale(last: _Factored, error: _Factored) -> _Factored:
        # What rounding does cannot be asked for.
        allowed = rtol + rounding_of(last) / rate_of(*change(last))
        scales = _Factored(1 + jnp.abs(last.lower), 1 + jnp.abs(last.log_pivots), 1)
        return jax.tree.map(lambda e, scale: e / (allowed * scale), error, scales)

    def blows_up(depth, factored: _Factored):
        """Return whether the logarithm of the trace grows too fast for the depth."""
        moved, growth = change(factored)
        shares = jnp.exp(factored.log_pivots - factored.log_trace())
        grown = 2 * moved + factored.lower * growth[None, :]
        rate = jnp.sum(shares * jnp.sum(factored.lower * grown, axis=0))
        return rate * depth * RESOLVED > 1

    def unresolved(depth, factored: _Factored):
        least = rounding_of(factored) / COARSE
        return (rate_of(*change(factored)) < least) & (least * (end - depth) > 1)

    one = jnp.ones_like(end)
    controller = diffrax.PIDController(rtol=0 * one, atol=one, norm=optimistix.max_norm)
    stretch = in_clock(
        field,
        first,
        1e-3,
        diffrax.Kvaerno5(root_finder=optimistix.Newton(NEWTON, NEWTON)),
        RescaledErrors(controller, rescale),
        [
            (lambda depth, _: depth >= end, Status.reached),
            (blows_up, Status.blow_up_suspected),
            (lambda _, factored: factored.log_trace() > LARGEST, Status.escaped),
            (unresolved, Status.unresolved),
        ],
        lambda factored: (depth_of(factored), factored),
        lambda factored, met: (depth_of(factored), factored),
    )
    every = stretch._replace(
        path=lambda factored: factored, record=lambda last, times, path: path
    )
    moved = run_stretch(every, State.first(0 * one, first), max_steps)
    path = moved.record
    return jax.vmap(depth_of)(path), path.lower, path.log_pivots, moved.status


def _read(axes: np.ndarray, depths, lower, log_pivots, status: PyTree) -> LongRun:
    """Return the steps that were taken as a run."""
    taken = np.isfinite(depths) & np.isfinite(log_pivots).all(axis=1)
    taken &= np.isfinite(lower).all(axis=(1, 2))
    spectra = [
        exponents.spectrum_of(axes @ matrix, logs)
        for matrix, logs in zip(lower[taken], log_pivots[taken], strict=True)
    ]
    ending = ENDINGS.get(status_name(status), UNFINISHED)
    return exponents.run_of(depths[taken], ending, spectra)
