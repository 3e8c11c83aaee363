r"""Distances between networks: heads are matched at each depth, never across.

Two transformers with layers of averaged heads are measures $\nu_s$, $\nu'_s$ of heads
at each depth $s$. The metric whose gradient flow training is,
$d(\nu, \nu')^2 = \int_0^1 W_2(\nu_s, \nu'_s)^2\,\mathrm{d}s$, forgets the order of
heads, not that of layers; a training path is at least as long as the distance that it
covers. Its geodesics move each head straight to its match. Between two networks trained
from different random heads the risk stays low along the geodesic; the straight line
between heads in the order they happen to have goes over a barrier.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import draw_curves, style
from meanformer.training import Dataset, Heads, MeanFieldTransformer, gradient, risk
from meanformer.training.distance import (
    cot_distance,
    cot_geodesic,
    cot_plans,
    function_distance,
)

STEP, SHOWN = 0.1, 8
SHARES = np.linspace(0, 1, 9)


class Parameters(lab.Parameters):
    """How large the networks are, and how long they train."""

    layers: int = lab.setting(4, full=8, help="layers, $L$", at_least=2)
    heads: int = lab.setting(64, full=256, help="heads in each, $M$", at_least=2)
    steps: int = lab.setting(120, full=400, help="gradient steps", at_least=SHOWN)
    seed: int = lab.setting(2, help="seed of heads and data", at_least=0)


SHIFT = lab.observation(
    "shift",
    r"Adding $0.3$ to all $12$ coordinates of every head is a distance of "
    r"$0.3\sqrt{12}$; permuting the heads of a layer is none.",
    source=lab.closed_form(r"$0.3\sqrt{12}$ and $0$"),
)
ASSIGNED = lab.observation(
    "assigned",
    "The distance of random networks, and of one from itself with layers reversed, is "
    "that of optimal assignments at each depth.",
    source=lab.other_method("SciPy's linear_sum_assignment, layer by layer"),
)
POOLED = lab.observation(
    "pooled",
    "Pooled over depth, the heads of reversed layers are at distance zero.",
    source=lab.theory("the measures are the same"),
)
CHAIN = lab.theorem(
    "chain",
    r"$W_2$ of pooled heads $\le d \le$ the distance of heads in the order they have.",
    "BPV25, conditional optimal transport distance",
    source=lab.other_method("both sides, for two random networks"),
)
GAUGE = lab.observation(
    "gauge",
    r"Heads $(RQ, R^{-\top}K, V)$ are other heads and the same function; in the gauge "
    r"$QQ^\top = KK^\top$ the distance is zero as well.",
    source=lab.theory("the score sees $K^\\top Q$ alone"),
)
SPEED = lab.theorem(
    "speed",
    r"Along the geodesic, $d(\nu, \nu_t) = t\,d(\nu, \nu')$.",
    "BPV25, conditional optimal transport distance",
    source=lab.theory("the shares $t$"),
)
LENGTH = lab.theorem(
    "length",
    r"Training covers at most the length of its path: "
    r"$d(\nu_0, \nu_t) \le \int_0^t|\nabla R|$.",
    "BHFP26, gradient flow of the conditional Wasserstein metric",
    source=lab.other_method("sums of gradient norms along the steps"),
)
BARRIER = lab.observation(
    "barrier",
    "Between trained networks the barrier of the risk along the geodesic is at most "
    "half of that along the straight line of unmatched heads.",
    source=lab.other_method("half of the barrier along the line"),
)


@lab.experiment(
    "Networks as measures of heads: distance and geodesics", room="training"
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Check the distance on random networks, then train two and join them."""
    random = np.random.default_rng(parameters.seed)
    size = (2, 3, parameters.layers, parameters.heads, 2, 2)
    nu, other = (MeanFieldTransformer(*one) for one in random.normal(size=size))
    tokens, ends = random.normal(size=(3, 4, 2)), random.normal(size=(2, 3, 2))
    data, order = Dataset(tokens, *ends), random.permutation(parameters.heads)
    findings, squares = random_networks(nu, other, data, order)
    trained = [descent(one, data, parameters.steps) for one in (nu, other)]
    (path, lengths), ends = trained[0], [models[-1] for models, _ in trained]
    far = [cot_distance(nu, one) for one in progress.over(path, 0.4)]
    between = [cot_geodesic(*ends, t) for t in progress.over(SHARES, 0.6)]
    covered = np.array([cot_distance(ends[0], one) for one in between[2::2]])
    lines = [straight(*ends, t) for t in SHARES]
    ways = {"heads in the order they have": lines, "geodesic": between}
    ways = {name: [risk(one, data) for one in way] for name, way in ways.items()}
    barriers = [np.max(way) - max(way[0], way[-1]) for way in ways.values()]
    findings += [
        SPEED.close_to(covered / cot_distance(*ends), SHARES[2::2], tolerance=1e-10),
        LENGTH.at_most(far[1:], lengths[1:], tolerance=1e-12),
        BARRIER.at_most(barriers[1], barriers[0] / 2),
    ]
    pictures = [draw_heads(*ends, squares), draw_ways(ways, far, lengths)]
    return lab.Outcome(findings, pictures)


def random_networks(nu, other, data: Dataset, order) -> tuple[list, np.ndarray]:
    """Findings about networks before training, and squared distances by SciPy."""
    *moved, backward, turned = variants(nu, order)
    moves = [cot_distance(nu, one) for one in moved]
    distances = [cot_distance(nu, one) for one in (other, backward)]
    squares, backwards = assigned(nu, other), assigned(nu, backward)
    exact = np.sqrt([squares.mean(), backwards.mean()])
    in_order = np.sqrt(np.mean((vectors(nu) - vectors(other)) ** 2 * 12))
    pooled = [mf.wasserstein(nu.measure(), one.measure()) for one in (other, backward)]
    alike = [function_distance(nu, turned, data), cot_distance(nu, turned, gauge=True)]
    return [
        SHIFT.close_to(moves, [0.3 * np.sqrt(12), 0], tolerance=1e-12),
        ASSIGNED.close_to(distances, exact, tolerance=1e-10),
        POOLED.close_to(pooled[1], 0, tolerance=1e-10),
        CHAIN.at_most([pooled[0], distances[0]], [distances[0], in_order]),
        GAUGE.close_to(alike, 0, tolerance=1e-8),
    ], squares


@eqx.filter_jit
def variants(nu: MeanFieldTransformer, order) -> list[MeanFieldTransformer]:
    """The network shifted, with heads permuted, layers reversed, in another gauge."""
    turn = jnp.array([[1.0, 0.5], [-0.3, 2.0]])
    query, keys, value, _ = nu.parameters.heads
    found = [
        jax.tree.map(change, nu.parameters)
        for change in (lambda a: a + 0.3, lambda a: a[:, order], lambda a: a[::-1])
    ]
    turned = Heads(turn @ query, jnp.linalg.inv(turn).T @ keys, value)
    found.append(dataclasses.replace(nu.parameters, heads=turned))
    return [nu.with_parameters(one) for one in found]


def straight(nu, other, share: float) -> MeanFieldTransformer:
    """The network on the straight line between two, heads in the order they have."""
    sides = nu.parameters, other.parameters
    return nu.with_parameters(
        jax.tree.map(lambda a, b: (1 - share) * a + share * b, *sides)
    )


def vectors(model: MeanFieldTransformer) -> np.ndarray:
    """The heads of each layer as rows."""
    points = np.asarray(model.measure().points)
    return points.reshape(model.layers, model.heads, -1)


def assigned(*pair: MeanFieldTransformer) -> np.ndarray:
    """Squared distances at each depth, from SciPy's assignments."""
    costs = [
        cdist(*both, "sqeuclidean") for both in zip(*map(vectors, pair), strict=True)
    ]
    return np.array([one[linear_sum_assignment(one)].mean() for one in costs])


def descent(model: MeanFieldTransformer, data: Dataset, steps: int):
    """Networks at a few times of gradient descent, and the lengths of their paths."""
    before, speeds = stepped(model, data, steps + 1)
    lengths = STEP * np.append(0, np.cumsum(speeds))
    shown = np.linspace(0, steps, SHOWN + 1).astype(int)
    kept = [jax.tree.map(lambda leaf, t=t: leaf[t], before) for t in shown]
    return [model.with_parameters(one) for one in kept], lengths[shown]


@eqx.filter_jit
def stepped(model: MeanFieldTransformer, data: Dataset, steps: int):
    """Heads before each step, and norms of the gradients there."""

    def one(heads, _):
        found = gradient(model.with_parameters(heads), data)
        after = jax.tree.map(lambda a, g: a - STEP * g, heads, found.parameters)
        return after, (heads, jnp.sqrt(found.squared_norm))

    return jax.lax.scan(one, model.parameters, None, length=steps)[1]


def draw_heads(nu, other, random) -> lab.Picture:
    """Heads of two networks at half depth with their matches, distances by depth."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.8))
    layer = nu.layers // 2
    sides = [vectors(one)[layer] for one in (nu, other)]
    plan = cot_plans(nu, other)[layer]
    centre = np.concatenate(sides).mean(axis=0)
    axes_of = np.linalg.svd(np.concatenate(sides) - centre)[2][:2]
    one, two = ((side - centre) @ axes_of.T for side in sides)
    pieces = np.stack([one, two[np.asarray(plan.matrix()).argmax(axis=1)]], axis=1)
    style.add_lines(left, pieces, colors=style.GREY, linewidths=0.8, alpha=0.7)
    for points, name in ((one, r"$\nu$"), (two, r"$\nu'$")):
        left.plot(*points.T, "o", label=f"heads of {name}", markersize=4)
    left.set(xlabel="first principal axis", ylabel="second principal axis")
    left.set_ylim(top=left.get_ylim()[1] + 1)
    left.legend(loc="upper center", ncols=2)
    edges, trained = np.asarray(nu.depths), assigned(nu, other)
    for squares, name in ((random, "random heads"), (trained, "after training")):
        right.stairs(np.sqrt(squares), edges, label=name, linewidth=1.8, baseline=None)
    top = 1.1 * np.sqrt(np.max([random, trained]))
    right.set(xlabel="depth $s$", ylabel=r"$W_2(\nu_s, \nu'_s)$", ylim=(0, top))
    right.legend(loc="lower left")
    return lab.Picture(
        figure,
        "Left: heads of two trained networks at half depth in the plane in which they "
        "vary most; lines join heads that are matched. Right: the distance at each "
        "depth, before and after training.",
    )


def draw_ways(ways: dict, far, lengths) -> lab.Picture:
    """The risk between two trained networks; distance and path length in training."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.6))
    draw_curves(SHARES, ways, left, marks="o-", xlabel="share $t$", ylabel="risk")
    left.set_ylim(top=1.3 * np.max(list(ways.values())))
    left.legend(loc="upper left")
    paths = {r"path length $\int_0^t|\nabla R|$": lengths}
    paths[r"distance $d(\nu_0, \nu_t)$"] = far
    times = np.linspace(0, 1, len(far))
    draw_curves(times, paths, right, marks="o-", legend="lower right")
    right.set(xlabel="share of training time", ylabel="distance of heads")
    return lab.Picture(
        figure,
        "Left: the risk on the way from one trained network to another. Right: the "
        "distance that heads cover in training, and the length of their path, which is "
        "more where they turn.",
    )
