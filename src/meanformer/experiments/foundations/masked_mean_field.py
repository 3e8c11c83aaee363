r"""Causal attention as a map of measures on $[0,1] \times \mathbb{R}^d$.

Give each token a place $s \in [0,1]$ and let it see the places $\tau \le s$. Causal
attention is then a map on measures of pairs $(s, x)$: only the order of the places
matters, tokens that share a place see each other, and the past never learns of the
future. Distances compare tokens at the same place,
$d_p(\bar\mu,\bar\nu)^p = \int W_p(\mu_s,\nu_s)^p\,\mathrm{d}\theta(s)$. Because a
running mean appears, Hardy's inequality enters the stability constant with the factor
$p/(p-1)$: finite at $p = 2$, infinite at $p = 1$, and there stability really fails,
logarithmically in the number of tokens.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.linalg

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import draw_curves, mark_values, style


class Parameters(lab.Parameters):
    """Sizes of the stress tests."""

    trials: int = lab.setting(
        150, full=3000, help="random pairs of clouds per size", at_least=1
    )
    largest: int = lab.setting(
        512, full=4096, help="most tokens in the test at $p = 1$", at_least=8
    )
    dimension: int = lab.setting(3, help="dimension, $d$", at_least=1)
    seed: int = lab.setting(0, help="seed of the random clouds", at_least=0)


PREFIX = lab.theorem(
    "prefix",
    "Dropping the last token leaves the paths of all others unchanged.",
    "CACP25, masked attention",
    source=lab.other_method("the flow of the shorter sequence"),
)
FIRST = lab.theorem(
    "first-token",
    "The first token sees only itself and follows $e^{tV}x_1$.",
    "CACP25, masked attention",
    source=lab.closed_form(r"$e^{tV}x_1$ by SciPy's matrix exponential"),
)
ORDER = lab.observation(
    "order-only",
    "Places enter through their order alone: relabelling them increasingly changes "
    "nothing.",
    source=lab.other_method("the map at the places 1/4, 1/2, 3/4, 1"),
)
TIES = lab.observation(
    "ties",
    "Tokens that share one place see each other: with all places equal the masked "
    "map is the unmasked one.",
    source=lab.other_method("the map without a mask"),
)
HARDY = lab.theorem(
    "hardy",
    "At $p = 2$ the map obeys "
    r"$\mathrm{Lip}_{d_2} \le \|V\|\,[\beta aR^2 + 2(1+2\beta aR^2)e^{2\beta "
    r"aR^2}]$, $a = \|A\|_2$; measured over bound is at most $1$.",
    "CACP25, masked attention (the constant with Hardy's factor: theory page on "
    "attention)",
    source=lab.theory("distance of the outputs over bound times distance"),
)
HARMONIC = lab.observation(
    "p-one",
    "At $p = 1$ there is no such bound: with $A = 0$, $V = I$, moving the first of "
    r"$n$ tokens is amplified by $1 + \tfrac12 + \dots + \tfrac1n$.",
    source=lab.closed_form("the harmonic numbers"),
)
BOUNDED = lab.observation(
    "p-two",
    "The same move at $p = 2$ is amplified by "
    r"$(\sum_{i \le n} i^{-2})^{1/2} < \pi/\sqrt6$.",
    source=lab.closed_form(r"$(\sum_i i^{-2})^{1/2}$"),
)
HARDY_TWO = lab.theorem(
    "hardy-two",
    "No move of the tokens is amplified by more than Hardy's $2$ in $d_2$.",
    "CACP25, masked attention (Hardy's inequality: theory page on attention)",
    source=lab.theory("the local Lipschitz constant at every size"),
)


@lab.experiment(
    "Causal attention is a map of measures with places", room="attention", seconds=15
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Check the structure, then stress the stability constants."""
    ratios = {n: stress(parameters, n) for n in progress.over((2, 5, 12), 0.5)}
    counts = np.geomspace(2, parameters.largest, 6).round().astype(int)
    moves = np.array([amplifications(int(n)) for n in progress.over(counts, 0.5)]).T
    powers = [1.0 / np.arange(1, n + 1) for n in counts]
    harmonic, squares = ([np.sum(p**k) for p in powers] for k in (1, 2))
    return lab.Outcome(
        findings=[
            *path_findings(),
            *structure_findings(),
            HARDY.at_most(np.concatenate(list(ratios.values())), 1.0),
            HARMONIC.close_to(moves[0], harmonic, relative_tolerance=1e-6),
            BOUNDED.close_to(moves[1], np.sqrt(squares), relative_tolerance=1e-6),
            HARDY_TWO.at_most(moves[2], 2.0),
        ],
        pictures=[draw_growth(counts, moves, ratios)],
    )


def sequence(places: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)) -> mf.TokenCloud:
    """The reference tokens at these places."""
    return lab.reference_cloud(positions=jnp.array(places))


def path_findings():
    """The first three tokens alone and in company; the first one by itself."""
    cloud, attention = sequence(), lab.reference_attention()
    options = {"save": 41, "solver": mf.FixedStep(0.025)}
    flow, start = mf.Flow(mf.Masked(attention)), cloud.points[:3]
    path = mf.solve(flow, cloud, 2.0, **options)
    short = mf.TokenCloud(start, cloud.weights[:3], normalize=True)
    alone = mf.solve(flow, mf.in_order(short), 2.0, **options)
    depths, value = np.asarray(path.depths), np.asarray(attention.value)
    growths = scipy.linalg.expm(depths[:, None, None] * value)
    return (
        PREFIX.close_to(path.points[:, :3], alone.points, tolerance=1e-12),
        FIRST.close_to(path.points[:, 0], growths @ start[0], tolerance=1e-8),
    )


def structure_findings():
    """Order of places, and ties, at the level of one map."""
    attention = lab.reference_attention()

    def output(*places):
        return mf.push_forward(mf.Masked(attention), sequence(*places)).points

    squeezed, tied = output((0.01, 0.02, 0.9, 0.95)), output((0.5,) * 4)
    unmasked = mf.push_forward(attention, lab.reference_cloud()).points
    return (
        ORDER.close_to(squeezed, output(), tolerance=1e-14),
        TIES.close_to(tied, unmasked, tolerance=1e-13),
    )


def stress(parameters: Parameters, count: int) -> np.ndarray:
    """Distances of outputs over bound times distances, for random pairs of clouds."""
    places = jnp.arange(1, count + 1) / count
    dimension = parameters.dimension

    def ratio(key):
        key_first, key_move, key_query, key_value, key_size = jr.split(key, 5)
        first = jr.uniform(key_first, (count, dimension), minval=-1, maxval=1)
        size, heat = 10 ** jr.uniform(key_size, (2,), minval=-3, maxval=0.0)
        second = first + size * jr.normal(key_move, (count, dimension))
        square = dimension, dimension
        query, value = jr.normal(key_query, square), jr.normal(key_value, square)
        attention = mf.Softmax(heat * query, jnp.eye(dimension), value)
        clouds = [mf.TokenCloud(x, positions=places) for x in (first, second)]
        outputs = [mf.push_forward(mf.Masked(attention), c).points for c in clouds]
        radius = jnp.max(jnp.linalg.norm(jnp.concatenate([first, second]), axis=1))
        before, after = (jnp.linalg.norm(x - y) for x, y in ((first, second), outputs))
        return after / (hardy_bound(attention, radius) * before)

    keys = jr.split(jr.fold_in(jr.key(parameters.seed), count), parameters.trials)
    return np.asarray(jax.jit(jax.vmap(ratio))(keys))


def hardy_bound(attention: mf.Softmax, radius):
    """The stability constant at $p = 2$, written out."""
    spread = attention.beta * jnp.linalg.norm(attention.score, 2) * radius**2
    hardy = 2 * (1 + 2 * spread) * jnp.exp(2 * spread)
    return jnp.linalg.norm(attention.value, 2) * (spread + hardy)


def amplifications(count: int) -> list[float]:
    """A move of the first token in the distances of order 1 and 2, and any in 2."""
    running_mean = mf.Masked(mf.Softmax([[0.0]], [[0.0]], [[1.0]]))
    before = mf.in_order(mf.TokenCloud(jr.uniform(jr.key(count), (count, 1))))
    pair = before, before.moved(before.points.at[0].add(1e-3))
    images = [mf.push_forward(running_mean, cloud) for cloud in pair]
    distance = mf.measures.conditional_wasserstein
    growth = [distance(*images, order=p) / distance(*pair, order=p) for p in (1, 2)]
    return [*map(float, growth), float(mf.local_lipschitz(running_mean, before))]


def draw_growth(counts, moves, ratios) -> lab.Picture:
    """Amplification against the number of tokens, and the stress test."""
    figure, (left, right) = style.canvas(2)
    curves = {"$p = 1$": moves[0], "$p = 2$": moves[1]}
    curves[r"$\log n + \gamma$"] = np.log(counts) + np.euler_gamma
    mark_values(2, left, axis="y", label="Hardy's constant, $p=2$")
    draw_curves(counts, curves, left, marks=("o-", "o-", "--"), xscale="log")
    left.set(xlabel="tokens $n$", ylabel="amplification")
    left.set_title("moving the first token")
    names = [f"$n = {n}$" for n in ratios]
    right.hist(list(ratios.values()), bins=30, stacked=True, label=names)
    mark_values(1, right)
    right.set(xlabel="measured over bound, $p = 2$", ylabel="trials")
    right.set_title("random pairs of clouds")
    right.legend()
    return lab.Picture(
        figure,
        "Left: with $A = 0$ and $V = I$ a move of the first token is amplified "
        "without bound in $d_1$, but not in $d_2$. Right: random attentions and "
        "clouds against the bound with Hardy's factor (dotted at 1).",
    )
