r"""One head tells any two contexts apart, and knows all moments.

Along $\omega$ a head with score $t\langle\omega, y\rangle$ sees
$L_1(t) = \langle\omega, \nabla\Lambda_\mu(t\omega)\rangle$. With $L_k(t)$ the mean of
the $k$-th power under the same exponential, $L_k' = L_{k+1} - L_kL_1$: this one
function determines all moments of the projection, and the projections determine $\mu$.
So blocks separate points, which is what density needs.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.expressivity import moments_from_attention, seen_along, separate
from meanformer.plotting import draw_curves, style


class Parameters(lab.Parameters):
    """How many moments are recovered, and how many pairs are told apart."""

    moments: int = lab.setting(5, full=8, help="moments", at_least=2, at_most=10)
    pairs: int = lab.setting(3, full=20, help="random pairs of contexts", at_least=1)


MOMENTS = lab.theorem(
    "moments",
    "The tilted means alone give the moments of a context.",
    "FHP25, blocks separate points",
    source=lab.other_method("moments of the tokens"),
)
RECURSION = lab.theorem(
    "recursion",
    "$L_k' = L_{k+1} - L_kL_1$ at $t = 0.7$, for $k$ from 1 to 4.",
    "FHP25, blocks separate points",
    source=lab.other_method("powers of the tokens under the exponential"),
)
STRONG = lab.observation(
    "strong-scores",
    "The uniform law and three points, equal in five moments, are told apart by "
    "scores of strength 1, 2, 4 and 8.",
    source=lab.closed_form(
        r"$\coth t - 1/t - \frac{\sqrt{3/5}\sinh\sqrt{3/5}\,t}"
        r"{4/5 + \cosh\sqrt{3/5}\,t}$"
    ),
)
CROSS = lab.observation(
    "equal-marginals",
    "Two contexts with equal marginals are told apart the best along a diagonal.",
    source=lab.closed_form(r"$\sqrt2\tanh 8$ along the diagonal"),
)
ALL = lab.theorem(
    "all-pairs",
    "Some block differs on random pairs of contexts that are equal but for one token.",
    "FHP25, blocks separate points",
    source=lab.theory("far above rounding"),
)
EQUAL = lab.theorem(
    "equal",
    "No block differs on a context whose tokens are reordered and split.",
    "FHP25, maps of measures",
    source=lab.theory("zero, to rounding"),
)

POINTS = np.array([-0.9, -0.2, 0.1, 0.7, 1.0])
WEIGHTS = np.array([0.1, 0.3, 0.2, 0.25, 0.15])
STRENGTHS = np.array([1.0, 2.0, 4.0, 8.0])
DIAGONALS = np.array([[[1.0, 1.0], [-1.0, -1.0]], [[1.0, -1.0], [-1.0, 1.0]]])


@lab.experiment("One head tells any two contexts apart", room="expressivity", seconds=8)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Read moments off attention, and search for the blocks that differ the most."""
    cloud = mf.TokenCloud(POINTS[:, None], WEIGHTS)
    orders = np.arange(1, parameters.moments + 1)
    found = moments_from_attention(
        lambda t: seen_along(cloud, [[1.0]], t)[0], parameters.moments
    )
    slopes, rest = recursion(cloud)
    uniform, three = mf.UniformBox([-1.0], [1.0]), three_points()
    seen = [seen_along(mu, [[1.0]], STRENGTHS)[0] for mu in (uniform, three)]
    cross = separate(*crosses(), key=jr.key(0), most=8 / np.sqrt(2))
    gaps = [pair_gap(seed) for seed in progress.over(range(parameters.pairs), 0.6)]
    split = mf.TokenCloud(
        POINTS[[4, 2, 0, 1, 3, 1], None],
        WEIGHTS[[4, 2, 0, 1, 3, 1]] * np.array([1, 1, 1, 0.5, 1, 0.5]),
    )
    same = separate(cloud, split, key=jr.key(0))
    return lab.Outcome(
        findings=[
            MOMENTS.close_to(
                found,
                WEIGHTS @ POINTS[:, None] ** orders,
                tolerance=1e-13 * 40.0**orders,
            ),
            RECURSION.close_to(slopes, rest, tolerance=1e-12),
            STRONG.close_to(seen[0] - seen[1], closed_gap(), relative_tolerance=1e-9),
            CROSS.close_to(
                cross.difference, np.sqrt(2) * np.tanh(8), relative_tolerance=1e-9
            ),
            ALL.at_least(gaps, 1e-6),
            EQUAL.at_most(same.difference, 1e-13),
        ],
        pictures=[draw_gaps(seen), draw_directions(cross)],
    )


def recursion(cloud) -> tuple[np.ndarray, np.ndarray]:
    """The slopes of $L_k$, and what the recursion says they are."""

    def power(k: int):
        def mean(t):
            masses = WEIGHTS * jnp.exp(t * POINTS)
            return masses @ POINTS**k / masses.sum()

        return mean

    place = 0.7
    first = float(seen_along(cloud, [[1.0]], [place])[0, 0])
    slopes = [float(jax.grad(power(k))(place)) for k in range(1, 5)]
    rest = [float(power(k + 1)(place) - power(k)(place) * first) for k in range(1, 5)]
    return np.array(slopes), np.array(rest)


def three_points() -> mf.TokenCloud:
    """Three points with the first five moments of the uniform law."""
    nodes, weights = np.polynomial.legendre.leggauss(3)
    return mf.TokenCloud(nodes[:, None], weights / 2)


def crosses() -> list[mf.TokenCloud]:
    """Two points on one diagonal, and two on the other."""
    return [mf.TokenCloud(points) for points in DIAGONALS]


def closed_gap() -> np.ndarray:
    """The difference of the tilted means of the two laws, in closed form."""
    node = np.sqrt(3 / 5)
    three = node * np.sinh(node * STRENGTHS) / (4 / 5 + np.cosh(node * STRENGTHS))
    return 1 / np.tanh(STRENGTHS) - 1 / STRENGTHS - three


def pair_gap(seed: int) -> float:
    """The best difference for two clouds of six tokens, one of which is moved."""
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((6, 2))
    moved = points + 0.1 * np.eye(6, 1) * rng.standard_normal(2)
    pair = mf.TokenCloud(points), mf.TokenCloud(moved)
    return separate(*pair, key=jr.key(seed)).difference


def draw_gaps(seen) -> lab.Picture:
    """What the two laws show, and by how much they differ."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.4))
    t = np.linspace(0.25, 12, 95)
    laws = {"uniform": mf.UniformBox([-1.0], [1.0]), "three points": three_points()}
    curves = {name: seen_along(mu, [[1.0]], t)[0] for name, mu in laws.items()}
    draw_curves(t, curves, left, xlabel="strength $t$", ylabel="$L_1(t)$")
    one, other = curves.values()
    leading = (1 / 7 - 0.12) * t**5 / 120
    small = t <= 3
    right.loglog(t, np.abs(one - other), label="difference")
    right.loglog(t[small], leading[small], "k:", label="leading term")
    right.plot(STRENGTHS, np.abs(seen[0] - seen[1]), "o")
    right.set(xlabel="strength $t$", ylabel="difference of $L_1$")
    right.legend()
    return lab.Picture(
        figure,
        "The uniform law on $[-1, 1]$ and three points with its first five moments. "
        "Weak scores see the sixth, by a difference that grows as $t^5$; strong ones "
        "see where the supports end.",
    )


def draw_directions(cross) -> lab.Picture:
    """Differences of the two crosses against strength, along several directions."""
    figure, axes = style.canvas(panel=(5.0, 3.6))
    t, turns = np.linspace(-6, 6, 121), np.array([0, 0.05, 0.1, 0.25])
    rows = np.stack([np.cos(np.pi * turns), np.sin(np.pi * turns)], axis=1)
    seen = [seen_along(mu, rows, t) for mu in crosses()]
    gaps = seen[0] - seen[1]
    names = [f"{180 * turn:.0f}°" for turn in turns]
    curves = dict(zip(names, np.asarray(gaps), strict=True))
    draw_curves(
        t,
        curves,
        axes,
        colours="depth",
        xlabel="strength $t$",
        ylabel="difference of $L_1$",
    )
    axes.axhline(abs(cross.difference), color=style.INK, linestyle=":", linewidth=1)
    return lab.Picture(
        figure,
        r"Half on $\pm(1, 1)$ against half on $\pm(1, -1)$: along an axis no strength "
        "tells them apart, along the diagonal the difference is largest. Dotted: the "
        "best one found.",
    )
