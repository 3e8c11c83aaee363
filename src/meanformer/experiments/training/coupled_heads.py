r"""Propagation of chaos: trained heads stay close to those of a large network.

A large reference network draws its heads. A finite network takes the first $M$ of them
in each layer, and both are trained for the same time. Each head feels the others only
through their mean, so that it stays within $O(1/\sqrt{LM})$ of its twin in the
reference. A mean of some of finitely many heads differs from that of all by a variance
proportional to $\frac1{LM} - \frac1{LM_\mathrm{ref}}$: rates are fitted against it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

import meanformer.experiments as lab
from meanformer.experiments.helpers import fitting
from meanformer.experiments.helpers.rates import exponent
from meanformer.plotting import draw_curves, mark_sizes, style
from meanformer.training import MeanFieldTransformer, gradient, tangent_kernel

# Heads in each of so many layers: wide and deep networks have equally many in all.
HEADS = {4: (4, 8, 16, 32), 16: (1, 2, 4, 8)}
PRODUCTS = np.array([16, 32, 64, 128])
STEP, STEPS = 0.5, 8
NAMES = "heads after training", "gradients at the start"
NAMES += "smallest eigenvalue", "largest eigenvalue"


class Parameters(lab.Parameters):
    """How often references are drawn, and how large they are."""

    draws: int = lab.setting(24, full=96, help="references of each depth", at_least=16)
    times: int = lab.setting(
        4, full=16, help="heads of the reference for one of the largest", at_least=4
    )
    seed: int = lab.setting(0, help="seed of all draws", at_least=0)


CHAOS = "Chi25, infinite depth and width of residual networks"
DISTANCES = lab.observation(
    "distances",
    "The root mean square distance of heads from their twins after training falls like "
    r"$(\frac1{LM} - \frac1{LM_\mathrm{ref}})^{1/2}$, which is $1/\sqrt{LM}$ for large "
    "references. So does that of the gradients $G$ at the start.",
    CHAOS,
    source=lab.theory("the rate"),
)
EIGENVALUES = lab.observation(
    "eigenvalues",
    "The smallest and the largest eigenvalue of the tangent kernel after training tend "
    "to those of the reference, in logarithms at this rate.",
    CHAOS,
    source=lab.theory("the rate"),
)
OPTIMAL = lab.observation(
    "optimal",
    "No other order within layers brings heads nearer to the twins: the distance is "
    "that of conditional optimal transport, which is never larger.",
    "BPV25, conditional optimal transport",
    source=lab.other_method("SciPy's assignments"),
)


@lab.experiment("Finite networks stay by their reference", room="training", seconds=8)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Train references and networks of their first heads, and compare twins."""
    random, data = np.random.default_rng(parameters.seed), fitting.examples()
    errors, least, paths = {name: [] for name in NAMES}, [], {}
    for deep, widths in progress.over(HEADS.items(), 0.9):
        size = (parameters.draws, deep, parameters.times * max(widths), 12)
        drawn = trained(jnp.asarray(random.normal(size=size)), data, widths)
        ends, slopes, values, paths[deep] = map(np.asarray, drawn)
        found = [apart(ends, widths), apart(slopes, widths)]
        found += list(abs(np.log(values[:, :-1] / values[:, -1:])).T)
        for name, one in zip(NAMES, found, strict=True):
            errors[name].append(one)
        least.append([matched(*pair) for pair in twins(ends, widths)])
    shares = 1 / PRODUCTS - 1 / (parameters.times * PRODUCTS.max())
    rates = {
        name: exponent(np.tile(1 / shares, 2), np.concatenate(both))
        for name, both in errors.items()
    }
    slopes = [slope for slope, _ in rates.values()]
    findings = [
        DISTANCES.close_to(slopes[:2], -0.5, tolerance=0.15),
        EIGENVALUES.close_to(slopes[2:], -0.5, tolerance=0.15),
        OPTIMAL.close_to(np.array(least) / errors[NAMES[0]], 1, tolerance=1e-12),
    ]
    pictures = [draw_rates(errors, shares, rates), draw_twins(paths[min(HEADS)])]
    return lab.Outcome(findings, pictures)


@eqx.filter_jit
def trained(heads, data, widths: tuple[int, ...]):
    """Train references, the last network for each draw, and networks of first heads.

    Repeated heads count as one: with them all networks have one shape. Returned are
    heads at the end, gradients at the start, eigenvalues, and paths of first heads.
    """
    most = heads.shape[2]
    rows = jnp.arange(most) % jnp.array([*widths, most])[:, None]

    def with_heads(heads):
        matrices = heads.reshape(*heads.shape[:2], 3, 2, 2)
        return MeanFieldTransformer(*jnp.moveaxis(matrices, 2, 0))

    def of_one(heads):
        def step(heads, _):
            query, key, value, _ = gradient(with_heads(heads), data).parameters.heads
            change = jnp.stack([query, key, value], axis=2).reshape(heads.shape)
            return heads - STEP * change, (heads, change)

        _, (path, changes) = jax.lax.scan(step, heads, length=STEPS + 1)
        kernel = tangent_kernel(with_heads(path[-1]), data)
        values = jnp.linalg.eigvalsh(kernel)[jnp.array([0, -1])]
        return path[-1], changes[0], values, path[:, 0, 0]

    def of_draw(heads):
        return jax.vmap(of_one)(jnp.moveaxis(heads[:, rows], 1, 0))

    return jax.lax.map(of_draw, heads)


def twins(heads, widths):
    """Heads of networks, and those of the reference that began as they did."""
    for index, wide in enumerate(widths):
        yield heads[:, index, :, :wide], heads[:, -1, :, :wide]


def apart(heads, widths) -> list[np.ndarray]:
    """Root mean square distances from the twins, by size and draw."""
    squares = [np.sum((a - b) ** 2, axis=-1) for a, b in twins(heads, widths)]
    return [np.sqrt(one.mean(axis=(1, 2))) for one in squares]


def matched(heads, others) -> np.ndarray:
    """Root mean square distances in the best order within each layer, by draw."""

    def square(layer, other):
        costs = cdist(layer, other, "sqeuclidean")
        return costs[linear_sum_assignment(costs)].mean()

    each = [list(map(square, *pair)) for pair in zip(heads, others, strict=True)]
    return np.sqrt(np.mean(each, axis=1))


def draw_rates(errors: dict, shares, rates: dict) -> lab.Picture:
    """Distances from the reference by the number of heads in all."""
    figure, panels = style.canvas(2, panel=(4.6, 3.7))
    colours = (style.ORANGE, style.BLUE, style.GREEN, style.ROSE)
    for name, axes, colour in zip(NAMES, np.repeat(panels, 2), colours, strict=True):
        means, (rate, error) = np.mean(errors[name], axis=2), rates[name]
        label = f"{name}: ${rate:.2f} \\pm {error:.2f}$"
        for mark, heights in zip("os", means, strict=True):
            axes.plot(PRODUCTS, heights, mark, color=colour, label=label)
            label = None
        scale = np.exp(np.mean(np.log(means / np.sqrt(shares))))
        axes.plot(PRODUCTS, scale * np.sqrt(shares), "--", color=colour, linewidth=1.1)
    ticks = (0.05, 0.1, 0.2, 0.4, 0.8)
    for axes, title in zip(panels, ("heads", "tangent kernel at the end"), strict=True):
        axes.set(xscale="log", yscale="log", xlabel="heads in all, $LM$", title=title)
        mark_sizes(PRODUCTS, axes)
        axes.set_yticks(ticks, [f"{one:g}" for one in ticks])
        axes.yaxis.minorticks_off()
        axes.legend(loc="upper right")
    panels[0].set_ylabel("mean distance from the reference")
    return lab.Picture(
        figure,
        "Networks of 4 layers (circles) and of 16 (squares); exponents with standard "
        "errors; eigenvalues in logarithms. Dashed: multiples of "
        r"$(1/LM - 1/LM_\mathrm{ref})^{1/2}$.",
    )


def draw_twins(paths) -> lab.Picture:
    """Paths of heads in training as seen from their twins, and mean distances."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.9))
    deep = min(HEADS)
    names = [f"$M = {wide}$" for wide in HEADS[deep]]
    gaps = paths[:, :-1] - paths[:, -1:]
    plane = np.linalg.svd(gaps[:, 0, -1])[2][:2]
    colours = style.shades(len(names))
    for index in (0, -1):
        x, y = np.moveaxis(gaps[:24, index] @ plane.T, 2, 0)
        options = {"color": colours[index], "markevery": [-1], "linewidth": 0.8}
        left.plot(x.T, y.T, "o-", **options)[0].set_label(names[index])
    left.set(xlabel="first principal direction", ylabel="second one")
    left.set_title("heads as seen from their twins")
    left.set_aspect("equal", adjustable="datalim")
    left.legend()
    curves = dict(zip(names, np.linalg.norm(gaps, axis=-1).mean(axis=0), strict=True))
    draw_curves(STEP * np.arange(STEPS + 1), curves, right, colours="depth")
    right.set(xlabel="mean-field time $t$", title="mean distance of twins")
    return lab.Picture(
        figure,
        f"The first head of {deep} layers, a line for each draw: twins begin at the "
        "same place and come apart in training, less if layers have more heads $M$.",
    )
