r"""Tell before any training whether one layer can fit given data.

One layer of heads moves the query $x^k$ by $\int V m_\theta[\mu^k](x^k)\,\mathrm
d\nu(\theta)$, with $m_\theta[\mu](x) = \nabla\Lambda_\mu(\beta Ax)$. It can send all
queries anywhere unless some $c \ne 0$ has $\sum_k c_k m_\theta[\mu^k](x^k) = 0$ for all
$\theta$. Such a row says how far the risk can fall at best.
"""

from collections.abc import Sequence

import equinox as eqx
import numpy as np
from jaxtyping import Float

from meanformer.errors import as_doubles, as_number, check
from meanformer.measures import AbstractMeasure
from meanformer.measures.comparison import ZERO
from meanformer.measures.mixture import check_measures
from meanformer.numerics.row_spaces import reduced, small_integers, spanned
from meanformer.observables.injectivity.dependence import (
    DEPENDENT,
    RADII,
    judged,
    values_seen,
)
from meanformer.observables.injectivity.relations import (
    Asked,
    Relation,
    find_relations,
    prepared,
)
from meanformer.training.data import Dataset
from meanformer.typing import ArrayLike

# An eigenvalue of the kernel with no larger share of the largest may be zero.
SINGULAR = 1e-13
SAYING = {
    "dependent": "one layer cannot fit all targets",
    "independent": "one layer can fit all targets, with heads enough",
    "undecided": "too close to tell by numbers; training would be very slow",
}


class InjectivityReport(eqx.Module):
    r"""Which targets one layer cannot fit, and why; see `injectivity_report`.

    Attributes:
        verdict: `"dependent"`: some targets cannot be fitted by one layer;
            `"independent"`: all can; or `"undecided"`.
        statistic: the smallest singular value over the largest.
        groups: the contexts whose queries are on one line through zero.
        zero_queries: the contexts whose query is zero.
        null_vectors: orthonormal rows $c$ with $\sum_k c_k m_\theta[\mu^k](x^k) = 0$.
        integers: the same space by rows of small integers, or none for such a row.
        relations: named relations that hold exactly.
        floor: the least risk of one layer, by the squared error, if there are targets.
        deep_floor: the least risk at any depth that the relations allow.
        eigenvalue: the smallest one of `value_kernel` for normal heads at $\beta = 1$.
        slow_time: $N/(2\lambda_{\min})$, in which the slowest part of the risk falls by
            a factor e.
        tolerance: up to which tokens are the same, relative to the radius; it is not
            below the precision of the tokens.
    """

    verdict: str
    statistic: float
    groups: tuple[tuple[int, ...], ...]
    zero_queries: tuple[int, ...]
    null_vectors: Float[np.ndarray, "r N"]
    integers: tuple[tuple[int, ...] | None, ...]
    relations: tuple[Relation, ...]
    floor: float | None
    deep_floor: float | None
    eigenvalue: float
    slow_time: float
    tolerance: float

    def __str__(self) -> str:
        count, lines = self.null_vectors.shape[1], len(self.groups)
        lines += bool(self.zero_queries)
        text = [
            f"{self.verdict}: {SAYING[self.verdict]} (contexts: {count}, query "
            f"lines: {lines}, smallest over largest singular value "
            f"{self.statistic:.3g})."
        ]
        text += [f"- {one.sentence}." for one in self.relations]
        if len(self.null_vectors) > len(self.relations):
            rows = [row for row in self.integers if row is not None]
            text.append(f"- Not all relations have names; rows of integers: {rows}.")
        if self.statistic > DEPENDENT:
            slow = f"a time of about {self.slow_time:.3g} with normal heads"
            text.append(f"The slowest part takes {slow}.")
        if self.verdict == "dependent" and self.floor is not None:
            deep = f", that of more layers not below {self.deep_floor:.6g}"
            deep = deep if self.deep_floor else ""
            text.append(
                f"The risk of one layer cannot fall below {self.floor:.6g}{deep}."
            )
        text.append(f"Tokens within {self.tolerance:.2g} of the radius count as equal.")
        return "\n".join(text)


def injectivity_report(
    data: Dataset | Sequence[AbstractMeasure],
    queries: ArrayLike | None = None,
    *,
    bias: bool = False,
    points: int | None = None,
    radii: Sequence[float] = RADII,
    tolerance: float = 1e-9,
) -> InjectivityReport:
    r"""Tell whether one layer of softmax heads can fit any targets, and if not, why.

    With queries $x^k = \alpha_k\xi_g$ grouped by lines, and bounded contexts, a row
    $c$ cancels if and only if
    $$\sum_{k\in g}\frac{c_k}{\alpha_k}\,\tilde\Lambda_k(\alpha_k u) = 0
      \text{ for every line } g, \qquad \sum_k c_k\int y\,\mathrm d\mu^k = 0,$$
    with $\tilde\Lambda_k$ the log-Laplace transform of the centred context; with a
    value bias also $\sum_k c_k = 0$. Where there are Gaussians or mixtures, lines may
    share their quadratic parts: these are taken out of $\tilde\Lambda_k$, and
    $\sum_k c_k\,\Sigma_k\otimes x^k = 0$ is asked as well. Singular values of sampled
    functions say dependent below 1e-11, independent above 1e-6, undecided in between;
    there, a relation that is found on the tokens themselves decides.

    Dependent data stop one layer only; more layers lift all relations but those that
    persist [BHFP26].

    Args:
        data: contexts, each with one query, and targets; or measures.
        queries: for measures, a query for each of them, or one for all.
        bias: whether heads have a value bias.
        points: how many places functions are sampled at; 400 or more by default.
        radii: the sizes of places, in turns, times the typical radius of a context.
        tolerance: up to which tokens are the same, relative to the radius.

    Returns:
        The report; it prints as plain sentences. Cost: $O(SndN + SN^2)$ for $S$ places.
    """
    asked, residuals = _asked(data, queries, tolerance)
    count = len(asked.measures)
    verdict, statistic, rows = judged(asked, points, radii, is_kernel=True, bias=bias)
    relations = find_relations(asked, bias=bias)
    rows = spanned([*(one.row(count) for one in relations), *rows], count)
    verdict = "dependent" if len(rows) else verdict
    kept = spanned([one.row(count) for one in relations if one.persists], count)
    eigenvalues = np.linalg.eigvalsh(values_seen(asked, None, bias))
    smallest, largest = eigenvalues[[0, -1]]
    if verdict == "independent" and smallest <= SINGULAR * largest:
        verdict = "undecided"
    return InjectivityReport(
        verdict,
        statistic,
        tuple(tuple(asked.members(line)) for line in asked.lines),
        tuple(asked.members(ZERO)),
        rows,
        tuple(map(small_integers, reduced(rows))),
        tuple(relations),
        _floor(rows, residuals),
        _floor(kept, residuals),
        float(smallest),
        float(count / (2 * smallest)) if smallest > 0 else np.inf,
        asked.tolerance,
    )


def value_kernel(
    data: Dataset | Sequence[AbstractMeasure],
    queries: ArrayLike | None = None,
    *,
    scores: ArrayLike | None = None,
    bias: bool = False,
) -> Float[np.ndarray, "N N"]:
    r"""Return the part of values of the tangent kernel of one layer.

    $$\int\langle m_\theta[\mu^j](x^j), m_\theta[\mu^k](x^k)\rangle
      \,\mathrm d\nu(\theta) \;(+\,1 \text{ with a value bias}),$$
    whose null space, times all vectors, is that of the whole kernel.

    Args:
        data: as for `injectivity_report`, like queries and bias.
        queries: see there.
        scores: the matrices $\beta K^\top Q$, one for each head; by default those of
            256 heads with normal queries and keys, always the same.
        bias: see there.
    """
    return values_seen(_asked(data, queries, 0.0)[0], scores, bias)


def _asked(data, queries, tolerance) -> tuple[Asked, np.ndarray | None]:
    """Return contexts with queries, and targets less queries if they are known."""
    tolerance = as_number("tolerance", tolerance, "in [0, 1)", least=0, below=1)
    if not isinstance(data, Dataset):
        check_measures("data", data)
        check(queries is not None, "queries is None; measures need queries.")
        places = as_doubles("queries", queries)
        places = np.tile(places, (len(data), 1)) if places.ndim == 1 else places
        wanted = len(data), data[0].dimension
        check(
            places.shape == wanted and bool(np.isfinite(places).all()),
            f"queries has shape {places.shape}; it must be {wanted}, one for each "
            "context, or one for all, and finite.",
        )
        return prepared(data, places, tolerance), None
    check(queries is None, "queries is given twice; a Dataset has its own.")
    number, targets = data.queries.shape[1], data.targets
    check(
        number == 1,
        f"data has {number} queries for each context; one is needed: repeat a context "
        "for each of its queries, Dataset([c for c in contexts for _ in range(m)], …).",
    )
    places, residuals = np.asarray(data.queries[:, 0], np.float64), None
    if targets is not None and np.shape(targets) == data.queries.shape:
        residuals = np.asarray(targets, np.float64)[:, 0] - places
    return prepared(data.contexts, places, tolerance), residuals


def _floor(rows: np.ndarray, residuals: np.ndarray | None) -> float | None:
    """Return the risk that is left where residuals cannot be moved along rows."""
    if residuals is None:
        return None
    return float(np.sum((rows @ residuals) ** 2) / (2 * len(residuals)))
