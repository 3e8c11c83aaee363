"""Where tokens go, read off the matrices of a layer alone."""

from typing import Literal, NamedTuple, cast

import equinox as eqx
import numpy as np
from jaxtyping import Float

from meanformer.attention import AbstractAttention, AbstractInContextMap
from meanformer.errors import Unsupported, check, check_known, check_square
from meanformer.flows import Flow, Rescaled
from meanformer.flows.schedule import AbstractSchedule, Constant
from meanformer.geometry import Euclidean
from meanformer.numerics.multiples import ROUNDINGS, multiple_of
from meanformer.observables.limits import spectrum
from meanformer.observables.limits.spectrum import CLEAR, Spectrum

Geometry = Literal[
    "boolean-1d",
    "polytope",
    "hyperplanes",
    "polytope x subspace",
    "codimension-k",
    "origin",
    "unknown",
]
SMALLEST = 1e-70


class LimitPrediction(eqx.Module):
    r"""What the theorems say of the tokens' limit, from query, key and value alone.

    Attributes:
        geometry: the shape of the limit; the first of the known ones that applies.
        status: whether a theorem or a conjecture says so; `"none"` where unknown.
        reason: the hypotheses that hold, or why nothing is known, in one sentence.
        failures: for every other geometry the hypothesis that fails.
        spectrum: eigenvalues and leading eigenspace of $V$.
        alignment: smallest $\langle Q\varphi, K\varphi\rangle$ over unit vectors of the
            leading eigenspace, $\langle Q\varphi_1, K\varphi_1\rangle$ if it is simple.
        definiteness: smallest $\langle Qx, Kx\rangle$ over all unit vectors.
        functionals: the coordinates of $z = e^{-tV}x$ that settle, one per row.
        size: norm of $\beta K^\top Q$.
        time_scale: depth in which distances to the limit fall by the factor $e$,
            $1/\lambda$.
    """

    geometry: Geometry
    status: Literal["theorem", "conjecture", "none"]
    reason: str
    failures: dict[str, str]
    spectrum: Spectrum
    alignment: float
    definiteness: float
    functionals: Float[np.ndarray, "k d"]
    size: float
    time_scale: float | None

    @property
    def codimension(self) -> int:
        """How many coordinates settle."""
        return len(self.functionals)

    @property
    def gap(self) -> float:
        r"""The margin $\lambda_1 - |\lambda_2|$ between the two leading eigenvalues."""
        return self.spectrum.gap

    def __str__(self) -> str:
        said = "" if self.status == "none" else f" ({self.status})"
        return f"{self.geometry}{said}: {self.reason}."


def predict_limit(
    gamma: AbstractInContextMap | Flow | AbstractSchedule,
) -> LimitPrediction:
    r"""Say what the tokens' limit looks like, before any simulation.

    For $\dot x_i = \sum_j P_{ij}Vx_j$ with softmax attention of constant query, key and
    value; limits are those of $z = e^{-tV}x$, but for the last, which is of $x$. The
    first row that applies counts [GLPR23b]:

    - `boolean-1d`: $d = 1$, $V > 0$, $QK > 0$. The attention matrix tends to one whose
      rows are basis vectors, up to one exceptional row.
    - `polytope`: $V = \lambda I$, $\lambda > 0$, and $\langle Qx, Kx\rangle > 0$. Each
      token tends to 0 or to the boundary of a polytope, generically to a vertex.
    - `hyperplanes`: the eigenvalue of largest modulus is real, simple, positive, and
      $\langle Q\varphi_1, K\varphi_1\rangle > 0$. At most three parallel hyperplanes.
    - `polytope x subspace`: $V = \lambda I$ on an invariant subspace, smaller spectral
      radius on a complement, $\langle Qx, Kx\rangle > 0$.
    - `codimension-k`: a conjecture, for $k \ge 2$ leading real positive eigenvalues,
      $\langle Qx, Kx\rangle > 0$ on the span of their eigenvectors.
    - `origin`: $V = -cI$ and $K^\top Q = aI$ with $a, c > 0$. Tokens tend to 0.

    Otherwise `unknown`, with the hypothesis that fails for each of them.

    Args:
        gamma: `Softmax`; or a flow of it, rescaled or not.

    Returns:
        The prediction. Cost: $O(d^3)$ on the host; not under `jit`.
    """
    facts = _Facts(attention_of(gamma))
    failures: dict[str, str] = {}
    for geometry, status, rule in RULES:
        try:
            return facts.prediction(geometry, status, rule(facts), failures)
        except _HypothesisFails as failure:
            failures[geometry] = str(failure)
    nothing = _Holds(facts.why_unknown(failures), np.zeros((0, len(facts.value))), None)
    return facts.prediction("unknown", "none", nothing, failures)


def attention_of(
    gamma: AbstractInContextMap | Flow | AbstractSchedule,
) -> AbstractAttention:
    """Return the single attention layer of a map, a flow or a rescaled flow."""
    if isinstance(gamma, Flow):
        if not isinstance(gamma.space, Euclidean):
            raise Unsupported(
                f"the flow is on {type(gamma.space).__name__}(); these limits are of "
                "tokens in R^d; on the sphere count_clusters tells."
            )
        check(gamma.noise is None, "limits are known for flows without noise.")
        gamma = gamma.velocity
    if isinstance(gamma, Rescaled):
        return gamma.attention
    if isinstance(gamma, Constant):
        gamma = gamma.gamma
    if not isinstance(gamma, AbstractAttention):
        raise Unsupported(
            f"this is a {type(gamma).__name__}; limits are known for one attention "
            "layer that is the same at all depths: Softmax(query, key, value); of "
            "several heads give one."
        )
    return gamma


class _Holds(NamedTuple):
    """Why a geometry is predicted, and the coordinates that settle in what time."""

    reason: str
    functionals: np.ndarray
    time_scale: float | None


class _HypothesisFails(Exception):
    """The hypothesis of a theorem that does not hold, in words."""


def _need(condition: bool, failure: str) -> None:
    if not condition:
        raise _HypothesisFails(failure)


class _Facts(eqx.Module):
    """What the rules look at."""

    value: np.ndarray
    score: np.ndarray
    spectrum: Spectrum
    common_failure: str
    definiteness: float
    alignment: float
    size: float
    rounding: float

    def __init__(self, layer: AbstractAttention):
        self.value, self.score = _matrices(layer)
        self.spectrum = spectrum.spectrum(self.value)
        self.size = float(np.linalg.norm(self.score, 2))
        self.rounding = _rounding(layer, self.size)
        self.definiteness = _least_form(self.score, np.eye(len(self.score)))
        self.alignment = _least_form(self.score, self.spectrum.vectors)
        self.common_failure = _outside_of_theory(layer)

    def prediction(self, geometry, status, holds: _Holds, failures) -> LimitPrediction:
        return LimitPrediction(
            geometry,
            status,
            holds.reason,
            failures,
            self.spectrum,
            self.alignment,
            self.definiteness,
            holds.functionals,
            self.size,
            holds.time_scale,
        )

    def why_unknown(self, failures: dict[str, str]) -> str:
        leading = self.spectrum.leading
        if self.common_failure:
            return self.common_failure
        if not np.any(self.value):
            return "V is zero, and nothing moves"
        if self.spectrum.is_defective:
            return _defective(self.spectrum)
        if not self.spectrum.is_real:
            return (
                f"the leading eigenvalues {leading.real:.4g} +- "
                f"{abs(leading.imag):.4g}i of V are complex: tokens rotate"
            )
        if self.spectrum.multiplicity > 1 and self.spectrum.is_clear:
            return failures["polytope x subspace"]
        return failures["hyperplanes"]


def _least_form(score: np.ndarray, vectors: np.ndarray) -> float:
    r"""Smallest $\langle\varphi, A\varphi\rangle$ over unit vectors of a span."""
    if len(vectors) == 0:
        return 0.0
    basis = np.linalg.qr(vectors.T)[0]
    form = basis.T @ score @ basis
    return float(np.linalg.eigvalsh((form + form.T) / 2)[0])


def _matrices(layer: AbstractAttention) -> tuple[np.ndarray, np.ndarray]:
    check_known("predict_limit", layer.query, layer.key, layer.value, layer.beta)
    check_square("value", layer.value)
    keys, queries = (np.asarray(m, np.float64) for m in (layer.key, layer.query))
    sizes = [float(np.abs(m).max(initial=0)) for m in (keys, queries)]
    check(
        all(size == 0 or SMALLEST < size < 1 / SMALLEST for size in sizes),
        f"the largest entries of key and query are {sizes[0]:.2g} and {sizes[1]:.2g}; "
        "their product would leave the range of numbers: rescale them.",
    )
    return np.asarray(layer.value), float(layer.beta) * keys.T @ queries


def _rounding(layer: AbstractAttention, size: float) -> float:
    """Relative error of the product of query and key, from their own rounding."""
    factors = abs(float(layer.beta))
    for matrix in (layer.query, layer.key):
        factors *= float(np.linalg.norm(np.asarray(matrix, np.float64), 2))
    eps = float(np.finfo(np.asarray(layer.query).dtype).eps)
    return ROUNDINGS * layer.input_dimension * eps * factors / size if size else eps


def _outside_of_theory(layer: AbstractAttention) -> str:
    if not layer.has_known_limits:
        return f"the theorems are on softmax attention, this is {type(layer).__name__}"
    if float(layer.beta) == 0:
        return "beta is 0: every token follows the mean, z' = V(mean - z)"
    biases = (layer.query_bias, layer.value_bias)
    if any(bias is not None and np.any(np.asarray(bias)) for bias in biases):
        return "the theorems are on attention without biases"
    return ""


def _boolean(facts: _Facts) -> _Holds:
    _need(len(facts.value) == 1, f"the dimension is {len(facts.value)}, not 1")
    _need(not facts.common_failure, facts.common_failure)
    value, score = float(facts.value[0, 0]), float(facts.score[0, 0])
    _need(
        value > 0 and score > 0,
        f"V is {value:.4g} and QK is {score:.4g}; both must be positive",
    )
    reason = "in dimension one, V and QK are positive"
    return _Holds(reason, np.ones((1, 1)), 1 / value)


def _polytope(facts: _Facts) -> _Holds:
    factor = facts.spectrum.multiple
    _need(factor is not None, "V is not a multiple of the identity")
    factor = cast(float, factor)
    _need(not facts.common_failure, facts.common_failure)
    _need(factor > 0, f"V is {factor:.4g} I, not a positive multiple")
    _need_definite(facts)
    reason = f"V = {factor:.4g} I and <Qx, Kx> is positive definite"
    return _Holds(reason, np.eye(len(facts.value)), 1 / factor)


def _need_definite(facts: _Facts) -> None:
    _need(
        facts.definiteness > CLEAR * facts.size,
        f"<Qx, Kx> reaches {facts.definiteness:.4g}; it must be positive definite",
    )


def _leading_rate(facts: _Facts) -> float:
    """Return the leading eigenvalue if it is real and positive with a clear gap."""
    found = facts.spectrum
    rate = found.leading.real
    _need(not facts.common_failure, facts.common_failure)
    _need(not found.is_defective, _defective(found))
    _need(found.is_real, f"the leading eigenvalue {found.leading:.4g} of V is complex")
    _need(rate > 0, f"the leading eigenvalue {rate:.4g} of V is not positive")
    _need(
        found.is_clear,
        f"the modulus of the next eigenvalue is less by {found.gap:.3g} only, not "
        "clearly smaller",
    )
    return rate


def _defective(found: Spectrum) -> str:
    return (
        "V has a Jordan block at its leading eigenvalue, or cannot be told from such a "
        f"matrix: its left and right eigenvectors have the cosine {found.cosine:.2g}"
    )


def _hyperplanes(facts: _Facts) -> _Holds:
    found, rate, alignment = facts.spectrum, _leading_rate(facts), facts.alignment
    _need(
        found.multiplicity == 1 == len(found.vectors),
        f"the leading eigenvalue is {found.multiplicity}-fold, not simple",
    )
    _need(
        alignment > CLEAR * facts.size,
        f"<Q phi, K phi> is {alignment:.4g}; it must be positive",
    )
    reason = (
        f"the leading eigenvalue {rate:.6g} of V is simple, real and positive (gap "
        f"{found.gap:.4g}), and <Q phi, K phi> = {alignment:.4g}"
    )
    return _Holds(reason, found.functionals, 1 / rate)


def _mixed(facts: _Facts) -> _Holds:
    found, rate = facts.spectrum, _leading_rate(facts)
    count = found.multiplicity
    _need(count >= 2, "the leading eigenvalue is simple")
    _need(count != len(facts.value), "no other eigenvalue is left for the subspace")
    _need_definite(facts)
    reason = (
        f"V = {rate:.4g} I on a space of dimension {count} (gap {found.gap:.4g}) and "
        "<Qx, Kx> is positive definite"
    )
    return _Holds(reason, found.functionals, 1 / rate)


def _codimension(facts: _Facts) -> _Holds:
    _need(not facts.common_failure, facts.common_failure)
    _need(not facts.spectrum.is_defective, _defective(facts.spectrum))
    vectors, functionals, values = spectrum.leading_positive(facts.value)
    # Those that are apart from the rest: the more, the better.
    gaps = values - np.append(values[1:], 0.0)
    counts = [k for k in range(len(values), 1, -1) if gaps[k - 1] > CLEAR * values[0]]
    for count in counts:
        if _least_form(facts.score, vectors[:count]) > CLEAR * facts.size:
            reason = f"the {count} leading eigenvalues of V are real and positive"
            return _Holds(reason, functionals[:count], 1 / values[count - 1])
    _need(
        len(counts) > 0,
        f"{len(values)} leading eigenvalues are real and positive; two are asked",
    )
    raise _HypothesisFails("<Qx, Kx> is not positive on the leading eigenvectors")


def _origin(facts: _Facts) -> _Holds:
    value = facts.spectrum.multiple or 0.0
    score = multiple_of(np.eye(len(facts.score)), facts.score, facts.rounding) or 0.0
    _need(value < 0, "V is not a negative multiple of the identity")
    _need(not facts.common_failure, facts.common_failure)
    _need(score > 0, "K^T Q is not a positive multiple of I")
    reason = f"V = {value:.4g} I and beta K^T Q = {score:.4g} I"
    return _Holds(reason, np.eye(len(facts.value)), None)


RULES = (
    ("boolean-1d", "theorem", _boolean),
    ("polytope", "theorem", _polytope),
    ("hyperplanes", "theorem", _hyperplanes),
    ("polytope x subspace", "theorem", _mixed),
    ("codimension-k", "conjecture", _codimension),
    ("origin", "theorem", _origin),
)
