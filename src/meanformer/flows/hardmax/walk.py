"""Hardmax attention from one change of leaders to the next."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from meanformer.errors import Unsupported
from meanformer.flows.hardmax.phase import (
    STRETCH,
    HardmaxPhase,
    Sets,
    chain_of,
    first_change,
    rates,
    sets_of,
)
from meanformer.flows.hardmax.rule import (
    SEVERAL,
    Choice,
    HardmaxRule,
    Representatives,
    of_size_one,
)
from meanformer.measures.cloud import TokenCloud

# Scores that tie part for good if they change at rates that differ by this much,
# relative to the terms of the rates.
RATE_TOLERANCE = 1e-9
# Changes per token before the flow counts as one that slides.
CHANGES_PER_TOKEN = 200


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


class HardmaxWalk:
    """The state of the flow while phases are being found.

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
        chain, is_finite = chain_of(self.points, self.sets.shares)
        followed = _followed(self.sets)
        return HardmaxPhase(self.place, end, chain, self.value, followed), is_finite

    def advance(self, end: float) -> None:
        """Go through one phase: to a change, to an arrival, or to the end."""
        norm = float(np.linalg.norm(self.value, 2))
        stretch = STRETCH / norm if norm > 0 else end
        phase, is_finite = self.phase(end)
        last = end if is_finite or norm == 0 else min(end, self.place + 1 / norm)
        start, found, standing = self.place, None, self.standing
        while start < last and found is None and standing is self.standing:
            stop = min(start + stretch, last)
            where = (phase, self.sets, standing, self.rule, start, stop)
            found = first_change(*where)
            start = stop if found is None else found
            standing = self.arrivals(phase.at(np.array([start]))[0])
        self.close(phase, start, found is not None, standing)

    def arrivals(self, points: np.ndarray) -> Representatives:
        """Followers that have come to their leader count no more."""
        followed = _followed(self.sets)
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
        after = _followed(self.sets)
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

    def choose(self) -> Sets:
        """Whom each token follows from here on: of a tie, who gains fastest."""
        points, masses = self.points, self.standing.masses
        tied = self.rule.sets(points, points, masses)
        members = tied
        while True:
            sets = sets_of(members, masses)
            velocity = (sets.shares @ points - points) @ self.value.T
            change, sizes = rates(points, velocity, self.rule)
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
        return sets

    def slides(self, why: str) -> Unsupported:
        """Return the error that says where and why the flow cannot go on."""
        return Unsupported(
            f"at depth {self.place:.6g} tokens slide along a tie ({why}), where the "
            "sets of hardmax attention tell no velocity; take steps with run_hardmax, "
            "or Softmax at a low temperature. No token slides if the score is positive "
            "definite and the value a positive multiple of the identity."
        )


def _followed(sets: Sets) -> Int[np.ndarray, " n"]:
    return np.where(sets.is_tied, SEVERAL, sets.first)
