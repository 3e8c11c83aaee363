r"""Two groups that attract each other: integrals over their angle, in logarithms.

With $u = \log\tan(\varphi/2)$ one has $\mathrm{d}u = \mathrm{d}\varphi/\sin\varphi$ and
$\cos\varphi = -\tanh u$: the time is the integral over $u$ of a function that is
analytic up to a distance of $\pi/4$ from the real line, whatever $\beta$ and the
masses. Gauss rules on short panels, finer where the exponential is steep, converge to
rounding. All is computed by numpy in float64, whatever JAX is set to.
"""

import numpy as np
from jaxtyping import Array, Float

from meanformer.numerics.special.quadrature import gauss_panels

NODES = 20
PANEL = 1.0
# Where an exponential has fallen by e to these powers.
FALLS = (1.0, 3.0, 6.0, 10.0, 16.0, 24.0, 40.0, 80.0)
# An exponential flatter than this does not fall at all.
FLATTEST = 1e-30

Numbers = Float[np.ndarray, " q"]
Grid = Float[np.ndarray, "*s"] | Float[Array, "*s"]
Masses = tuple[float, float]


def log_dwell_integral(
    beta: float, masses: Masses, start: float, end: float, *, is_softmax: bool
) -> float:
    r"""Logarithm of the time from one angle to a smaller one, over $e^{-\beta\cos}$.

    $$\log\int_{\varphi_1}^{\varphi_0} \frac{e^{\beta(\cos\varphi_0-\cos\varphi)}}
      {f(\varphi)\sin\varphi}\,\mathrm{d}\varphi,$$
    where $f$ is the sum of the pulls of `relative_pulls`, or of the masses if attention
    is not normalised.

    Args:
        beta: the inverse temperature, zero or more.
        masses: those of the two groups.
        start: the angle $\varphi_0$ at the beginning.
        end: the angle $\varphi_1$ at the end.
        is_softmax: whether attention is divided by its mass.
    """
    first, last = ends = np.log(np.tan(np.array([end, start]) / 2))
    foot, height = _rise(ends)
    steepness = max(2 * beta, FLATTEST)
    falls = height - np.minimum(np.array(FALLS) / steepness, height - foot)
    # Rounding may put the end of a fall outside of the way.
    below, least = 1 - np.finfo(float).eps, np.finfo(float).tiny
    falls = np.clip(falls, least, below)
    steep = np.clip(np.log(falls / (1 - falls)) / 2, first, last)
    even = np.linspace(first, last, int(np.ceil((last - first) / PANEL)) + 1)
    u, weights = gauss_panels(np.sort(np.concatenate([even, steep])), NODES)
    rises = _rise(u)
    logs = 2 * beta * (rises - height)
    if is_softmax:
        fall = np.exp(-2 * beta * rises)
        logs = logs - np.log(sum(relative_pulls(fall, masses)))
    else:
        logs = logs - np.log(sum(masses))
    largest = logs.max()
    return float(largest + np.log(weights @ np.exp(logs - largest)))


def first_way(beta: float, masses: Masses, start: float, end: float) -> float:
    r"""How far the first group goes under softmax, the angle closing from start to end.

    $$\int_{\varphi_1}^{\varphi_0} \frac{p_1}{p_1+p_2}\,\mathrm{d}\varphi,$$
    with the pulls $p_1, p_2$ of `relative_pulls`.

    Args:
        beta: the inverse temperature, zero or more.
        masses: those of the two groups.
        start: the angle $\varphi_0$ at the beginning.
        end: the angle $\varphi_1$ at the end.
    """
    scale = 1 / np.sqrt(max(beta, FLATTEST))
    near = np.clip(scale * np.arange(1, 13), end, start)
    even = np.linspace(end, start, int(np.ceil((start - end) / PANEL)) + 1)
    angles, weights = gauss_panels(np.sort(np.concatenate([even, near])), NODES)
    first, second = relative_pulls(np.exp(-2 * beta * np.sin(angles / 2) ** 2), masses)
    return float(weights @ (first / (first + second)))


def relative_pulls(fall: Grid, masses: Masses) -> tuple[Grid, Grid]:
    r"""What each group feels of the other under softmax, over $e^{\beta(\cos-1)}$.

    With $f = e^{\beta(\cos\varphi-1)}$: $m_2/(m_1+m_2f)$ and $m_1/(m_2+m_1f)$.
    """
    first, second = masses
    return second / (first + second * fall), first / (second + first * fall)


def _rise(u: Numbers) -> Numbers:
    r"""Return $\sin^2(\varphi/2)$ where $\tan(\varphi/2) = e^u$, to rounding."""
    small = np.exp(-2 * np.abs(u))
    return np.where(u > 0, 1, small) / (1 + small)
