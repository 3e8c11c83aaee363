"""Attention in extended precision, with derivatives, for many instances at once.

Plain formulas on complex numbers of 80 bits: a step of 1e-1000 along the imaginary axis
gives derivatives without a difference. Arrays have one leading axis more, that of the
instances.
"""

import numpy as np

STEP = np.longdouble("1e-1000")
# Places of the tokens and of the queries in the sequence, for masks.
PLACES = np.array([0.2, 0.8, 0.4, 0.4, 1.0, 0.4])
QUERY_PLACES = np.array([0.2, 0.5, 1.0])


def value_and_derivative(function, inputs, direction):
    """Return a function and its derivative along a direction."""
    with np.errstate(all="ignore"):
        moved = function(
            {
                name: inputs[name].astype(np.clongdouble)
                + 1j * STEP * direction[name].astype(np.longdouble)
                for name in inputs
            }
        )
        return moved.real, moved.imag / STEP


def _projected(points, matrix):
    return np.einsum("bnd,bkd->bnk", points, matrix)


def _products(queries, keys):
    return np.einsum("bmk,bnk->bmn", queries, keys)


def _squares(queries, keys):
    """Return squared distances less that to the first key, without cancellation."""
    queries, keys = queries - keys[:, :1], keys - keys[:, :1]
    return (keys**2).sum(2)[:, None] - 2 * _products(queries, keys)


def _visible(a, seen):
    present = (a["weights"].real > 0)[:, None, :]
    return present if seen is None else present & seen[None]


def _terms(a, scores, seen):
    """Return masses relative to the exponential of tops, and the tops."""
    visible = _visible(a, seen)
    logs = np.log(np.where(a["weights"].real > 0, a["weights"].real, 1))
    tops = np.where(visible, scores.real + logs[:, None], -np.inf).max(2)
    tops = np.where(np.isfinite(tops), tops, 0)
    exponents = np.where(visible, scores - tops[:, :, None], 0)
    return np.where(visible, a["weights"][:, None] * np.exp(exponents), 0), tops


def _average(a, scores, seen=None):
    masses, _ = _terms(a, scores, seen)
    total = masses.sum(2, keepdims=True)
    shares = masses / np.where(total.real > 0, total, 1)
    # From the first token, which is always present: far off, digits would be lost.
    first = a["points"][:, :1]
    near = {**a, "points": a["points"] - first}
    return _values(near, shares) + _projected(first, a["value"])


def _values(a, shares):
    # Where a share is zero its token may be anywhere.
    points = np.where((a["weights"].real > 0)[:, :, None], a["points"], 0)
    return np.einsum("bmn,bne->bme", shares, _projected(points, a["value"]))


def _sides(a):
    return _projected(a["x"], a["query"]), _projected(a["points"], a["key"])


def _score(a):
    return a["beta"][:, None, None] * _products(*_sides(a))


def softmax(a, seen=None):
    return _average(a, _score(a), seen)


def l2(a, seen=None):
    return _average(a, -a["beta"][:, None, None] * _squares(*_sides(a)), seen)


def unnormalised(a, seen=None):
    masses, tops = _terms(a, _score(a), seen)
    return _values(a, masses * np.exp(tops)[:, :, None])


def sigmoid(a):
    scores = _score(a)
    # Both halves of the line, so that no exponential overflows.
    small = np.exp(np.where(scores.real > 0, -scores, scores))
    gates = np.where(scores.real > 0, 1 / (1 + small), small / (1 + small))
    return _values(a, np.where(_visible(a, None), a["weights"][:, None] * gates, 0))


def linear(a):
    return _values(a, a["weights"][:, None] * _score(a))


def hardmax(a, seen=None):
    scores = np.where(_visible(a, seen), _score(a).real, -np.inf)
    shares = (scores == scores.max(2, keepdims=True)) * a["weights"][:, None]
    return _values(a, shares / shares.sum(2, keepdims=True))


def three_half_steps(a):
    queries, keys = _projected(a["points"], a["query"]), _sides(a)[1]
    scores = -a["beta"][:, None, None] * _squares(queries, keys)
    potential = -_log_sums(a, scores)
    potential = -_log_sums(a, scores.swapaxes(1, 2) + potential[:, None])
    return _average(
        a, -a["beta"][:, None, None] * _squares(*_sides(a)) + potential[:, None]
    )


def _log_sums(a, scores):
    masses, tops = _terms(a, scores, None)
    return np.log(masses.sum(2)) + tops


def nearest_other(a):
    squares = ((a["x"][:, :, None] - a["points"][:, None]).real ** 2).sum(3)
    squares = np.where(_visible(a, None) & (squares > 0), squares, np.inf)
    shares = (squares == squares.min(2, keepdims=True)) * a["weights"][:, None]
    present = np.where((a["weights"].real > 0)[:, :, None], a["points"], 0)
    return np.einsum("bmn,bne->bme", shares / shares.sum(2, keepdims=True), present)


def layer_norm(a, epsilon=1e-5):
    centred = a["x"] - a["x"].mean(2, keepdims=True)
    return centred / np.sqrt((centred**2).mean(2, keepdims=True) + epsilon)


def unit_norm(a, epsilon=1e-5):
    return a["x"] / np.sqrt((a["x"] ** 2).sum(2, keepdims=True) + epsilon)


def two_layers(a):
    """A residual softmax layer, then one of L2 attention in what it made."""
    seen_by_tokens = softmax({**a, "x": a["points"]})
    moved = {**a, "points": a["points"] + seen_by_tokens, "x": a["x"] + softmax(a)}
    return l2(moved)


CAUSAL = PLACES[None, :] <= QUERY_PLACES[:, None]
PREFIX = PLACES[None, :] <= np.maximum(QUERY_PLACES, 0.4)[:, None]
