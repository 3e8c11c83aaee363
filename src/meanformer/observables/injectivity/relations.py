r"""Why contexts are dependent: relations between measures that hold exactly.

A relation is a row $c$ with $\sum_k c_k m_\theta[\mu^k](x^k) = 0$ for what all heads
read. As $m_\theta[\mu](\alpha\xi) = \alpha^{-1} m_\theta[\alpha\mu](\xi)$, queries on
one line are compared as one query.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from meanformer.errors import check
from meanformer.measures import AbstractMeasure, Gaussian, TokenCloud, UniformBox
from meanformer.measures.comparison import (
    ZERO,
    Atoms,
    is_convolution,
    lines_through_zero,
)
from meanformer.measures.operations import group_labels
from meanformer.numerics.row_spaces import null_rows, spanned

# A kind, and a row under which centred contexts cancel, whatever their means do.
Clue = tuple[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Relation:
    r"""A named reason why no single layer can fit all targets.

    Attributes:
        name: the kind of relation.
        indices: the contexts in it.
        coefficients: their coefficients $c_k$.
        persists: whether it holds for attention of every depth, not for one layer only.
    """

    name: str
    indices: tuple[int, ...]
    coefficients: tuple[float, ...]
    persists: bool

    def row(self, count: int) -> Float[np.ndarray, " N"]:
        """Return the coefficients of all contexts, of which there are so many."""
        return np.bincount(self.indices, self.coefficients, count)

    @property
    def sentence(self) -> str:
        """The relation in words."""
        who = ", ".join(map(str, self.indices))
        pairs = zip(self.coefficients, self.indices, strict=True)
        terms = " ".join(f"{c:+.4g} m{k}" for c, k in pairs)
        reach = "at every depth" if self.persists else "in one layer"
        why = f"{WHY[self.name]}; what heads read obeys {terms} = 0"
        return f"{self.name} (contexts {who}): {why} {reach}"


WHY = {
    "equal measures": "the measures and the queries are the same",
    "parity": "measures and queries are mirror images through the origin",
    "dilation": "measures differ by a factor and queries by its inverse",
    "symmetric context, query zero": "heads see the mean alone, and nothing moves it",
    "convolution": "one measure is the convolution of two others",
    "convolution power": "one measure is the convolution of another with itself",
    "boxes": "their sides cancel",
    "Gaussians": "means and covariances are linearly dependent",
    "translates": "measures are translates, and their shifts cancel",
    "translates in arithmetic progression": "their shifts are equally spaced",
    "two translates, two queries": "the same shift is asked about twice",
    "Diracs": "single tokens are linearly dependent",
    "zero queries": "a query zero sees the mean alone, and the means are dependent",
    "combination": "relations of several kinds add up",
}
# Those that hold at every depth; without value biases, which move the origin.
PERSISTING = ("equal measures", "Diracs")
UNBIASED = ("parity", "symmetric context, query zero")


class Asked(NamedTuple):
    r"""Contexts, each with its query $x^k = \alpha_k\xi_g$, prepared for comparison.

    Queries that are zero are in the group -1, with factor 1. Atoms are the tokens,
    centred, those that have met as one; other measures have none. Radii are root mean
    squares, and slacks distances up to which tokens are the same.
    """

    measures: Sequence[AbstractMeasure]
    queries: Float[np.ndarray, "N d"]
    groups: Int[np.ndarray, " N"]
    factors: Float[np.ndarray, " N"]
    means: Float[np.ndarray, "N d"]
    atoms: tuple[Atoms | None, ...]
    radii: Float[np.ndarray, " N"]
    slacks: Float[np.ndarray, " N"]

    @property
    def tolerance(self) -> float:
        """The largest slack of tokens, as a share of their radius."""
        wide = self.radii > 0
        return float((self.slacks[wide] / self.radii[wide]).max(initial=0))

    def is_dirac(self, k: int) -> bool:
        """Return whether a context is a single token."""
        return self.atoms[k] is not None and bool(self.radii[k] == 0)

    @property
    def lines(self) -> list[int]:
        """The lines of queries that are not zero."""
        return sorted({int(line) for line in self.groups} - {ZERO})

    def members(self, line: int) -> list[int]:
        """Return the contexts whose queries are on a line."""
        return [int(k) for k in np.flatnonzero(self.groups == line)]


def prepared(
    measures: Sequence[AbstractMeasure], queries: np.ndarray, tolerance: float
) -> Asked:
    """Centre contexts, merge tokens, and group queries by lines."""
    parts = [_centred(one, tolerance) for one in measures]
    means, atoms, radii, slacks = zip(*parts, strict=True)
    rest = np.stack(means), atoms, np.array(radii), np.array(slacks)
    return Asked(measures, queries, *lines_through_zero(queries), *rest)


def _centred(measure: AbstractMeasure, tolerance: float):
    """Return mean, centred atoms, radius and slack of a context."""
    if not isinstance(measure, TokenCloud):
        mean, spread = np.asarray(measure.mean()), np.asarray(measure.covariance())
        check(
            mean.dtype == np.float64,
            f"a {type(measure).__name__} is {mean.dtype}, too few digits to tell "
            'dependence; call jax.config.update("jax_enable_x64", True) first.',
        )
        radius = np.sqrt(np.trace(spread))
        return mean, None, radius, tolerance * radius
    masses = np.asarray(measure.weights, np.float64)
    points = np.asarray(measure.points, np.float64)[masses > 0]
    masses = masses[masses > 0] / masses.sum()
    rounding = 64 * np.finfo(measure.points.dtype).eps * np.abs(points).max()
    mean = masses @ points
    radius = Atoms(points - mean, masses, 0).radius
    atoms = Atoms(points - mean, masses, tolerance * radius + rounding).joined
    if len(atoms.points) == 1:
        atoms, radius = atoms.scaled(0)._replace(slack=atoms.slack), 0.0
    return mean, atoms, radius, atoms.slack


def find_relations(asked: Asked, *, bias: bool = False) -> list[Relation]:
    """Return relations that span all that follow from the kinds known here."""
    kept, rest, relations = [], [], []
    for kind, row in _clues(asked):
        if not _cancels(asked, row, bias):
            rest.append((kind, row))
        elif _is_new(kept, row):
            relations.append(_named(asked, {kind}, row, bias))
    if not rest:
        return relations
    # Rows reduced from the end keep the first kinds apart, which hold at every depth.
    rest.sort(key=lambda clue: clue[0] not in PERSISTING)
    table = np.stack([row / np.abs(row).max() for _, row in rest])
    scale = float(bias) * (np.abs(asked.means).max() or 1.0)
    moments = np.column_stack([table @ asked.means, scale * table.sum(axis=1)])
    for parts in null_rows(moments.T, 1e-8):
        row = parts @ table
        # Clues may follow from each other, and add up to nothing.
        row = np.where(np.abs(row) > 1e-9 * (np.abs(parts) @ np.abs(table)), row, 0)
        if row.any() and _cancels(asked, row, bias) and _is_new(kept, row):
            kinds = {rest[i][0] for i in np.flatnonzero(np.abs(parts) > 1e-7)}
            relations.append(_named(asked, kinds, row, bias))
    return relations


def _cancels(asked: Asked, row: np.ndarray, bias: bool) -> bool:
    """Whether means cancel too, and with a bias the coefficients themselves."""
    size = np.abs(row)
    limit = size @ (asked.slacks + 1e-12 * np.abs(asked.means).max())
    is_free = abs(bias * row.sum()) <= 1e-9 * size.sum()
    return bool(is_free and np.abs(row @ asked.means).max() <= limit)


def _named(asked: Asked, kinds: set[str], row: np.ndarray, bias: bool) -> Relation:
    """Give a relation its name."""
    row = row / np.abs(row).max()
    indices = np.flatnonzero(np.abs(row) > 1e-8)
    row = np.sign(row[indices[0]]) * row[indices]
    row = row / np.abs(row).min()
    name = next(iter(kinds)) if len(kinds) == 1 else "combination"
    case = name, len(set(asked.groups[indices])), len(indices)
    if case == ("translates", 2, 4):
        name = "two translates, two queries"
    if case == ("translates", 1, 3):
        shares = np.sort(np.abs(row / asked.factors[indices]))
        if np.allclose(shares / shares[0], [1, 1, 2]):
            name = "translates in arithmetic progression"
    if case == ("zero queries", 1, 1) and _are_mirrored(asked, *[int(indices[0])] * 2):
        name = "symmetric context, query zero"
    persists = name in PERSISTING or (name in UNBIASED and not bias)
    members = tuple(map(int, indices))
    if not persists and all(map(asked.is_dirac, members)):
        name, persists = "Diracs", True
    return Relation(name, members, tuple(map(float, row)), persists)


def _are_mirrored(asked: Asked, i: int, j: int) -> bool:
    one, other = asked.atoms[i], asked.atoms[j]
    if one is None or other is None:
        return False
    gap = np.abs(asked.means[i] + asked.means[j]).max()
    return bool(gap <= one.slack + other.slack) and one.is_same(other.scaled(-1), 2)


def _clues(asked: Asked) -> Iterator[Clue]:
    """Return rows under which centred contexts cancel, the plainest kinds first."""
    eye = np.eye(len(asked.measures))
    lines = [ZERO, *asked.lines]
    classes = {line: _classes(asked, line) for line in lines}
    pairs = {line: _pairs(asked, classes[line], eye) for line in lines}
    for equal, _ in pairs.values():
        yield from equal
    for i, j in itertools.combinations(asked.members(ZERO), 2):
        if _are_mirrored(asked, i, j):
            yield "parity", eye[i] + eye[j]
    for k, row in enumerate(eye):
        if asked.is_dirac(k):
            yield "Diracs", row
        elif asked.groups[k] == ZERO:
            yield "zero queries", row
    for line in asked.lines:
        yield from _convolutions(asked, [one[0] for one in classes[line]], eye)
        yield from _boxes(asked, line)
    yield from _gaussians(asked)
    for line in asked.lines:
        yield from pairs[line][1]


def _classes(asked: Asked, line: int) -> list[list[int]]:
    """Sort contexts on a line into translates of each other, once they are scaled."""
    classes: list[list[int]] = []
    for k in asked.members(line):
        for one in classes:
            if _is_same(asked, k, one[0]):
                one.append(k)
                break
        else:
            classes.append([k])
    return classes


def _is_same(asked: Asked, i: int, j: int) -> bool:
    factors, (one, other) = asked.factors[[i, j]], (asked.atoms[i], asked.atoms[j])
    if one is None or other is None:
        is_asked = np.isclose(*factors, rtol=1e-9)
        return bool(is_asked and eqx.tree_equal(asked.measures[i], asked.measures[j]))
    one, other = one.scaled(factors[0]), other.scaled(factors[1])
    gap = abs(np.diff(np.abs(factors) * asked.radii[[i, j]]))
    return bool(gap <= 4 * max(one.slack, other.slack)) and one.is_same(other, 2)


def _pairs(asked: Asked, classes, eye) -> tuple[list[Clue], list[Clue]]:
    """Return pairs of equal contexts, and pairs of translates that are not equal."""
    equal, moved, factors = [], [], asked.factors
    rows, centres = factors[:, None] * eye, factors[:, None] * asked.means
    slacks = np.abs(factors) * asked.slacks
    for members in classes:
        distinct: list[int] = []
        for place, k in enumerate(members):
            before = np.array(members[:place], int)
            shifts = np.abs(centres[k] - centres[before]).max(axis=1)
            close = before[shifts <= slacks[k] + slacks[before]]
            if len(close) == 0:
                distinct.append(k)
                continue
            # One to which it is related at every depth, if there is any.
            ratios = np.round(factors[k] / factors[close], 8)
            i = np.lexsort((ratios != 1, np.abs(ratios) != 1))[0]
            kinds = {1.0: "equal measures", -1.0: "parity"}
            kind = kinds.get(float(ratios[i]), "dilation")
            equal.append((kind, rows[close[i]] - rows[k]))
        if asked.radii[members[0]] > 0:
            moved += [("translates", rows[distinct[0]] - rows[k]) for k in distinct[1:]]
    return equal, moved


def _convolutions(asked: Asked, places: list[int], eye) -> Iterator[Clue]:
    """Find clouds on a line that are convolutions of one, two or more others."""
    rows, parts, squares = asked.factors[:, None] * eye, {}, {}
    for k in places:
        atoms = asked.atoms[k]
        if atoms is not None and asked.radii[k] > 0:
            parts[k] = atoms.scaled(asked.factors[k])
            squares[k] = (asked.factors[k] * asked.radii[k]) ** 2
    wide, sizes = list(parts), np.array(list(squares.values()))
    pairs = itertools.combinations_with_replacement(wide, 2)
    powers = ((k,) * power for k in wide for power in (3, 4))
    for recipe in itertools.chain(pairs, powers):
        total = sum(squares[k] for k in recipe)
        for target in np.flatnonzero(np.abs(sizes - total) <= 1e-5 * total):
            k = wide[target]
            if is_convolution([parts[j] for j in recipe], parts[k]):
                kind = "convolution" if len(set(recipe)) > 1 else "convolution power"
                yield kind, rows[list(recipe)].sum(axis=0) - rows[k]


def _boxes(asked: Asked, line: int) -> Iterator[Clue]:
    """Find boxes whose sides, as scaled by their queries, cancel axis by axis."""
    pairs = [(k, asked.measures[k]) for k in asked.members(line)]
    boxes = {k: box for k, box in pairs if isinstance(box, UniformBox)}
    if len(boxes) > 1:
        sides = [np.asarray(box.high - box.low, np.float64) for box in boxes.values()]
        factors, table = asked.factors[list(boxes)], []
        for column in (np.abs(factors)[:, None] * np.stack(sides)).T:
            labels = group_labels(column[:, None], None, 1e-9 * column.max())
            table.append((labels[None] == np.unique(labels)[:, None]) / factors)
        yield from _null_clues("boxes", np.concatenate(table), list(boxes), asked)


def _gaussians(asked: Asked) -> Iterator[Clue]:
    """Find Gaussians with dependent products of covariance and query."""
    members = [k for line in asked.lines for k in asked.members(line)]
    places = [k for k in members if isinstance(asked.measures[k], Gaussian)]
    if places:
        table = second_moments(asked)[:, places]
        yield from _null_clues("Gaussians", table, places, asked)


def second_moments(asked: Asked) -> np.ndarray:
    r"""Return the products $\Sigma_k\otimes x^k$ as columns."""
    spreads = [np.asarray(one.covariance()) for one in asked.measures]
    pairs = zip(spreads, asked.queries, strict=True)
    return np.stack([np.multiply.outer(s, x).ravel() for s, x in pairs], axis=1)


def _null_clues(kind: str, table, places, asked: Asked) -> Iterator[Clue]:
    for parts in null_rows(table, 1e-9):
        row = np.zeros(len(asked.measures))
        row[places] = parts
        yield kind, row


def _is_new(kept: list[np.ndarray], row: np.ndarray) -> bool:
    """Keep a row if it is independent of those kept before."""
    is_new = len(spanned([*kept, row], len(row))) > len(kept)
    kept += [row] if is_new else []
    return is_new
