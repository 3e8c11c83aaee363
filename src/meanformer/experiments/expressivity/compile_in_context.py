r"""An in-context map written down as the weights of a transformer.

Sums of products of blocks
$\gamma[\mu](x) = \langle u, x\rangle + c + \langle v, \nabla\Lambda_\mu(Ax + b)\rangle$
are dense in the continuous in-context maps of a compact set. Each of them is computed
by a transformer whose weights are explicit: heads see the blocks exactly, perceptrons
multiply by splines of the square. In dimension $d$ it has width $4d$ and $d$ heads, and
one error bound for all contexts, however many tokens they have.
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.expressivity import (
    block,
    compile_transformer,
    coordinate,
    stack,
    verify,
)
from meanformer.plotting import draw_curves, draw_rate, mark_sizes, style


class Parameters(lab.Parameters):
    """How many maps are drawn, and how finely they are compiled."""

    dimensions: int = lab.setting(2, full=3, help="dimensions 1, 2, …", at_least=2)
    seeds: int = lab.setting(
        1, full=5, help="random maps of each dimension", at_least=1
    )
    accuracy: float = lab.setting(1e-3, help="accuracy asked for", above=0)
    doublings: int = lab.setting(3, full=6, help="pieces 8, 16, …", at_least=3)


CERTIFIED = lab.theorem(
    "certified",
    r"The error is below the certificate $\frac{M^2}{n^2}\sum_k|a_k|(N_k - 1)$ on "
    "random contexts of 5, 50, 500 and 2000 tokens.",
    "FHP25, universality by products of blocks",
    source=lab.closed_form("the error of the spline of a square, over all products"),
)
SIZES = lab.theorem(
    "sizes",
    "In dimension $d$ the transformer has width $4d$ and $d$ heads a layer.",
    "FHP25, universality with fixed width and heads",
    source=lab.theory("at most four times the dimension, and one head for each"),
)
UNIFORM = lab.observation(
    "uniform",
    "Errors for 2000 tokens are no more than three times those for 5.",
    source=lab.theory("the bound does not know the number of tokens"),
)
PRODUCT = lab.observation(
    "product",
    r"The largest error of the product $x_1x_2$ on a grid is $M^2/n^2$, the bound.",
    source=lab.closed_form("attained at the middle of a piece beside a knot"),
)


@lab.experiment(
    "An in-context map is compiled into a transformer", room="expressivity", seconds=10
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compile random maps, and compare them with what they should compute."""
    networks, found, sizes = [], [], []
    dimensions = range(1, parameters.dimensions + 1)
    cases = [(d, seed) for d in dimensions for seed in range(parameters.seeds)]
    for d, seed in progress.over(cases, 0.7):
        gamma = random_element(d, seed)
        networks.append(compile_transformer(gamma, parameters.accuracy))
        found.append(verify(networks[-1], key=jr.key(seed), contexts=2))
        certificate = networks[-1].certificate
        sizes.append([certificate.width / d, certificate.heads / d])
    errors = np.array([one.errors for one in found])
    bounds = np.array([max(one.certificate.bound) for one in networks])
    pieces = [8 * 2**k for k in range(parameters.doublings)]
    products = [product_error(n) for n in progress.over(pieces, 0.3)]
    table = [
        [d, c.width, c.heads, c.attentions, c.pieces, c.parameters, max(c.bound), worst]
        for (d, _), c, worst in zip(
            cases,
            [one.certificate for one in networks],
            errors.max(axis=1),
            strict=True,
        )
    ]
    return lab.Outcome(
        findings=[
            CERTIFIED.at_most(errors, bounds[:, None]),
            SIZES.close_to(sizes, [4, 1], tolerance=0),
            UNIFORM.at_most(errors[:, -1] / errors[:, 0], 3),
            PRODUCT.close_to(products, product_bounds(pieces), relative_tolerance=0.02),
        ],
        pictures=[
            draw_line(networks[0]),
            draw_errors(pieces, products, found[0], bounds[0]),
        ],
        tables=[lab.Table(HEADER, table, CAPTION)],
    )


HEADER = [
    "$d$",
    "width",
    "heads",
    "attentions",
    "pieces",
    "parameters",
    "bound",
    "error",
]
CAPTION = "Certificates of compiled maps, and their largest errors on random contexts."


def random_element(dimension: int, seed: int):
    """For each coordinate, three products of two or three blocks, and a block."""
    rng = np.random.default_rng(seed)

    def factor():
        vectors = 0.4 * rng.standard_normal((3, dimension))
        names = dict(zip(("shift", "direct", "value"), vectors, strict=True))
        score = 2 * rng.standard_normal((dimension, dimension))
        return block(dimension, score=score, constant=0.3 * rng.normal(), **names)

    def component():
        pairs, triples = [(factor(), factor()) for _ in range(2)], factor()
        products = [rng.normal() * one * other for one, other in pairs]
        return sum(products, start=factor()) + triples * triples * factor()

    return stack([component() for _ in range(dimension)])


def product_error(pieces: int) -> float:
    """The largest error of a product, at middles of pieces beside knots."""
    network = compile_transformer(coordinate(2, 0) * coordinate(2, 1), pieces=pieces)
    step = (1 + 2 / pieces**2) / pieces
    sums, gaps = np.meshgrid(*[np.arange(-2 * pieces, 2 * pieces + 1)] * 2)
    x = step * np.stack([sums + gaps, sums - gaps], axis=-1).reshape(-1, 2)
    x = jnp.asarray(x[np.linalg.norm(x, axis=1) <= 1])
    found = network(mf.TokenCloud(x[:1]), x)[:, 0]
    return float(np.abs(found - x[:, 0] * x[:, 1]).max())


def product_bounds(pieces) -> np.ndarray:
    """The bound of the theorem for one product of two factors."""
    pieces = np.asarray(pieces, float)
    return ((1 + 2 / pieces**2) / pieces) ** 2


def draw_line(network) -> lab.Picture:
    """What is computed and what should be, along a line of queries."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.4))
    x, gamma = np.linspace(-1, 1, 201)[:, None], random_element(1, 0)
    for count, colour in zip((2, 5, 500), style.shades(3), strict=True):
        draws = np.random.default_rng(count).uniform(-1, 1, (count, 1))
        cloud = mf.TokenCloud(draws)
        exact, found = gamma(cloud, jnp.asarray(x)), network(cloud, jnp.asarray(x))
        left.plot(x[:, 0], exact[:, 0], color=colour, label=f"{count} tokens")
        left.plot(x[::10, 0], found[::10, 0], ".", color=colour)
        right.plot(x[:, 0], 1e3 * (found - exact)[:, 0], color=colour)
    left.set(xlabel="query $x$", ylabel=r"$\Gamma[\mu](x)$")
    left.legend()
    bound = 1e3 * network.certificate.bound[0]
    right.axhspan(-bound, bound, color=style.GREY, alpha=0.15, linewidth=0)
    right.set(xlabel="query $x$", ylabel=r"error $\times 10^3$")
    return lab.Picture(
        figure,
        "Left: a map of a query and its context (lines), and the transformer compiled "
        "from it (dots), for three contexts. Right: its error, and the certificate "
        "(grey).",
    )


def draw_errors(pieces, products, found, bound) -> lab.Picture:
    """Errors against the pieces, and against the number of tokens."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.4))
    draw_rate(pieces, products, left, label="product $x_1x_2$")
    left.plot(pieces, product_bounds(pieces), "k:", label="certificate")
    left.set(xlabel="pieces $n$ of a square", ylabel="largest error")
    left.legend()
    mark_sizes(pieces, left)
    curves = {"error": found.errors, "certificate": np.full(len(found.counts), bound)}
    draw_curves(
        found.counts,
        {name: 1e3 * np.asarray(heights) for name, heights in curves.items()},
        right,
        marks=("o-", ":"),
        colours=(style.BLUE, style.INK),
        xscale="log",
        ylim=(0, None),
        xlabel="tokens $N$",
        ylabel=r"largest error $\times 10^3$",
    )
    mark_sizes(found.counts, right)
    return lab.Picture(
        figure,
        "Left: the error of a product falls with the square of the pieces, as the "
        "certificate says. Right: errors do not grow with the number of tokens.",
    )
