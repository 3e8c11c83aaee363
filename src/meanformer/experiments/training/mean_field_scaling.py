r"""One step size for every depth and width.

Heads are averaged over $L$ layers of $M$, so that the derivative of the risk in one
head is of size $1/(LM)$. In mean-field units, $\theta \leftarrow \theta -
\eta\,G(\theta)$, which is a learning rate $\eta LM$, the curve of the risk does not
depend on $L$ and $M$ beyond the chance of the draw; with the learning rate held fixed,
large networks freeze.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer import training
from meanformer.plotting import draw_curves, style

STEP = 0.2
SHAPES = ((4, 16), (16, 4), (32, 32))


class Parameters(lab.Parameters):
    """How many networks of each shape, and how long they are trained."""

    draws: int = lab.setting(16, full=96, help="networks of each shape", at_least=16)
    steps: int = lab.setting(12, full=60, help="steps of size 0.2", at_least=5)


ASPECT = lab.observation(
    "aspect",
    "The mean risks of networks of shapes (4, 16) and (16, 4) agree at every step, "
    "within three standard errors of their difference.",
    "Chi25, infinite depth and width",
    source=lab.other_method("the other shape, independent draws"),
)
SIZE = lab.observation(
    "size",
    "They agree with that of (32, 32), which has sixteen times as many heads, within "
    "three standard errors and a tenth of it: the variance of finitely many heads adds "
    "a part of order $1/(LM)$ to a risk.",
    "Chi25, infinite depth and width",
    source=lab.other_method("(32, 32), independent draws"),
)
DUPLICATES = lab.theorem(
    "duplicates",
    "A network whose heads are all doubled has the same risk at every step.",
    "BHFP26, mean-field limit",
    source=lab.theory("equal to rounding"),
)
RATE = lab.theorem(
    "rate",
    r"The derivative of the risk in a head, by automatic differentiation of layers of "
    r"ordinary maps, is $G/(LM)$.",
    "BHFP26, gradient flow of the risk",
    source=lab.other_method("jax.grad through run_layers"),
)
FREEZES = lab.observation(
    "freezes",
    "With the learning rate that is right for $LM = 4$, steps along the derivatives in "
    "heads make networks with $LM = 1024$ lose less than a tenth of what they lose in "
    "mean-field units.",
    source=lab.other_method("the same draws, in mean-field units"),
)


@lab.experiment("One step size for every depth and width", room="training", seconds=8)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Train many networks of each shape side by side."""
    curves = {}
    for index, shape in enumerate(progress.over(SHAPES, 0.7)):
        keys = jr.split(jr.key(index), parameters.draws)
        curves[shape] = np.asarray(risks(keys, *shape, parameters.steps))
    wide = SHAPES[-1]
    frozen = np.asarray(risks(keys, *wide, parameters.steps, 4 * STEP))
    losses = [one[:, 0] - one[:, -1] for one in (frozen, curves[wide])]
    deep, broad = (curves[shape] for shape in SHAPES[:2])
    pairs = [gap(one, curves[wide]) for one in (deep, broad)]
    slack = [bound + curves[wide].mean(axis=0) / 10 for _, bound in pairs]
    return lab.Outcome(
        findings=[
            ASPECT.at_most(*gap(deep, broad)),
            SIZE.at_most([found for found, _ in pairs], slack),
            DUPLICATES.close_to(*doubled(), tolerance=1e-12),
            RATE.at_most(difference_from_autodiff(), 1e-12),
            FREEZES.at_most(losses[0].mean(), losses[1].mean() / 10),
        ],
        pictures=[draw_risks(curves, frozen)],
    )


def data_set() -> training.Dataset:
    """Three contexts of four tokens, each with a query and a target."""
    keys = jr.split(jr.key(0), 3)
    contexts = jr.normal(keys[0], (3, 4, 2))
    queries, targets = jr.normal(keys[1], (3, 2)), jr.normal(keys[2], (3, 2))
    return training.Dataset(contexts, queries, queries + targets / 2)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def risks(keys, layers: int, heads: int, steps: int, rate: float | None = None):
    """The risk of networks drawn by keys, before all steps and after each one.

    Steps are in mean-field units, or along derivatives in heads by a learning rate.
    """
    data, size = data_set(), STEP if rate is None else rate

    def in_units(model):
        found = training.gradient(model, data)
        return found.risk, found.parameters

    def in_heads(model):
        found, slopes = jax.value_and_grad(lambda one: training.risk(one, data))(model)
        return found, slopes.parameters

    def descend(model, _):
        risk, slopes = in_units(model) if rate is None else in_heads(model)
        moved = jax.tree.map(lambda a, g: a - size * g, model.parameters, slopes)
        return model.with_parameters(moved), risk

    def of_one(key):
        model = training.MeanFieldTransformer.draw(layers, heads, 2, key=key)
        return jax.lax.scan(descend, model, length=steps + 1)[1]

    return jax.vmap(of_one)(keys)


def gap(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Differences of mean risks, and three standard errors of them."""
    means = one.mean(axis=0), other.mean(axis=0)
    variances = [curve.var(axis=0, ddof=1) / len(curve) for curve in (one, other)]
    return abs(means[0] - means[1]), 3 * np.sqrt(sum(variances))


def doubled():
    """Risks of a network, and of the same with every head twice."""
    model = training.MeanFieldTransformer.draw(4, 4, 2, key=jr.key(7))
    twice = jax.tree.map(lambda a: jnp.concatenate([a, a], axis=1), model.parameters)
    pair = (model.with_parameters(twice), model)
    rule = training.GradientDescent(0.05)
    found = [training.train(one, data_set(), 1.0, solver=rule, save=5) for one in pair]
    return found[0].risks, found[1].risks


def difference_from_autodiff() -> float:
    """The largest relative difference of the derivatives in values, both ways."""
    data = data_set()
    model = training.MeanFieldTransformer.draw(3, 2, 2, key=jr.key(3))

    def risk(model):
        def loss(tokens, weights, query, target):
            cloud = mf.TokenCloud(tokens, weights)
            path = mf.run_layers(model.flow(), cloud, 3, probes=query)
            ended = cast(jax.Array, path.probes)[-1]
            return jnp.sum((ended - target) ** 2) / 2

        given = (data.tokens, data.weights, data.queries, data.targets)
        return jax.vmap(loss)(*given).mean()

    expected = jax.jit(jax.grad(risk))(model).parameters.heads.value
    found = training.gradient(model, data).parameters.heads.value / (3 * 2)
    return float(jnp.abs(found - expected).max() / jnp.abs(expected).max())


def draw_risks(curves, frozen) -> lab.Picture:
    """Mean risk against time, with bands of a standard error."""
    figure, axes = style.canvas(panel=(5.2, 3.6))
    times = STEP * np.arange(frozen.shape[1])
    named = {f"$L = {a}$, $M = {b}$": curve for (a, b), curve in curves.items()}
    named["$L = M = 32$, learning rate of $LM = 4$"] = frozen
    means = {name: curve.mean(axis=0) for name, curve in named.items()}
    draw_curves(times, means, axes, marks=("-", "-", "-", "--"), legend="upper right")
    for line, curve in zip(axes.lines, named.values(), strict=True):
        error = curve.std(axis=0, ddof=1) / np.sqrt(len(curve))
        low, high = curve.mean(axis=0) - error, curve.mean(axis=0) + error
        axes.fill_between(times, low, high, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="mean-field time $t$", ylabel="mean risk $R$")
    axes.set_ylim(0, 1.9 * max(curve[0] for curve in means.values()))
    return lab.Picture(
        figure,
        "Mean risk of many networks, with bands of one standard error. In mean-field "
        "units all shapes train alike; with the learning rate of a small network the "
        "large one stands still (dashed).",
    )
