r"""Along the gradient flow the risk falls by exactly what is dissipated.

Heads that follow $\dot\theta = -G_s(\theta)$ lose risk at the rate
$|\nabla R|^2 = \int\!\int|G_s|^2\,\mathrm d\nu_s\,\mathrm ds$, and every head keeps
$QQ^\top - KK^\top$. Gradient descent does so up to an error of the order of its step:
two tests of a training code from end to end, which need no reference values.
"""

import jax.random as jr
import numpy as np

import meanformer.experiments as lab
from meanformer import training
from meanformer.experiments.helpers.fitting import network
from meanformer.plotting import draw_curves, draw_rate, style


class Parameters(lab.Parameters):
    """The network, and how long it is trained."""

    layers: int = lab.setting(6, help="layers", at_least=1)
    heads: int = lab.setting(8, help="heads in each layer", at_least=1)
    time: float = lab.setting(2.0, full=8.0, help="training time", above=0)
    halvings: int = lab.setting(4, full=6, help="steps 0.1, 0.05, …", at_least=3)


IDENTITY = lab.theorem(
    "identity",
    r"Along the flow $R(0) - R(t) = \int_0^t|\nabla R|^2$ at every saved time.",
    "BHFP26, gradient flow of the risk",
    source=lab.theory("equal, to the tolerance $10^{-8}$ of the steps"),
)
BALANCE = lab.theorem(
    "balance",
    r"$QQ^\top - KK^\top$ of every head stays along the flow.",
    "BHFP26, gradient flow of the risk",
    source=lab.closed_form(r"$G_QQ^\top + QG_Q^\top = G_KK^\top + KG_K^\top$"),
)
SLOPE = lab.theorem(
    "slope",
    r"$\dot R = -|\nabla R|^2$ at the end, with $\dot R$ from differences of the risk "
    "of heads that are moved a little along the flow.",
    "BHFP26, gradient flow of the risk",
    source=lab.other_method("central differences of the risk"),
)
LENGTH = lab.theorem(
    "length",
    "The conditional transport distance from the start is at most the length of the "
    "path.",
    "BPV25, conditional optimal transport",
    source=lab.other_method("linear assignment of heads at each depth"),
)
FIRST_ORDER = lab.observation(
    "first-order",
    r"The defect $R(0) - R(T) - \sum\eta|\nabla R|^2$ of gradient descent is of first "
    "order in its step.",
    source=lab.theory("order one, fitted to the smallest steps"),
)
DRIFT = lab.observation(
    "drift",
    r"So is the largest change of an entry of $QQ^\top - KK^\top$.",
    source=lab.theory("order one, fitted to the smallest steps"),
)


@lab.experiment("The risk falls by what is dissipated", room="training", seconds=8)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Flow once to a fine tolerance, and descend with smaller and smaller steps."""
    model, data = problem(parameters)
    times = np.linspace(0, parameters.time, 17)
    flowed = training.train(
        model, data, parameters.time, save=times, rtol=1e-8, atol=1e-10
    )
    steps = [0.1 / 2**k for k in range(parameters.halvings)]
    runs = [
        training.train(
            model,
            data,
            parameters.time,
            solver=training.GradientDescent(step),
            save=2,
        )
        for step in progress.over(steps, 0.8)
    ]
    defects = [abs(float(one.energy_defects[-1])) for one in runs]
    drifts = [float(one.gauge_drifts[-1]) for one in runs]
    distances = [
        float(training.cot_distance(model, flowed.at(index)))
        for index in range(len(flowed))
    ]
    return lab.Outcome(
        findings=[
            IDENTITY.close_to(
                flowed.risks[0] - flowed.risks, flowed.dissipated, tolerance=1e-8
            ),
            BALANCE.at_most(flowed.gauge_drifts, 1e-7),
            SLOPE.close_to(
                slope_of_risk(flowed.model, data),
                -flowed.squared_norms[-1],
                relative_tolerance=1e-6,
            ),
            LENGTH.at_most(distances, np.asarray(flowed.lengths), tolerance=1e-9),
            FIRST_ORDER.close_to(order(steps, defects), 1, tolerance=0.15),
            DRIFT.close_to(order(steps, drifts), 1, tolerance=0.15),
        ],
        pictures=[draw_balance(flowed, distances), draw_orders(steps, defects, drifts)],
    )


def problem(parameters: Parameters):
    """Random heads, and three contexts of four tokens with random targets."""
    model = network(parameters.layers, parameters.heads, 0)
    keys = jr.split(jr.key(1), 3)
    contexts = jr.normal(keys[0], (3, 4, 2))
    queries, targets = jr.normal(keys[1], (3, 2)), jr.normal(keys[2], (3, 2))
    return model, training.Dataset(contexts, queries, targets)


def slope_of_risk(model, data, step: float = 1e-4) -> float:
    """The derivative of the risk in time, from heads moved a little both ways."""
    moved = []
    for sign in (1, -1):
        found = training.gradient(model, data).parameters
        heads = [
            old - sign * step * change
            for old, change in zip(
                model.parameters.heads[:3], found.heads[:3], strict=True
            )
        ]
        moved.append(training.risk(training.MeanFieldTransformer(*heads), data))
    return float(moved[0] - moved[1]) / (2 * step)


def order(steps, errors) -> float:
    """The fitted exponent of the three smallest steps."""
    return float(np.polyfit(np.log(steps[-3:]), np.log(errors[-3:]), 1)[0])


def draw_balance(flowed, distances) -> lab.Picture:
    """Where the risk goes, and how far the heads."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.4))
    curves = {
        "risk $R$": flowed.risks,
        r"dissipated $\int|\nabla R|^2$": flowed.dissipated,
        "their sum": flowed.risks + flowed.dissipated,
    }
    draw_curves(
        flowed.times,
        curves,
        left,
        marks=("o-", "o-", ":"),
        legend="center right",
        xlabel="time $t$",
    )
    curves = {"length of the path": flowed.lengths, "distance": distances}
    draw_curves(flowed.times, curves, right, marks="o-", xlabel="time $t$")
    return lab.Picture(
        figure,
        "Left: what the risk loses is what is dissipated. Right: the conditional "
        "transport distance from the start stays below the length of the path.",
    )


def draw_orders(steps, defects, drifts) -> lab.Picture:
    """Errors of gradient descent against its step."""
    figure, axes = style.canvas(panel=(4.6, 3.4))
    draw_rate(steps, defects, axes, label="energy defect", slope=1)
    draw_rate(steps, drifts, axes, label=r"drift of $QQ^\top - KK^\top$", slope=1)
    axes.set(xlabel=r"step $\eta$", ylabel="error")
    axes.legend()
    return lab.Picture(
        figure,
        r"Both errors of gradient descent halve with its step. Dashed: slope 1.",
    )
