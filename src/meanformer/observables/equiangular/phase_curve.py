"""The temperature at which tokens cluster at a given depth: a curve, not a scan."""

import equinox as eqx
import numpy as np
from jaxtyping import Float

from meanformer.errors import (
    InvalidInput,
    Overflow,
    Unsupported,
    as_doubles,
    as_integer,
    check,
)
from meanformer.observables.equiangular.equiangular import (
    checked_kind,
    checked_level,
    checked_start,
)
from meanformer.observables.equiangular.times import (
    interval_between,
    log_clustering_time,
)
from meanformer.typing import ArrayLike

ITERATIONS = 100
CLOSE = 1e-9  # one more step from here is exact to rounding


class PhaseCurve(eqx.Module):
    r"""Where tokens at equal angles have clustered to a level.

    Attributes:
        depths: the depths asked for at which such a $\beta$ exists, in their order.
        betas: the $\beta$ at which the level is reached exactly there.
    """

    depths: Float[np.ndarray, " t"]
    betas: Float[np.ndarray, " t"]


def critical_beta(
    count: int,
    depth: float,
    *,
    level: float = 0.999,
    start: float = 0.0,
    kind: str = "softmax",
) -> float | None:
    r"""Return the inverse temperature at which a level is reached at a depth.

    Softmax attention has clustered by then for smaller $\beta$ and not for larger ones;
    unnormalised attention the other way round.

    Args:
        count: the number of tokens.
        depth: the depth, positive.
        level: the inner product that counts as clustered.
        start: the inner product at depth zero.
        kind: `"softmax"` or `"unnormalised"`.

    Returns:
        The $\beta \ge 0$, or `None` where there is none: softmax attention needs a
        depth of at least that at $\beta = 0$, unnormalised attention at most that.
    """
    curve = phase_curve(count, [depth], level=level, start=start, kind=kind)
    return float(curve.betas[0]) if len(curve.betas) else None


def phase_curve(
    count: int,
    depths: ArrayLike,
    *,
    level: float = 0.999,
    start: float = 0.0,
    kind: str = "softmax",
) -> PhaseCurve:
    r"""Return the boundary of the clustered phase in the plane of depth and $\beta$.

    The time to the level is a monotone function of $\beta$, and an integral; its
    inverse is found by safeguarded Newton steps on the logarithm of the time, for all
    depths at once, to rounding.

    Args:
        count: the number of tokens.
        depths: the depths, positive.
        level: the inner product that counts as clustered.
        start: the inner product at depth zero; not negative for unnormalised
            attention, whose time is not monotone in $\beta$ otherwise.
        kind: `"softmax"` or `"unnormalised"`.

    Returns:
        The curve, at those depths where it exists. Cost: milliseconds for hundreds of
        depths.
    """
    count = as_integer("count", count, least=2)
    is_softmax = checked_kind(kind) == "softmax"
    start = checked_start(count, start)
    level = checked_level(level, start)
    if 1 + (count - 1) * start <= 0:
        raise InvalidInput(f"start is {start}, a simplex, where nothing moves.")
    if start < 0 and not is_softmax:
        raise Unsupported(
            f"start is {start}; for unnormalised attention the time is not monotone in "
            "beta unless start is 0 or more, so it has no inverse: look at "
            "Equiangular(…).time_to for several beta."
        )
    times = _checked_times(depths)

    interval = interval_between(count, start, level)

    def log_time(beta):
        return log_clustering_time(interval, beta, is_softmax=is_softmax)

    sign = 1 if is_softmax else -1
    wanted = np.log(times)
    exists = sign * (wanted - log_time(np.zeros(1)).log_time[0]) >= 0
    betas = _inverse(log_time, wanted[exists], sign)
    return PhaseCurve(times[exists], betas)


def _checked_times(depths: ArrayLike) -> Float[np.ndarray, " t"]:
    times = as_doubles("depths", depths)
    check(times.ndim == 1, f"depths has shape {times.shape}; it must be a list.")
    check(
        bool(np.isfinite(times).all() and (times > 0).all()),
        "depths must be finite and positive.",
    )
    return times


def _inverse(log_time, wanted: np.ndarray, sign: int) -> np.ndarray:
    """Return where a monotone function takes these values, from zero on."""
    if len(wanted) == 0:
        return wanted
    low, high = np.zeros_like(wanted), np.ones_like(wanted)
    while (is_short := sign * (log_time(high).log_time - wanted) < 0).any():
        if high.max() > np.finfo(float).max / 2:
            raise Overflow("beta is beyond all numbers; ask for less extreme depths.")
        low, high = np.where(is_short, high, low), np.where(is_short, 2 * high, high)
    beta = (low + high) / 2
    rounding = 8 * np.finfo(float).eps * (1 + np.abs(wanted))
    for _ in range(ITERATIONS):
        value, slope = log_time(beta)
        excess = value - wanted
        is_exact = np.abs(excess) <= rounding
        is_above = sign * excess > 0
        low, high = np.where(is_above, low, beta), np.where(is_above, beta, high)
        step = -excess / np.where(slope == 0, 1, slope)
        is_close = (slope != 0) & (np.abs(step) <= CLOSE * (1 + beta))
        target = np.maximum(beta + step, 0)
        inside = (target >= low) & (target <= high) & (slope != 0)
        beta = np.where(is_close | inside, target, (low + high) / 2)
        if (is_close | is_exact).all():
            return beta
    raise Overflow(
        "no beta was found at which the level is reached at all depths; leave out the "
        "smallest and the largest depths."
    )
