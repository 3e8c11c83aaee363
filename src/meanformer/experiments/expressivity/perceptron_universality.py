r"""How many neurons an accuracy takes, by construction.

Perceptrons $c + \sum_i a_i\,\sigma(\langle w_i, x\rangle + b_i)$ are dense in the
continuous functions of a compact set unless $\sigma$ is a polynomial. A spline in one
variable, and a Fourier series whose waves are such splines, say how many neurons are
needed; random neurons with least squares are compared with both.
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.expressivity import fourier_series, random_features, spline
from meanformer.expressivity.approximation import held_out
from meanformer.plotting import draw_rate, style


class Parameters(lab.Parameters):
    """How many neurons, and how many draws."""

    doublings: int = lab.setting(
        6, full=8, help="splines of 8, 16, … pieces", at_least=3
    )
    degrees: int = lab.setting(4, full=6, help="degrees 2, 4, …", at_least=2, at_most=7)
    widths: int = lab.setting(3, full=5, help="random neurons: 32, 64, …", at_least=2)
    seeds: int = lab.setting(3, full=21, help="draws of random neurons", at_least=3)


SPLINE = lab.theorem(
    "spline",
    r"The spline of $\sin 2\pi x$ with $n$ pieces has an error of at most "
    r"$(2\pi)^2/(8n^2)$.",
    "Boo01, error of piecewise linear interpolation",
    source=lab.closed_form(r"$\max|f''|\,h^2/8$"),
)
SHARP = lab.theorem(
    "sharp",
    "The error tends to this bound; at the most pieces their ratio is one.",
    "Boo01, error of piecewise linear interpolation",
    source=lab.theory("one in the limit"),
)
WEIGHT = lab.observation(
    "weight",
    r"The Fourier coefficients of $e^{\cos(x - 0.3) + \frac12\sin(x + 2y)}$ add up in "
    "size.",
    source=lab.closed_form("$e^{3/2}$, the value where all waves agree"),
)
WAVES = lab.theorem(
    "waves",
    "A series as a perceptron differs from it by at most the accuracy asked for.",
    "Boo01, error of piecewise linear interpolation; Cyb89",
    source=lab.theory("the accuracy, divided among the waves"),
)
TAIL = lab.observation(
    "tail",
    "The error of the series falls faster than any power: from each degree to the next "
    "one by more than before, on a log-log scale.",
    source=lab.theory("steeper and steeper"),
)
RANDOM = lab.observation(
    "random",
    "The error of random neurons with least squares falls faster than $n^{-1/2}$.",
    "Bar93",
    source=lab.theory("the rate that some network of $n$ neurons has in any dimension"),
)


@lab.experiment(
    "Perceptrons approximate, at a known price", room="expressivity", seconds=6
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Build perceptrons of growing width, and measure their errors."""
    counts = np.array([8 * 2**k for k in range(parameters.doublings)])
    splines = [
        spline(wave, np.linspace(0, 1, n + 1)) for n in progress.over(counts, 0.3)
    ]
    errors = np.array([one.largest_error for one in splines])
    bounds = (2 * np.pi) ** 2 / (8 * counts**2)
    box = mf.UniformBox(np.zeros(2), np.full(2, 2 * np.pi))
    degrees = [2 * k for k in range(1, parameters.degrees + 1)]
    places = jnp.asarray(held_out(box))
    series = [fourier_series(periodic, degree, box) for degree in degrees]
    tails = [float(jnp.abs(one(places) - periodic(places)).max()) for one in series]
    accuracies = [1e-1, 1e-2]
    ridges = [series[1].perceptron(accuracy) for accuracy in accuracies]
    gaps = [
        jnp.abs(one.apply(places)[:, 0] - series[1](places)).max() for one in ridges
    ]
    slopes = np.diff(np.log(tails)) / np.diff(np.log(degrees))
    widths = [32 * 2**k for k in range(parameters.widths)]
    fits = [median_fit(n, parameters.seeds) for n in progress.over(widths, 0.6)]
    means = [one.mean_error for one in fits]
    return lab.Outcome(
        findings=[
            SPLINE.at_most(errors, bounds),
            SHARP.close_to(errors[-1] / bounds[-1], 1, tolerance=4 / counts[-1]),
            WEIGHT.close_to(series[-1].weight, np.exp(1.5), tolerance=2 * tails[-1]),
            WAVES.at_most(gaps, accuracies),
            TAIL.below(np.diff(slopes), 0),
            RANDOM.below(float(np.polyfit(np.log(widths), np.log(means), 1)[0]), -0.5),
        ],
        pictures=[
            draw_errors(counts, errors, widths, means, degrees, tails),
            draw_fit(fits[-1]),
        ],
    )


def wave(x):
    """One period of a sine."""
    return jnp.sin(2 * jnp.pi * x[:, 0])


def periodic(x):
    """A smooth function with two periods."""
    return jnp.exp(jnp.cos(x[:, 0] - 0.3) + 0.5 * jnp.sin(x[:, 0] + 2 * x[:, 1]))


def bump(x):
    """A bump with a wave on it."""
    return jnp.exp(-2 * jnp.sum(x**2, axis=1)) * jnp.cos(3 * x[:, 0])


def median_fit(count: int, seeds: int):
    """The fit of random neurons with the median error."""
    square = mf.UniformBox(-np.ones(2), np.ones(2))
    fits = [random_features(bump, count, square, key=jr.key(s)) for s in range(seeds)]
    return sorted(fits, key=lambda one: one.mean_error)[seeds // 2]


def draw_errors(counts, errors, widths, means, degrees, tails) -> lab.Picture:
    """Errors against neurons, and against the degree."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.4))
    draw_rate(counts, errors, left, label="splines", slope=-2)
    draw_rate(widths, means, left, label="random neurons", slope=-1)
    left.set(xlabel="neurons", ylabel="error")
    left.legend()
    right.semilogy(degrees, tails, "o-")
    right.set(xlabel="degree of the series", ylabel="largest error")
    return lab.Picture(
        figure,
        r"Left: largest error of splines of $\sin 2\pi x$, and mean error of random "
        "neurons for a bump in the plane. Dashed: slopes $-2$ and $-1$. Right: the "
        "tail of the Fourier series of a smooth periodic function.",
    )


def draw_fit(fit) -> lab.Picture:
    """The function, the perceptron, and what is between them."""
    figure, panels = style.canvas(3, panel=(3.1, 2.9), sharey=True)
    axis = np.linspace(-1, 1, 81)
    x = jnp.asarray(np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2))
    exact, found = (np.asarray(v).ravel() for v in (bump(x), fit.perceptron.apply(x)))
    gap = np.abs(found - exact).max()
    titles = "function", f"{fit.neurons} random neurons", f"difference, ±{gap:.1g}"
    values, limits = (exact, found, found - exact), (1, 1, gap)
    for axes, value, limit, title in zip(panels, values, limits, titles, strict=True):
        axes.imshow(
            value.reshape(81, 81),
            extent=(-1, 1, -1, 1),
            origin="lower",
            cmap=style.density_colours(),
            vmin=-limit,
            vmax=limit,
        )
        axes.set(title=title, xlabel="$x_1$")
        axes.grid(False)
    panels[0].set(ylabel="$x_2$")
    return lab.Picture(
        figure,
        "A bump with a wave on it, its fit by random neurons, and the difference, "
        "which folds along the lines where neurons begin.",
    )
