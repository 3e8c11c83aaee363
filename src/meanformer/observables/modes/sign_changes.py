"""Where the derivative of a sum of bumps changes its sign, and what is certain."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meanformer.errors import check
from meanformer.observables.modes.kernels import AbstractBump

_EPSILON = float(np.finfo(np.float64).eps)
_DEGREE = 8
_HALF_WIDTH = 0.4  # of a cell, in units of the bump
_CAUCHY = 1.2  # radius, in units of the bump, where the tails of series are bounded
_DEEPEST = 45  # halvings of a cell after which what is left is undecided
_LOSS = 10.0  # of digits to the width of a cell, beyond which it is halved
_COARSEST = 0.1  # rounding of places, in units of the bump
_PAIRS = 60_000  # of cells and tokens at a time


class Sites(NamedTuple):
    """Tokens at different places, in order, and the bump each of them carries."""

    # One for each token, different, in order; angles from 0 on a circle.
    places: np.ndarray
    logs: np.ndarray  # logarithms of the masses, over the largest
    bump: AbstractBump  # what each token carries
    # The places again, laid out several times on a circle, so that every window is a
    # slice; on the line with a token at infinity behind them.
    around: np.ndarray
    log_ratio: float  # logarithm of all the mass over that of the lightest token


def sites_of(places: np.ndarray, weights: np.ndarray, bump: AbstractBump) -> Sites:
    """Put tokens in order, or raise if places are coarser than bumps are wide."""
    period, present = bump.period, weights > 0
    places, label = np.unique(bump.wrapped(places[present]), return_inverse=True)
    farthest = 2 * period if period else np.abs(places[[0, -1]]).max()
    advice = "" if period else " or tokens closer to zero"
    check(
        4 * _EPSILON * farthest <= _COARSEST * bump.unit,
        f"beta is {bump.beta}, so the bandwidth is {bump.unit:.2g}: double precision "
        f"does not resolve it at places of size {farthest:.2g}; take a smaller beta"
        f"{advice}.",
    )
    masses = np.bincount(label.ravel(), weights[present])
    turns = period * np.arange(-1, 3) if period else np.zeros(1)
    around = (turns[:, None] + places[None, :]).ravel()
    if period is None:
        around = np.append(around, np.inf)
    ratio = np.log(masses.sum() / masses.min())
    return Sites(places, np.log(masses / masses.max()), bump, around, float(ratio))


class Leaves(NamedTuple):
    """Intervals on which the behaviour of a function is known, in order."""

    low: np.ndarray  # left ends
    high: np.ndarray  # right ends
    sign: np.ndarray  # the sign all over it, zero if it changes or is not known
    # 1 if the function increases all over it, -1 if it decreases, else 0.
    trend: np.ndarray
    ends: np.ndarray  # signs at the two ends, zero where they are not known

    def chosen(self, where: np.ndarray) -> "Leaves":
        """Some of the leaves."""
        return Leaves(*(part[where] for part in self))

    def joined(self, *others: "Leaves") -> "Leaves":
        """These and others, from left to right."""
        parts = zip(self, *others, strict=True)
        whole = Leaves(*(np.concatenate(part) for part in parts))
        return whole.chosen(np.argsort(whole.low, kind="stable"))


class SignChanges(NamedTuple):
    """Changes of sign of the derivative, in order."""

    low: np.ndarray  # left ends of the intervals in which they happen
    high: np.ndarray  # right ends
    is_mode: np.ndarray  # whether the derivative falls through zero there
    undecided: np.ndarray  # intervals, one per row, that rounding leaves open


def find_sign_changes(sites: Sites) -> SignChanges:
    """Find all changes of sign of the derivative of a sum of bumps.

    A mode needs a negative second derivative, hence a token closer than the reach of
    the bump: only cells around tokens are looked at, and between them the sum is
    convex. On the line all modes lie between the first token and the last.
    """
    is_line = sites.bump.period is None
    if is_line and len(sites.places) == 1:
        place = sites.places
        return SignChanges(place, place, np.ones(1, bool), np.empty((0, 2)))
    ends = _stretches(sites)
    leaves = _leaves(sites, *ends)
    low, high = ends[1], np.roll(ends[0], -1)
    if is_line:
        high[-1] = np.inf
        # There all other tokens are on one side.
        leaves.ends[0, 0], leaves.ends[-1, 1] = 1, -1
    else:
        high[-1] += sites.bump.period
    if len(low) > 1 or high[0] > low[0]:
        # Between tokens the derivative increases.
        trend = np.ones(len(low), np.int64)
        unknown = np.zeros((len(low), 2), np.int64)
        leaves = leaves.joined(Leaves(low, high, 0 * trend, trend, unknown))
    return _read(leaves, sites.bump.period)


def derivative_signs(sites: Sites, points: np.ndarray) -> np.ndarray:
    """Sign of the derivative of the sum at points, by its largest terms."""
    totals = np.empty_like(points)
    for index, cell, gaps, masses, starts in _pairs(sites, points):
        logs = masses + sites.bump.logs(gaps)
        top = np.maximum.reduceat(logs, starts)
        terms = sites.bump.slopes(gaps) * np.exp(logs - top[cell])
        totals[index] = np.add.reduceat(terms, starts)
    return np.sign(totals)


def _stretches(sites: Sites) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the stretches within reach of a token, on a circle cut in a gap."""
    places, reach, period = sites.places, sites.bump.reach, sites.bump.period
    if period is not None:
        around = np.append(places, places[0] + period)
        widest = int(np.diff(around).argmax())
        if np.diff(around)[widest] <= 2 * reach:
            return places[:1], places[:1] + period
        places = np.append(places[widest + 1 :], places[: widest + 1] + period)
    is_gap = np.diff(places) > 2 * reach
    low = places[np.append(True, is_gap)] - reach
    high = places[np.append(is_gap, True)] + reach
    if period is None:
        low[0], high[-1] = places[0], places[-1]
    return low, high


def _leaves(sites: Sites, low: np.ndarray, high: np.ndarray) -> Leaves:
    """Cut the stretches until each cell has one sign, one trend, or only rounding."""
    low, high = _cut(sites, low, high)
    found = []
    for halvings in range(_DEEPEST + 1):
        leaves, is_open = _known(sites, low, high)
        is_open &= halvings < _DEEPEST
        found.append(leaves.chosen(~is_open))
        low, high = low[is_open], high[is_open]
        if len(low) == 0:
            break
        middle = 0.5 * (low + high)
        low, high = np.append(low, middle), np.append(middle, high)
    return found[0].joined(*found[1:])


def _cut(sites: Sites, low: np.ndarray, high: np.ndarray):
    """Ends of cells of about one unit that fill the stretches."""
    unit = sites.bump.unit
    counts = np.ceil((high - low) / (2 * _HALF_WIDTH * unit)).astype(np.int64)
    stretch = np.repeat(np.arange(len(low)), counts)
    index = np.arange(len(stretch)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = ((high - low) / counts)[stretch]
    left = low[stretch] + index * width
    right = np.where(index + 1 == counts[stretch], high[stretch], left + width)
    right[:-1] = np.where(stretch[1:] == stretch[:-1], left[1:], right[:-1])
    return left, right


def _known(sites: Sites, low: np.ndarray, high: np.ndarray):
    """What series prove on each cell, and which cells to halve."""
    rows, errors, least = _series(sites, low, high)
    # What the other terms, and those of the derivative, can add up to at most.
    sizes, powers = np.abs(rows), np.arange(_DEGREE + 1)
    rest = sizes[:, 1:].sum(axis=1) + errors
    bend = sizes[:, 2:] @ powers[2:] + _DEGREE * errors
    ends = np.stack([rows @ (-1.0) ** powers, rows.sum(axis=1)], axis=1)
    sign, trend = _certain(rows[:, 0], rest), _certain(rows[:, 1], bend)
    leaves = Leaves(low, high, sign, trend, _certain(ends, errors[:, None]))
    # Where all is rounding, and narrower cells would tell no more.
    is_noise = (sizes.sum(axis=1) <= 4 * errors) & (errors <= _LOSS * least)
    return leaves, (sign == 0) & (trend == 0) & ~is_noise


def _certain(values: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Signs of values that exceed their errors; zero for others."""
    return np.where(np.abs(values) > errors, np.sign(values), 0).astype(np.int64)


def _series(sites: Sites, low: np.ndarray, high: np.ndarray):
    """Coefficients of the derivative, their errors, and those of narrowest cells."""
    unit = sites.bump.unit
    centres = 0.5 * (low + high)
    # Ends are rounded: neighbours overlap by that much.
    spread = 4 * _EPSILON * np.maximum(np.abs(low), np.abs(high)) / unit
    radii = 0.5 * (high - low) / unit * (1 + 1e-9) + spread
    rows = np.empty((len(centres), _DEGREE + 1))
    errors, least = np.empty((2, len(centres)))
    for index, cell, gaps, masses, starts in _pairs(sites, centres):
        heights = sites.bump.logs(gaps)
        logs = masses + heights
        exponents = np.maximum.reduceat(logs, starts)[cell] - logs
        series = sites.bump.series(gaps, _DEGREE + 1)[1:]
        series *= np.exp(-exponents)[None, :]
        rows[index] = np.add.reduceat(series, starts, axis=1).T
        # Errors of logarithms are relative to what they are a sum of.
        rounding = 4 * (_DEGREE + 4) + np.diff(np.append(starts, len(gaps)))[cell]
        rounding = rounding + 10 * (1 + exponents - masses)
        rounding += sites.bump.rounding(heights, radii[index][cell])
        errors[index], least[index] = _errors(
            sites.bump, gaps, exponents, rounding, radii[index][cell], starts
        )
    powers = np.arange(_DEGREE + 1)
    return rows * (powers + 1) * radii[:, None] ** powers, errors, least


def _errors(bump: AbstractBump, gaps, exponents, rounding, radii, starts):
    """Bounds of tails and rounding for each cell, and those of the narrowest cells."""
    # The coefficient k of the derivative of a bump is at most that derivative of the
    # majorant at a radius, over the power k of the radius.
    log_near, slope = bump.majorant(gaps, radii)
    log_far, far_slope = bump.majorant(gaps, np.full_like(radii, _CAUCHY))
    sizes = _EPSILON * rounding * slope
    # The same bound, over the degree, for the derivative of the tail.
    ratio = radii / _CAUCHY
    tail = (_DEGREE + 1) / _DEGREE * ratio ** (_DEGREE + 1) / (1 - ratio) ** 2
    every = sizes * np.exp(log_near - exponents)
    every += tail * far_slope * np.exp(log_far - exponents)
    least = np.add.reduceat(sizes * np.exp(-exponents), starts)
    return np.add.reduceat(every, starts), least


def _pairs(sites: Sites, points: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """All pairs of points and tokens that matter there, some points at a time.

    Yields the indices of these points, and for each pair which of them it is of, the
    gap and the mass; and where the pairs of each point start.
    """
    around = sites.around
    after = np.searchsorted(around, points).clip(1, len(around) - 1)
    gaps = np.abs(np.stack([around[after - 1], around[after]]) - points[None, :])
    radius = sites.bump.window(gaps.min(axis=0), sites.log_ratio)
    first = np.searchsorted(around, points - radius, side="left")
    last = np.searchsorted(around, points + radius, side="right")
    counts = np.minimum(last - first, len(sites.places))
    total = np.cumsum(counts)
    cuts = np.searchsorted(total, np.arange(_PAIRS, total[-1], _PAIRS), side="right")
    for index in np.split(np.arange(len(points)), np.unique(cuts)):
        if len(index) == 0:
            continue
        cell = np.repeat(np.arange(len(index)), counts[index])
        starts = np.cumsum(counts[index]) - counts[index]
        token = np.arange(len(cell)) - starts[cell] + first[index][cell]
        gaps = around[token] - points[index][cell]
        yield index, cell, gaps, sites.logs[token % len(sites.places)], starts


def _read(leaves: Leaves, period: float | None) -> SignChanges:
    """Changes of sign, from what is known of each leaf, once around."""
    # On the line the last leaf joins the two ends; it has no valley.
    before = np.roll(leaves.ends[:, 1], 1)
    here = leaves.ends[:, 0]
    # Both neighbours tell the sign of a node; if they disagree, it is not known.
    nodes = np.where(before * here < 0, 0, np.sign(before + here))
    if not nodes.any():
        # Only a circle is flat all around: at the ends of a line the signs are known.
        low, high = leaves.low[:1], leaves.high[-1:]
        whole = _turned_back(np.stack([low, high], axis=1), period)
        return SignChanges(low, high, np.array([True]), whole)
    first = int(np.flatnonzero(nodes)[0])
    if period is not None:  # what stands before the first comes once around later
        leaves.low[:first] += period
        leaves.high[:first] += period
    leaves = Leaves(*(np.roll(part, -first, axis=0) for part in leaves))
    nodes = np.roll(nodes, -first)
    starts = np.flatnonzero(nodes)
    ends = np.append(starts[1:], len(nodes)) - 1
    is_known = np.logical_or.reduceat(leaves.sign != 0, starts)
    for trend in (-1, 1):
        is_known |= np.logical_and.reduceat(leaves.trend == trend, starts)
    signs = nodes[starts]
    changes = signs != np.roll(signs, -1)
    low, high = leaves.low[starts], leaves.high[ends]
    undecided = np.stack([low, high], axis=1)[~is_known]
    if period is None:
        changes &= np.isfinite(high)
    else:
        undecided = _turned_back(undecided, period)
    return SignChanges(low[changes], high[changes], signs[changes] > 0, undecided)


def _turned_back(intervals: np.ndarray, period: float) -> np.ndarray:
    """Intervals of a circle that begin on its first turn, in order."""
    turned = intervals - period * np.floor(intervals[:, :1] / period)
    return turned[np.argsort(turned[:, 0])]
