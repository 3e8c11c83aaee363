"""What a covariance does in the long run, read off the growth of its eigenvalues."""

import dataclasses
import itertools
from typing import Any, NamedTuple, cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float
from scipy.optimize import linear_sum_assignment

from meanformer.attention import AbstractInContextMap
from meanformer.attention.affine import slope_and_drift
from meanformer.errors import check
from meanformer.flows import (
    Flow,
    GaussianTrajectory,
    LongDepth,
    Status,
    StepBudget,
    solve,
)
from meanformer.flows.solvers import Rescaled
from meanformer.gaussian.quiet import quietly
from meanformer.gaussian.velocity import (
    affine_velocity,
    centred,
    check_gaussian,
    check_map,
)
from meanformer.measures import Gaussian
from meanformer.numerics.matrices import matmul

# Exponents within so much of zero belong to a limit, below the other to a decay.
LEVEL, DECAY = 0.02, -0.5
# Larger ones belong to a limit too if they fall by this factor in every decade, faster
# than those of the logarithm do.
SMALL, FALLING = 0.1, 0.7
# What grows like a power keeps its exponent from decade to decade.
KEPT = 0.9
# So much larger, at a rate that changes by less than the other while the trace grows
# ten times: exponential growth.
GROWN, STEADY = 1e4, 1.5
# Eigenvalues whose exponents differ by less stay comparable.
COMPARABLE = 0.1
# Logarithm of the ratio of columns that are told apart by their size alone.
SEPARATE = 25.0
# What an eigenvector that stays counts, in changes of the logarithm of its eigenvalue.
OVERLAP = 5.0
# Logarithm of the ratio of eigenvalues of which the smaller is lost in a factor.
ROUNDED = 55.0
# Share of the depth; where less is left to a blow-up, it is reached.
RESOLVED = 1e-9
# Saved depths of a flow, a dozen to a decade, and its most steps between two.
SAVED, STEPS = 120, 4096
# Roundings of the covariance in its slope.
ROUNDINGS = 16
# Where rounding is a larger share of the slope, the run ends.
COARSE = 1e-5
# Logarithm of the largest trace.
LARGEST = 175.0
# Newton's method converges quadratically: what is left is rounding.
NEWTON = 1e-10
REACHED, BLEW_UP, ESCAPED, UNFINISHED = "reached", "blew up", "escaped", "unfinished"
UNRESOLVED = "unresolved"
ENDINGS = (REACHED, BLEW_UP, ESCAPED, UNRESOLVED, UNFINISHED)


@dataclasses.dataclass(frozen=True)
class LongRun:
    r"""A covariance followed over many decades of depth.

    An eigenvalue that tends to zero does so exponentially, and is soon lost in
    rounding, or like a power of depth, here $1/t$ as a rule, so that no threshold tells
    it from a positive limit. The exponent $p = \mathrm{d}\log\lambda/\mathrm{d}\log t$
    does: it tends to $-1$, not to $0$. Eigenvalues are matched from depth to depth by
    their eigenvectors, since they may cross.

    Attributes:
        depths: the depths of the integrator's steps, or those saved.
        log_eigenvalues: the logarithms of the eigenvalues there, largest first; minus
            infinity for those that are zero.
        eigenvectors: the eigenvectors there, as columns.
        ending: `"reached"`, `"blew up"`, `"escaped"` (beyond all numbers),
            `"unresolved"` (the slope cancels down to rounding) or `"unfinished"` (the
            steps were used up).
        exponents: those of the last eigenvalues over the last decade of depth.
        previous_exponents: those over the decade before, to see if they have settled.
    """

    depths: np.ndarray
    log_eigenvalues: np.ndarray
    eigenvectors: np.ndarray
    ending: str
    exponents: np.ndarray
    previous_exponents: np.ndarray

    @property
    def eigenvalues(self) -> np.ndarray:
        """The last eigenvalues, largest first."""
        return np.exp(self.log_eigenvalues[-1])

    @property
    def vectors(self) -> np.ndarray:
        """The last eigenvectors, as columns."""
        return self.eigenvectors[-1]

    @property
    def covariances(self) -> np.ndarray:
        """The covariances at all depths."""
        values, vectors = np.exp(self.log_eigenvalues), self.eigenvectors
        return (vectors * values[:, None, :]) @ vectors.swapaxes(1, 2)

    @property
    def log_traces(self) -> np.ndarray:
        """The logarithms of the traces."""
        return np.logaddexp.reduce(self.log_eigenvalues, axis=1)

    @property
    def is_settled(self) -> bool:
        """Whether every exponent is that of a limit or a decay, and stays so."""
        now, before = self.exponents, self.previous_exponents
        level = (np.abs(now) <= LEVEL) & (np.abs(before) <= LEVEL)
        levels_off = np.abs(now) <= np.minimum(SMALL, FALLING * np.abs(before))
        decays = (now <= DECAY) & (before <= DECAY)
        has_ended = self.ending in (REACHED, UNRESOLVED)
        stay = [p > p.max() - COMPARABLE for p in (now, before)]
        is_steady = np.array_equal(*stay)
        return bool(has_ended and is_steady and (level | levels_off | decays).all())

    @property
    def grows(self) -> bool:
        """Whether the trace grows like a power of depth, or faster."""
        now, before = self.exponents.max(), self.previous_exponents.max()
        return bool(now > max(LEVEL, KEPT * before))

    @property
    def rank(self) -> int:
        """How many eigenvalues do not tend to zero."""
        return int(np.sum(self.exponents > DECAY))

    @property
    def normalised_rank(self) -> int:
        """How many stay comparable to the largest: the rank of the limit of S/tr S."""
        return int(np.sum(self.exponents > self.exponents.max() - COMPARABLE))

    @property
    def limit(self) -> np.ndarray:
        """The last covariance without the eigenvalues that tend to zero."""
        values = np.where(self.exponents > DECAY, self.eigenvalues, 0)
        return (self.vectors * values) @ self.vectors.T

    @property
    def growth_rates(self) -> tuple[float, float]:
        r"""The rate of $\log\operatorname{tr}S$ at a tenth of the last trace, and last.

        They agree for exponential growth; towards a blow-up the second is ten times the
        first. NaN where too few depths are known.
        """
        logs, rates = self.log_traces, np.array([])
        if len(logs) > 1:
            rates = np.diff(logs) / np.diff(self.depths)
        earlier = int(np.searchsorted(logs[1:], logs[-1] - np.log(10)))
        if earlier > len(rates) - 3:
            return np.nan, np.nan
        return float(rates[earlier]), float(rates[-1])

    @property
    def grows_exponentially(self) -> bool:
        """Whether the trace has grown far, at last at a rate that did not change."""
        earlier, last = self.growth_rates
        is_steady = earlier > 0 and earlier / STEADY < last < earlier * STEADY
        grown = self.log_traces[-1] - self.log_traces[0]
        return bool(grown > np.log(GROWN) and is_steady)


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
    with those at the end. The run ends where the slope cancels down to rounding.

    Where the covariance depends on the mean (linear attention) the flow of `solve` is
    taken instead, which follows every turn.

    Args:
        gamma: the velocity, the same at all depths.
        mu: the Gaussian at depth zero.
        depth: how far, in units of the time in which it moves at first.
        rtol: tolerance of the integration, of every eigenvalue.
        max_steps: most steps.
    """
    check_map(gamma)
    check_gaussian(mu)
    check(depth >= 1e3, f"depth is {depth}; it must be at least 1000.")
    check(bool(jnp.any(mu.covariance() != 0)), "the covariance is zero, and stays so.")
    # In the widest type there is: the tolerance is far below single precision.
    gamma, mu = as_wide((gamma, mu))
    unit = first_time(gamma, mu)
    if mean_matters(gamma, mu):
        return growth_along(long_flow(gamma, mu, depth * unit, rtol))
    numbers = [jnp.asarray(number) for number in (unit, depth * unit, rtol)]
    root = np.asarray(mu.root())

    def followed(axes: np.ndarray) -> LongRun:
        walk = _first_walk(root, axes)
        found = _follow(gamma, jnp.asarray(axes), walk, *numbers, max_steps)
        return _read(axes, *map(np.asarray, found))

    run = followed(followed(_range_of(root)[1]).vectors)
    if run.ending != UNFINISHED or run.grows_exponentially:
        return run
    # It may turn: the flow of factors follows that.
    still = centred(factor=mu.root())
    other = growth_along(long_flow(gamma, still, depth * unit, rtol))
    return run if other.depths[-1] < run.depths[-1] else other


def as_wide(tree):
    """Return the same with all numbers in the widest type there is."""
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array_like)
    wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(float)), arrays)
    return eqx.combine(wide, rest)


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
    with quietly():
        return solve(
            Flow(gamma),
            mu,
            depth,
            save=depths,
            solver=LongDepth(),
            rtol=rtol,
            stop=StepBudget(STEPS),
        )


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
    ending = UNFINISHED
    if bool(trajectory.status == Status.blow_up_suspected):
        ending = BLEW_UP
    elif bool(trajectory.status == Status.reached):
        ending = REACHED
    elif bool(trajectory.status == Status.escaped):
        ending = ESCAPED
    factors = np.asarray(trajectory.factors, np.float64)
    spectra = [_spectrum(factor) for factor in factors]
    if factors.shape[1] == factors.shape[2]:
        volumes = 2 * np.asarray(trajectory.log_volumes, np.float64)
        log_det = spectra[0].logs.sum()
        spectra = [
            _completed(spectrum, log_det + volume)
            for spectrum, volume in zip(spectra, volumes, strict=True)
        ]
    return _judged(depths, ending, spectra)


def first_time(gamma: AbstractInContextMap, mu: Gaussian) -> float:
    """Return the time in which the covariance moves at first; one if it rests."""
    size = float(jnp.linalg.norm(affine_velocity(gamma, mu)[0]))
    return 1 / size if size > 0 else 1.0


class _Walk(NamedTuple):
    r"""What is integrated, in numbers of ordinary size.

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


def _first_walk(root: np.ndarray, axes: np.ndarray) -> _Walk:
    """Return a covariance in these axes, as far as its rank goes."""
    rank = _range_of(root)[0]
    vectors, singular, _ = np.linalg.svd(root, full_matrices=False)
    along = axes.T @ (vectors[:, :rank] * singular[:rank])
    lower = np.linalg.qr(along.T)[1].T
    pivots = np.diag(lower)
    log_pivots = 2 * np.log(np.abs(pivots))
    return _Walk(*map(jnp.asarray, (lower / pivots[None, :], log_pivots, 0.0)))


def _range_of(root: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the rank of a factor, and the axes of its covariance."""
    vectors, singular, _ = np.linalg.svd(root)
    rounding = max(root.shape) * np.finfo(root.dtype).eps
    return int(np.sum(singular > rounding * singular[0])), vectors


@eqx.filter_jit
def _follow(
    gamma: AbstractInContextMap,
    axes: Float[Array, "d d"],
    first: _Walk,
    unit: Float[Array, ""],
    end: Float[Array, ""],
    rtol: Float[Array, ""],
    max_steps: int,
) -> tuple[Float[Array, " s"], Float[Array, "s d r"], Float[Array, "s r"], Array]:
    """Return depths, $N$ and the logarithms of pivots at every step; and why it ended.

    After the last step they are infinite.
    """

    def slope_at(factor: Float[Array, "d r"]) -> Float[Array, "d d"]:
        slope = affine_velocity(gamma, centred(factor=matmul(axes, factor)))[0]
        return matmul(axes.T, matmul(slope, axes))

    def change(walk: _Walk) -> tuple[Array, Array]:
        """Return the velocities of $N$ and of the logarithms of the pivots."""
        rank = walk.lower.shape[1]
        moved = matmul(slope_at(walk.factor()), walk.lower)
        inner = solve_triangular(
            walk.lower[:rank], moved[:rank], lower=True, unit_diagonal=True
        )
        upper, ratios = jnp.triu(inner, 1), jnp.subtract.outer(*[walk.log_pivots] * 2)
        below = jnp.tril(jnp.exp(jnp.minimum(ratios, LARGEST)) * upper.T, -1)
        turning = upper - below + jnp.diag(jnp.diag(inner))
        moved = moved - matmul(walk.lower, turning)
        # The upper square stays unit triangular.
        moved = moved.at[:rank].set(jnp.tril(moved[:rank], -1))
        return moved, 2 * jnp.diag(inner)

    def rate_of(moved: Array, growth: Array) -> Float[Array, ""]:
        return jnp.sqrt(jnp.sum(moved**2) + jnp.sum(growth**2) + 1 / end**2)

    def field(s, walk: _Walk, args) -> _Walk:
        moved, growth = change(walk)
        rate = rate_of(moved, growth)
        depth = jnp.exp(-walk.log_depth) / (unit * rate)
        return _Walk(moved / rate, growth / rate, depth)

    def depth_of(walk: _Walk) -> Float[Array, ""]:
        return unit * jnp.expm1(walk.log_depth)

    def rounding_of(walk: _Walk) -> Float[Array, ""]:
        """Return what rounding of the covariance does to its slope."""
        size = jnp.exp(walk.log_trace() / 2) / jnp.sqrt(len(axes))
        full = jnp.linalg.norm(slope_at(size * jnp.eye(len(axes))))
        return ROUNDINGS * jnp.finfo(axes.dtype).eps * full

    def rescale(last: _Walk, error: _Walk) -> _Walk:
        # What rounding does cannot be asked for.
        allowed = rtol + rounding_of(last) / rate_of(*change(last))
        scales = _Walk(1 + jnp.abs(last.lower), 1 + jnp.abs(last.log_pivots), 1)
        return jax.tree.map(lambda e, scale: e / (allowed * scale), error, scales)

    def arrived(s, walk: _Walk, args, **kwargs):
        return depth_of(walk) >= end

    def growth_of(walk: _Walk) -> Float[Array, ""]:
        """Return the rate of the logarithm of the trace."""
        moved, growth = change(walk)
        shares = jnp.exp(walk.log_pivots - walk.log_trace())
        grown = 2 * moved + walk.lower * growth[None, :]
        columns = jnp.sum(walk.lower * grown, axis=0)
        return jnp.sum(shares * columns)

    def blows_up(s, walk: _Walk, args, **kwargs):
        return growth_of(walk) * depth_of(walk) * RESOLVED > 1

    def escaped(s, walk: _Walk, args, **kwargs):
        return walk.log_trace() > LARGEST

    def unresolved(s, walk: _Walk, args, **kwargs):
        least, left = rounding_of(walk) / COARSE, end - depth_of(walk)
        return (rate_of(*change(walk)) < least) & (least * left > 1)

    one = jnp.ones_like(end)
    controller = diffrax.PIDController(rtol=0 * one, atol=one, norm=optimistix.max_norm)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Kvaerno5(root_finder=optimistix.Newton(NEWTON, NEWTON)),
        0 * one,
        jnp.inf * one,
        1e-3 * one,
        first,
        saveat=diffrax.SaveAt(t0=True, steps=True),
        stepsize_controller=Rescaled(controller, rescale),
        event=diffrax.Event([arrived, blows_up, escaped, unresolved]),
        max_steps=max_steps,
        throw=False,
    )
    walk, fired = cast(Any, solution.ys), jnp.stack(cast(Any, solution.event_mask))
    ending = jnp.where(fired.any(), jnp.argmax(fired), len(fired))
    return jax.vmap(depth_of)(walk), walk.lower, walk.log_pivots, ending


def _read(
    axes: np.ndarray,
    depths: np.ndarray,
    lower: np.ndarray,
    log_pivots: np.ndarray,
    ending: np.ndarray,
) -> LongRun:
    """Return the steps that were taken as a run."""
    taken = np.isfinite(depths) & np.isfinite(log_pivots).all(axis=1)
    taken &= np.isfinite(lower).all(axis=(1, 2))
    spectra = [
        _spectrum(axes @ matrix, logs)
        for matrix, logs in zip(lower[taken], log_pivots[taken], strict=True)
    ]
    return _judged(depths[taken], ENDINGS[int(ending)], spectra)


class _Spectrum(NamedTuple):
    """Logarithms of the eigenvalues of a covariance, largest first; eigenvectors."""

    logs: np.ndarray
    vectors: np.ndarray


def _spectrum(factor: np.ndarray, log_scales: np.ndarray | None = None) -> _Spectrum:
    r"""Return the spectrum of $FDF^\top$ to relative accuracy, however graded $D$ is.

    With the columns in the order of their size, $F = QR$, and the diagonal blocks of
    $RD^{1/2}$ that belong to columns of like size have its singular values, up to the
    ratio of these sizes.

    Args:
        factor: the matrix $F$ of shape (d, r).
        log_scales: the logarithms of the diagonal of $D$; zero by default.
    """
    sizes = np.linalg.norm(factor, axis=0)
    with np.errstate(divide="ignore"):
        logs = 2 * np.log(sizes)
    logs = logs if log_scales is None else logs + log_scales
    order = np.argsort(-logs, kind="stable")
    logs = logs[order]
    basis, upper = np.linalg.qr(factor[:, order] / np.where(sizes > 0, sizes, 1)[order],
                                mode="complete")  # fmt: skip
    values = np.full(len(factor), -np.inf)
    starts = [0, *(1 + np.flatnonzero(np.diff(logs) < -SEPARATE)), len(logs)]
    for start, stop in itertools.pairwise(starts):
        if np.isneginf(logs[start]):
            break
        block = upper[start:stop, start:stop]
        scales = np.exp((logs[start:stop] - logs[start]) / 2)
        turn, singular, _ = np.linalg.svd(block * scales[None, :])
        with np.errstate(divide="ignore"):
            values[start:stop] = logs[start] + 2 * np.log(singular)
        basis[:, start:stop] = basis[:, start:stop] @ turn
    ranked = np.argsort(-values, kind="stable")
    return _Spectrum(values[ranked], basis[:, ranked])


def _completed(spectrum: _Spectrum, log_det: float) -> _Spectrum:
    """Give eigenvalues that are lost in rounding their share of the determinant."""
    is_lost = spectrum.logs < spectrum.logs[0] - ROUNDED
    left = log_det - spectrum.logs[~is_lost].sum()
    logs = np.where(is_lost, left / max(is_lost.sum(), 1), spectrum.logs)
    return spectrum._replace(logs=logs)


def _judged(depths: np.ndarray, ending: str, spectra: list[_Spectrum]) -> LongRun:
    """Read the exponents off the eigenvalues, at three depths a decade apart."""
    last = len(depths) - 1
    places = [last]
    for decade in (10, 100):
        early = np.searchsorted(depths, depths[last] / decade, side="right") - 1
        places.append(max(int(early), min(1, last)))
    kept, exponents = np.arange(len(spectra[0].logs)), []
    for later, earlier in itertools.pairwise(places):
        now, then = spectra[later], spectra[earlier]
        order = _matched(_Spectrum(now.logs[kept], now.vectors[:, kept]), then)
        span = np.log(depths[later] / depths[earlier]) if later > earlier else np.inf
        with np.errstate(invalid="ignore"):
            slopes = (now.logs[kept] - then.logs[order]) / span
        exponents.append(np.where(np.isneginf(now.logs[kept]), -np.inf, slopes))
        kept = order
    return LongRun(
        depths,
        np.stack([spectrum.logs for spectrum in spectra]),
        np.stack([spectrum.vectors for spectrum in spectra]),
        ending,
        exponents[0],
        exponents[1],
    )


def _matched(later: _Spectrum, earlier: _Spectrum) -> np.ndarray:
    """Return for each later eigenvalue the number of the earlier one it came from.

    Eigenvalues that cross keep their eigenvectors; a covariance that turns keeps its
    eigenvalues. Which of the two it is shows in the sum of both changes.
    """
    floor = np.log(np.finfo(float).tiny)
    logs = [np.maximum(spectrum.logs, floor) for spectrum in (later, earlier)]
    overlaps = (later.vectors.T @ earlier.vectors) ** 2
    changes = np.abs(np.subtract.outer(*logs))
    return linear_sum_assignment(changes - OVERLAP * overlaps)[1]
