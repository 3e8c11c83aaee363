"""When a flow of Gaussians blows up: exactly, by bounds, or by integration."""

import dataclasses
import math

import numpy as np

from meanformer.attention import (
    L2,
    AbstractAttention,
    AbstractInContextMap,
    Linear,
    Sinkhorn,
    Softmax,
)
from meanformer.errors import check
from meanformer.flows import Flow, LongDepth, Status, StepBudget, solve
from meanformer.gaussian.explicit import riccati_clock, riccati_matrix
from meanformer.gaussian.heads import (
    Parts,
    parts_of,
    peculiarity,
    spectral_norm,
)
from meanformer.gaussian.quiet import quietly
from meanformer.gaussian.velocity import check_gaussian
from meanformer.measures import Gaussian
from meanformer.numerics.proportions import agree, multiple_of, multiple_of_identity

STEPS = 20_000
# Relative error of entries up to which an equation between matrices holds.
ROUNDED = 1e-12
NEVER, OPEN = "never", "open"


@dataclasses.dataclass(frozen=True)
class BlowUp:
    """When a flow blows up, and how that is known.

    Attributes:
        depth: the depth of the blow-up; `None` if there is none, as far as is known.
        lower: a depth before which it is proved not to happen; `None` if no such depth
            is known, or where it never happens.
        upper: a depth by which it is proved to have happened; `None` if none is known.
        certainty: `"exact"` from a closed form, `"never"` from a theorem, `"numerical"`
            for an integration that ran into it, `"not seen"` for one that did not;
            `"open"` from `proved`, which does not integrate.
        reason: why, in words.
    """

    depth: float | None
    lower: float | None
    upper: float | None
    certainty: str
    reason: str


def blowup_time(
    gamma: AbstractInContextMap,
    mu: Gaussian,
    *,
    horizon: float = 1e6,
    rtol: float = 1e-10,
) -> BlowUp:
    r"""Find when the covariance, or the mean, becomes infinite.

    Proved, with $|\cdot|$ the largest singular value:

    - softmax: not before $1/(2\beta|V||A||S_0|)$; with a perceptron $Ux$ beside it not
      before $\frac{1}{2|U|}\log\bigl(1 + \frac{|U|}{\beta|V||A||S_0|}\bigr)$;
    - softmax with $V = vI$: at $1/(2v\beta\lambda_{\max}(S_0^{1/2}A_sS_0^{1/2}))$, or
      never;
    - softmax with $V$ positive definite: never if $A_s \le 0$; if $A_s > 0$, by
      $d/(2\beta\lambda_{\min}(A_s)\lambda_{\min}(V)^2\operatorname{tr}(V^{-1}S_0))$;
    - Sinkhorn: never, $\operatorname{tr}S(t) \le e^{2|V|t}\operatorname{tr}S_0$;
    - L2: never if $K$ has full column rank, or $Q = cK$; but it may otherwise;
    - linear attention: as softmax, with the second moment in the place of $S_0$.

    Elsewhere the flow is integrated in a clock that resolves the blow-up.

    Args:
        gamma: the velocity, the same at all depths.
        mu: the Gaussian at depth zero.
        horizon: how far to integrate where nothing is proved.
        rtol: relative tolerance of the integration.
    """
    check(horizon > 0, f"horizon is {horizon}; it must be positive.")
    known = proved(gamma, mu)
    if known.certainty != OPEN:
        return known
    return _integrated(gamma, mu, horizon, rtol, known.lower, known.upper)


def proved(gamma: AbstractInContextMap, mu: Gaussian) -> BlowUp:
    """Return what is known without an integration; it may leave the question open."""
    check_gaussian(mu)
    parts = parts_of(gamma, mu)
    reason = global_reason(parts)
    if reason is not None:
        return BlowUp(None, None, None, NEVER, reason)
    lower = lower_bound(parts, mu)
    head = parts.only_head
    if head is not None and _is_riccati(head):
        return _exact(head, mu, lower)
    upper = None if head is None else upper_bound(head, mu)
    return BlowUp(None, lower, upper, OPEN, "no theorem decides it")


def global_reason(parts: Parts) -> str | None:
    """Return why the flow exists for all depths, if that is proved."""
    reasons = [_why_tame(head) for head in parts.heads]
    if all(reason is not None for reason in reasons):
        return "; ".join(dict.fromkeys(map(str, reasons))) or "the velocity is linear"
    alone = len(parts.heads) == 1 and not parts.affine.any()
    if alone and isinstance(parts.heads[0], Softmax):
        return _why_contracting(parts.heads[0])
    return None


def _why_tame(head: AbstractAttention) -> str | None:
    """Return why a head is of linear growth in the covariance, if it is."""
    if isinstance(head, Sinkhorn):
        return "Sinkhorn: the covariance grows at most like exp(2 |V| t)"
    if not isinstance(head, L2) or float(head.beta) < 0:
        return None
    key, query = (np.asarray(x, np.float64) for x in (head.key, head.query))
    if np.linalg.matrix_rank(key) == key.shape[1]:
        return "L2: K has full column rank"
    if multiple_of(key, query, ROUNDED) is not None:
        return "L2: Q is a multiple of K"
    return None


def _why_contracting(head: Softmax) -> str | None:
    """Return why softmax never grows, if V is definite and A_s of the other sign."""
    value, symmetric = _symmetric_parts(head)
    if value is None:
        return None
    signs = np.linalg.eigvalsh(value)
    if signs[0] <= 0 and signs[-1] >= 0:
        return "V is zero" if not value.any() else None
    sign = np.sign(signs[0])
    highest = np.linalg.eigvalsh(sign * symmetric)[-1]
    if highest > ROUNDED * spectral_norm(symmetric):
        return None
    if sign > 0:
        return "softmax: V is positive definite, A_s negative semi-definite"
    return "softmax: V is negative definite, A_s positive semi-definite"


def lower_bound(parts: Parts, mu: Gaussian) -> float | None:
    r"""Return a depth before which nothing blows up; `None` if none is known.

    $\frac{\mathrm{d}}{\mathrm{d}t}|S| \le 2a|S|^2 + 2u|S|$ with a rate $a$ from softmax
    and L2 heads and a rate $u$ from Sinkhorn heads and perceptrons.
    """
    quadratic, linear, sees_mean = 0.0, spectral_norm(parts.affine), False
    for head in parts.heads:
        value, score = spectral_norm(head.value), spectral_norm(head.score)
        if isinstance(head, Sinkhorn):
            linear += value
        elif isinstance(head, L2):
            quadratic += abs(float(head.sharpness)) * value * score
        else:
            if isinstance(head, Linear) and peculiarity(head) is not None:
                return None
            sees_mean |= isinstance(head, Linear)
            quadratic += abs(float(head.temperature)) * value * score
    if any(float(head.beta) < 0 and isinstance(head, L2) for head in parts.heads):
        return None
    size = spectral_norm(mu.covariance())
    if sees_mean:
        # The second moment moves by the linear part alone, if there is nothing else.
        if parts.has_constant or not all(
            isinstance(head, Linear) for head in parts.heads
        ):
            return None
        size = spectral_norm(mu.second_moment())
    if quadratic * size == 0:
        return None
    if linear == 0:
        return 1 / (2 * quadratic * size)
    return math.log1p(linear / (quadratic * size)) / (2 * linear)


def upper_bound(head: AbstractAttention, mu: Gaussian) -> float | None:
    """Return a depth by which the flow has blown up; `None` if none is known."""
    if not isinstance(head, Softmax):
        return None
    value, symmetric = _symmetric_parts(head)
    if value is None:
        return None
    lowest_value = np.linalg.eigvalsh(value)[0]
    lowest_score = np.linalg.eigvalsh(symmetric)[0]
    spread = np.asarray(mu.covariance(), np.float64)
    trace = float(np.trace(np.linalg.solve(value, spread))) if lowest_value > 0 else 0
    if min(lowest_value, lowest_score, trace) <= 0:
        return None
    rate = 2 * lowest_score * lowest_value**2 * trace
    return float(len(value) / rate)


def _is_riccati(head: AbstractAttention) -> bool:
    """Whether the covariance, or the second moment, obeys the explicit law."""
    is_plain = isinstance(head, Softmax | Linear) and peculiarity(head) is None
    return is_plain and multiple_of_identity(head.value) is not None


def _exact(head: AbstractAttention, mu: Gaussian, lower: float | None) -> BlowUp:
    root = np.asarray(mu.root(), np.float64)
    if isinstance(head, Linear):
        mean = np.asarray(mu.mean(), np.float64)
        root = np.concatenate([root, mean[:, None]], axis=1)
    # Signs of the clock: blow-up where it meets an inverse eigenvalue.
    rates = riccati_clock(head, 1.0) * np.linalg.eigvalsh(riccati_matrix(head, root))
    fastest = float(rates.max(initial=0))
    if fastest <= ROUNDED * np.abs(rates).max(initial=0):
        reason = "V = vI, and v A_s is negative semi-definite on the range of S"
        return BlowUp(None, None, None, NEVER, reason)
    depth = 1 / fastest
    lower = None if lower is None else min(lower, depth)
    return BlowUp(depth, lower, depth, "exact", "V = vI: the explicit solution")


def _integrated(gamma, mu, horizon, rtol, lower, upper) -> BlowUp:
    flow = Flow(gamma)
    with quietly():
        path = solve(
            flow,
            mu,
            horizon,
            save=2,
            solver=LongDepth(),
            rtol=rtol,
            stop=StepBudget(STEPS),
        )
    if bool(path.status == Status.blow_up_suspected):
        depth = float(path.depths[-1])
        return BlowUp(depth, lower, upper, "numerical", "the integration ran into it")
    reached = float(path.depths[-1])
    if bool(path.status == Status.reached):
        reason = f"the integration reached depth {reached:.6g}"
    else:
        reason = f"the integration ended: {path.message}"
    return BlowUp(None, lower, upper, "not seen", reason)


def _symmetric_parts(head: AbstractAttention) -> tuple[np.ndarray | None, np.ndarray]:
    """Return V if it is symmetric, else `None`, and beta times the symmetric A_s."""
    value, score = (np.asarray(x, np.float64) for x in (head.value, head.score))
    is_symmetric = agree(value, value.T, ROUNDED)
    pull = float(head.temperature) * (score + score.T) / 2
    return (value + value.T) / 2 if is_symmetric else None, pull
