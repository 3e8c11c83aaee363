"""Hardmax attention in continuous depth: phases in which no leader changes."""

from typing import NamedTuple

import equinox as eqx
import numpy as np
import scipy.linalg
from jaxtyping import Bool, Float, Int
from numpy.polynomial import chebyshev
from scipy.special import comb

from meanformer.errors import Overflow, Unsupported
from meanformer.flows.hardmax.rule import (
    SEVERAL,
    Choice,
    HardmaxRule,
    Representatives,
    of_size_one,
)
from meanformer.measures.cloud import TokenCloud

# A stretch of depth is so long, in units of the norm of the value matrix, that
# polynomials of this degree are margins up to rounding.
STRETCH, DEGREE = 0.25, 12
# Chains of followers that do not end are cut off here: the remainder of the series of
# an exponential of norm one is below 1e-23.
LONGEST_CHAIN = 24
ROOT_SLACK = 1e-9
LARGEST = 1e60
# Scores that tie part for good if they change at rates that differ by this much,
# relative to the terms of the rates.
RATE_TOLERANCE = 1e-9
# Changes per token before the flow counts as one that slides.
CHANGES_PER_TOKEN = 200


class LeaderSets(NamedTuple):
    """The tokens that each token follows, and their shares, in one phase.

    Attributes:
        members: the tokens that each one follows, several in a tie.
        shares: the weight of each of them in the mean, a row for each token.
    """

    members: Bool[np.ndarray, "n n"]
    shares: Float[np.ndarray, "n n"]

    @property
    def followed(self) -> Int[np.ndarray, " n"]:
        """The token that each one follows; -1 in a tie of several."""
        is_tied = self.members.sum(axis=1) > 1
        return np.where(is_tied, SEVERAL, self.members.argmax(axis=1))


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
    first = places[inside][:1]
    return float(np.clip((first[0] + 1) / 2, 0, 1)) if len(first) else None


class LeaderChange(NamedTuple):
    """A token turns from one leader to another.

    Attributes:
        depth: where.
        token: which token.
        before: whom it followed before; -1 for a tie of several.
        after: whom it follows then; -1 for a tie of several.
    """

    depth: float
    token: int
    before: int
    after: int


class PhaseFinder:
    """Finds the phases of the flow one after another, and keeps them.

    Tokens and score are divided by powers of two, which changes no choice and no digit,
    so that products of them stay in range.
    """

    def __init__(self, rule: HardmaxRule, value: np.ndarray, cloud: TokenCloud):
        score, _ = of_size_one(rule.score)
        self.rule = HardmaxRule(score, rule.ties, rule.width, rule.tolerance)
        self.value = value
        points = np.asarray(cloud.points, np.float64)
        self.points, self.scale = of_size_one(points)
        weights = np.asarray(cloud.weights, np.float64)
        self.has_weight = weights > 0
        self.standing = rule.first_representatives(self.points, weights)
        self.place, self.turns = 0.0, 0
        self.phases: list[HardmaxPhase] = []
        self.changes: list[LeaderChange] = []
        self.sets = self.choose()

    def phase(self, end: float) -> tuple[HardmaxPhase, bool]:
        """Return the phase that begins here, and whether its series is finite."""
        links, is_finite = [self.points], False
        while len(links) < LONGEST_CHAIN and not is_finite:
            links.append(self.sets.shares @ links[-1])
            is_finite = np.array_equal(links[-1], links[-2])
        # The tokens, their means, the means of those, …
        chain = np.stack(links[:-1] if is_finite else links)
        phase = HardmaxPhase(self.place, end, chain, self.value, self.sets.followed)
        return phase, is_finite

    def advance(self, end: float) -> None:
        """Go through one phase: to a change, to an arrival, or to the end."""
        norm = float(np.linalg.norm(self.value, 2))
        stretch = STRETCH / norm if norm > 0 else end
        phase, is_finite = self.phase(end)
        last = end if is_finite or norm == 0 else min(end, self.place + 1 / norm)
        start, found, standing = self.place, None, self.standing
        while start < last and found is None and standing is self.standing:
            stop = min(start + stretch, last)
            found = self.first_change(phase, start, stop)
            start = stop if found is None else found
            standing = self.arrivals(phase.at(np.array([start]))[0])
        self.close(phase, start, found is not None, standing)

    def first_change(
        self, phase: HardmaxPhase, start: float, stop: float
    ) -> float | None:
        r"""Return where in a stretch of a phase a token first prefers another leader.

        The margins $\langle Az_i, z_{f(i)} - z_j\rangle$ are polynomials up to rounding
        in a short stretch. If the coefficients of such a polynomial in Bernstein's
        basis are positive, so is the polynomial: no crossing is missed. Of the others
        roots are computed. Members of a tie must keep equal scores.
        """
        depths = start + (stop - start) * _NODES
        points = phase.at(depths)
        keys = np.flatnonzero(self.standing.masses > 0)
        first = self.sets.members.argmax(axis=1)
        looks = points @ self.rule.score.T
        scores = looks @ points[:, keys].transpose(0, 2, 1)
        best = np.einsum("tnd,tnd->tn", looks, points[:, first])
        margins = best[:, :, None] - scores
        is_rival = ~self.sets.members[:, keys]
        # Pairs whose margin is not positive for certain.
        smallest = np.einsum("st,tnk->snk", _TO_BERNSTEIN, margins).min(axis=0)
        falls = np.nonzero(is_rival & ~(smallest > 0))
        norms = (
            np.linalg.norm(x, axis=2).max(axis=0) for x in (looks, points[:, keys])
        )
        places = [_falling_root(margins[:, i, j]) for i, j in zip(*falls, strict=True)]
        slack = self.rule.tolerance * np.outer(*norms)
        parts = ~is_rival & (np.abs(margins).max(axis=0) > slack)
        for i, j in zip(*np.nonzero(parts), strict=True):
            places.append(_falling_root(slack[i, j] - np.abs(margins[:, i, j])))
        found = [place for place in places if place is not None]
        return start + (stop - start) * min(found) if found else None

    def arrivals(self, points: np.ndarray) -> Representatives:
        """Return who stands for whom, followers that reached their leader left out."""
        followed = self.sets.followed
        standing = self.standing
        is_own = (followed == standing.heads) & ~standing.is_absorbed
        choice = Choice(points, followed, is_own & (standing.masses > 0))
        later = self.rule.later_representatives(standing, choice, points)
        return standing if np.array_equal(later.heads, standing.heads) else later

    def close(
        self, phase: HardmaxPhase, end: float, turns: bool, standing: Representatives
    ) -> None:
        """End a phase, and choose anew."""
        self.points = phase.at(np.array([end]))[0]
        if end > phase.start:
            self.record(phase, end)
        self.place, self.standing = end, standing
        self.turns += turns
        if self.turns > CHANGES_PER_TOKEN * len(self.points):
            raise self.slides(f"{self.turns} changes of leaders")
        before, self.sets = phase.followed, self.choose()
        after = self.sets.followed
        # Who followed a token that has come to its leader follows the leader now.
        known = np.where(before == SEVERAL, SEVERAL, standing.heads[before])
        for token in np.flatnonzero((after != known) & self.has_weight):
            change = (end, int(token), int(before[token]), int(after[token]))
            self.changes.append(LeaderChange(*change))

    def record(self, phase: HardmaxPhase, end: float) -> None:
        """Keep a phase, in the original scale."""
        chain = self.scale * phase.chain
        kept = HardmaxPhase(phase.start, end, chain, phase.value, phase.followed)
        self.phases.append(kept)

    def choose(self) -> LeaderSets:
        """Whom each token follows from here on: of a tie, who gains fastest."""
        points, masses = self.points, self.standing.masses
        tied = self.rule.sets(points, points, masses)
        members = tied
        while True:
            weights = np.where(members, masses[None, :], 0.0)
            shares = weights / weights.sum(axis=1, keepdims=True)
            velocity = (shares @ points - points) @ self.value.T
            change, sizes = self.rates(velocity)
            best = np.where(members, change, -np.inf).max(axis=1, keepdims=True)
            slack = RATE_TOLERANCE * np.where(tied, sizes, 0).max(axis=1, keepdims=True)
            kept = members & (change >= best - slack)
            if np.array_equal(kept, members):
                break
            members = kept
        gains = tied & ~members & (change > best + slack)
        if gains.any():
            token = int(np.flatnonzero(gains.any(axis=1))[0])
            raise self.slides(f"token {token} turns back as soon as it turns")
        return LeaderSets(members, shares)

    def rates(
        self, velocity: Float[np.ndarray, "n d"]
    ) -> tuple[Float[np.ndarray, "n n"], Float[np.ndarray, "n n"]]:
        r"""Return how fast all scores change, and the sizes of the terms of that.

        $\frac{\mathrm d}{\mathrm dt}\langle Az_i, z_j\rangle
          = \langle A\dot z_i, z_j\rangle + \langle Az_i, \dot z_j\rangle$.
        """
        points = self.points
        looks, turns = points @ self.rule.score.T, velocity @ self.rule.score.T
        change = turns @ points.T + looks @ velocity.T
        norm = np.linalg.norm
        sizes = np.outer(norm(turns, axis=1), norm(points, axis=1))
        return change, sizes + np.outer(norm(looks, axis=1), norm(velocity, axis=1))

    def slides(self, why: str) -> Unsupported:
        """Return the error that says where and why the flow cannot go on."""
        return Unsupported(
            f"at depth {self.place:.6g} tokens slide along a tie ({why}), where the "
            "sets of hardmax attention tell no velocity; take steps with run_hardmax, "
            "or Softmax at a low temperature. No token slides if the score is positive "
            "definite and the value a positive multiple of the identity."
        )


def _bernstein_matrix() -> np.ndarray:
    """Return the matrix from values at the nodes to Bernstein coefficients."""
    orders = np.arange(DEGREE + 1)
    basis = comb(DEGREE, orders) * _NODES[:, None] ** orders
    return np.linalg.inv(basis * (1 - _NODES[:, None]) ** (DEGREE - orders))


_NODES = (1 - np.cos(np.pi * np.arange(DEGREE + 1) / DEGREE)) / 2
_TO_CHEBYSHEV = np.linalg.inv(chebyshev.chebvander(2 * _NODES - 1, DEGREE))
_TO_BERNSTEIN = _bernstein_matrix()
