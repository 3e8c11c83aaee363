"""Attention at zero temperature, step by step: leaders, followers and ties."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from meanformer.errors import (
    Unsupported,
    as_finite_array,
    as_integer,
    as_number,
    check,
    check_choice,
    check_known,
)
from meanformer.flows.hardmax.rule import SEVERAL, HardmaxRule
from meanformer.flows.status import Status
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.measures.cloud import TokenCloud, check_cloud
from meanformer.numerics.arrays import norms_of
from meanformer.typing import ArrayLike

TIES = ("merged", "exact", "lowest")


class HardmaxRun(eqx.Module):
    r"""Tokens along steps of hardmax attention, and whom they follow.

    All arrays are of NumPy, in double precision. A step $k$ counts from zero, the
    start.

    Attributes:
        points: the tokens $z_i$ at each step.
        targets: the mean over $C_i$ that each token moves towards.
        followed: the token that each follows, if $C_i$ is one point; otherwise -1.
        is_leader: whether $C_i = \{i\}$; a token equal to $i$ from the start does not
            count as another, nor does one that has come to it since.
        heads: the token that stands for each token in the sets $C_i$: itself, an equal
            one, or the leader that it has come to.
        masses: the weight with which each token counts in the sets $C_i$.
        step: the share $\gamma$ of the way to the target that is gone in a step.
        start: the cloud at the start.
        rule: what decides the sets $C_i$.
    """

    points: Float[np.ndarray, "t n d"]
    targets: Float[np.ndarray, "t n d"]
    followed: Int[np.ndarray, "t n"]
    is_leader: Bool[np.ndarray, "t n"]
    heads: Int[np.ndarray, "t n"]
    masses: Float[np.ndarray, "t n"]
    step: float = eqx.field(static=True)
    start: TokenCloud
    rule: HardmaxRule

    def __len__(self) -> int:
        return len(self.points)

    @property
    def is_tied(self) -> Bool[np.ndarray, "t n"]:
        """Whether several distinct points are followed at once; never by accident."""
        return self.followed == SEVERAL

    @property
    def leaders(self) -> list[list[int]]:
        """The leaders at each step, in order."""
        return [np.flatnonzero(row).tolist() for row in self.is_leader]

    def cloud(self, index: int) -> TokenCloud:
        """Return the token cloud at a step."""
        points = jnp.asarray(self.points[index], self.start.points.dtype)
        return self.start.moved(points)

    def sets(self, index: int) -> Bool[np.ndarray, "n n"]:
        """Return the sets $C_i$ at a step, a row for each token.

        Equal tokens are all in them; not those that have come to their leader since.
        """
        points, masses, first = self.points[index], self.masses[index], self.heads[0]
        is_key = np.asarray(self.start.weights) > 0
        return self.rule.sets(points, points, masses)[:, first] & is_key[None, :]

    @property
    def is_settled(self) -> Bool[np.ndarray, " n"]:
        r"""Which tokens have a limit that is known exactly, after the last step.

        A leader stays one, because the hull of the tokens shrinks; so who follows a
        leader alone follows it for ever. Who is tied between leaders goes to the mean
        of them, if that is tied between them too.
        """
        followed, is_leader = self.followed[-1], self.is_leader[-1]
        is_tied = followed == SEVERAL
        return np.where(is_tied, self._has_steady_tie(is_tied), is_leader[followed])

    def _has_steady_tie(self, is_tied: np.ndarray) -> np.ndarray:
        """Whether leaders alone are followed, and from their mean the same ones."""
        points, masses, goals = self.points[-1], self.masses[-1], self.targets[-1]
        result = np.zeros(len(points), bool)
        if not is_tied.any():
            return result
        sets, at_goals = (
            self.rule.sets(x[is_tied], points, masses) for x in (points, goals)
        )
        # Who has come to the mean shares the tie, and changes nothing.
        reach = self.rule.reach(points)
        gaps = [norms_of(goal[None] - points) for goal in goals[is_tied]]
        others = sets & (np.array(gaps) > reach)
        is_led = ~(others & ~self.is_leader[-1][None, :]).any(axis=1)
        result[is_tied] = is_led & ~(others & ~at_goals).any(axis=1)
        return result

    @property
    def limits(self) -> Float[np.ndarray, "n d"]:
        """Where the tokens go: the exact limit if settled, else where they are."""
        is_settled = self.is_settled[:, None]
        return np.where(is_settled, self.targets[-1], self.points[-1])

    @property
    def leader_of(self) -> Int[np.ndarray, " n"]:
        """The leader that each token goes to; -1 if there is none, or not one."""
        is_one = self.is_settled & (self.followed[-1] != SEVERAL)
        return np.where(is_one, self.followed[-1], SEVERAL)

    def to_trajectory(self) -> Trajectory:
        r"""Return the steps as layers of the flow $\dot z_i = m_i - z_i$.

        The depth of step $k$ is $k\gamma$, and $m_i$ the mean over $C_i$.
        """
        depths = self.step * np.arange(len(self))
        return as_trajectory(
            self.start, depths, self.points, self.targets - self.points
        )


def run_hardmax(
    cloud: TokenCloud,
    count: int,
    *,
    score: ArrayLike | None = None,
    step: float | None = None,
    alpha: float | None = None,
    ties: str = "merged",
    width: float = 0.0,
    tolerance: float = 1e-12,
) -> HardmaxRun:
    r"""Run attention at zero temperature: each token moves to those it scores highest.

    $$z_i \leftarrow z_i + \gamma\,\Bigl(\frac{\sum_{j \in C_i} w_j z_j}
      {\sum_{j \in C_i} w_j} - z_i\Bigr), \qquad
      C_i = \arg\max_j\,\langle Az_i, z_j\rangle ,$$
    with $\gamma = \alpha/(1+\alpha)$ in [AFZ24]. A linear form is largest on a convex
    hull at a vertex, so this is also one step of Frank and Wolfe's method for all
    tokens at once, over their hull [AGR25]. For $A$ symmetric positive definite all
    tokens converge, and generic ones to leaders, tokens with $C_i = \{i\}$, which stay
    [AFZ24]. Any other matrix $A$ is allowed.

    Ties happen in symmetric clouds, and they are unstable. So it matters how they are
    decided, when scores are rounded and followers come to their leaders:

    | `ties` | which tokens tie | what counts in a tie |
    |---|---|---|
    | `"merged"` | scores equal to $\tau\,\lvert Az_i\rvert\lvert z_j\rvert$ | points |
    | `"exact"` | scores equal as floating-point numbers | tokens |
    | `"lowest"` | none: the first of equal scores wins | the order of tokens |

    Merged means: tokens equal at the start are one, with their weights added; and a
    follower that has come to its leader, up to $1000\,\tau$ times the radius, counts no
    more. In exact arithmetic it never gets there; rounded, it would double the weight
    of its leader in the ties of others.

    With a positive width $\delta$ the set is
    $C_i = \{j : \langle Az_i, z_j\rangle \ge \max_l - \delta\}$ ("localmax"; our own
    definition), and every token in it counts with its weight.

    Tokens of weight zero are followed by nobody, but they move. All is computed by
    NumPy in double precision, whatever the type of the cloud.

    Args:
        cloud: the tokens at the start.
        count: the number of steps.
        score: the matrix $A$, or $B$ of Frank and Wolfe; the identity by default.
        step: the share $\gamma$ of the way, in $(0, 1]$; either this or `alpha`.
        alpha: the number $\alpha > 0$ of [AFZ24].
        ties: how ties are decided, see above.
        width: the width $\delta \ge 0$.
        tolerance: the tolerance $\tau$ of the rule `"merged"`.

    Returns:
        The tokens before the first step and after each one, with leaders, ties and
        limits. Cost: $O(n^2 d)$ time a step, two million pairs of memory.
    """
    check_cloud("cloud", cloud)
    otherwise = ", or use run_layers with Hardmax"
    check_known("run_hardmax", cloud.points, cloud.weights, otherwise=otherwise)
    count, size = as_integer("count", count, least=0), _checked_step(step, alpha)
    rule = _checked_rule(cloud.dimension, score, ties, width, tolerance)
    points = np.asarray(cloud.points, np.float64)
    standing = rule.first_representatives(points, np.asarray(cloud.weights, np.float64))
    states = []
    for _ in range(count):
        choice = rule.choose(points, standing)
        states.append((points, choice, standing))
        points = points + size * (choice.targets - points)
        standing = rule.later_representatives(standing, choice, points)
    states.append((points, rule.choose(points, standing), standing))
    points, choices, standings = zip(*states, strict=True)
    chosen = (np.stack(part) for part in zip(*choices, strict=True))
    heads, masses, _ = (np.stack(part) for part in zip(*standings, strict=True))
    return HardmaxRun(np.stack(points), *chosen, heads, masses, size, cloud, rule)


def _checked_step(step: float | None, alpha: float | None) -> float:
    check(
        (step is None) != (alpha is None),
        f"step is {step} and alpha is {alpha}; give one of them, where "
        "step = alpha / (1 + alpha).",
    )
    if alpha is not None:
        allowed = "positive and finite"
        number = as_number("alpha", alpha, allowed, above=0, below=np.inf)
        return number / (1 + number)
    allowed = "above 0 and at most 1, to stay in the hull"
    number = as_number("step", step, allowed, above=0)
    check(number <= 1, f"step is {number}; it must be {allowed}.")
    return number


def _checked_rule(
    dimension: int, score: Any, ties: str, width: float, tolerance: float
) -> HardmaxRule:
    matrix = np.eye(dimension)
    if score is not None:
        array = as_finite_array("score", score, (dimension, dimension))
        matrix = np.asarray(array, np.float64)
    check_choice("ties", ties, TIES)
    allowed = "zero or more, and finite"
    delta = as_number("width", width, allowed, least=0, below=np.inf)
    if ties == "lowest" and delta > 0:
        raise Unsupported(
            f'width is {width} and ties is "lowest", which follows one token only; use '
            'ties="merged" for sets of tokens.'
        )
    return HardmaxRule(matrix, ties, delta, checked_tolerance(tolerance))


def checked_tolerance(tolerance: float) -> float:
    """Return the relative tolerance of ties, or raise."""
    allowed = "zero or more, and below 1e-3"
    return as_number("tolerance", tolerance, allowed, least=0, below=1e-3)


def as_trajectory(
    start: TokenCloud, depths: np.ndarray, points: np.ndarray, velocities: np.ndarray
) -> Trajectory:
    """Return tokens along depth in the type of their start, as a solve leaves them."""
    arrays = (depths, points, velocities)
    steps = jnp.arange(len(depths))
    return Trajectory(
        *(jnp.asarray(array, start.points.dtype) for array in arrays),
        start.weights,
        start.positions,
        None,
        Status.reached,
        steps,
        jnp.zeros_like(steps),
    )
