"""Attention at zero temperature in continuous depth, exact from leader to leader."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from meanformer.attention import AbstractAttention
from meanformer.errors import (
    Unsupported,
    as_doubles,
    as_number,
    check,
    check_finite,
    check_known,
)
from meanformer.flows.hardmax.constant_leaders import HardmaxPhase, PhaseFinder
from meanformer.flows.hardmax.constant_leaders import LeaderChange as LeaderChange
from meanformer.flows.hardmax.rule import SEVERAL, HardmaxRule
from meanformer.flows.hardmax.steps import (
    HardmaxRun,
    as_trajectory,
    checked_tolerance,
    run_hardmax,
)
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.measures.cloud import TokenCloud, check_cloud
from meanformer.typing import ArrayLike


class HardmaxPath(eqx.Module):
    """Tokens along hardmax attention in continuous depth, and whom they follow.

    All arrays are of NumPy, in double precision.

    Attributes:
        phases: stretches of depth without a change, each with its closed form.
        changes: all changes of leaders of tokens that have a weight, in order.
        start: the cloud at the start.
        rule: what decides the sets of followed tokens.
    """

    phases: tuple[HardmaxPhase, ...]
    changes: tuple[LeaderChange, ...]
    start: TokenCloud
    rule: HardmaxRule

    @property
    def depth(self) -> float:
        """The depth up to which it was computed."""
        return self.phases[-1].end

    def points(self, depths: ArrayLike) -> Float[np.ndarray, "t n d"]:
        """Return the tokens at some depths, exact up to rounding.

        Args:
            depths: any depths in range, in any order.
        """
        places = self._checked(depths)
        index = self._phase_index(places)
        result = np.empty((len(places), *self.phases[0].chain.shape[1:]))
        for phase in np.unique(index):
            chosen = index == phase
            result[chosen] = self.phases[phase].at(places[chosen])
        return result

    def at(self, depth: float) -> TokenCloud:
        """Return the token cloud at a depth."""
        points = self.points([as_number("depth", depth)])[0]
        return self.start.moved(jnp.asarray(points, self.start.points.dtype))

    def followed(self, depths: ArrayLike) -> Int[np.ndarray, "t n"]:
        """Return whom each token follows just after a depth; -1 in a tie of several.

        Args:
            depths: any depths in range, in any order.
        """
        index = self._phase_index(self._checked(depths))
        return np.stack([phase.followed for phase in self.phases])[index]

    @property
    def is_tied(self) -> bool:
        """Whether a token follows several at once, somewhere along depth."""
        present = np.asarray(self.start.weights) > 0
        return any((p.followed[present] == SEVERAL).any() for p in self.phases)

    @property
    def keeps_leaders(self) -> bool:
        r"""Whether leaders stay leaders by theory: $V = \lambda I$, $\lambda > 0$."""
        value = self.phases[0].value
        multiple = value[0, 0] * np.eye(len(value))
        return bool(value[0, 0] > 0 and np.array_equal(value, multiple))

    def settled(self) -> HardmaxRun:
        r"""Return leaders and limits as seen from the last depth.

        Its `limits` are the exact limits of the tokens that are `is_settled` there: for
        $V = \lambda I$, $\lambda > 0$, the hull of the tokens shrinks, leaders stay
        leaders, and who follows a leader alone follows it for ever.
        """
        if not self.keeps_leaders:
            raise Unsupported(
                "the value matrix is no positive multiple of the identity; then tokens "
                "may change their leader at any depth, and only points(depth) is exact."
            )
        return run_hardmax(self.at(self.depth), 0, score=self.rule.score, step=1.0)

    def to_trajectory(self, depths: ArrayLike) -> Trajectory:
        """Return the tokens at increasing depths, as a solve would leave them.

        Args:
            depths: increasing depths in range.
        """
        places = self._checked(depths)
        check(
            bool((np.diff(places) > 0).all()),
            "depths of a trajectory must increase; sort them first.",
        )
        arrays = (places, self.points(places), self._velocities(places))
        return as_trajectory(self.start, *arrays)

    def _velocities(self, places: np.ndarray) -> np.ndarray:
        velocities = []
        for place, index in zip(places, self._phase_index(places), strict=True):
            phase = self.phases[index]
            # The means of the tokens are one further along their chain of followers.
            later = np.append(phase.chain[1:], phase.chain[-1:], axis=0)
            onward = eqx.tree_at(lambda p: p.chain, phase, later)
            here = np.array([place])
            velocities.append((onward.at(here) - phase.at(here))[0] @ phase.value.T)
        return np.stack(velocities)

    def _phase_index(self, places: np.ndarray) -> np.ndarray:
        starts = np.array([phase.start for phase in self.phases])
        return np.searchsorted(starts, places, side="right") - 1

    def _checked(self, depths: ArrayLike) -> np.ndarray:
        places = as_doubles("depths", depths)
        check(
            places.ndim == 1 and len(places) > 0,
            f"depths has shape {places.shape}; it must be a list of depths.",
        )
        check(
            bool(((places >= 0) & (places <= self.depth)).all()),
            f"depths reach from {places.min()} to {places.max()}; they must be between "
            f"0 and {self.depth}.",
        )
        return places


def hardmax_flow(
    attention: AbstractAttention,
    cloud: TokenCloud,
    depth: float,
    *,
    tolerance: float = 1e-12,
) -> HardmaxPath:
    r"""Follow attention at zero temperature in continuous depth, without a solver.

    $$\dot z_i = V\Bigl(\frac{\sum_{j \in C_i} w_j z_j}{\sum_{j \in C_i} w_j}
      - z_i\Bigr), \qquad C_i = \arg\max_j\,\langle Az_i, z_j\rangle ,$$
    the limit $\beta \to \infty$ of $\dot z_i = \sum_j P_{ij}V(z_j - z_i)$ with softmax
    weights $P_{ij}$. While the sets $C_i$ stay the flow is linear, and the exponential
    of a matrix. Where a token first prefers another leader is found by roots of its
    margins, polynomials up to rounding in stretches of depth; no crossing is missed,
    and none is stepped over.

    At a crossing the token turns to the leader whose score grows fastest. For
    $V = \lambda I$, $\lambda > 0$, and $A + A^\top$ positive definite this is
    consistent: turning from $f$ to $j$ makes the margin grow by
    $\lambda\langle A(z_j - z_f), z_j - z_f\rangle > 0$ faster, so ties repel.
    Otherwise a token may slide along a tie, at a velocity that the sets do not tell;
    that raises, with the depth. Exact ties that symmetry preserves (up to `tolerance`,
    as for `run_hardmax`) are kept: the token goes to the mean.

    Tokens of weight zero are followed by nobody, but they move. All is computed by
    NumPy in double precision, whatever the type of the cloud.

    Args:
        attention: `Softmax` or `Hardmax` with a square value matrix and no bias; its
            temperature does not matter.
        cloud: the tokens at the start.
        depth: how far, finite and not negative.
        tolerance: relative tolerance of ties and of equal tokens.

    Returns:
        The path, with all changes of leaders. Cost: $O(n^2 d)$ time for each quarter
        of a unit of depth (over the norm of $V$), and for each change.
    """
    score, value = _checked_attention(attention, cloud)
    allowed = "zero or more, and finite"
    end = as_number("depth", depth, allowed, least=0, below=np.inf)
    rule = HardmaxRule(score, "merged", 0.0, checked_tolerance(tolerance))
    finder = PhaseFinder(rule, value, cloud)
    while finder.place < end:
        finder.advance(end)
    if not finder.phases:
        finder.record(finder.phase(0.0)[0], 0.0)
    return HardmaxPath(tuple(finder.phases), tuple(finder.changes), cloud, rule)


def check_tends_to_hardmax(attention: object) -> None:
    """Raise unless this is hardmax attention, or tends to it as beta grows."""
    check(
        isinstance(attention, AbstractAttention) and attention.tends_to_hardmax,
        f"attention is {type(attention).__name__}; it must be Softmax or Hardmax.",
    )


def _checked_attention(
    attention: AbstractAttention, cloud: TokenCloud
) -> tuple[np.ndarray, np.ndarray]:
    check_cloud("cloud", cloud)
    check_tends_to_hardmax(attention)
    value, dimension = attention.value, cloud.dimension
    check(
        attention.query_bias is None and attention.value_bias is None,
        "attention has a bias; hardmax_flow is for linear queries and values.",
    )
    check(
        value.shape == (dimension, dimension),
        f"value has shape {value.shape} and tokens have dimension {dimension}; it must "
        "be a square matrix of that size.",
    )
    arrays = (cloud.points, cloud.weights, attention.score, value, attention.beta)
    check_known("hardmax_flow", *arrays)
    allowed = "positive; for the repulsive case change the sign of query"
    as_number("beta", attention.beta, allowed, above=0)
    check_finite("score", attention.score)
    check_finite("value", value)
    return np.asarray(attention.score, np.float64), np.asarray(value, np.float64)
