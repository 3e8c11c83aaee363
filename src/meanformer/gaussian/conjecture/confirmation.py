"""Confirming what a covariance does, by another method than the first."""

import jax.numpy as jnp
import numpy as np

from meanformer.attention import AbstractInContextMap
from meanformer.gaussian.conjecture.classify import CONVERGES, PERIODIC, Outcome
from meanformer.gaussian.long_run import growth_along, long_flow
from meanformer.gaussian.stationary import certified, polished
from meanformer.gaussian.without_warnings import quiet_solve
from meanformer.measures import Gaussian

# How many more periods, and how close the covariance must be to itself after each.
PERIODS, RETURNED = 10, 1e-5
# How much longer a decay is followed.
LONGER = 100.0
# A stationary covariance is solved for, and must be one to this, near the limit.
STATIONARY, NEAR = 1e-9, 1e-2
# Tolerance of the second look; that of the first is about 1e-9.
PRECISE = 1e-12


def is_confirmed(gamma: AbstractInContextMap, mu: Gaussian, found: Outcome) -> bool:
    r"""Whether another method agrees with what was found.

    - A period: the flow of factors, with a tolerance of 1e-12, returns ten more times.
    - A limit: a stationary covariance of its rank is solved for, starting there; it
      must be one to 1e-9 and lie close.
    - A decay of full rank: the flow of factors, a hundred times longer, with a
      tolerance of 1e-12; all eigenvalues must decay alike over the last two decades.

    What is undecided or without a limit has nothing to be confirmed, and is not.

    Args:
        gamma: the velocity.
        mu: the Gaussian at depth zero.
        found: what `classify` found.
    """
    if found.kind == PERIODIC and found.period is not None:
        return _returns(gamma, mu, found.depth, found.period)
    if found.kind != CONVERGES or found.limit is None:
        return False
    if found.rank:
        return _is_stationary(gamma, found.limit, found.rank)
    return _decays_alike(gamma, mu, found)


def _returns(gamma, mu: Gaussian, late: float, period: float) -> bool:
    depths = np.concatenate([[0.0], late + period * np.arange(PERIODS + 1)])
    path = quiet_solve(gamma, mu, float(depths[-1]), save=depths, rtol=PRECISE)
    if len(path) < len(depths):
        return False
    first, *later = np.asarray(path.covariances)[1:]
    away = [np.linalg.norm(spread - first) for spread in later]
    return bool(max(away) <= RETURNED * np.linalg.norm(first))


def _is_stationary(gamma, limit: np.ndarray, rank: int) -> bool:
    values, vectors = np.linalg.eigh(limit)
    root = vectors[:, -rank:] * np.sqrt(values[-rank:])
    point = certified(gamma, np.asarray(polished(gamma, jnp.asarray(root))))
    away = np.linalg.norm(point.covariance - limit) / np.linalg.norm(limit)
    return bool(point.residual <= STATIONARY and away <= NEAR)


def _decays_alike(gamma, mu: Gaussian, found: Outcome) -> bool:
    run = growth_along(long_flow(gamma, mu, LONGER * found.depth, PRECISE))
    same_rank = run.normalised_rank == found.normalised_rank
    return bool(run.is_settled and run.rank == 0 and same_rank)
