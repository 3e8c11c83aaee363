r"""Gaussians stay Gaussian, and obey two equations.

Under softmax, L2, Sinkhorn and linear attention the velocity of a Gaussian
$\mathcal{N}(m, S)$ is affine, $\Gamma[\mu](x) = c + Lx$. So the measure stays Gaussian,
with $\dot m = Lm + c$ and $\dot S = LS + SL^\top$, and a residual layer of step $h$
maps it to $\mathcal{N}(m + h(Lm + c), (I + hL)S(I + hL)^\top)$ exactly. A partial
differential equation has become an ordinary one of dimension $d + d^2$.

Every formula is held against what does not know it: integrals over the Gaussian,
written-out equations in SciPy, many tokens. Sigmoid and unnormalised attention bend
Gaussians, and it is measured by how much.
"""

import jax.numpy as jnp
import numpy as np
import scipy.linalg
from scipy.spatial.distance import cdist
from scipy.special import expit, logsumexp

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers import reference
from meanformer.experiments.helpers.gaussians import COVARIANCE, KINDS
from meanformer.plotting import draw_ellipses, style

BENT = {"sigmoid": mf.Sigmoid, "unnormalised": mf.Unnormalised}
QUERY, KEY, VALUE = map(np.array, (reference.QUERY, reference.KEY, reference.VALUE))
SCORE, MEAN = KEY.T @ QUERY, np.array([0.3, -0.4])
LAYERS = 10


class Parameters(lab.Parameters):
    """How many tokens stand for the Gaussian, and how many nodes."""

    counts: tuple[int, ...] = lab.setting(
        (16, 64, 256), full=(16, 64, 256, 1024), help="numbers of tokens", at_least=8
    )
    clouds: int = lab.setting(6, full=16, help="clouds of each number", at_least=4)
    sinkhorn_count: int = lab.setting(
        128, full=512, help="number of tokens under Sinkhorn attention", at_least=16
    )
    order: int = lab.setting(30, full=60, help="nodes along each axis", at_least=16)


AFFINE = lab.theorem(
    "affine",
    "On a Gaussian, softmax, L2, Sinkhorn and linear attention are $c + Lx$ with "
    r"$L = \beta VSA$, $2\beta VNSA$, $2\beta VMA$, $\beta V(S + mm^\top)A$.",
    "CACP25, Gaussian data (derivations: theory page on Gaussians)",
    source=lab.other_method("Gauss-Hermite quadrature of the integrals, in NumPy"),
)
FLOW = lab.theorem(
    "flow",
    r"The flow of a Gaussian is $\dot m = Lm + c$, $\dot S = LS + SL^\top$.",
    "CACP25, Gaussian data",
    source=lab.other_method("the written-out equations, solved by SciPy's DOP853"),
)
RESIDUAL_LAYERS = lab.theorem(
    "layers",
    r"Ten residual layers apply $m + h(Lm + c)$ and $(I + hL)S(I + hL)^\top$ exactly.",
    "CACP25, Gaussian data (layers: theory page on Gaussians)",
    source=lab.other_method("the update, written out in NumPy"),
)
TOKENS = lab.observation(
    "tokens",
    "The covariance of $n$ quasi-random tokens errs by less than order $n^{-1/2}$.",
    source=lab.theory("exponents of softmax and L2; random tokens would have -1/2"),
)
NEAR = lab.observation(
    "near",
    "A few hundred tokens have the covariance of the Gaussian within 2%.",
    source=lab.other_method("the Gaussian flow, distance relative to its size"),
)
MOMENTS = lab.theorem(
    "moments",
    "Linear attention sees two moments: four tokens keep those of a Gaussian flow.",
    "CACP25, Gaussian data (any measure: theory page on Gaussians)",
    source=lab.theory("distances along the flow, the covariance's relative"),
)
BEND = lab.observation(
    "bent",
    "The best affine fit leaves over 1% of sigmoid and unnormalised attention.",
    source=lab.theory("root mean square of what is left, relative"),
)
FIT = lab.observation(
    "fit",
    "What the best affine fit leaves of the velocity is measured right.",
    source=lab.other_method("least squares in NumPy on other nodes"),
)


@lab.experiment(
    "Gaussians stay Gaussian, and obey two equations", room="gaussian", seconds=35
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Solve the four flows, and hold each against what does not know the formulas."""
    mu, counts = mf.Gaussian(jnp.array(MEAN), jnp.array(COVARIANCE)), parameters.counts
    layers = {n: lab.reference_attention(kind) for n, kind in (KINDS | BENT).items()}
    flows = {name: mf.Flow(layers[name]) for name in KINDS}
    paths = {
        name: mf.solve(flow, mu, 1.0, rtol=1e-12, atol=1e-13)
        for name, flow in progress.over(flows.items(), 0.4)
    }
    exponents, seeds = [], range(parameters.clouds)
    for name in progress.over(("softmax", "L2"), 0.4):
        errors = []
        for count in counts:
            draws = [compared(flows[name], mu, count, max(counts), s) for s in seeds]
            errors.append(np.mean([draw.covariance_errors[-1] ** 2 for draw in draws]))
        exponents.append(np.polyfit(np.log(counts), np.log(errors) / 2, 1)[0])
    most = dict.fromkeys(KINDS, max(counts)) | {"Sinkhorn": parameters.sinkhorn_count}
    for _ in progress.over(range(1), 0.2):
        pairs = {name: compared(flows[name], mu, n, n) for name, n in most.items()}
        # Far from Gaussian, but linear attention cannot tell.
        four = mf.gaussian.compare_with_particles(
            flows["linear"], lab.reference_cloud(), 1.0, rtol=1e-10
        )
    four_errors = [four.mean_errors, four.covariance_errors]
    return lab.Outcome(
        findings=[
            *integral_findings(layers, mu, parameters.order),
            *flow_findings(flows, paths),
            TOKENS.at_most(exponents, -0.5),
            NEAR.at_most([pair.covariance_errors[-1] for pair in pairs.values()], 0.02),
            MOMENTS.at_most(four_errors, 0.0, tolerance=1e-8),
        ],
        pictures=[draw_flows(paths, pairs)],
    )


def compared(flow: mf.Flow, mu: mf.Gaussian, count: int, size: int, seed: int = 0):
    """So many tokens next to the Gaussian, padded: one program for all numbers."""
    tokens = mf.pad(mf.gaussian.matched_tokens(mu, count, seed=seed), size)
    return mf.gaussian.compare_with_particles(flow, tokens, 1.0)


def integral_findings(layers, mu: mf.Gaussian, order: int):
    """Velocities against integrals, and what affine fits leave of those that bend."""
    found, expected, left, fitted = [], [], [], []
    for name, layer in layers.items():
        nodes, weights, values = integrated_velocity(name, order)
        if name in KINDS:
            slope, constant = mf.gaussian.affine_velocity(layer, mu)
            likely = weights > 1e-6
            found.append(constant + nodes[likely] @ slope.T)
            expected.append(values[likely])
            continue
        left.append(mf.gaussian.closure_residual(layer, mu).relative)
        # Covariances of velocity and place; what no affine map fits is left of them.
        both = np.cov(values.T, nodes.T, aweights=weights)
        explained = both[:2, 2:] @ np.linalg.solve(both[2:, 2:], both[2:, :2])
        fitted.append(np.sqrt(1 - np.trace(explained) / np.trace(both[:2, :2])))
    return (
        AFFINE.close_to(found, expected, tolerance=1e-10),
        BEND.above(left, 0.01),
        FIT.close_to(left, fitted, relative_tolerance=1e-6),
    )


def integrated_velocity(name: str, order: int) -> tuple[np.ndarray, ...]:
    """Gauss-Hermite nodes, their weights, and the velocity there by its definition."""
    line, masses = np.polynomial.hermite_e.hermegauss(order)
    grid = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
    nodes = MEAN + grid @ np.linalg.cholesky(COVARIANCE).T
    weights = np.outer(masses, masses).ravel() / masses.sum() ** 2
    scores = nodes @ SCORE.T @ nodes.T
    plain = {"linear": np.array, "sigmoid": expit, "unnormalised": np.exp}
    if name in plain:
        return nodes, weights, (weights * plain[name](scores)) @ nodes @ VALUE.T
    if name != "softmax":
        scores = -cdist(nodes @ QUERY.T, nodes @ KEY.T, "sqeuclidean")
    # Sinkhorn's algorithm in the log domain.
    columns, change = np.zeros(len(nodes)), float(name == "Sinkhorn")
    while change > 1e-13:
        rows = -np.asarray(logsumexp(scores + columns, axis=1, b=weights))
        moved = -np.asarray(logsumexp(scores.T + rows, axis=1, b=weights))
        change = np.abs(moved - columns)[weights > 1e-20].max()
        columns = moved
    scores = scores + columns
    totals = np.asarray(logsumexp(scores, axis=1, b=weights, keepdims=True))
    return nodes, weights, (weights * np.exp(scores - totals)) @ nodes @ VALUE.T


def flow_findings(flows: dict[str, mf.Flow], paths):
    """Flows against SciPy, and each of ten layers against its update."""
    found, solved, layered, updated, h = [], [], [], [], 0.5 / LAYERS
    for name, flow in flows.items():

        def velocity(_, state, name=name):
            slope, drift = written_out(name, state[0], state[1:])
            half = slope @ state[1:]
            return np.vstack([drift, half + half.T])

        state, path = np.vstack([MEAN, COVARIANCE]), paths[name]
        solved.append(lab.by_scipy(velocity, state, np.asarray(path.depths)))
        layers = mf.run_layers(flow, path.gaussian(0), LAYERS, step=h)
        for each, rows in ((path, found), (layers, layered)):
            rows.append(np.concatenate([each.means[:, None], each.covariances], axis=1))
        updated.append([state])
        for _ in range(LAYERS):
            slope, drift = written_out(name, state[0], state[1:])
            step = np.eye(2) + h * slope
            state = np.vstack([state[0] + h * drift, step @ state[1:] @ step.T])
            updated[-1].append(state)
    return (
        FLOW.close_to(found, solved, tolerance=1e-9),
        RESIDUAL_LAYERS.close_to(layered, updated, tolerance=1e-12),
    )


def written_out(name: str, mean: np.ndarray, spread: np.ndarray):
    """The slope and the velocity of the mean, from the formulas, in NumPy."""
    if name == "softmax":
        slope = VALUE @ spread @ SCORE
        return slope, VALUE @ mean + slope @ mean
    if name == "L2":
        thinner = VALUE @ np.linalg.inv(np.eye(2) + 2 * spread @ KEY.T @ KEY)
        slope = 2 * thinner @ spread @ SCORE
        return slope, thinner @ mean + slope @ mean
    if name == "linear":
        slope = VALUE @ (spread + np.outer(mean, mean)) @ SCORE
        return slope, slope @ mean
    # The conditional covariance solves M + M B S B^T M = S, a Riccati equation.
    root = 2 * SCORE @ np.linalg.cholesky(spread)
    riccati = scipy.linalg.solve_continuous_are
    conditional = riccati(-np.eye(2) / 2, root, spread, np.eye(2))
    return 2 * VALUE @ conditional @ SCORE, VALUE @ mean


def draw_flows(paths, pairs) -> lab.Picture:
    """Ellipses along depth, with tokens over the last of them."""
    figure, panels = style.canvas(2, 2, panel=(3.6, 2.9), sharex=True, sharey=True)
    for panel, (name, path) in zip(panels.flat, paths.items(), strict=True):
        points = np.asarray(pairs[name].tokens.cloud(-1).points)
        panel.plot(*points.T, ".", color=style.GREY, markersize=2.6, alpha=0.7)
        draw_ellipses(path, panel, count=6, deviations=2, is_labelled=False)
        panel.set(xlim=(-4.6, 4.6), ylim=(-4.2, 3.2))
        panel.set(title=f"{name}, {len(points)} tokens")
        panel.label_outer()
    figure.colorbar(panels[0, 0].collections[0], ax=panels, label="depth $t$")
    return lab.Picture(
        figure,
        "Two standard deviations of the Gaussian along depth, with the path of its "
        "mean. Grey: tokens that started with the same moments, at depth 1.",
    )
