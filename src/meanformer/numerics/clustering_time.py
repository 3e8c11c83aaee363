r"""Times of tokens at equal angles: an integral over the gap, in logarithms.

With the gap $u = 1 - \rho$ and $c = n/(n-1)$, the variable
$y = \log\frac{u}{c-u}$ makes the integrand smooth, and Gauss rules on short panels
converge to rounding. All is computed by numpy in float64, whatever JAX is set to.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from meanformer.numerics.quadrature import gauss_legendre

NODES = 16
PANEL = 3.5  # the integrand has its nearest singularities at distance pi
# Where the exponential of the gap has fallen by e to these powers.
FALLS = (2.0, 5.0, 10.0, 20.0, 40.0, 80.0)

Numbers = Float[np.ndarray, "*b"]
Grid = Float[np.ndarray, "*b q"]


class LogTime(NamedTuple):
    """The logarithm of a time, and its derivative in the inverse temperature."""

    log_time: Numbers
    slope: Numbers


def log_clustering_time(
    count: float,
    beta: Numbers,
    start: float,
    level: float,
    *,
    is_softmax: bool,
    by_length: bool = False,
) -> LogTime:
    r"""Time in which the common inner product rises from one value to another.

    $$T = \int_{y_1}^{y_0} \frac{s}{2nq}\,\mathrm{d}y, \qquad
      \frac1q = n - 1 + e^{\beta u} \quad\text{or}\quad ne^{-\beta(1-u)},$$
    with $s = 1$, or $s = |A|$.

    Args:
        count: the number $n$ of tokens.
        beta: inverse temperatures, any shape.
        start: the inner product at the beginning, above $-1/(n-1)$.
        level: the one at the end.
        is_softmax: whether attention is divided by its mass.
        by_length: whether the speed is divided by the length of the attention.

    Returns:
        Logarithm and logarithmic derivative (the latter for $s = 1$ only), of the shape
        of beta. Cost: some hundred exponentials for each.
    """
    y, weights = _rule(count, beta, start, level)
    gap = count / (count - 1) / (1 + np.exp(-y))
    score = beta[..., None] * gap
    if by_length:
        log_terms = _log_length_over_share(count, gap, score)
        growth = np.zeros_like(gap)
    elif is_softmax:
        log_terms = np.logaddexp(score, np.log(count - 1))
        growth = gap * np.exp(score - log_terms)
    else:
        log_terms = np.log(count) - beta[..., None] + score
        growth = gap - 1
    largest = log_terms.max(axis=-1, keepdims=True)
    masses = weights * np.exp(log_terms - largest)
    total = masses.sum(axis=-1)
    log_time = largest[..., 0] + np.log(total) - np.log(2 * count)
    return LogTime(log_time, (masses * growth).sum(axis=-1) / total)


def _log_length_over_share(count: float, gap: Grid, score: Grid) -> Grid:
    r"""Return $\log(|A|/q)$, half of that of $(E-1)^2 + 2(E-1)\kappa + n\kappa$.

    Here $\kappa = 1 + (n-1)\rho$, and $E = a/q = e^{\beta u}$ for both kinds.
    """
    with np.errstate(divide="ignore"):
        log_kappa = np.log(count - (count - 1) * gap)
        log_excess = score + np.log(-np.expm1(-score))
    return 0.5 * np.logaddexp(
        2 * log_excess,
        log_kappa + np.logaddexp(np.log(2) + log_excess, np.log(count)),
    )


def _rule(count: float, beta: Numbers, start: float, level: float) -> tuple[Grid, Grid]:
    """Return nodes and weights in the variable, fine where the integrand is steep."""
    top, bottom = _variable(count, 1 - start, start), _variable(count, 1 - level, level)
    even = np.linspace(bottom, top, int(np.ceil((top - bottom) / PANEL)) + 1)
    with np.errstate(divide="ignore"):
        falls = np.array(FALLS) / beta[..., None]
    steep = np.maximum(1 - start - falls, 1 - level)
    steep = np.clip(_variable(count, steep, 1 - steep), bottom, top)
    shape = (*beta.shape, len(even))
    ends = np.sort(np.concatenate([np.broadcast_to(even, shape), steep], -1), -1)
    nodes, masses = gauss_legendre(NODES)
    low, width = ends[..., :-1, None], np.diff(ends)[..., None]
    y, weights = low + width * (1 + nodes) / 2, width * masses
    return y.reshape(*beta.shape, -1), weights.reshape(*beta.shape, -1)


def _variable(count: float, gap, rho):
    return np.log(gap) - np.log(1 / (count - 1) + rho)
