"""What becomes of a Gaussian: blow-up, a limit and its rank, growth, a cycle."""

import dataclasses

import numpy as np

from meanformer.attention import AbstractInContextMap
from meanformer.flows import Status
from meanformer.gaussian.blow_up import blowup_time, proved
from meanformer.gaussian.conjecture.recurrence import early_path, find_return
from meanformer.gaussian.exponents import (
    BLEW_UP,
    ESCAPED,
    UNFINISHED,
    UNRESOLVED,
    LongRun,
)
from meanformer.gaussian.long_run import first_time, limit_of, mean_matters
from meanformer.gaussian.velocity import affine_velocity, check_gaussian
from meanformer.measures import Gaussian

BLOW_UP, CONVERGES, GROWS = "blow-up", "converges", "grows"
PERIODIC, UNDECIDED = "periodic", "undecided"
# Exponents below this are those of exponential decay.
FAST = -30.0
# How long to look for a return, in units of the time in which it moves at first.
WATCHED = 60.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What becomes of a covariance, with the evidence.

    Attributes:
        kind: `"blow-up"`, `"converges"`, `"grows"`, `"periodic"` or `"undecided"`.
        reason: the evidence in words.
        depth: that of the blow-up, or how far the flow was followed.
        rank: the rank of the limit, of one that converges; else `None`.
        normalised_rank: the rank of the limit of the covariance over its trace; it
            differs from `rank` where eigenvalues tend to zero together. `None` where
            there is no such limit.
        limit: the limit of the covariance, of one that converges; else `None`. Where
            the reason does not say that it is known in closed form, it is the last
            covariance without the eigenvalues that tend to zero.
        eigenvalues: of the last covariance, largest first.
        exponents: the power of depth that each follows; `None` where none was found.
        period: that of a periodic one; else `None`.
        lower: a depth before which no blow-up is possible, where one is proved.
        upper: a depth by which it blows up, where one is proved.
    """

    kind: str
    reason: str
    depth: float
    rank: int | None
    normalised_rank: int | None
    limit: np.ndarray | None
    eigenvalues: np.ndarray
    exponents: np.ndarray | None
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
) -> Outcome:
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
        return _of_point(gamma, mu)
    early = early_path(gamma, mu, WATCHED * first_time(gamma, mu))
    if bool(early.status == Status.reached):
        found = find_return(gamma, early)
        if found is not None:
            return Outcome(
                PERIODIC,
                f"the covariance returns after depth {found.period:.10g}, to "
                f"{found.distance:.1e} of its size",
                float(early.depths[-1]),
                None,
                None,
                None,
                np.asarray(early.statistics["eigenvalues"][-1]),
                None,
                period=found.period,
            )
    run = limit_of(gamma, mu, depth=depth, rtol=rtol, max_steps=max_steps)
    return outcome_of(gamma, mu, run, locate=locate)


def outcome_of(
    gamma: AbstractInContextMap, mu: Gaussian, run: LongRun, *, locate: bool = True
) -> Outcome:
    """Judge a long run."""
    reached = float(run.depths[-1])
    found = Outcome(
        UNDECIDED, "", reached, None, None, None, run.eigenvalues, run.exponents
    )
    if run.ending == BLEW_UP:
        if locate:
            bounds = blowup_time(gamma, mu, horizon=2 * reached)
        else:
            bounds = proved(gamma, mu)
        depth = bounds.depth or reached
        return dataclasses.replace(
            found,
            kind=BLOW_UP,
            reason=f"infinite at depth {depth:.8g}",
            depth=depth,
            exponents=None,
            lower=bounds.lower,
            upper=bounds.upper,
        )
    if run.ending == ESCAPED:
        reason = f"beyond all numbers at depth {reached:.6g}, without a blow-up"
        return dataclasses.replace(found, kind=GROWS, reason=reason)
    if run.ending in (UNFINISHED, UNRESOLVED) and run.grows_exponentially:
        reason = f"exponential growth at the rate {run.growth_rates[1]:.6g}"
        return dataclasses.replace(found, kind=GROWS, reason=reason)
    if run.ending == UNFINISHED:
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


def _of_point(gamma: AbstractInContextMap, mu: Gaussian) -> Outcome:
    """Tell whether the mean of a point blows up; its covariance rests until then."""
    bounds, rest = blowup_time(gamma, mu), _at_rest(mu)
    if bounds.depth is None:
        return rest
    return dataclasses.replace(
        rest,
        kind=BLOW_UP,
        reason=f"the mean is infinite at depth {bounds.depth:.8g}",
        depth=bounds.depth,
        rank=None,
        normalised_rank=None,
        limit=None,
        exponents=None,
        lower=bounds.lower,
        upper=bounds.upper,
    )


def _at_rest(mu: Gaussian) -> Outcome:
    spread = np.asarray(mu.covariance(), np.float64)
    eigenvalues = np.linalg.eigvalsh(spread)[::-1]
    rounding = len(spread) * np.finfo(np.asarray(mu.mean()).dtype).eps
    rank = int(np.sum(eigenvalues > rounding * eigenvalues.max(initial=0)))
    exponents = np.zeros(len(spread))
    return Outcome(
        CONVERGES,
        "the covariance is stationary",
        0.0,
        rank,
        rank,
        spread,
        eigenvalues,
        exponents,
    )
