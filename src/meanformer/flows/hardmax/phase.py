"""Hardmax attention in continuous depth while nobody changes its leader: a formula."""

from typing import NamedTuple

import equinox as eqx
import numpy as np
import scipy.linalg
from jaxtyping import Bool, Float, Int
from numpy.polynomial import chebyshev

from meanformer.errors import Overflow
from meanformer.flows.hardmax.rule import HardmaxRule, Representatives

# A stretch of depth is so long, in units of the norm of the value matrix, that
# polynomials of this degree are margins up to rounding.
STRETCH, DEGREE = 0.25, 12
# Chains of followers that do not end are cut off here: the remainder of the series of
# an exponential of norm one is below 1e-23.
LONGEST_CHAIN = 24
ROOT_SLACK = 1e-9
LARGEST = 1e60


class Sets(NamedTuple):
    """Whom each token follows in a phase.

    Attributes:
        members: the tokens that each one follows, several in a tie.
        shares: the weight of each of them in the mean, a row for each token.
        first: the first one of them.
        is_tied: whether there are several.
    """

    members: Bool[np.ndarray, "n n"]
    shares: Float[np.ndarray, "n n"]
    first: Int[np.ndarray, " n"]
    is_tied: Bool[np.ndarray, " n"]


def sets_of(members: Bool[np.ndarray, "n n"], masses: Float[np.ndarray, " n"]) -> Sets:
    """Return the sets with the weights of their means."""
    weights = np.where(members, masses[None, :], 0.0)
    shares = weights / weights.sum(axis=1, keepdims=True)
    return Sets(members, shares, members.argmax(axis=1), members.sum(axis=1) > 1)


class HardmaxPhase(eqx.Module):
    r"""Tokens between two changes of leaders, by the exponential of a matrix.

    With the constant matrix $P$ of the means over $C_i$,
    $\dot z = (P - I)zV^\top$, so that with $\tau$ the depth since the start
    $$z(\tau) = Rz + \sum_{k<p}\frac{(\tau V)^k}{k!}\,e^{-\tau V}(P^k - R)z ,$$
    where $P^p = R$: chains of followers end at leaders. Where they go round in a circle
    the sum is cut off, and the phase is kept so short that this is far below rounding.

    Attributes:
        start: the depth where it begins.
        end: the depth up to which it holds.
        chain: $z, Pz, P^2z, \dots, Rz$.
        value: the matrix $V$.
        followed: the token that each one follows; -1 in a tie of several.
    """

    start: float
    end: float
    chain: Float[np.ndarray, "k n d"]
    value: Float[np.ndarray, "d d"]
    followed: Int[np.ndarray, " n"]

    def at(self, depths: Float[np.ndarray, " t"]) -> Float[np.ndarray, "t n d"]:
        """Return the tokens at some depths of the phase."""
        times = (depths - self.start)[:, None, None]
        goal = self.chain[-1]
        points = np.broadcast_to(goal, (len(depths), *goal.shape)).copy()
        with np.errstate(over="ignore", invalid="ignore"):
            factors = scipy.linalg.expm(-times * self.value.T)
            for order, link in enumerate(self.chain[:-1]):
                points += (link - goal) @ factors
                factors = factors @ (times * self.value.T) / (order + 1)
        # Scores are products of two, and norms of scores squares of those.
        largest = LARGEST * np.maximum(1, np.abs(self.chain).max())
        if not np.abs(points).max() <= largest:
            raise Overflow(
                f"between depths {depths.min():.6g} and {depths.max():.6g} followers "
                "drift beyond what numbers hold: the value matrix has an eigenvalue "
                "with negative real part; take a smaller depth."
            )
        return points


def chain_of(
    points: Float[np.ndarray, "n d"], shares: Float[np.ndarray, "n n"]
) -> tuple[Float[np.ndarray, "k n d"], bool]:
    """Return the tokens, their means, the means of those, …, and whether this ends."""
    links = [points]
    while len(links) < LONGEST_CHAIN:
        following = shares @ links[-1]
        if np.array_equal(following, links[-1]):
            return np.stack(links), True
        links.append(following)
    return np.stack(links), False


def rates(
    points: Float[np.ndarray, "n d"], velocity: Float[np.ndarray, "n d"], rule
) -> tuple[Float[np.ndarray, "n n"], Float[np.ndarray, "n n"]]:
    r"""Return how fast all scores change, and the sizes of the terms of that.

    $\frac{\mathrm d}{\mathrm dt}\langle Az_i, z_j\rangle
      = \langle A\dot z_i, z_j\rangle + \langle Az_i, \dot z_j\rangle$.
    """
    looks, turns = points @ rule.score.T, velocity @ rule.score.T
    change = turns @ points.T + looks @ velocity.T
    norm = np.linalg.norm
    sizes = np.outer(norm(turns, axis=1), norm(points, axis=1))
    return change, sizes + np.outer(norm(looks, axis=1), norm(velocity, axis=1))


def first_change(
    phase: HardmaxPhase,
    sets: Sets,
    standing: Representatives,
    rule: HardmaxRule,
    start: float,
    stop: float,
) -> float | None:
    r"""Return where in a stretch of a phase a token first prefers another leader.

    The margins $\langle Az_i, z_{f(i)} - z_j\rangle$ are polynomials up to rounding in
    a short stretch. If the coefficients of such a polynomial in Bernstein's basis are
    positive, so is the polynomial: no crossing is missed. Of the others roots are
    computed. Members of a tie must keep equal scores.

    Args:
        phase: the phase.
        sets: whom each token follows in it.
        standing: which tokens can be followed.
        rule: what decides.
        start: depth where the stretch begins.
        stop: depth where it ends.

    Returns:
        The depth of the first change; `None` if there is none.
    """
    depths = start + (stop - start) * _NODES
    points = phase.at(depths)
    keys = np.flatnonzero(standing.masses > 0)
    looks = points @ rule.score.T
    scores = looks @ points[:, keys].transpose(0, 2, 1)
    best = np.einsum("tnd,tnd->tn", looks, points[:, sets.first])
    margins = best[:, :, None] - scores
    is_rival = ~sets.members[:, keys]
    falls = _suspects(margins, is_rival)
    sizes = np.linalg.norm(looks, axis=2).max(axis=0)[:, None] * np.linalg.norm(
        points[:, keys], axis=2
    ).max(axis=0)
    places = [_falling_root(margins[:, i, j]) for i, j in zip(*falls, strict=True)]
    slack = rule.tolerance * sizes
    parts = ~is_rival & (np.abs(margins).max(axis=0) > slack)
    for i, j in zip(*np.nonzero(parts), strict=True):
        places.append(_falling_root(slack[i, j] - np.abs(margins[:, i, j])))
    found = [place for place in places if place is not None]
    return start + (stop - start) * min(found) if found else None


def _suspects(
    margins: Float[np.ndarray, "t n k"], is_rival: Bool[np.ndarray, "n k"]
) -> tuple[np.ndarray, ...]:
    """Pairs whose margin is not positive for certain."""
    smallest = np.einsum("st,tnk->snk", _TO_BERNSTEIN, margins).min(axis=0)
    return np.nonzero(is_rival & ~(smallest > 0))


def _falling_root(values: Float[np.ndarray, " t"]) -> float | None:
    """The first zero in [0, 1] where the polynomial through the nodes falls, if any."""
    scale = np.abs(values).max()
    if scale == 0:
        return None
    series = _TO_CHEBYSHEV @ (values / scale)
    roots = chebyshev.chebroots(series)
    places = np.sort(roots.real[np.abs(roots.imag) < ROOT_SLACK])
    slopes = chebyshev.chebval(places, chebyshev.chebder(series))
    # A zero at the seam of two stretches must not fall between them.
    inside = (np.abs(places) <= 1 + ROOT_SLACK) & (slopes < 0)
    if inside.any():
        return float(np.clip((places[inside][0] + 1) / 2, 0, 1))
    return None


def _bernstein_matrix() -> np.ndarray:
    """From values at the nodes to coefficients in Bernstein's basis."""
    from scipy.special import comb

    orders = np.arange(DEGREE + 1)
    basis = comb(DEGREE, orders) * _NODES[:, None] ** orders
    return np.linalg.inv(basis * (1 - _NODES[:, None]) ** (DEGREE - orders))


_NODES = (1 - np.cos(np.pi * np.arange(DEGREE + 1) / DEGREE)) / 2
_TO_CHEBYSHEV = np.linalg.inv(chebyshev.chebvander(2 * _NODES - 1, DEGREE))
_TO_BERNSTEIN = _bernstein_matrix()
