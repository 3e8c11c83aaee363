"""Where the derivative of a sum of bumps changes its sign, and what is certain."""

from typing import NamedTuple

import numpy as np

from meanformer.observables.modes.bernstein import Cells, Leaves, from_powers, isolate
from meanformer.observables.modes.kernels import AbstractBump

_EPSILON = float(np.finfo(np.float64).eps)
_DEGREE = 22
_HALF_WIDTH = 0.5  # of a cell, in units of the bump
_CAUCHY = 10.0  # radius, in half widths, where the tails of series are bounded
_PAIRS = 60_000  # of cells and tokens at a time


class Sites(NamedTuple):
    """Tokens at different places, in order, and the bump each of them carries.

    Attributes:
        places: one for each token, different, in order; angles from 0 on a circle.
        logs: logarithms of the masses.
        bump: what each token carries.
        around: the places again, laid out several times on a circle, so that every
            window is a slice; on the line with a token at infinity behind them.
        log_ratio: logarithm of all the mass over that of the lightest token.
    """

    places: np.ndarray
    logs: np.ndarray
    bump: AbstractBump
    around: np.ndarray
    log_ratio: float


def sites_of(places: np.ndarray, weights: np.ndarray, bump: AbstractBump) -> Sites:
    """Put tokens in order, those of weight zero left out and equal ones as one."""
    period, present = bump.period, weights > 0
    if period is not None:
        places = np.mod(places, period)
        places = np.where(places == period, 0, places)
    places, label = np.unique(places[present], return_inverse=True)
    masses = np.bincount(label.ravel(), weights[present])
    turns = period * np.arange(-1, 3) if period else np.zeros(1)
    around = (turns[:, None] + places[None, :]).ravel()
    if period is None:
        around = np.append(around, np.inf)
    ratio = np.log(masses.sum() / masses.min())
    return Sites(places, np.log(masses), bump, around, float(ratio))


class Crossings(NamedTuple):
    """Changes of sign of the derivative, in order.

    Attributes:
        low: left ends of the intervals in which they happen.
        high: right ends.
        is_mode: whether the derivative falls through zero there.
        undecided: intervals, one per row, that rounding leaves open.
    """

    low: np.ndarray
    high: np.ndarray
    is_mode: np.ndarray
    undecided: np.ndarray


def crossings(sites: Sites) -> Crossings:
    """Find all changes of sign of the derivative of a sum of bumps.

    A mode needs a negative second derivative, hence a token closer than the reach of
    the bump: only cells around tokens are looked at, and between them the sum is
    convex.
    """
    ends = _stretches(sites)
    leaves = isolate(_cells(sites, *ends))
    low, high = ends[1], np.roll(ends[0], -1)
    if sites.bump.period is None:
        high[-1] = np.inf
    else:
        high[-1] += sites.bump.period
    if len(low) > 1 or high[0] > low[0]:
        leaves = leaves.joined(_convex(low, high))
    return _read(leaves, sites.bump.period)


def derivative_signs(sites: Sites, points: np.ndarray) -> np.ndarray:
    """Sign of the derivative of the sum at points, by its largest terms."""
    totals = np.empty_like(points)
    for rows in _chunks(*_windows(sites, points)):
        cell, gaps, logs, starts = _pairs(sites, points, rows)
        top = np.maximum.reduceat(logs, starts)
        terms = sites.bump.slopes(gaps) * np.exp(logs - top[cell])
        totals[rows[0]] = np.add.reduceat(terms, starts)
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
    return low, high


def _cells(sites: Sites, low: np.ndarray, high: np.ndarray) -> Cells:
    """Cut the stretches into cells with a polynomial on each."""
    unit = sites.bump.unit
    counts = np.ceil((high - low) / (2 * _HALF_WIDTH * unit)).astype(np.int64)
    stretch = np.repeat(np.arange(len(low)), counts)
    index = np.arange(len(stretch)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = ((high - low) / counts)[stretch]
    left = low[stretch] + index * width
    right = np.where(index + 1 == counts[stretch], high[stretch], left + width)
    right[:-1] = np.where(stretch[1:] == stretch[:-1], left[1:], right[:-1])
    centres = 0.5 * (left + right)
    # Ends are rounded: neighbours overlap by that much.
    spread = 4 * _EPSILON * max(abs(low[0]), abs(high[-1])) / unit
    radii = 0.5 * (right - left) / unit * (1 + 1e-9) + spread
    coefficients, errors = _polynomials(sites, centres, radii)
    return Cells(left, right, coefficients, errors)


def _polynomials(
    sites: Sites, centres: np.ndarray, radii: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The derivative on each cell, up to a positive factor, and its error."""
    rows = np.empty((len(centres), _DEGREE + 1))
    errors = np.empty(len(centres))
    for chunk in _chunks(*_windows(sites, centres)):
        cells = chunk[0]
        cell, gaps, logs, starts = _pairs(sites, centres, chunk)
        top = np.maximum.reduceat(logs, starts)
        masses = np.exp(logs - top[cell])
        series = sites.bump.series(gaps, _DEGREE + 1)[1:]
        series *= masses[None, :]
        rows[cells] = np.add.reduceat(series, starts, axis=1).T
        errors[cells] = _errors(
            sites.bump, gaps, top[cell] - logs, radii[cells][cell], starts
        )
    powers = np.arange(_DEGREE + 1)
    rows *= (powers + 1) * radii[:, None] ** powers
    return from_powers(rows), errors


def _errors(
    bump: AbstractBump,
    gaps: np.ndarray,
    exponents: np.ndarray,
    radii: np.ndarray,
    starts: np.ndarray,
) -> np.ndarray:
    """Bounds of the tails of the series and of all rounding, for each cell."""
    log_near, slope = bump.majorant(gaps, radii)
    log_far, _ = bump.majorant(gaps, _CAUCHY * radii)
    near = np.add.reduceat(slope * np.exp(log_near - exponents), starts)
    far = np.add.reduceat(np.exp(log_far - exponents) / (_CAUCHY * radii), starts)
    ratio = 1 / _CAUCHY
    tail = (_DEGREE + 1) * (_DEGREE + 2) / _DEGREE
    tail *= ratio ** (_DEGREE + 1) / (1 - 2 * ratio)
    largest = np.maximum.reduceat(exponents, starts)
    local = np.diff(np.append(starts, len(gaps)))
    rounding = 4 * (_DEGREE + 4) + local + bump.rounding(largest)
    return _EPSILON * rounding * near + tail * far


def _windows(sites: Sites, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last index, of the tokens laid out thrice on a circle, that matter."""
    around = sites.around
    after = np.searchsorted(around, points).clip(1, len(around) - 1)
    gaps = np.abs(np.stack([around[after - 1], around[after]]) - points[None, :])
    radius = sites.bump.window(gaps.min(axis=0), sites.log_ratio)
    first = np.searchsorted(around, points - radius, side="left")
    last = np.searchsorted(around, points + radius, side="right")
    return first, np.minimum(last, first + len(sites.places))


def _chunks(first: np.ndarray, last: np.ndarray):
    """Points in turn, with their windows, so that memory stays bounded."""
    total = np.cumsum(last - first)
    cuts = np.searchsorted(total, np.arange(_PAIRS, total[-1], _PAIRS), side="right")
    for piece in np.split(np.arange(len(first)), np.unique(cuts)):
        if len(piece):
            yield piece, first[piece], last[piece]


def _pairs(
    sites: Sites, points: np.ndarray, chunk: tuple
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All pairs of points and tokens of their windows, one after the other."""
    index, first, last = chunk
    lengths = last - first
    cell = np.repeat(np.arange(len(index)), lengths)
    starts = np.cumsum(lengths) - lengths
    token = np.arange(len(cell)) - starts[cell] + first[cell]
    gaps = sites.around[token] - points[index][cell]
    logs = sites.logs[token % len(sites.places)] + sites.bump.logs(gaps)
    return cell, gaps, logs, starts


def _convex(low: np.ndarray, high: np.ndarray) -> Leaves:
    """The stretches between tokens, where the derivative increases."""
    trend = np.ones(len(low), np.int64)
    unknown = np.zeros((len(low), 2), np.int64)
    return Leaves(low, high, np.zeros_like(trend), trend, unknown)


def _read(leaves: Leaves, period: float | None) -> Crossings:
    """Changes of sign, from what is known of each leaf, once around.

    On the line the last leaf joins the two ends; it has no valley.
    """
    before = np.roll(leaves.ends[:, 1], 1)
    here = leaves.ends[:, 0]
    # Both neighbours tell the sign of a node; if they disagree, it is not known.
    nodes = np.where(before * here < 0, 0, np.sign(before + here))
    if not nodes.any():
        whole = np.array([[leaves.low[0], leaves.high[-1]]])
        return Crossings(whole[:, 0], whole[:, 1], np.array([True]), whole)
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
    if period is None:
        changes &= np.isfinite(high)
    return Crossings(
        low[changes],
        high[changes],
        signs[changes] > 0,
        np.stack([low, high], axis=1)[~is_known],
    )
