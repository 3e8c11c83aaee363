"""Data sets for experiments on fitting, and gradient descent on them."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from meanformer import training
from meanformer.plotting import draw_curves, mark_values

QUERY = (1.0, 0.5)
# Heads in each of one or eight layers; the step of descent; how many times are kept.
HEADS = {1: 64, 8: 16}
STEP, KEPT = 0.5, 17
# Of risks; and the share of the largest eigenvalue below which one is zero.
ROUNDING, ZERO = 1e-16, 1e-11


def examples() -> training.Dataset:
    """Three contexts of four tokens, with queries and targets."""
    random = np.random.default_rng(7)
    tokens = random.normal(size=(3, 4, 2)) / 2
    queries, moves = random.normal(size=(2, 3, 2))
    return training.Dataset(tokens, queries / 2, queries / 2 + moves)


def dependent_contexts() -> list[np.ndarray]:
    """Three contexts whose means under every tilt are related: $m_3 = m_1 + m_2$."""
    a, b, c, e = np.array([[1, 0], [-0.5, 0.8], [0.3, -1], [-0.2, 0.4]])
    return [np.stack(rows) for rows in ([a, b], [c, e], [a + c, a + e, b + c, b + e])]


def independent_contexts() -> list[np.ndarray]:
    """The same with one token moved, which ends the relation."""
    first, second, third = dependent_contexts()
    return [first, second, third + np.array([[0, 0], [0, 0], [0, 0], [0.5, 0]])]


def offset_by(model, contexts, queries, offsets) -> training.Dataset:
    """A data set whose targets are the outputs of a network plus offsets."""
    data = training.Dataset(contexts, queries)
    ends = np.asarray(training.outputs(model, data))[:, 0]
    return data.with_targets(ends + np.asarray(offsets))


def null_offsets(size: float = 0.1) -> np.ndarray:
    """Offsets along the direction in which no head can move the dependent contexts."""
    return size * np.outer(np.array([-1, -1, 1]) / np.sqrt(3), (1, 0))


def network(layers: int, heads: int, seed: int, **options):
    """Heads with normal entries, drawn by a seed."""
    return training.MeanFieldTransformer.draw(
        layers, heads, 2, key=jr.key(seed), **options
    )


class Variant(NamedTuple):
    """Contexts, queries, and offsets of the targets from the outputs of a network."""

    contexts: list[np.ndarray]
    queries: list[np.ndarray]
    offsets: np.ndarray
    layers: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def report(self) -> training.InjectivityReport:
        """The report on the data, which needs no training."""
        # What no layer can move it cannot move at the start: residuals are offsets.
        targets = np.asarray(self.queries) + self.offsets
        data = training.Dataset(self.contexts, self.queries, targets)
        has_bias = dict(self.options).get("value_bias", False)
        return training.injectivity_report(data, bias=has_bias)

    def repeated(self, count: int) -> training.Dataset:
        """So many contexts: to repeat all of them changes neither risk nor gradient."""
        copies = count // len(self.contexts)
        rows = [np.tile(one, (copies, 1)) for one in (self.queries, self.offsets)]
        return training.Dataset(self.contexts * copies, *rows)


class Fit(NamedTuple):
    """Gradient descents on a variant from several starts, and their prediction.

    Attributes:
        nullity: how many eigenvalues of the tangent kernel are to be zero.
        floor: the least risk of such a network, and
        floor_of_one: of one layer.
        times: the times that are kept; there, one row for each start,
        risks: the risk,
        squared_norms: the squared norm of the gradient,
        values: the eigenvalues of the tangent kernel.
        count: how many contexts there are.
    """

    nullity: int
    floor: float
    floor_of_one: float
    times: np.ndarray
    risks: np.ndarray
    squared_norms: np.ndarray
    values: np.ndarray
    count: int

    @property
    def zeros(self) -> np.ndarray:
        """How many eigenvalues are zero at the start."""
        values = self.values[:, 0]
        return np.sum(values < ZERO * values[:, -1:], axis=1)

    @property
    def shares(self) -> np.ndarray:
        r"""The risk above the floor, as a share of what eigenvalues allow.

        It falls at least like $e^{-2\int\lambda/N}$, with $\lambda$ the smallest
        eigenvalue that is not zero: between two times, the smaller one there.
        """
        rates = 2 / self.count * self.values[:, :, self.nullity]
        least = np.minimum(rates[:, 1:], rates[:, :-1])
        falls = np.exp(-np.cumsum(least * np.diff(self.times), axis=1))
        above = np.maximum(self.risks - self.floor, ROUNDING)
        return above[:, 1:] / np.maximum(above[:, :1] * falls, ROUNDING)


def fit_all(
    variants: dict[str, Variant], *, starts: int, time: float, seed: int
) -> dict[str, Fit]:
    """Fit variants with one kind of network side by side, from the same starts."""
    first, *_ = several = list(variants.values())
    shape = (starts, 3, first.layers, HEADS[first.layers], 2, 2)
    heads = np.random.default_rng(seed).normal(size=shape)
    count = int(np.lcm.reduce([len(one.contexts) for one in several]))
    data = [one.repeated(count) for one in several for _ in range(starts)]
    each = round(time / STEP / (KEPT - 1))
    found = _descend(
        jnp.asarray(np.concatenate([heads] * len(several))),
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *data),
        each,
        **dict(first.options),
    )
    times, fits = STEP * each * np.arange(KEPT), {}
    for index, (name, one) in enumerate(variants.items()):
        rows = slice(index * starts, (index + 1) * starts)
        risks, squares, kernels = (np.asarray(leaf[rows]) for leaf in found)
        size = 2 * len(one.contexts)
        values = np.linalg.eigvalsh(kernels[:, :, :size, :size])
        report, is_deep = one.report, one.layers > 1
        kept = [one for one in report.relations if one.persists or not is_deep]
        floor = report.deep_floor if is_deep else report.floor
        foretold = 2 * len(kept), floor, report.floor
        fits[name] = Fit(*foretold, times, risks, squares, values, len(one.contexts))
    return fits


@eqx.filter_jit
def _descend(heads, data, each: int, value_bias: bool = False, **options):
    """Return risks, gradients and kernels of descents, with offsets for targets."""

    def of_one(heads, data):
        bias = jnp.zeros(heads.shape[1:4]) if value_bias else None
        model = training.MeanFieldTransformer(*heads, value_bias=bias, **options)
        given = data.with_targets(training.outputs(model, data) + data.targets)

        def step(model, _):
            found = training.gradient(model, given)
            moved = jax.tree.map(
                lambda a, g: a - STEP * g, model.parameters, found.parameters
            )
            return model.with_parameters(moved), (found.risk, found.squared_norm)

        def stretch(model, _):
            kernel = training.tangent_kernel(model, given)
            model, seen = jax.lax.scan(step, model, length=each)
            return model, (*(one[0] for one in seen), kernel)

        return jax.lax.scan(stretch, model, length=KEPT)[1]

    return jax.vmap(of_one)(heads, data)


def summary(fits: dict[str, Fit]) -> list[tuple]:
    """Rows of a table: eigenvalue, floor, risk at the start, risks at the end."""
    return [
        (
            name,
            np.median(fit.values[:, 0, 0]),
            np.median(fit.risks[:, 0]),
            fit.risks[:, -1].min(),
            np.median(fit.risks[:, -1]),
            fit.risks[:, -1].max(),
            fit.floor,
        )
        for name, fit in fits.items()
    ]


SUMMARY = (
    "data and network",
    r"$\lambda_{\min}$, median",
    "$R(0)$",
    "least $R(T)$",
    "median",
    "largest",
    "predicted floor",
)


def draw_risks(fits: dict[str, Fit], axes) -> None:
    """Draw medians and ranges of risks over starts, and mark floors."""
    times = next(iter(fits.values())).times
    medians = {name: np.median(fit.risks, axis=0) for name, fit in fits.items()}
    settings = {"xlabel": "time $t$", "yscale": "log", "legend": "upper right"}
    draw_curves(times, medians, axes, **settings)
    for line, fit in zip(axes.lines, fits.values(), strict=True):
        low, high = fit.risks.min(axis=0), fit.risks.max(axis=0)
        axes.fill_between(times, low, high, color=line.get_color(), alpha=0.2)
    floors = [fit.floor for fit in fits.values() if fit.floor > ROUNDING]
    mark_values(sorted(set(floors)), axes, axis="y")
    least, most = np.min(list(medians.values())), np.max(list(medians.values()))
    axes.set(ylabel="risk $R$", ylim=(max(1e-9, least / 3), 10 * most))
