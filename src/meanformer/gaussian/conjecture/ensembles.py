"""Random and structured laws of attention parameters, and cases worth knowing."""

import abc
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from meanformer import attention
from meanformer.attention import AbstractInContextMap
from meanformer.errors import as_integer, check, check_choice
from meanformer.gaussian.velocity import centred
from meanformer.measures import Gaussian

KINDS = {
    "softmax": attention.Softmax,
    "l2": attention.L2,
    "sinkhorn": attention.Sinkhorn,
    "linear": attention.Linear,
}


class Case(NamedTuple):
    r"""A velocity and a first covariance, as plain matrices that can be written down.

    Attributes:
        kind: `"softmax"`, `"l2"`, `"sinkhorn"` or `"linear"`.
        heads: for each head the matrices $Q$, $K$ and $V$.
        covariance: the first covariance.
        beta: the inverse temperature.
        perceptron: a matrix $U$ of a linear perceptron beside the heads; or `None`.
    """

    kind: str
    heads: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    covariance: np.ndarray
    beta: float = 1.0
    perceptron: np.ndarray | None = None

    @property
    def dimension(self) -> int:
        """The dimension of the tokens."""
        return len(self.covariance)

    @property
    def kernel_dimension(self) -> int:
        """The dimension of the common kernel of the scores."""
        scores = np.concatenate([key.T @ query for query, key, _ in self.heads])
        return self.dimension - int(np.linalg.matrix_rank(scores))

    def gamma(self) -> AbstractInContextMap:
        """Return the velocity."""
        heads = [KINDS[self.kind](*head, beta=self.beta) for head in self.heads]
        whole = heads[0] if len(heads) == 1 else attention.MultiHead(heads)
        if self.perceptron is None:
            return whole
        return attention.Sum([whole, attention.Perceptron.affine(self.perceptron)])

    def gaussian(self) -> Gaussian:
        """Return the first Gaussian, of mean zero."""
        return centred(self.covariance)

    def to_json(self) -> dict:
        """Return the case as lists of numbers, which JSON keeps to the last digit."""
        return json.loads(json.dumps(self._asdict(), default=np.ndarray.tolist))


def case_from_json(record: dict) -> Case:
    """Return the case that `Case.to_json` wrote."""
    case = Case(**record)
    return case._replace(
        heads=[tuple(map(np.array, head)) for head in case.heads],
        covariance=np.array(case.covariance),
        perceptron=None if case.perceptron is None else np.array(case.perceptron),
    )


Matrices = tuple[np.ndarray, np.ndarray, np.ndarray]


def _normal(random: np.random.Generator, d: int) -> Matrices:
    score, value = random.standard_normal((2, d, d))
    return score, np.eye(d), value


def _orthogonal(random: np.random.Generator, d: int) -> Matrices:
    score, key, value = _normal(random, d)
    return np.linalg.qr(score)[0], key, np.linalg.qr(value)[0]


def _symmetric(random: np.random.Generator, d: int) -> Matrices:
    score, key, value = _normal(random, d)
    return (score + score.T) / 2, key, (value + value.T) / 2


def _negative(random: np.random.Generator, d: int) -> Matrices:
    query = random.standard_normal((max(d // 2, 1), d))
    value = random.standard_normal((d, d))
    return query, -query, value.T @ value


def _commuting(random: np.random.Generator, d: int) -> Matrices:
    basis = np.linalg.qr(random.standard_normal((d, d)))[0]
    score, value = ((basis * row) @ basis.T for row in random.standard_normal((2, d)))
    return score, np.eye(d), value


def _near_rotation(random: np.random.Generator, d: int) -> Matrices:
    check(d % 2 == 0, f"dimension is {d}; rotations need an even one.")
    turn = np.kron(np.eye(d // 2), np.array([[0.0, -1.0], [1.0, 0.0]]))
    noise = 0.05 * random.standard_normal((2, d, d))
    return np.eye(d) + noise[0], np.eye(d), turn + noise[1]


ENSEMBLES: dict[str, Callable[[np.random.Generator, int], Matrices]] = {
    "normal": _normal,
    "orthogonal": _orthogonal,
    "symmetric": _symmetric,
    "negative": _negative,
    "commuting": _commuting,
    "near-rotation": _near_rotation,
}


class AbstractEnsemble(abc.ABC):
    """A law of cases. Derive from it, as a frozen dataclass, for one of your own."""

    dimension: int

    @abc.abstractmethod
    def draw(self, index: int) -> Case:
        """Return draw number `index`, always the same."""

    def settings(self) -> dict:
        """Return what tells its draws from those of another, in terms of JSON."""
        fields = cast(Any, self).__dataclass_fields__
        values = {name: getattr(self, name) for name in fields}
        text = json.dumps(values, default=np.ndarray.tolist)
        return {"ensemble": type(self).__qualname__, **json.loads(text)}


@dataclasses.dataclass(frozen=True)
class GivenHeads(AbstractEnsemble):
    """Given matrices, such as the heads of a trained model, from random covariances.

    Args:
        heads: the matrices $Q$, $K$ and $V$ of each head; draw number $i$ takes that of
            number $i$, and begins again after the last.
        kind: `"softmax"`, `"l2"`, `"sinkhorn"` or `"linear"`.
        beta: the inverse temperature.
        seed: the seed of the covariances, which are those of Wishart.
    """

    heads: Sequence[Matrices]
    kind: str = "softmax"
    beta: float = 1.0
    seed: int = 0

    def __post_init__(self):
        check(len(self.heads) > 0, "heads is empty; give at least one (Q, K, V).")
        check_choice("kind", self.kind, KINDS)

    @property
    def dimension(self) -> int:
        """The dimension of the tokens."""
        return len(self.heads[0][2])

    def draw(self, index: int) -> Case:
        """Return draw number `index`, always the same."""
        random = np.random.default_rng([self.seed, index])
        matrices = self.heads[index % len(self.heads)]
        head = tuple(np.asarray(matrix, np.float64) for matrix in matrices)
        factor = random.standard_normal((self.dimension, self.dimension))
        return Case(self.kind, [head], factor @ factor.T, self.beta)


@dataclasses.dataclass(frozen=True)
class Ensemble(AbstractEnsemble):
    r"""A law of cases: matrices of a family, a Wishart covariance.

    The families, for the score $A = K^\top Q$ and the value matrix $V$: `"normal"`
    (independent standard normal entries), `"orthogonal"`, `"symmetric"`, `"negative"`
    ($A = -Q^\top Q$ of rank $\lfloor d/2\rfloor$ and $V$ positive semi-definite),
    `"commuting"` (symmetric, with common eigenvectors) and `"near-rotation"`
    ($V$ close to a quarter turn, $A$ to the identity).

    Args:
        family: the family of matrices.
        dimension: the dimension of the tokens.
        kind: `"softmax"`, `"l2"`, `"sinkhorn"` or `"linear"`.
        heads: how many heads, each drawn alike.
        perceptron: standard deviation of a random linear perceptron; none by default.
        seed: the seed; draw number $i$ depends on it and on $i$ alone.
    """

    family: str = "normal"
    dimension: int = 2
    kind: str = "softmax"
    heads: int = 1
    perceptron: float | None = None
    seed: int = 0

    def __post_init__(self):
        check_choice("family", self.family, ENSEMBLES)
        check_choice("kind", self.kind, KINDS)
        as_integer("dimension", self.dimension, least=1)
        as_integer("heads", self.heads, least=1)

    def draw(self, index: int) -> Case:
        """Return draw number `index`, always the same."""
        random, family = (
            np.random.default_rng([self.seed, index]),
            ENSEMBLES[self.family],
        )
        heads = [family(random, self.dimension) for _ in range(self.heads)]
        shape, perceptron = (self.dimension, self.dimension), None
        factor = random.standard_normal(shape)
        if self.perceptron is not None:
            perceptron = self.perceptron * random.standard_normal(shape)
        return Case(self.kind, heads, factor @ factor.T, 1.0, perceptron)


_IDENTITY, _TURN = np.eye(2), np.array([[0.0, -1.0], [1.0, 0.0]])
_SPREAD = np.array([[1.0, 0.3], [0.3, 0.6]])


_SKEW = np.array([[-0.85, -0.7], [-0.2, -0.6]])


def _one_head(
    value: Any, spread: Any = _SPREAD, kind: str = "softmax", score: Any = _IDENTITY
) -> Case:
    """Return attention with these values, the score of the identity by default."""
    return Case(kind, [(score, _IDENTITY, np.array(value))], spread)


#: Cases that refute the literal conjecture, or show how its words must be read.
KNOWN_CASES: dict[str, Case] = {
    "rotation, stationary": _one_head(_TURN, 0.8 * _IDENTITY),
    "rotation, periodic": _one_head(_TURN),
    "rotation, periodic, L2": _one_head(_TURN, kind="l2"),
    "rotation, periodic, Sinkhorn": _one_head(_TURN, kind="sinkhorn"),
    "rotation, contracting": _one_head(_TURN - 0.1 * _IDENTITY),
    "rotation, expanding": _one_head(_TURN + 0.1 * _IDENTITY),
    "full rank over t": _one_head([[0.0, 0.6], [-1.3, 0.9]], _IDENTITY, score=_SKEW),
}
