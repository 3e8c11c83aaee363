r"""A mixture of Gaussians is not closed: its velocity bends.

With a Gaussian as context, softmax attention is affine in the query. With a mixture
$\mu = \sum_k c_k\,\mathcal{N}(m_k, S_k)$ it is a weighted mean of affine maps whose
weights change with the query, $\Gamma[\mu](x) = V\sum_k p_k(x)(m_k + \beta S_kAx)$ with
$p_k(x) \propto c_k\exp(\beta m_k^\top Ax + \tfrac{\beta^2}2 x^\top A^\top S_kAx)$: each
query attends to the component that suits it. So the image of a mixture is not a
mixture, and masked attention, where every place sees the mixture of what came before,
does not keep Gaussians.

How much is lost if a measure is replaced by the one Gaussian with its mean and
covariance? Nothing while the components coincide, and the more the farther they are
apart. Tokens tell.
"""

import jax.numpy as jnp
import numpy as np
import scipy.integrate
import scipy.stats

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import draw_curves, draw_rate, draw_slope, style

QUERIES = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
CENTRES, WIDTHS = (0.0, 1.0), (1.0, 0.5)
# The components of the flows: their covariance, and the line on which they part.
SPREAD = ((0.5, 0.15), (0.15, 0.3))
DIRECTION = (0.8, 0.6)
SCORE, VALUE = np.array([[[0.5, -0.3], [0.2, 0.4]], [[0.15, 0.06], [-0.03, -0.18]]])
SMALL = 0.1


class Parameters(lab.Parameters):
    """How far the components are apart, and how the mixture is resolved."""

    separations: tuple[float, ...] = lab.setting(
        (0.5, 1.0, 2.0, 4.0),
        full=(0.25, 0.5, 1.0, 2.0, 3.0, 4.0),
        help="distances of the two components, rising",
        above=0,
        at_most=4,
    )
    order: int = lab.setting(
        16, full=28, help="Gauss-Hermite nodes along an axis", at_least=8, at_most=60
    )
    depth: float = lab.setting(
        1.0, full=1.5, help="depth of the flows", above=0, at_most=1.5
    )


INTEGRAL = lab.theorem(
    "integral",
    r"With $A = V = 1$ the velocity in a mixture on the line is "
    r"$\int ye^{xy}\,\mathrm{d}\mu(y)\big/\int e^{xy}\,\mathrm{d}\mu(y)$.",
    "CACP25, masked attention (mixtures: theory page on measures)",
    source=lab.other_method("SciPy's quad over the density of the mixture"),
)
BENT = lab.observation(
    "bent",
    "It is not affine: second differences are not zero.",
    source=lab.theory("smallest second difference; 0 for an affine map"),
)
RESIDUAL = lab.observation(
    "residual",
    "For two equal components what no affine map can fit grows like the fourth power "
    "of their separation at first: their third cumulant is zero, the fourth is not.",
    source=lab.theory(rf"exponent from {SMALL / 2:g} to {SMALL:g}"),
)
EQUAL = lab.theorem(
    "coincide",
    "Where the components coincide, nothing is left and the moments of tokens are "
    "those of the Gaussian at all depths.",
    "CACP25, Gaussian data",
    source=lab.theory("relative residual, relative distances of the moments"),
)
DEPART = lab.observation(
    "depart",
    "The farther apart the components, the farther are mean and covariance of the "
    "tokens from those of the Gaussian that had the same at depth $0$.",
    source=lab.theory("change with the separation of the distance at the end"),
)
LINEAR = lab.theorem(
    "linear",
    "Linear attention sees two moments only: the mixture keeps those of its Gaussian "
    "at all depths, whatever the separation.",
    "CACP25, Gaussian data (linear attention: theory page on Gaussians)",
    source=lab.theory("relative Wasserstein distance of the moments"),
)


@lab.experiment("A mixture of Gaussians is not closed", room="gaussian", seconds=15)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Look at one velocity closely, then follow mixtures of growing separation."""
    line, dots = line_mixture(), np.array([integrated(query) for query in QUERIES])
    found = np.asarray(line_velocity(line, jnp.array(QUERIES)))
    separations = [0.0, SMALL / 2, SMALL, *parameters.separations]
    residuals = {gap: bend(gap, parameters) for gap in separations}
    gaps = [0.0, *parameters.separations]
    comparisons = {
        gap: compare(mf.Softmax, gap, parameters) for gap in progress.over(gaps, 0.8)
    }
    for _ in progress.over(range(1), 0.2):
        linear = compare(mf.Linear, parameters.separations[-1], parameters)
    departures = [float(comparisons[gap].distances[-1]) for gap in gaps]
    return lab.Outcome(
        findings=[
            INTEGRAL.close_to(found, dots, tolerance=1e-9),
            BENT.at_least(np.abs(np.diff(found, 2)).min(), 0.1),
            RESIDUAL.close_to(
                np.log2(residuals[SMALL] / residuals[SMALL / 2]), 4.0, tolerance=0.1
            ),
            EQUAL.close_to(
                [residuals[0.0], *comparisons[0.0].distances], 0.0, tolerance=1e-7
            ),
            DEPART.above(np.diff(departures), 0.0),
            LINEAR.close_to(linear.distances, 0.0, tolerance=1e-7),
        ],
        pictures=[
            draw_velocity(line, dots),
            draw_departures(residuals, comparisons, linear, parameters),
        ],
    )


def line_mixture() -> mf.Mixture:
    """The mixture on the line, of two components of unequal widths."""
    components = [
        mf.Gaussian(jnp.array([centre]), jnp.array([[width**2]]))
        for centre, width in zip(CENTRES, WIDTHS, strict=True)
    ]
    return mf.Mixture(jnp.array([0.5, 0.5]), components)


def line_velocity(mixture: mf.Mixture, places):
    """The velocity at places of the line, where all matrices are one."""
    return mf.Softmax(*np.ones((3, 1, 1)))(mixture, jnp.asarray(places)[:, None])[:, 0]


def integrated(query: float) -> float:
    """The velocity by integrals over the density of the mixture, by SciPy."""
    options = {"points": [0.0, query], "epsabs": 1e-13, "epsrel": 1e-13}

    def integral(power: int) -> float:
        def tilted(y):
            density = scipy.stats.norm.pdf(y, CENTRES, WIDTHS).mean()
            return y**power * np.exp(query * y) * density

        return scipy.integrate.quad(tilted, -25, 25, **options)[0]

    return integral(1) / integral(0)


def cloud(separation: float, parameters: Parameters) -> mf.TokenCloud:
    """Tokens that stand for two components so far apart, around the origin."""
    shift = separation / 2 * jnp.array(DIRECTION)
    components = [mf.Gaussian(side * shift, jnp.array(SPREAD)) for side in (-1, 1)]
    mixture = mf.Mixture(jnp.array([0.5, 0.5]), components)
    return mf.quadrature(mixture, parameters.order)


def bend(separation: float, parameters: Parameters) -> float:
    """The share of the velocity that no affine map of the tokens explains."""
    tokens = cloud(separation, parameters)
    points, weights = np.asarray(tokens.points), np.asarray(tokens.weights)
    velocity = np.asarray(mf.Softmax(SCORE, np.eye(2), VALUE)(tokens, tokens.points))
    moved = velocity - weights @ velocity
    features = np.column_stack([np.ones(len(points)), points])
    root = np.sqrt(weights)[:, None]
    fitted = np.linalg.lstsq(root * features, root * moved, rcond=None)[0]
    left = moved - features @ fitted
    return float(np.linalg.norm(root * left) / np.linalg.norm(root * moved))


def compare(kind, separation: float, parameters: Parameters):
    """Tokens of the mixture and the Gaussian of their moments, side by side."""
    flow, tokens = mf.Flow(kind(SCORE, np.eye(2), VALUE)), cloud(separation, parameters)
    return mf.gaussian.compare_with_particles(
        flow, tokens, parameters.depth, save=21, rtol=1e-9
    )


def draw_velocity(mixture: mf.Mixture, dots: np.ndarray) -> lab.Picture:
    """The velocity over the line with its best affine fit and that of the moments."""
    figure, axes = style.canvas(panel=(5.6, 3.7))
    places = np.linspace(-4, 4, 321)
    tokens = mf.quadrature(mixture, 40)
    nodes, weights = np.asarray(tokens.points)[:, 0], np.asarray(tokens.weights)
    seen = np.asarray(line_velocity(mixture, nodes))
    slope, constant = np.polyfit(nodes, seen, 1, w=np.sqrt(weights))
    mean, variance = mixture.mean()[0], mixture.covariance()[0, 0]
    curves = {
        "the mixture": line_velocity(mixture, places),
        "best affine fit": constant + slope * places,
        "Gaussian of its moments": mean + variance * places,
    }
    axes.plot(QUERIES, dots, "o", color=style.INK, label="by integrals")
    draw_curves(places, curves, axes, marks=("-", "--", ":"), ylim=(-4.2, 4.2))
    axes.set(xlabel="query $x$", ylabel=r"velocity $\Gamma[\mu](x)$")
    return lab.Picture(
        figure,
        r"Half $\mathcal{N}(0, 1)$, half $\mathcal{N}(1, \tfrac14)$ as context: the "
        "velocity, steep on the left where queries attend to the wide component, with "
        "the affine map closest to it under the mixture.",
    )


def draw_departures(residuals, comparisons, linear, parameters) -> lab.Picture:
    """Residual against the separation, and departure along depth."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.6))
    gaps = [gap for gap in sorted(residuals) if gap > 0]
    draw_rate(gaps, [residuals[gap] for gap in gaps], left, label="residual")
    small = gaps[:4]
    draw_slope(small[::-1], residuals[small[0]], 4, left, label="fourth power")
    left.set(xlabel="separation of the components")
    left.set(ylabel="share of the velocity not affine")
    left.legend()
    shown = {f"{gap:g}": one for gap, one in comparisons.items()}
    shown[f"linear, {parameters.separations[-1]:g}"] = linear
    draw_curves(
        linear.depths[1:],
        {name: np.maximum(one.distances[1:], 1e-16) for name, one in shown.items()},
        right,
        marks=["-", *[".-"] * (len(shown) - 2), "--"],
        colours=[style.GREY, *style.shades(len(shown) - 2), style.GREY],
        yscale="log",
        xlabel="depth $t$",
        ylabel="relative distance of the moments",
    )
    right.legend(title="separation", ncols=2)
    return lab.Picture(
        figure,
        "Two equal components in the plane. Left: the share of the velocity that no "
        "affine map explains. Right: the Wasserstein distance of the moments of the "
        "tokens from those of the single Gaussian; with components that coincide, and "
        "under linear attention, only rounding.",
    )
