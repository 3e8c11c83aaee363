"""Flows of Gaussians that have a solution in closed form."""

import functools
import itertools
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import brentq
from scipy.special import wrightomega

from meanformer import attention
from meanformer.attention import AbstractAttention, AbstractInContextMap
from meanformer.errors import InvalidInput, Overflow, Unsupported, as_number
from meanformer.flows import AbstractSchedule, Flow
from meanformer.gaussian import velocity
from meanformer.gaussian.velocity import spectral_norm as norm
from meanformer.measures import Gaussian
from meanformer.numerics.multiples import agree, multiple_of_identity

# Gauss-Legendre nodes on each panel between two jumps of a schedule, and panels.
NODES, PANELS = 8, 16
# Steps of Newton's method that end in rounding.
POLISHED = 3
# Relative error up to which a score counts as symmetric.
SYMMETRIC = 1e-12


def explicit_solution(
    gamma: AbstractInContextMap | AbstractSchedule | Callable,
    mu: Gaussian,
    depth: float | Float[Array, ""],
) -> Gaussian:
    r"""Return the Gaussian at a depth where the flow is solved in closed form.

    - Softmax, $V = vI$, any $A$: with $A_s = (A + A^\top)/2$,
      $$S(t) = S_0\bigl(I - 2v\beta t\,A_sS_0\bigr)^{-1};$$
      where $v$, $\beta$ and $A$ change with depth, $\int v\beta A_s\,\mathrm{d}t$ takes
      the place of $v\beta t\,A_s$, for a Gaussian of mean zero;
      the mean, if $A$ is symmetric or $m_0 = 0$, is
      $e^{vt}(I - 2v\beta t\,S_0A)^{-1/2}m_0$.
    - Linear attention, $V = vI$: the second moment $S + mm^\top$ obeys the same law.
    - L2 in one dimension: $-1/s + 2\beta k^2\log s$ grows at the rate $4\beta va$.
    - Sinkhorn in one dimension: $u - \coth(u/2)$ grows at the rate
      $2v\operatorname{sign} b$, where $\sinh u = 2|b|s$; and $m = e^{vt}m_0$.

    Args:
        gamma: one attention layer of these kinds, without biases; or a schedule
            of softmax layers, or a function of depth, as `Flow` takes them.
        mu: the Gaussian at depth zero.
        depth: the depth.

    Raises:
        Unsupported: if no closed form is known, with what is missing.
        InvalidInput: if the solution has blown up before.
        Overflow: if the solution is too large for the numbers.
    """
    velocity.check_gaussian(mu)
    time = as_number("depth", depth)
    if not isinstance(gamma, AbstractInContextMap):
        return _along_schedule(Flow(gamma).velocity, mu, time)
    head = velocity.parts_of(gamma, mu).only_head
    if head is None:
        raise Unsupported("a closed form is known for a single attention layer only.")
    if head.peculiarity is not None:
        raise Unsupported(f"no closed form is known: {head.peculiarity}.")
    try:
        return _solution(head, mu, time)
    except (OverflowError, ZeroDivisionError, FloatingPointError) as error:
        raise Overflow(f"the solution at depth {time:g} is too large.") from error


def _along_schedule(schedule: AbstractSchedule, mu: Gaussian, depth: float) -> Gaussian:
    r"""Return $F(I - 2F^\top HF)^{-1/2}$ with $H = \int v\beta A_s\,\mathrm{d}t$."""
    mean, root = (np.asarray(x, np.float64) for x in (mu.mean(), mu.root()))
    if mean.any():
        raise Unsupported("the mean has no closed form under a schedule; solve it.")
    jumps = () if schedule.jumps is None else np.asarray(schedule.jumps).tolist()
    inside = [jump for jump in jumps if 0 < jump * np.sign(depth) < abs(depth)]
    ends = np.linspace(0, 1, PANELS + 1)[1:]
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    pull, factor = np.zeros((len(root), len(root))), root
    breaks = [0.0, *sorted(inside, key=abs), depth]
    for start, stop in itertools.pairwise(breaks):
        width = (stop - start) / PANELS
        for end in start + (stop - start) * ends:
            for node, weight in zip(nodes, weights, strict=True):
                place = end - width * (1 - node) / 2
                pull = pull + width / 2 * weight * _pull(schedule, mu, place)
            values, vectors = np.linalg.eigh(root.T @ pull @ root)
            if values.max(initial=0) >= 0.5:
                raise InvalidInput(
                    f"the solution blows up before depth {depth:g}, about {end:.3g}."
                )
            factor = root @ (vectors / np.sqrt(1 - 2 * values)) @ vectors.T
    return _like(mu, mean, factor)


def _pull(schedule: AbstractSchedule, mu: Gaussian, depth: float) -> np.ndarray:
    """Return v beta A_s at a depth, of a softmax layer."""
    head = velocity.parts_of(schedule.at(jnp.asarray(depth)), mu).only_head
    if head is None or head.sees_second_moment or not is_riccati(head):
        raise Unsupported("under a schedule a closed form is known for softmax only.")
    score = head.exact_score
    return _identity_values(head) * float(head.temperature) * (score + score.T) / 2


def explicit_limit(gamma: AbstractInContextMap, mu: Gaussian) -> np.ndarray | None:
    r"""Return a factor of the limit of the covariance, where that is known.

    Softmax, or linear attention of a mean zero, with $V = vI$ and $vA_s$ negative
    semi-definite on the range of $S_0$: with the projection $\Pi$ onto the kernel of
    $A_s$ there the limit is $(\Pi S_0^+\Pi)^+$. The factor has as many columns as its
    rank; it is `None` elsewhere.
    """
    try:
        head = velocity.parts_of(gamma, mu).only_head
    except Unsupported:
        return None
    if head is None or not obeys_riccati(head):
        return None
    if head.sees_second_moment and bool(jnp.any(mu.mean() != 0)):
        return None
    root = certain_root(mu)
    directions, rates, rounding = riccati_rates(head, root)
    if rates.max(initial=0) > rounding:
        return None
    kept = directions[:, rates >= -rounding]
    upper = np.linalg.qr(np.linalg.pinv(root) @ kept)[1]
    return np.linalg.solve(upper.T, kept.T).T


@functools.singledispatch
def _solution(head: AbstractAttention, mu: Gaussian, depth: float) -> Gaussian:
    raise Unsupported(f"no closed form is known for {type(head).__name__}.")


@_solution.register
def _of_softmax(head: attention.Softmax, mu: Gaussian, depth: float) -> Gaussian:
    rate = _identity_values(head)
    factor, mean = _law(head, mu.root(), mu.mean(), depth)
    return _like(mu, _grown(mean, rate * depth), factor)


@_solution.register
def _of_linear(head: attention.Linear, mu: Gaussian, depth: float) -> Gaussian:
    mean = np.asarray(mu.mean(), np.float64)
    if not mean.any():
        return _like(mu, mean, _law(head, mu.root(), mean, depth)[0])
    # The mean is one more column of a factor of the second moment, and moves with it.
    both = np.concatenate([np.asarray(mu.root()), mean[:, None]], axis=1)
    moved, at_mean = _law(head, both, mean, depth, needs_map=True)
    return _like(mu, at_mean, moved[:, :-1])


@_solution.register
def _of_distance(head: attention.L2, mu: Gaussian, depth: float) -> Gaussian:
    mean, spread = _on_line(head, mu)
    if float(head.beta) < 0:
        raise Unsupported("no closed form is known for a repulsive L2 kernel.")
    value, score, key = (float(x[0, 0]) for x in (head.value, head.score, head.key))
    sharpness = float(head.sharpness)
    rate = 2 * sharpness * value * score
    if spread == 0 or rate == 0:
        # dm = v N m: the variance does not change, and scores add nothing.
        share = 1 / (1 + sharpness * spread * key**2)
        return _line(mu, _grown(mean, value * share * depth), spread)
    growth = distance_growth(spread, sharpness * key**2, rate * depth)
    # (1/s_0 - 1/s)/(2 beta a), of which this is the other side of the equation.
    exponent = value * depth - key**2 * growth / (2 * score)
    moved = _grown(mean, exponent + growth / 2)
    return _line(mu, moved, spread * math.exp(growth))


@_solution.register
def _of_sinkhorn(head: attention.Sinkhorn, mu: Gaussian, depth: float) -> Gaussian:
    mean, spread = _on_line(head, mu)
    value, form = float(head.value[0, 0]), float(head.form[0, 0])
    moved = _grown(mean, value * depth)
    if spread == 0 or form == 0 or value == 0:
        return _line(mu, moved, spread)
    grown = sinkhorn_variance(spread, abs(form), 2 * value * np.sign(form) * depth)
    return _line(mu, moved, grown)


def distance_growth(spread: float, curvature: float, growth: float) -> float:
    r"""Solve $-1/s + c\log s = -1/s_0 + c\log s_0 + g$ for $\log(s/s_0)$.

    $s = 1/(c\,W(e^{-E/c}/c))$ with Lambert's function, by Wright's, which takes the
    logarithm of the argument and so does not overflow. Newton's method for
    $-(e^{-y} - 1)/s_0 + cy = g$ then makes it accurate relatively.
    """
    level = -1 / spread + growth
    if curvature == 0:
        if level >= 0:
            raise InvalidInput("the solution blows up before this depth.")
        return -math.log1p(-spread * growth)
    level += curvature * math.log(spread)
    place = -level / curvature - math.log(curvature)
    # The logarithm of Wright's function is its argument less its value.
    found = float(wrightomega(place)) - place - math.log(curvature * spread)
    for _ in range(POLISHED):
        slope = math.exp(-found) / spread + curvature
        found -= (-math.expm1(-found) / spread + curvature * found - growth) / slope
    return found


def sinkhorn_variance(spread: float, form: float, growth: float) -> float:
    r"""Solve $u - \coth(u/2) = u_0 - \coth(u_0/2) + g$, where $\sinh u = 2bs$."""

    def level(u: float) -> float:
        return u - 1 / math.tanh(u / 2)

    start = math.asinh(2 * form * spread)
    target = level(start) + growth
    # Between u - 2/u - 1, which is smaller, and u - 2/u, which is larger.
    low, high = map(_crossing, (target, target + 1))
    slack = 1 + 1e-9
    root = brentq(
        lambda u: level(u) - target, low / slack, high * slack, xtol=1e-300, rtol=1e-15
    )
    return math.sinh(root) / (2 * form)


def _crossing(level: float) -> float:
    """Solve u - 2/u = level for the positive u, without cancellation."""
    size = math.sqrt(level**2 + 8)
    return (level + size) / 2 if level > 0 else 4 / (size - level)


def riccati_clock(head: AbstractAttention, depth: float) -> float:
    r"""Return $2v\beta t$ for values $V = vI$."""
    return 2 * _identity_values(head) * float(head.temperature) * depth


def riccati_matrix(head: AbstractAttention, root) -> np.ndarray:
    r"""Return $F^\top A_sF$, whose largest eigenvalue sets the blow-up."""
    score, root = np.asarray(head.score, np.float64), np.asarray(root, np.float64)
    return root.T @ (score + score.T) @ root / 2


def obeys_riccati(head: AbstractAttention) -> bool:
    """Whether the covariance, or the second moment, obeys the explicit law."""
    return is_riccati(head) and multiple_of_identity(head.value) is not None


def is_riccati(head: AbstractAttention) -> bool:
    """Whether the covariance, or the second moment, obeys a Riccati equation."""
    return head.obeys_riccati and head.peculiarity is None


def certain_root(mu: Gaussian) -> np.ndarray:
    """Return a factor of the covariance, without eigenvalues that are its rounding.

    A factor that was given has small directions as they are.
    """
    if mu.factor is not None:
        return np.asarray(mu.factor, np.float64)
    values, vectors = np.linalg.eigh(np.asarray(mu.covariance(), np.float64))
    rounding = velocity.ROUNDINGS * len(values) * float(jnp.finfo(mu.mean().dtype).eps)
    kept = values > rounding * values.max(initial=0)
    return vectors[:, kept] * np.sqrt(values[kept])


def riccati_rates(
    head: AbstractAttention, root: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    r"""Return eigenvectors and eigenvalues of $2v\beta A_s$ on the range of a factor.

    The last is the rounding of the eigenvalues.
    """
    vectors, sizes, _ = np.linalg.svd(root, full_matrices=False)
    basis = vectors[:, sizes > velocity.rounding_of(head) * sizes.max(initial=0)]
    clock = riccati_clock(head, 1.0)
    rates, turn = np.linalg.eigh(clock * riccati_matrix(head, basis))
    size = abs(clock) * norm(head.query) * norm(head.key)
    return basis @ turn, rates, velocity.rounding_of(head) * size


def _law(head, root, mean, depth: float, *, needs_map: bool = False):
    r"""Return $F(I - \tau H)^{-1/2}$ and $(I - \tau FF^\top A)^{-1/2}m$.

    $H = F^\top A_sF$ is symmetric. The map is known for symmetric $A$ only.
    """
    root, mean = np.asarray(root, np.float64), np.asarray(mean, np.float64)
    score = np.asarray(head.score, np.float64)
    clock = riccati_clock(head, depth)
    values, vectors = np.linalg.eigh(riccati_matrix(head, root))
    left = 1 - clock * values
    if left.min(initial=1.0) <= 0:
        raise InvalidInput(
            f"the solution blows up before depth {depth:g}; blowup_time tells where."
        )
    factor = root @ (vectors / np.sqrt(left)) @ vectors.T
    if (needs_map or mean.any()) and not agree(score, score.T, SYMMETRIC):
        raise Unsupported(
            "the mean has a closed form for symmetric A only; use a Gaussian of mean "
            "zero, or solve."
        )
    if not mean.any():
        return factor, mean
    # ((1 - tau x)^(-1/2) - 1)/x of the matrix H, smooth at zero.
    roots = np.sqrt(left)
    share = (vectors * (clock / (roots * (1 + roots)))) @ vectors.T
    return factor, mean + root @ share @ (root.T @ score @ mean)


def _identity_values(head: AbstractAttention) -> float:
    rate = multiple_of_identity(head.value)
    if rate is None:
        raise Unsupported(
            f"{type(head).__name__} has a closed form for values V = vI only."
        )
    return rate


def _on_line(head: AbstractAttention, mu: Gaussian) -> tuple[float, float]:
    """Return mean and variance in one dimension, or raise in others."""
    if mu.dimension != 1 or len(head.key) != 1:
        raise Unsupported(
            f"{type(head).__name__} has a closed form in one dimension only; this is "
            f"dimension {mu.dimension}."
        )
    return float(mu.mean()[0]), float(mu.covariance()[0, 0])


def _grown(mean, exponent: float):
    """Return the mean times an exponential; zero stays zero, however large that is."""
    return mean * math.exp(exponent) if np.any(mean) else mean


def _like(mu: Gaussian, mean: np.ndarray, factor: np.ndarray) -> Gaussian:
    return Gaussian(_rounded(mu, mean), factor=_rounded(mu, factor))


def _line(mu: Gaussian, mean: float, spread: float) -> Gaussian:
    return Gaussian(_rounded(mu, [mean]), _rounded(mu, [[spread]]))


def _rounded(mu: Gaussian, numbers) -> Array:
    """Return numbers in the type of a Gaussian, or raise where they overflow."""
    with np.errstate(over="raise"):
        return jnp.asarray(np.asarray(numbers, np.float64).astype(mu.mean().dtype))
