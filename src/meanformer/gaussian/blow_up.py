"""When a flow of Gaussians blows up: exactly, by bounds, or by integration."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from meanformer.attention import AbstractAttention, AbstractInContextMap
from meanformer.errors import InvalidInput, as_number
from meanformer.flows import LongDepth, Status
from meanformer.gaussian import explicit, long_depth, velocity
from meanformer.gaussian.exponents import BLEW_UP, REACHED
from meanformer.gaussian.velocity import Parts, rounding_of
from meanformer.gaussian.velocity import spectral_norm as norm
from meanformer.measures import Gaussian
from meanformer.numerics.multiples import agree

STEPS = 20_000
# Least depth of a long run, in units of the time in which it moves.
SHORTEST = 1e3
# An eigenvalue so much smaller than the others has few digits left.
UNSURE = 1e-10
NEVER, OPEN = "never", "open"


@dataclasses.dataclass(frozen=True)
class BlowUp:
    """When a flow blows up, and how that is known; `float` of it is the depth.

    That is infinite where there is never a blow-up, and an error where it is open.

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

    def __float__(self) -> float:
        if self.depth is None and self.certainty != NEVER:
            raise InvalidInput(
                f"the depth of a blow-up is not known ({self.reason}); look at depth, "
                "lower and upper."
            )
        return math.inf if self.depth is None else self.depth


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
    as_number("horizon", horizon, "positive", above=0)
    known = proved(gamma, mu)
    if known.certainty != OPEN:
        return known
    return _integrated(*long_depth.in_double(gamma, mu), horizon, rtol, known)


def proved(gamma: AbstractInContextMap, mu: Gaussian) -> BlowUp:
    """Return what is known without an integration; it may leave the question open."""
    velocity.check_map(gamma)
    velocity.check_gaussian(mu)
    parts = velocity.parts_of(gamma, mu)
    reason = global_reason(parts)
    is_point = not bool(jnp.any(mu.covariance() != 0))
    if is_point and not any(head.sees_second_moment for head in parts.heads):
        reason = "the covariance is zero, and the mean moves at most exponentially"
    if reason is not None:
        return BlowUp(None, None, None, NEVER, reason)
    lower = lower_bound(parts, mu)
    head = parts.only_head
    if head is not None and explicit.obeys_riccati(head):
        return _exact(head, mu, lower)
    upper = None if head is None else upper_bound(head, mu)
    return BlowUp(None, lower, upper, OPEN, "no theorem decides it")


def global_reason(parts: Parts) -> str | None:
    """Return why the flow exists for all depths, if that is proved."""
    reasons = [head.why_global(rounding_of(head)) for head in parts.heads]
    if all(reason is not None for reason in reasons):
        return "; ".join(dict.fromkeys(map(str, reasons))) or "the velocity is linear"
    alone = len(parts.heads) == 1 and not parts.affine.any()
    return _why_contracting(parts.heads[0]) if alone else None


def _why_contracting(head: AbstractAttention) -> str | None:
    """Return why softmax never grows, if V is definite and A_s of the other sign."""
    value, symmetric = _symmetric_parts(head)
    if value is None:
        return None
    signs = np.linalg.eigvalsh(value)
    if signs[0] <= 0 and signs[-1] >= 0:
        return "V is zero" if not value.any() else None
    sign = np.sign(signs[0])
    highest = np.linalg.eigvalsh(sign * symmetric)[-1]
    size = abs(float(head.temperature)) * norm(head.query)
    if highest > rounding_of(head) * size * norm(head.key):
        return None
    first, second = ("positive", "negative") if sign > 0 else ("negative", "positive")
    return f"softmax: V is {first} definite, A_s {second} semi-definite"


def lower_bound(parts: Parts, mu: Gaussian) -> float | None:
    r"""Return a depth before which nothing blows up; `None` if none is known.

    $\frac{\mathrm{d}}{\mathrm{d}t}|S| \le 2a|S|^2 + 2u|S|$ with a rate $a$ from softmax
    and L2 heads and a rate $u$ from Sinkhorn heads and perceptrons.
    """
    quadratic, linear, sees_mean = 0.0, norm(parts.affine), False
    for head in parts.heads:
        value, score = norm(head.mean_value), norm(head.exact_score)
        if head.sees_second_moment and head.peculiarity is not None:
            return None
        sees_mean |= head.sees_second_moment
        if head.grows_linearly:
            linear += value
        elif head.obeys_riccati or float(head.beta) >= 0:
            quadratic += abs(float(head.sharpness)) * value * score
        else:
            return None
    size = norm(mu.covariance())
    if sees_mean:
        # The second moment moves by the linear part alone, if there is nothing else.
        others = [head for head in parts.heads if not head.sees_second_moment]
        if parts.has_constant or others:
            return None
        size = norm(mu.second_moment())
    if quadratic * size == 0:
        return None
    if linear == 0:
        return 1 / (2 * quadratic * size)
    return math.log1p(linear / (quadratic * size)) / (2 * linear)


def upper_bound(head: AbstractAttention, mu: Gaussian) -> float | None:
    """Return a depth by which the flow has blown up; `None` if none is known."""
    value, symmetric = _symmetric_parts(head)
    if value is None:
        return None
    # The flow is the same with both signs changed.
    sign = np.sign(np.trace(value)) or 1.0
    value, symmetric = sign * value, sign * symmetric
    lowest_value, lowest_score = lowest = [
        np.linalg.eigvalsh(matrix)[0] for matrix in (value, symmetric)
    ]
    if np.any(lowest <= rounding_of(head) * np.array([norm(value), norm(symmetric)])):
        return None
    spread = np.asarray(mu.covariance(), np.float64)
    trace = float(np.trace(np.linalg.solve(value, spread)))
    if trace <= 0:
        return None
    return float(len(value) / (2 * lowest_score * lowest_value**2 * trace))


def _exact(head: AbstractAttention, mu: Gaussian, lower: float | None) -> BlowUp:
    root = explicit.certain_root(mu)
    if head.sees_second_moment:
        mean = np.asarray(mu.mean(), np.float64)
        root = np.concatenate([root, mean[:, None]], axis=1)
    _, signs, rounding = explicit.riccati_rates(head, root)
    if signs.max(initial=0) <= rounding:
        reason = "V = vI, and v A_s is negative semi-definite on the range of S"
        return BlowUp(None, None, None, NEVER, reason)
    # Signs of the clock: blow-up where it meets an inverse eigenvalue.
    rates = explicit.riccati_clock(head, 1.0) * np.linalg.eigvalsh(
        explicit.riccati_matrix(head, root)
    )
    fastest = float(rates.max(initial=0))
    if fastest <= UNSURE * np.abs(rates).max(initial=0):
        reason = "V = vI: it blows up, but so late that rounding hides when"
        return BlowUp(None, lower, None, OPEN, reason)
    depth = 1 / fastest
    lower = None if lower is None else min(lower, depth)
    return BlowUp(depth, lower, depth, "exact", "V = vI: the explicit solution")


def _integrated(gamma, mu: Gaussian, horizon: float, rtol: float, known: BlowUp):
    """Follow the covariance as far as asked for; locate a blow-up more closely."""
    found = dataclasses.replace(known, certainty="not seen")
    if long_depth.mean_matters(gamma, mu):
        end = horizon
    else:
        units = max(horizon / long_depth.first_time(gamma, mu), SHORTEST)
        run = long_depth.limit_of(gamma, mu, depth=units)
        end = float(run.depths[-1])
        if run.ending != BLEW_UP or end > horizon:
            reached = min(end, horizon)
            ended = "" if run.ending == REACHED else f": {run.ending}"
            reason = f"the covariance was followed to depth {reached:.6g}{ended}"
            if len(run.depths) < 2:
                reason = "the covariance rests, as far as rounding lets one see"
            return dataclasses.replace(found, reason=reason)
    options = {"solver": LongDepth(), "rtol": rtol, "steps": STEPS}
    path = velocity.quiet_solve(gamma, mu, 2 * end, save=2, **options)
    if bool(path.status == Status.blow_up_suspected):
        end = float(path.depths[-1])
    elif long_depth.mean_matters(gamma, mu):
        reason = f"the integration ended: {path.message}"
        return dataclasses.replace(found, reason=reason)
    reason = "the integration ran into it"
    return dataclasses.replace(found, depth=end, certainty="numerical", reason=reason)


def _symmetric_parts(head: AbstractAttention) -> tuple[np.ndarray | None, np.ndarray]:
    """Return V of softmax if it is symmetric, else `None`, and beta times A_s."""
    value, score = np.asarray(head.mean_value, np.float64), head.exact_score
    is_softmax = head.obeys_riccati and not head.sees_second_moment
    is_symmetric = is_softmax and agree(value, value.T, rounding_of(head))
    pull = float(head.temperature) * (score + score.T) / 2
    return (value + value.T) / 2 if is_symmetric else None, pull
