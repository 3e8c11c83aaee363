r"""Many thin layers are a flow.

$T$ residual layers $x \leftarrow x + \tfrac1T\,\Gamma[\mu](x)$ are the explicit Euler
method with step $1/T$ for $\dot x_i = \Gamma[\mu_t](x_i)$, so their output differs from
the flow at depth $1$ by $O(1/T)$. Where a layer is attention followed by a perceptron,
alternating the two is Lie splitting, of first order as well, while the symmetric
arrangement is Strang splitting, of second order. Every integrator used here has its
order measured: a method that is not what it says would show.
"""

import jax.numpy as jnp
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import draw_paths, draw_rate, mark_sizes, style


class Parameters(lab.Parameters):
    """How far the number of layers is pushed."""

    doublings: int = lab.setting(
        4, full=8, help="numbers of layers: 10, 20, 40, …, so many of them", at_least=3
    )
    beta: float = lab.setting(
        1.0, help=r"inverse temperature, $\beta$", at_least=0, at_most=8
    )


LAYERS = lab.observation(
    "layers",
    r"The residual layers $x + \tfrac1T\,\Gamma[\mu](x)$ of the four reference tokens "
    "are computed exactly.",
    source=lab.other_method("ten layers of the dense formula in NumPy"),
)
FLOW = lab.observation(
    "flow",
    r"Their limit is the flow $\dot x_i = \Gamma[\mu_t](x_i)$ at depth $1$.",
    source=lab.other_method("the dense formula, solved by SciPy's DOP853"),
)
FIRST_ORDER = lab.theorem(
    "first-order",
    "The distance of $T$ layers from the flow decays as $T^{-1}$.",
    "SAP22, residual networks and their continuous limit; CACP25",
)
LIE = lab.observation(
    "lie",
    "Alternating attention and perceptron has an error of order $h$.",
)
STRANG = lab.observation(
    "strang",
    "The symmetric arrangement of the two has an error of order $h^2$.",
)
RUNGE_KUTTA = lab.observation(
    "runge-kutta",
    "The classical Runge-Kutta method has an error of order $h^4$.",
)

FITTED = lab.theory("fitted to the three finest steps")


@lab.experiment("Residual layers converge to a flow", room="flows", seconds=12)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Refine layers and splittings, and compare both with independent solutions."""
    counts = [10 * 2**k for k in range(parameters.doublings)]
    attention = lab.reference_attention(beta=parameters.beta)
    flow, cloud = mf.Flow(attention), lab.reference_cloud()
    layers = [mf.run_layers(flow, cloud, count) for count in progress.over(counts, 0.4)]
    path = mf.solve(flow, cloud, 1.0, save=41, rtol=1e-11, atol=1e-13)
    exact, by_hand = lab.dense_flow(attention, cloud, 1.0), np.asarray(cloud.points)
    for _ in range(10):
        velocity = lab.dense_velocity(attention, np.asarray(cloud.weights), by_hand)
        by_hand = by_hand + velocity / 10
    errors = [distance(one, exact) for one in layers]
    split = splitting_errors(attention, counts[:4], progress)
    return lab.Outcome(
        findings=[
            LAYERS.close_to(layers[0].points[-1], by_hand, tolerance=1e-12),
            FLOW.close_to(path.points[-1], exact, tolerance=1e-9),
            order_finding(FIRST_ORDER, counts, errors, 1),
            order_finding(LIE, counts[:4], split["Lie splitting"], 1),
            order_finding(STRANG, counts[:4], split["Strang splitting"], 2),
            order_finding(RUNGE_KUTTA, counts[:4], split["Runge-Kutta"], 4),
        ],
        pictures=[draw_orders(counts, errors, split), draw_both(path, layers[0])],
    )


def distance(path: mf.Trajectory, exact) -> float:
    """The largest error of a coordinate at the last depth."""
    return float(np.abs(path.points[-1] - exact).max())


def order_finding(claim: lab.Claim, counts, errors, order: int):
    """The fitted exponent of the last three errors, against the order."""
    fitted = -np.polyfit(np.log(counts[-3:]), np.log(errors[-3:]), 1)[0]
    return claim.close_to(fitted, order, tolerance=0.1, source=FITTED)


def splitting_errors(attention, counts, progress) -> dict[str, list[float]]:
    """Errors of integrators for attention plus perceptron, at steps $2/T$."""
    perceptron = mf.Perceptron(
        jnp.array([[0.7, -0.4], [0.2, 1.1], [-0.8, 0.5]]),
        jnp.array([0.1, -0.3, 0.2]),
        jnp.array([[0.6, -0.2, 0.3], [0.1, 0.5, -0.7]]),
        activation=jnp.tanh,
    )
    flow, cloud = mf.Flow(attention + perceptron), lab.reference_cloud()
    exact = mf.solve(flow, cloud, 1.0, save=2, rtol=1e-13, atol=1e-14)
    solvers = {
        "Lie splitting": lambda step: mf.flows.Splitting(step, order=1),
        "Strang splitting": lambda step: mf.flows.Splitting(step, order=2),
        "Runge-Kutta": mf.FixedStep,
    }
    errors = {}
    for name in progress.over(solvers, 0.6):
        steps = [solvers[name](2 / count) for count in counts]
        paths = [mf.solve(flow, cloud, 1.0, save=2, solver=step) for step in steps]
        errors[name] = [distance(path, exact.points[-1]) for path in paths]
    return errors


def draw_orders(counts, errors, split) -> lab.Picture:
    """Errors against the number of layers, with the slopes they should have."""
    figure, axes = style.canvas(panel=(5.4, 3.8))
    draw_rate(counts, errors, axes, label="residual layers", slope=-1)
    orders = {"Lie splitting": -1, "Strang splitting": -2, "Runge-Kutta": -4}
    for name, values in split.items():
        steps = np.array(counts[: len(values)]) / 2
        draw_rate(steps, values, axes, label=name, slope=orders[name])
    mark_sizes([counts[0] / 2, *counts], axes)
    axes.set(xlabel="layers $T$ (steps per unit depth)", ylabel="largest error")
    axes.legend()
    return lab.Picture(
        figure,
        "Error at depth 1 against the number of steps, for attention alone (residual "
        "layers) and for attention plus perceptron (the others). Dashed: slopes $-1$, "
        "$-1$, $-2$ and $-4$.",
    )


def draw_both(flow: mf.Trajectory, layers: mf.Trajectory) -> lab.Picture:
    """Paths of the flow, with ten layers as dots."""
    figure, axes = style.canvas(panel=(5.0, 4.2))
    draw_paths(flow, axes)
    points = np.asarray(layers.points).reshape(-1, 2)
    axes.plot(*points.T, ".", color=style.INK, markersize=3.5)
    return lab.Picture(
        figure,
        "The four reference tokens flowing from depth 0 (blue) to depth 1 (gold), and "
        "the tokens after each of ten residual layers (dots), which lag behind.",
    )
