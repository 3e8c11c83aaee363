"""Attention at low temperature beside its limit: distances, bounds, new leaders."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from meanformer.attention import AbstractAttention, Perceptron, Softmax
from meanformer.errors import (
    Unsupported,
    as_doubles,
    as_integer,
    check,
    check_kind,
    check_square,
)
from meanformer.flows import Flow, HardmaxPath, hardmax_flow, solve
from meanformer.flows.hardmax.flow import check_tends_to_hardmax
from meanformer.flows.hardmax.rule import HardmaxRule
from meanformer.measures import TokenCloud, wasserstein
from meanformer.typing import ArrayLike

# Leaders closer than this under hardmax, relative to the size of the cloud, are one:
# followers that have come to their leader are no other leaders. Under softmax errors of
# the solver must not tell tokens apart that have met.
SAME_PLACE, MET = 1e-6, 1e-8
Pairs = Bool[np.ndarray, "n n"]


class LowTemperature(eqx.Module):
    r"""The softmax flow at several temperatures beside the hardmax flow.

    All arrays are of NumPy, in double precision; the first axis is that of the inverse
    temperatures, the second that of the depths.

    Attributes:
        betas: the inverse temperatures $\beta$.
        depths: the depths $t$.
        points: tokens $z_i^\beta(t)$ of the softmax flow.
        limit: the flow at zero temperature, $z_i^\infty(t)$.
        limit_points: its tokens at the depths.
        ends: limits of the hardmax flow at infinite depth; `None` where they are not
            known: a value matrix that is no positive multiple of the identity, or
            tokens that have not settled at the last depth.
    """

    betas: Float[np.ndarray, " b"]
    depths: Float[np.ndarray, " t"]
    points: Float[np.ndarray, "b t n d"]
    limit: HardmaxPath
    limit_points: Float[np.ndarray, "t n d"]
    ends: Float[np.ndarray, "n d"] | None

    def at(self, index: int) -> "LowTemperature":
        """Return the same for one of the depths, by its index."""
        count = len(self.depths)
        place = as_integer("index", index, least=-count)
        check(place < count, f"index is {place}; there are {count} depths.")
        only = slice(place % count, place % count + 1)
        return dataclasses.replace(
            self,
            depths=self.depths[only],
            points=self.points[:, only],
            limit_points=self.limit_points[only],
        )

    @property
    def changed(self) -> Int[np.ndarray, "b t"]:
        """How many tokens with a weight prefer other leaders than under hardmax.

        Leaders that are at one place there count as one. Computed anew at each call, in
        $O(n^3)$ for each pair of clouds.
        """
        weights = np.asarray(self.limit.start.weights, np.float64)
        present = weights > 0
        size = np.abs(self.limit_points[:, present]).max()
        counts = np.zeros(self.points.shape[:2], int)
        for index, points in enumerate(self.limit_points):
            theirs = _leaders(self.limit.rule, points, weights)
            is_same = _same_place(points, SAME_PLACE * size)
            for row, run in enumerate(self.points):
                met = _same_place(run[index], MET * size) & present[None, :]
                ours = _reached(_leaders(self.limit.rule, run[index], weights), met)
                # Members of one set that are at the place of no member of the other.
                strangers = ours & ~_reached(theirs, is_same)
                strangers |= theirs & ~_reached(ours, is_same)
                counts[row, index] = int((strangers.any(axis=1) & present).sum())
        return counts

    @property
    def coupled(self) -> Float[np.ndarray, "b t"]:
        r"""Distances with labels kept.

        The root of $\sum_i w_i \lvert z_i^\beta - z_i^\infty\rvert^2$.
        """
        return self._coupled_to(self.limit_points)

    @property
    def distances(self) -> Float[np.ndarray, "b t"]:
        """Exact distances $W_2$ of the two clouds, computed anew at each call.

        Never above `coupled`. Cost: a transport problem for each pair of clouds.
        """
        return self._transported_to(self.limit_points)

    @property
    def end_coupled(self) -> Float[np.ndarray, "b t"]:
        """Distances of the softmax flow to the `ends`, with labels kept."""
        return self._coupled_to(self._known_ends())

    @property
    def end_distances(self) -> Float[np.ndarray, "b t"]:
        """Exact distances $W_2$ of the softmax flow to the `ends`."""
        return self._transported_to(self._known_ends())

    def _coupled_to(self, others: np.ndarray) -> Float[np.ndarray, "b t"]:
        squares = ((self.points - others) ** 2).sum(axis=3)
        return np.sqrt(squares @ np.asarray(self.limit.start.weights, np.float64))

    def _transported_to(self, others: np.ndarray) -> Float[np.ndarray, "b t"]:
        """Return exact distances of all clouds to others, one for each depth."""
        weights, dtype = self.limit.start.weights, self.limit.start.points.dtype

        def measure(points):
            return TokenCloud(jnp.asarray(points, dtype), weights)

        targets = [measure(x) for x in np.broadcast_to(others, self.points.shape[1:])]
        rows = [
            [wasserstein(measure(x), nu) for x, nu in zip(path, targets, strict=True)]
            for path in self.points
        ]
        return np.array(rows, np.float64)

    def _known_ends(self) -> Float[np.ndarray, "n d"]:
        if self.ends is None:
            raise Unsupported(
                "the limits at infinite depth are not known here; they need a value "
                "matrix that is a positive multiple of the identity, and a depth at "
                "which all tokens have settled."
            )
        return self.ends

    @property
    def reach(self) -> Float[np.ndarray, " b"]:
        r"""The depths $\log\beta$ up to which the flows keep together by theory."""
        return np.log(self.betas)


def low_temperature_flow(attention: AbstractAttention) -> Flow:
    r"""Return the flow that draws tokens to the output of attention.

    $$\dot z_i = \sum_j P_{ij}V(z_j - z_i), \qquad
      P_{ij} = \operatorname{softmax}_j\,\beta\langle Qz_i, Kz_j\rangle .$$
    This is the rescaled flow of `Rescaled` without the growth of scores along depth, so
    that $\beta$ alone is the temperature. `hardmax_flow` is its limit.

    Args:
        attention: `Softmax` or `Hardmax`, with a square value matrix.
    """
    check_tends_to_hardmax(attention)
    check_square("value", attention.value)
    return Flow(attention + Perceptron.affine(-attention.value))


def low_temperature_comparison(
    attention: Softmax,
    cloud: TokenCloud,
    depths: ArrayLike,
    betas: ArrayLike,
    *,
    rtol: float = 1e-8,
    atol: float = 1e-11,
) -> LowTemperature:
    r"""Run attention at low and at zero temperature from the same tokens, and compare.

    Two tokens that meet their leaders' boundary on different sides go to different
    leaders: until the last of them has changed over, the distance does not fall as
    $\beta$ grows. So the number of tokens with another leader stands beside it. With
    no such token it is, for $V = I$,

    - exponentially small in $\beta$ at a fixed depth, as long as followers are farther
      than $1/\beta$ from their leaders, up to $t \approx \log\beta$;
    - of order $1/\beta$ beyond, and also where a token has changed its leader on the
      way (see `low_temperature_shift`).

    The published bound on $W_2$ to the limit at infinite depth is of the form
    $\sqrt{\log(\beta+1)/\beta}\,e^{Ct} + e^{-ct}$ [ABRR26]; its hypotheses and
    constants are not checked here; `fit_low_temperature_bound` fits some.

    Args:
        attention: softmax attention with a square value matrix and no bias; its own
            temperature is replaced.
        cloud: the tokens at the start.
        depths: increasing depths, the first may be zero.
        betas: inverse temperatures, positive.
        rtol: relative tolerance of the softmax flow.
        atol: absolute tolerance of the softmax flow.

    Returns:
        Both flows, with distances and counts on request. Cost: a solve for each
        temperature.
    """
    places, temperatures = checked_grid(depths, betas)
    check_kind("attention", attention, Softmax, "Softmax")
    path = hardmax_flow(attention, cloud, float(places[-1]))
    options = {"rtol": rtol, "atol": atol}
    soft = [_solved(attention, cloud, b, places, **options) for b in temperatures]
    runs = np.stack(soft), path, path.points(places)
    return LowTemperature(temperatures, places, *runs, _ends(path))


def _solved(attention, cloud: TokenCloud, beta: float, places, **tolerances):
    """Return the tokens of the softmax flow at depths, the start among them or not."""
    layer = dataclasses.replace(attention, beta=beta)
    save = np.unique(np.append(0.0, places))
    if len(save) == 1:
        return np.asarray(cloud.points, np.float64)[None]
    flow, dtype = low_temperature_flow(layer), cloud.points.dtype
    last = float(save[-1])
    path = solve(flow, cloud, last, save=jnp.asarray(save, dtype), **tolerances)
    return np.asarray(path.points, np.float64)[-len(places) :]


def _leaders(rule: HardmaxRule, points: np.ndarray, weights: np.ndarray) -> Pairs:
    """Return the tokens that each one scores highest, with all equal to them."""
    standing = rule.first_representatives(points, weights)
    sets = rule.sets(points, points, standing.masses)
    return sets[:, standing.heads] & (weights > 0)[None, :]


def _same_place(points: np.ndarray, reach: float) -> Pairs:
    from scipy.spatial.distance import cdist

    return cdist(points, points, "chebyshev") <= reach


def _reached(sets: Pairs, is_same: Pairs) -> Pairs:
    """Return sets with all tokens that are at the place of a member."""
    return sets.astype(float) @ is_same.astype(float) > 0


def _ends(path: HardmaxPath) -> Float[np.ndarray, "n d"] | None:
    if not path.keeps_leaders:
        return None
    settled = path.settled()
    present = np.asarray(path.start.weights) > 0
    return settled.limits if settled.is_settled[present].all() else None


class BoundFit(eqx.Module):
    r"""The published form of a bound, with constants that were fitted to a run.

    $$a\sqrt{\frac{\log(\beta+1)}{\beta}}\,e^{Ct} + b\,e^{-ct}$$

    Attributes:
        growth: the rate $C$.
        decay: the rate $c$.
        rough: the factor $a$.
        far: the factor $b$.
        excess: the largest ratio of a distance to the fitted form; a multiple of the
            form by this factor is a bound on the distances that were measured.
    """

    growth: float
    decay: float
    rough: float
    far: float
    excess: float

    def __call__(
        self, betas: Float[np.ndarray, " b"], depths: Float[np.ndarray, " t"]
    ) -> Float[np.ndarray, "b t"]:
        """Return the fitted form for inverse temperatures and depths."""
        logs = np.log([self.rough, self.far])
        return np.exp(_log_form((self.growth, self.decay, *logs), betas, depths))


def fit_low_temperature_bound(
    betas: ArrayLike, depths: ArrayLike, distances: ArrayLike
) -> BoundFit:
    r"""Fit the published form of the bound to distances that were measured.

    Least squares of the logarithms of $W_2(\mu_t^\beta, \mu_\infty^\infty)$, with
    $C, c \ge 0$. A fit and no theorem: the constants of [ABRR26] are not known here.

    Args:
        betas: inverse temperatures, two or more.
        depths: increasing depths, three or more.
        distances: to the limit of hardmax at infinite depth, positive, a row for each
            temperature; such as `LowTemperature.end_distances`.
    """
    from scipy.optimize import least_squares

    depths, betas = checked_grid(depths, betas)
    distances = as_doubles("distances", distances)
    check(
        len(betas) >= 2 and len(depths) >= 3,
        f"there are {len(betas)} temperatures and {len(depths)} depths; a fit of four "
        "constants needs 2 and 3 or more.",
    )
    check(
        distances.shape == (len(betas), len(depths)),
        f"distances has shape {distances.shape}; it must be {len(betas)} by "
        f"{len(depths)}, one row for each temperature.",
    )
    check(
        bool((np.isfinite(distances) & (distances > 0)).all()),
        "a distance is not positive and finite; the fit is one of logarithms.",
    )
    logs = np.log(distances)
    low = [0.0, 0.0, -np.inf, -np.inf]

    def residual(constants):
        return (_log_form(constants, betas, depths) - logs).ravel()

    found = least_squares(residual, [0.1, 1.0, -1.0, 0.0], bounds=(low, np.inf)).x
    excess = float(np.exp(-residual(found).min()))
    return BoundFit(*map(float, (*found[:2], *np.exp(found[2:]))), excess)


def _log_form(constants, betas: np.ndarray, depths: np.ndarray) -> np.ndarray:
    growth, decay, log_rough, log_far = constants
    rough = log_rough + np.log(np.log1p(betas) / betas)[:, None] / 2
    return np.logaddexp(rough + growth * depths, log_far - decay * depths)


def checked_grid(depths: ArrayLike, betas: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return increasing depths and inverse temperatures as arrays, or raise."""
    places = np.atleast_1d(as_doubles("depths", depths))
    check(
        _is_list(places) and places[0] >= 0 and bool((np.diff(places) > 0).all()),
        f"depths are {depths}; they must be finite, not negative, and increase.",
    )
    temperatures = np.atleast_1d(as_doubles("betas", betas))
    check(
        _is_list(temperatures) and bool((temperatures > 0).all()),
        f"betas are {betas}; they must be positive and finite.",
    )
    return places, temperatures


def _is_list(numbers: np.ndarray) -> bool:
    return numbers.ndim == 1 and len(numbers) > 0 and bool(np.isfinite(numbers).all())
