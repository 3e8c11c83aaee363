"""Leaders and followers, and the closed form once every token attends to one."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meanformer.attention import AbstractAttention
from meanformer.errors import Overflow, as_number, check
from meanformer.numerics.growth import ScaledExponential

# Rounding of an attention matrix is far below this, and a share that still counts
# far above.
SHARP = 1e-6
# Later depths at which the choices are looked at: how many, the first and the last in
# units of the growth rate, and the last in units of the smallest gap of rates.
LATER, FIRST_GROWTH, LAST_GROWTH, LAST_GAP = 81, 1e-3, 1e3, 100.0
# Powers of e beyond which one term outweighs another whatever its factor.
OUTWEIGHED = 300.0
# An exponential of a matrix: the logarithm of a scale, and the rest.
Growth = tuple[float, np.ndarray]
TINY = float(np.finfo(float).tiny)


class Following(eqx.Module):
    r"""Whom each token attends to most, and how exclusively.

    Attributes:
        follows: for each token the index of the one with the largest share of its row.
        spread: what the row gives to all others, $1 - \max_j P_{ij}$; the distance of
            the row to the closest basis vector, in the largest entry.
        is_leader: tokens that attend to themselves alone, $P_{ii} > 1 - \varepsilon$.
        is_boolean: rows with a single entry, up to $\varepsilon$.
        rank: number of singular values of the matrix above $\varepsilon$.
    """

    follows: Int[np.ndarray, " n"]
    spread: Float[np.ndarray, " n"]
    is_leader: Bool[np.ndarray, " n"]
    is_boolean: Bool[np.ndarray, " n"]
    rank: int

    @property
    def leaders(self) -> Int[np.ndarray, " k"]:
        """Indices of the leaders."""
        return np.flatnonzero(self.is_leader)

    @property
    def chosen(self) -> Int[np.ndarray, " k"]:
        """Indices of the tokens that somebody follows."""
        return np.unique(self.follows)


def find_leaders(
    matrix: Float[Array, "m n"] | np.ndarray, *, tolerance: float = SHARP
) -> Following:
    r"""Read off an attention matrix who follows whom.

    Args:
        matrix: the matrix $P$, one row for each token; `attention_matrix` makes it.
        tolerance: the $\varepsilon$ of `Following`, absolute.

    Returns:
        Followers, leaders and rank. Cost: one singular value decomposition.
    """
    tolerance = as_number(
        "tolerance", tolerance, "between 0 and one half", above=0, below=0.5
    )
    shares = np.asarray(matrix, np.float64)
    check(
        shares.ndim == 2 and shares.shape[0] == shares.shape[1],
        f"matrix has shape {shares.shape}; it must be square, one row per token; for "
        "several heads give one of them.",
    )
    sums = shares.sum(axis=1)
    off = np.abs(sums - 1)
    check(
        bool(off.max(initial=0) < 1e-3),
        f"a row sums to {sums[off.argmax()] if len(sums) else 0:.4g}; leaders are read "
        "off rows that sum to one.",
    )
    largest = shares.max(axis=1)
    return Following(
        shares.argmax(axis=1),
        1 - largest,
        np.diagonal(shares) > 1 - tolerance,
        largest > 1 - tolerance,
        attention_rank(shares, tolerance=tolerance),
    )


def attention_rank(
    matrix: Float[Array, "m n"] | np.ndarray, *, tolerance: float = SHARP
) -> int:
    """Count the singular values of a matrix above an absolute tolerance.

    A relative tolerance near rounding would count noise: the rows of an attention
    matrix sum to one, so that its scale is known.

    Args:
        matrix: the matrix.
        tolerance: the smallest singular value that counts.
    """
    values = np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)
    return int((values > tolerance).sum())


class BooleanPhase(eqx.Module):
    r"""Tokens that attend to one token each: a linear flow, solved exactly.

    With $\Pi$ the map from a token to the one it follows, $\dot z = (\Pi - I)zV^\top$.
    If no choices go round in a circle, $\Pi^p = R$ maps every token to its final
    leader, and with $\tau = t - t_0$
    $$z(t) = Rz + \sum_{k<p} \frac{(\tau V)^k}{k!}\,e^{-\tau V}(\Pi^k - R)z,$$
    where $z = z(t_0)$: leaders rest; followers reach their leader along eigenvectors of
    $V$ with positive eigenvalues and drift away along those with negative ones.

    Attributes:
        depth: the depth $t_0$ where it begins.
        points: rescaled tokens there.
        value: the matrix $V$.
        follows: the token that each one follows, $\Pi$.
        leaders: the final leader of each token, $R$.
        length: longest chain of followers, $p$.
    """

    depth: float
    points: Float[np.ndarray, "n d"]
    value: Float[np.ndarray, "d d"]
    follows: Int[np.ndarray, " n"]
    leaders: Int[np.ndarray, " n"]
    length: int

    def at(self, depth: float | Float[Array, ""]) -> Float[np.ndarray, "n d"]:
        """Return the rescaled tokens at a later depth."""
        later = float(depth) - self.depth
        check(later >= 0, f"depth is {depth}; the phase begins at {self.depth}.")
        log_scale, matrix = _growths(-self.value, np.array([later]))[0]
        drift = self.drift(later) @ matrix.T
        size = np.abs(drift).max(initial=0)
        if size > 0 and log_scale + math.log(size) > 700:
            raise Overflow(
                f"at depth {float(depth):.6g} followers have drifted beyond what "
                "numbers hold; look at the coordinates that settle instead."
            )
        return self.points[self.leaders] + np.exp(min(log_scale, 700.0)) * drift

    def drift(self, later: float) -> Float[np.ndarray, "n d"]:
        r"""Return $\sum_{k<p}(\tau V)^k(\Pi^k - R)z/k!$, before $e^{-\tau V}$ acts."""
        goal, total = self.points[self.leaders], np.zeros_like(self.points)
        ends, power = np.arange(len(self.points)), np.eye(len(self.value))
        for step in range(self.length):
            total += (self.points[ends] - goal) @ power.T
            ends, power = self.follows[ends], later / (step + 1) * self.value @ power
        return total

    def distances(
        self,
        depth: float | Float[Array, ""],
        functionals: Float[np.ndarray, "k d"],
        values: Float[np.ndarray, " k"],
    ) -> Float[np.ndarray, "n k"]:
        r"""Return the distances of tokens to their leaders along eigenvectors of $V$.

        $\varphi^*(z_i - z_{R(i)})$ for left eigenvectors $V^\top\varphi^* =
        \lambda\varphi^*$: small ones are accurate also where others are huge.

        Args:
            depth: a later depth.
            functionals: the left eigenvectors, one per row.
            values: their eigenvalues.
        """
        later = float(depth) - self.depth
        check(later >= 0, f"depth is {depth}; the phase begins at {self.depth}.")
        goal = self.points[self.leaders]
        total = np.zeros((len(self.points), len(values)))
        ends, factor = np.arange(len(self.points)), np.exp(-later * values)
        for step in range(self.length):
            total += factor * ((self.points[ends] - goal) @ functionals.T)
            ends, factor = self.follows[ends], factor * later * values / (step + 1)
        return total

    def lasts(
        self, attention: AbstractAttention, *, accuracy: float
    ) -> Float[np.ndarray, " n"]:
        r"""Return by how much each token's choice wins, at the worst later depth.

        For token $i$ that follows $l$ the smallest over $j$ of the cosine of $Qx_i$ and
        $K(x_l - x_j)$, times the distance of the two at first over the diameter:
        positive if the choice stands at all later depths that were looked at, not above
        `accuracy` if the points are not accurate enough to tell. Tokens of one place do
        not compete.

        Args:
            attention: the layer in original coordinates.
            accuracy: relative error of the points.
        """
        times = self._later()
        growths = _growths(self.value, self.depth + times)
        margins = [
            self._margins(attention, later, growths[0], growth, accuracy)
            for later, growth in zip(times, growths, strict=True)
        ]
        return np.min(margins, axis=0)

    def _later(self) -> np.ndarray:
        """Later depths: up to where also the closest eigenvalue has fallen behind."""
        rates = np.sort(np.real(np.linalg.eigvals(self.value)))[::-1]
        rate = rates[0] if rates[0] > 0 else 1.0
        gaps = rates[0] - rates
        slowest = np.min(gaps[gaps > 1e-9 * abs(rate)], initial=rate)
        last = max(LAST_GROWTH / rate, LAST_GAP / slowest)
        return np.append(0.0, np.geomspace(FIRST_GROWTH / rate, last, LATER))

    def _margins(self, attention, later, then, now, accuracy: float) -> np.ndarray:
        tokens, apart = self._original(later, then, now)
        keys, queries = (np.asarray(m, float) for m in (attention.key, attention.query))
        looks = tokens @ queries.T
        if attention.query_bias is not None:
            # The scale of the tokens is dropped; a bias counts for less and less.
            scale = np.exp(-min(now[0], OUTWEIGHED))
            looks = looks + scale * np.asarray(attention.query_bias, float)
        lengths = np.linalg.norm(looks, axis=1)
        margins = np.full(len(tokens), np.inf)
        diameter = max(np.ptp(self.points, axis=0).max(initial=0), TINY)
        for chosen in np.unique(self.follows):
            followers = self.follows == chosen
            gaps = np.abs(self.points[chosen] - self.points).max(axis=1) / diameter
            rivals = gaps > accuracy
            others = apart(int(chosen))[rivals] @ keys.T
            sizes = lengths[followers, None] * np.linalg.norm(others, axis=1)
            cosines = looks[followers] @ others.T / np.maximum(sizes, TINY)
            margins[followers] = (cosines * gaps[rivals]).min(axis=1, initial=np.inf)
        return margins

    def _original(self, later: float, then: Growth, now: Growth):
        r"""Return tokens and their differences in original coordinates, scaled."""
        # x = e^{tV} R z + e^{t_0 V} D: the second term is what tells followers of one
        # leader apart, and is not computed as a difference.
        goal = self.points[self.leaders]
        growth = np.exp(min(now[0] - then[0], OUTWEIGHED))
        far = growth * goal @ now[1].T
        near = self.drift(later) @ then[1].T

        def apart(token: int) -> np.ndarray:
            same = self.leaders == self.leaders[token]
            wide = np.where(same[:, None], 0, far[token] - far)
            return wide + near[token] - near

        return (far + near) / growth, apart


def _growths(matrix: np.ndarray, depths: np.ndarray) -> list[Growth]:
    exponential = ScaledExponential(jnp.asarray(matrix))
    places = jnp.asarray(depths, exponential.rate.dtype)
    scales = np.asarray(exponential.rate * places, np.float64)
    matrices = np.asarray(jax.vmap(exponential.at)(places), np.float64)
    return list(zip(scales.tolist(), matrices, strict=True))


def boolean_phase(
    attention: AbstractAttention,
    depth: float,
    points: Float[Array, "n d"] | np.ndarray,
    follows: Int[Array, " n"] | np.ndarray,
) -> BooleanPhase:
    """Take over from a flow once every token attends to a single one.

    Args:
        attention: the layer in original coordinates.
        depth: where.
        points: the rescaled tokens there.
        follows: the token that each one attends to, as `find_leaders` tells.

    Returns:
        The rest of the flow, in closed form. Raises if choices go round in a circle.
    """
    follows = np.asarray(follows)
    leaders, length = np.arange(len(follows)), 0
    while not np.array_equal(follows[leaders], leaders):
        check(
            length < len(follows),
            "the tokens' choices go round in a circle; such a phase has no leaders.",
        )
        leaders, length = follows[leaders], length + 1
    return BooleanPhase(
        float(depth),
        np.asarray(points, np.float64),
        np.asarray(attention.value, np.float64),
        follows,
        leaders,
        length,
    )
