r"""Gaussians stay Gaussian, and obey two equations.

Under softmax, L2, Sinkhorn and linear attention the velocity of a Gaussian
$\mathcal{N}(m, S)$ is affine, $\Gamma[\mu](x) = c + Lx$. So the measure stays Gaussian,
with $\dot m = Lm + c$ and $\dot S = LS + SL^\top$, and a residual layer of step $h$
maps it to $\mathcal{N}(m + h(Lm + c), (I + hL)S(I + hL)^\top)$ exactly. A partial
differential equation has become an ordinary one of dimension $d + d^2$.

Every formula is held against something that does not know it: integrals over the
Gaussian for the velocity, the written-out equations in SciPy for the flow, many tokens
for the measure. Sigmoid and unnormalised attention bend Gaussians, and it is measured
by how much.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import scipy.linalg
from scipy.spatial.distance import cdist
from scipy.special import expit, logsumexp

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.gaussians import COVARIANCE, KINDS
from meanformer.plotting import draw_ellipses, draw_rate, draw_slope, mark_sizes, style

BENT = {"sigmoid": mf.Sigmoid, "unnormalised": mf.Unnormalised}
MEAN = np.array([0.3, -0.4])
QUERIES = np.array([[0.0, 0.0], [1.0, 0.5], [-2.0, 1.0], [0.7, -1.9], [3.0, 2.0]])
LAYERS = 10

# Mean and S11, S12, S22 at depths 0.5 and 1, kind after kind.
TABLE = np.array([
    [0.372736662226, -0.621750649595, 1.178027558944, 0.428694433931, 0.739732816668],
    [0.458739126804, -0.964809063496, 1.465481018613, 0.653376758187, 0.970033844588],
    [0.387417580171, -0.526299539252, 1.264009939127, 0.483319040957, 0.793340238403],
    [0.523437473244, -0.669042848981, 1.699515482301, 0.817530221393, 1.133074330233],
    [0.328828027154, -0.616073138149, 1.283791744675, 0.488343861744, 0.821769577919],
    [0.335838342329, -0.939644817944, 1.751705843592, 0.823670540015, 1.198704978327],
    [0.338074237963, -0.410561615947, 1.170914830325, 0.456353015090, 0.812857224171],
    [0.389726202238, -0.411689656665, 1.469299064243, 0.761743786037, 1.218414745166],
])  # fmt: skip


@dataclass(frozen=True)
class Parameters:
    """How many tokens stand for the Gaussian, and how many nodes."""

    counts: tuple[int, ...] = lab.setting(
        (16, 64, 256),
        full=(16, 64, 256, 1024),
        help="numbers of tokens, rising",
        at_least=8,
    )
    clouds: int = lab.setting(
        6, full=16, help="clouds of each number, for the mean error", at_least=4
    )
    sinkhorn_count: int = lab.setting(
        128, full=512, help="number of tokens under Sinkhorn attention", at_least=16
    )
    order: int = lab.setting(
        30, full=60, help="Gauss-Hermite nodes along each axis", at_least=16
    )


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
REFERENCE = lab.observation(
    "reference-values",
    r"Mean and covariance take their tabulated values at depths $\tfrac12$ and $1$ "
    "for the four kinds.",
    source=lab.tabulated("12 digits"),
)
RESIDUAL_LAYERS = lab.theorem(
    "layers",
    r"Ten residual layers of step $\tfrac1{20}$ apply $m + h(Lm + c)$ and "
    r"$(I + hL)S(I + hL)^\top$ ten times, without error.",
    "CACP25, Gaussian data (layers: theory page on Gaussians)",
    source=lab.other_method("the update, written out in NumPy"),
)
TOKENS = lab.observation(
    "tokens",
    "The covariance of $n$ quasi-random tokens under softmax and L2 attention "
    "approaches that of the Gaussian faster than $n^{-1/2}$.",
    source=lab.theory("fitted exponents; random tokens would have -1/2"),
)
NEAR = lab.observation(
    "near",
    "A few hundred tokens have the covariance of the Gaussian within 2%, under each "
    "of the four kinds.",
    source=lab.other_method("the Gaussian flow, distance relative to its size"),
)
MOMENTS = lab.theorem(
    "moments",
    "Linear attention sees first and second moments only: four tokens have mean and "
    "covariance of the Gaussian flow at all depths.",
    "CACP25, Gaussian data (any measure: theory page on Gaussians)",
    source=lab.theory("distances along the flow, the covariance's relative"),
)
BEND = lab.observation(
    "bent",
    "Sigmoid and unnormalised attention are not affine on a Gaussian: the best "
    r"affine fit in $L^2(\mu)$ leaves more than 1% of the velocity.",
    source=lab.theory("root mean square of what is left, relative"),
)
FIT = lab.observation(
    "fit",
    "What the best affine fit leaves of the velocity is measured right.",
    source=lab.other_method("least squares in NumPy on other nodes"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Solve the four flows, and hold each against what does not know the formulas."""
    mu, counts, order = reference_gaussian(), parameters.counts, parameters.order
    layers = {n: lab.reference_attention(kind) for n, kind in (KINDS | BENT).items()}
    flows = {name: mf.Flow(layers[name]) for name in KINDS}
    paths = {
        name: mf.solve(flow, mu, 1.0, rtol=1e-12, atol=1e-13)
        for name, flow in progress.over(flows.items(), 0.4)
    }
    errors = {}
    for name in progress.over(("softmax", "L2"), 0.4):
        each = [
            [
                compared(flows[name], count, size=max(counts), seed=seed)
                for seed in range(parameters.clouds)
            ]
            for count in counts
        ]
        squares = [[one.covariance_errors[-1] ** 2 for one in row] for row in each]
        errors[name] = np.sqrt(np.mean(squares, axis=1))
    for _ in progress.over(range(1), 0.2):
        most = dict.fromkeys(KINDS, max(counts)) | {
            "Sinkhorn": parameters.sinkhorn_count
        }
        pairs = {name: compared(flows[name], most[name]) for name in KINDS}
        # Far from Gaussian, but linear attention cannot tell.
        four = mf.gaussian.compare_with_particles(
            flows["linear"], lab.reference_cloud(), 1.0, rtol=1e-10
        )
    affine = [mf.gaussian.affine_velocity(layers[name], mu) for name in KINDS]
    left = [mf.gaussian.closure_residual(layers[name], mu).relative for name in BENT]
    return lab.Outcome(
        findings=[
            AFFINE.close_to(
                [constant + QUERIES @ slope.T for slope, constant in affine],
                [integrated_velocity(name, QUERIES, order) for name in KINDS],
                tolerance=1e-10,
            ),
            *flow_findings(flows, paths),
            TOKENS.at_most(
                [np.polyfit(np.log(counts), np.log(e), 1)[0] for e in errors.values()],
                -0.5,
            ),
            NEAR.at_most(
                [float(pair.covariance_errors[-1]) for pair in pairs.values()], 0.02
            ),
            MOMENTS.at_most(
                np.stack([four.mean_errors, four.covariance_errors]),
                0.0,
                tolerance=1e-8,
            ),
            BEND.above(left, 0.01),
            FIT.close_to(
                left,
                [least_squares_residual(name, order) for name in BENT],
                relative_tolerance=1e-6,
            ),
        ],
        pictures=[draw_flows(paths, pairs), draw_errors(counts, errors)],
    )


def reference_gaussian() -> mf.Gaussian:
    """The Gaussian of the tabulated values."""
    return mf.Gaussian(jnp.array(MEAN), jnp.array(COVARIANCE))


def compared(flow: mf.Flow, count: int, *, size: int | None = None, seed: int = 0):
    """So many tokens next to the Gaussian; padded, so as to compile but once."""
    tokens = mf.gaussian.matched_tokens(reference_gaussian(), count, seed=seed)
    return mf.gaussian.compare_with_particles(flow, mf.pad(tokens, size or count), 1.0)


def matrices() -> tuple[np.ndarray, ...]:
    """Query, key, value and score of the reference layer, in NumPy."""
    layer = lab.reference_attention()
    query, key, value = map(np.asarray, (layer.query, layer.key, layer.value))
    return query, key, value, key.T @ query


def written_out(name: str, mean: np.ndarray, spread: np.ndarray):
    """The slope and the velocity of the mean, from the formulas, in NumPy."""
    _, key, value, score = matrices()
    drift, identity = value @ mean, np.eye(2)
    if name == "softmax":
        slope = value @ spread @ score
        drift = drift + slope @ mean
    elif name == "L2":
        thinner = np.linalg.inv(identity + 2 * spread @ key.T @ key)
        slope = 2 * value @ thinner @ spread @ score
        drift = value @ thinner @ mean + slope @ mean
    elif name == "Sinkhorn":
        # The conditional covariance solves M + M B S B^T M = S, a Riccati equation.
        form = 2 * score
        root = form @ np.linalg.cholesky(spread)
        conditional = scipy.linalg.solve_continuous_are(
            -identity / 2, root, spread, identity
        )
        slope = value @ conditional @ form
    else:
        slope = value @ (spread + np.outer(mean, mean)) @ score
        drift = slope @ mean
    return slope, drift


def hermite_nodes(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the reference Gaussian, along its Cholesky axes."""
    line, masses = np.polynomial.hermite_e.hermegauss(order)
    grid = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
    weights = np.outer(masses, masses).ravel()
    return MEAN + grid @ np.linalg.cholesky(COVARIANCE).T, weights / weights.sum()


def integrated_velocity(name: str, queries: np.ndarray, order: int) -> np.ndarray:
    """The velocity at these queries, from its definition."""
    query, key, value, score = matrices()
    nodes, weights = hermite_nodes(order)
    scores = queries @ score.T @ nodes.T
    plain = {"linear": np.array, "sigmoid": expit, "unnormalised": np.exp}
    if name in plain:
        return (weights * plain[name](scores)) @ nodes @ value.T
    if name != "softmax":
        scores = -cdist(queries @ query.T, nodes @ key.T, "sqeuclidean")
    if name == "Sinkhorn":
        scores = scores + sinkhorn_potential(nodes, weights)
    log_masses = scores - logsumexp(scores, axis=1, b=weights, keepdims=True)
    return (weights * np.exp(log_masses)) @ nodes @ value.T


def sinkhorn_potential(nodes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The potential of the columns, by Sinkhorn's algorithm in the log domain."""
    query, key, _, _ = matrices()
    scores = -cdist(nodes @ query.T, nodes @ key.T, "sqeuclidean")
    columns, change = np.zeros(len(nodes)), np.inf
    while change > 1e-13:
        rows = -np.asarray(logsumexp(scores + columns, axis=1, b=weights))
        moved = -np.asarray(logsumexp(scores.T + rows, axis=1, b=weights))
        change = np.abs(moved - columns)[weights > 1e-20].max()
        columns = moved
    return columns


def flow_findings(flows: dict[str, mf.Flow], paths):
    """Flows against SciPy and the table, and each of ten layers against its update."""
    solved, layered, updated, h = [], [], [], 0.5 / LAYERS
    first = np.concatenate([MEAN, COVARIANCE.ravel()])
    for name, flow in flows.items():

        def velocity(_, state, name=name):
            mean, spread = state[:2], state[2:].reshape(2, 2)
            slope, drift = written_out(name, mean, (spread + spread.T) / 2)
            return np.concatenate([drift, (slope @ spread + spread @ slope.T).ravel()])

        solved.append(lab.by_scipy(velocity, first, np.asarray(paths[name].depths)))
        path = mf.run_layers(flow, reference_gaussian(), LAYERS, step=h)
        layered.extend(flattened(path)[1:])
        mean, spread = MEAN, COVARIANCE
        for _ in range(LAYERS):
            slope, drift = written_out(name, mean, spread)
            step = np.eye(2) + h * slope
            mean, spread = mean + h * drift, step @ spread @ step.T
            updated.append(np.concatenate([mean, spread.ravel()]))
    found = [flattened(path) for path in paths.values()]
    return (
        FLOW.close_to(found, solved, tolerance=1e-9),
        REFERENCE.close_to(
            [row[[len(row) // 2, -1]][:, [0, 1, 2, 3, 5]] for row in found],
            TABLE.reshape(4, 2, 5),
            tolerance=1e-9,
        ),
        RESIDUAL_LAYERS.close_to(layered, updated, tolerance=1e-12),
    )


def flattened(path: mf.flows.GaussianTrajectory) -> np.ndarray:
    """Means and covariances side by side, a row for each depth."""
    spreads = np.reshape(path.covariances, (len(path), -1))
    return np.concatenate([np.asarray(path.means), spreads], axis=1)


def least_squares_residual(name: str, order: int) -> float:
    """What a weighted least-squares fit leaves of the velocity, relative."""
    nodes, weights = hermite_nodes(order)
    values, roots = integrated_velocity(name, nodes, order), np.sqrt(weights)[:, None]
    design = roots * np.concatenate([np.ones((len(nodes), 1)), nodes], axis=1)
    left = np.linalg.lstsq(design, roots * values, rcond=None)[1].sum()
    spread = roots * (values - weights @ values)
    return float(np.sqrt(left) / np.linalg.norm(spread))


def draw_flows(paths, pairs) -> lab.Picture:
    """Ellipses along depth, with tokens over the last of them."""
    figure, panels = style.canvas(2, 2, panel=(3.6, 2.9), sharex=True, sharey=True)
    for panel, (name, path) in zip(panels.flat, paths.items(), strict=True):
        points = np.asarray(pairs[name].tokens.cloud(-1).points)
        panel.plot(*points.T, ".", color=style.GREY, markersize=2.6, alpha=0.7)
        draw_ellipses(path, panel, count=6, deviations=2, is_labelled=False)
        panel.set(xlim=(-4.6, 4.6), ylim=(-4.2, 3.2), xlabel="$x_1$", ylabel="$x_2$")
        panel.set_title(f"{name}, {len(points)} tokens")
        panel.label_outer()
    colours = panels[0, 0].collections[0]
    figure.colorbar(colours, ax=panels, label="depth $t$", shrink=0.6)
    return lab.Picture(
        figure,
        "Two standard deviations of the Gaussian along depth, blue to gold, with the "
        "path of its mean, for four attentions with the same matrices. Grey: tokens "
        "that started with the same mean and covariance, at depth 1.",
    )


def draw_errors(counts, errors) -> lab.Picture:
    """The error of tokens against their number."""
    figure, axes = style.canvas()
    for name, row in errors.items():
        draw_rate(counts, row, axes, label=name)
    highest = max(row[-1] for row in errors.values())
    draw_slope(counts, highest, -0.5, axes, label=r"$n^{-1/2}$")
    mark_sizes(counts, axes)
    axes.set(xlabel="tokens $n$", ylabel="error of the covariance at depth 1, relative")
    axes.legend(loc="lower left")
    return lab.Picture(
        figure,
        "Relative distance of the tokens' covariance from the Gaussian's, root mean "
        "square over several clouds; dashed: slope $-1/2$, the rate of independent "
        "tokens.",
    )


experiment = lab.experiment(
    run, "Gaussians stay Gaussian, and obey two equations", room="gaussian", seconds=35
)
