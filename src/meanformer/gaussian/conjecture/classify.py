"""Classify flows of Gaussians: blow-up, limits and their rank, growth, cycles."""

import dataclasses
from typing import NamedTuple, cast

import numpy as np
from scipy.optimize import brentq

from meanformer.attention import AbstractInContextMap
from meanformer.flows import Adaptive, Flow, GaussianTrajectory, Status, solve
from meanformer.gaussian import exponents
from meanformer.gaussian.blow_up import BlowUp, blowup_time, proved
from meanformer.gaussian.exponents import LongRun
from meanformer.gaussian.long_depth import first_time, limit_of, mean_matters
from meanformer.gaussian.stationary import covariance_velocity
from meanformer.gaussian.velocity import affine_velocity, check_gaussian, quiet_solve
from meanformer.measures import Gaussian

BLOW_UP, CONVERGES, GROWS = "blow-up", "converges", "grows"
PERIODIC, UNDECIDED = "periodic", "undecided"
# Exponents below this are those of exponential decay.
FAST = -30.0
# How long to look for a return, in units of the time in which it moves at first.
WATCHED = 60.0
# Depths at which it is watched.
SAVED = 801
# A path is looked at more closely where it comes so close, in units of its extent.
NEAR = 0.2
RETURNED = 1e-9
MOVED = 1e-3


@dataclasses.dataclass(frozen=True)
class Classification:
    """Whether a covariance blows up, converges, grows or returns, and the evidence.

    Attributes:
        kind: `"blow-up"`, `"converges"`, `"grows"`, `"periodic"` or `"undecided"`.
        reason: the evidence in words.
        depth: that of the blow-up, or how far the flow was followed.
        eigenvalues: of the last covariance, largest first.
        rank: the rank of the limit, of one that converges; else `None`.
        normalised_rank: the rank of the limit of the covariance over its trace; it
            differs from `rank` where eigenvalues tend to zero together. `None` where
            there is no such limit.
        limit: the limit of the covariance, of one that converges; else `None`. Where
            the reason does not say that it is known in closed form, it is the last
            covariance without the eigenvalues that tend to zero.
        exponents: the power of depth that each follows; `None` where none was found.
        period: that of a periodic one; else `None`.
        lower: a depth before which no blow-up is possible, where one is proved.
        upper: a depth by which it blows up, where one is proved.
    """

    kind: str
    reason: str
    depth: float
    eigenvalues: np.ndarray
    rank: int | None = None
    normalised_rank: int | None = None
    limit: np.ndarray | None = None
    exponents: np.ndarray | None = None
    period: float | None = None
    lower: float | None = None
    upper: float | None = None


def classify(
    gamma: AbstractInContextMap,
    mu: Gaussian,
    *,
    depth: float = 1e6,
    rtol: float = 1e-9,
    max_steps: int = 4096,
    locate: bool = True,
) -> Classification:
    r"""Tell whether a covariance blows up, converges, grows or returns.

    A short stretch is searched for a return to an earlier covariance. Then the flow is
    followed over many decades of depth, and the exponent of each eigenvalue tells a
    positive limit from a decay to zero. What is neither is reported as undecided.

    Args:
        gamma: the velocity, the same at all depths.
        mu: the Gaussian at depth zero.
        depth: how far to follow it, in units of the time in which it moves at first.
        rtol: relative tolerance of the integration.
        max_steps: most steps of the long run.
        locate: integrate again for the depth of a blow-up, to more digits.
    """
    check_gaussian(mu)
    slope = affine_velocity(gamma, mu)[0]
    if not np.any(np.asarray(slope @ mu.root())) and not mean_matters(gamma, mu):
        return _at_rest(mu)
    if not np.any(np.asarray(mu.covariance())):
        # The covariance rests until the mean blows up, if it does.
        bounds, rest = blowup_time(gamma, mu), _at_rest(mu)
        if bounds.depth is None:
            return rest
        reason = f"the mean is infinite at depth {bounds.depth:.8g}"
        return _blown_up(rest, reason, bounds.depth, bounds)
    watched = WATCHED * first_time(gamma, mu)
    early = quiet_solve(gamma, mu, watched, save=SAVED, rtol=1e-11, steps=20_000)
    found = find_return(gamma, early)
    if found is not None:
        reason = f"the covariance returns after depth {found.period:.10g}, to "
        reason += f"{found.distance:.1e} of its size"
        end, last = float(early.depths[-1]), early.statistics["eigenvalues"][-1]
        known = PERIODIC, reason, end, np.asarray(last)
        return Classification(*known, period=found.period)
    run = limit_of(gamma, mu, depth=depth, rtol=rtol, max_steps=max_steps)
    return classify_run(gamma, mu, run, locate=locate)


def classify_run(
    gamma: AbstractInContextMap, mu: Gaussian, run: LongRun, *, locate: bool = True
) -> Classification:
    """Tell what a covariance does from a flow that was followed far."""
    reached = float(run.depths[-1])
    known = UNDECIDED, "", reached, run.eigenvalues
    found = Classification(*known, exponents=run.exponents)
    if run.ending == exponents.BLEW_UP:
        if locate:
            bounds = blowup_time(gamma, mu, horizon=2 * reached)
        else:
            bounds = proved(gamma, mu)
        depth = bounds.depth or reached
        return _blown_up(found, f"infinite at depth {depth:.8g}", depth, bounds)
    if run.ending == exponents.ESCAPED:
        reason = f"beyond all numbers at depth {reached:.6g}, without a blow-up"
        return dataclasses.replace(found, kind=GROWS, reason=reason)
    has_ended_early = run.ending in (exponents.UNFINISHED, exponents.UNRESOLVED)
    if has_ended_early and run.grows_exponentially:
        reason = f"exponential growth at the rate {run.growth_rates[1]:.6g}"
        return dataclasses.replace(found, kind=GROWS, reason=reason)
    if run.ending == exponents.UNFINISHED:
        reason = f"the steps were used up at depth {reached:.6g}"
        return dataclasses.replace(found, reason=reason)
    powers = ", ".join("gone" if p < FAST else f"{p:+.3f}" for p in run.exponents)
    found = dataclasses.replace(found, normalised_rank=run.normalised_rank)
    is_known = run.limit_factor is not None
    reason = f"eigenvalues go with the powers {powers} of depth"
    if run.grows:
        return dataclasses.replace(found, kind=GROWS, reason=reason)
    if not (run.is_settled or is_known):
        reason = f"powers {powers} of depth are neither those of a limit nor of a decay"
        return dataclasses.replace(found, reason=reason)
    return dataclasses.replace(
        found,
        kind=CONVERGES,
        reason=reason + ("; the limit is known in closed form" if is_known else ""),
        rank=run.rank,
        limit=run.limit,
    )


def _blown_up(
    found: Classification, reason: str, depth: float, bounds: BlowUp
) -> Classification:
    known = BLOW_UP, reason, depth, found.eigenvalues
    return Classification(*known, lower=bounds.lower, upper=bounds.upper)


def _at_rest(mu: Gaussian) -> Classification:
    spread = np.asarray(mu.covariance(), np.float64)
    eigenvalues = np.linalg.eigvalsh(spread)[::-1]
    rounding = len(spread) * np.finfo(np.asarray(mu.mean()).dtype).eps
    rank = int(np.sum(eigenvalues > rounding * eigenvalues.max(initial=0)))
    found = eigenvalues, rank, rank, spread, np.zeros(len(spread))
    return Classification(CONVERGES, "the covariance is stationary", 0.0, *found)


class Return(NamedTuple):
    """The depth after which a covariance comes back, and how far from its first place.

    The distance is relative to its size.
    """

    period: float
    distance: float


def find_return(gamma: AbstractInContextMap, path: GaussianTrajectory) -> Return | None:
    """Look for a return to the first covariance, or to that half way.

    The second finds a cycle that a path only approaches. One that ended early has none.
    """
    if not bool(path.status == Status.reached):
        return None
    spreads = np.asarray(path.covariances)
    for start in (0, len(spreads) // 2):
        found = _return_to(gamma, path, spreads, start)
        if found is not None:
            return found
    return None


def _return_to(gamma, path, spreads: np.ndarray, start: int) -> Return | None:
    size = np.linalg.norm(spreads[start])
    distances = np.linalg.norm(spreads[start:] - spreads[start], axis=(1, 2))
    if size == 0 or distances.max() < MOVED * size:
        return None
    # The largest distance is among them.
    left = np.flatnonzero(distances > NEAR * distances.max())
    for index in range(left[0] + 1, len(distances) - 1):
        near = distances[index] < NEAR * distances.max()
        if near and distances[index - 1 : index + 2].min() == distances[index]:
            found = _refined(gamma, path, spreads, start, start + index, size)
            if found.distance < RETURNED:
                return found
    return None


def _refined(gamma, path, spreads, start: int, index: int, size: float) -> Return:
    """Find the closest approach between the neighbours of a saved depth."""
    depths, before = np.asarray(path.depths), path.gaussian(index - 1)
    first, spacing = float(depths[index - 1]), float(depths[index] - depths[index - 1])

    def at(share: float) -> tuple[float, np.ndarray]:
        """Return whether the covariance still approaches, and how far it is."""
        span = first, first + spacing * share
        options = {"save": 2, "rtol": 1e-12, "solver": Adaptive()}
        spread = solve(Flow(gamma), before, span, **options).covariances[-1]
        away = np.asarray(spread - spreads[start]) / size
        velocity = np.asarray(covariance_velocity(gamma, spread)) * spacing / size
        return float(np.sum(away * velocity)), away

    low, high = 1e-3, float(depths[index + 1] - first) / spacing
    if at(low)[0] * at(high)[0] > 0:
        return Return(float(depths[index] - depths[start]), np.inf)
    root = brentq(lambda share: at(share)[0], low, high, xtol=1e-15, rtol=1e-14)
    share = cast(float, root)
    period = first - float(depths[start]) + spacing * share
    return Return(period, float(np.linalg.norm(at(share)[1])))
