r"""Many tokens on the sphere, in time nearly linear in their number.

In three dimensions the exponential of the score is a Gaussian of the difference of
query and key, and a sum over all tokens is a convolution: two nonuniform fast Fourier
transforms instead of $n^2$ pairs. The error is bounded for every query before it is
believed and compared with exact sums on a sample.

Here the bound is put to the test: by the closed form for the uniform law on the sphere,
at every one of the tokens of a quadrature cloud; by plain sums in NumPy for tokens
without any symmetry; by the energy, which must never fall along the flow. And the time
is measured.
"""

import time

import jax.numpy as jnp
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import draw_rate, draw_sphere_density, mark_sizes, style

BETAS = (4.0, 25.0)
# The time of exact sums is proportional to the number of queries.
QUERIES = 1024


class Parameters(lab.Parameters):
    """How many tokens, and how accurate."""

    count: int = lab.setting(
        100_000, full=1_000_000, help="number of tokens", at_least=20_000
    )
    tolerance: float = lab.setting(1e-7, help="tolerance of the fast sums")
    beta: float = lab.setting(9.0, help="inverse temperature of the flow", at_least=1.0)
    depth: float = lab.setting(2.0, full=4.0, help="depth of the flow")
    checks: int = lab.setting(64, help="queries summed by NumPy", at_least=16)
    seed: int = lab.setting(0, help="seed of the tokens", at_least=0)


UNIFORM = lab.observation(
    "uniform-law",
    "On $n$ tokens in a quadrature of the uniform law on $S^2$, softmax attention is "
    r"$x \mapsto (\coth\beta - 1/\beta)\,x$ at every token, $\beta = 4, 25$.",
    source=lab.closed_form(r"largest error over all tokens"),
)
SAMPLE = lab.observation(
    "spot-check",
    "On $n$ tokens without symmetry and with unequal weights, fast sums agree with "
    "plain ones within their tolerance.",
    source=lab.other_method("NumPy at random tokens"),
)
FAST = lab.observation(
    "fast",
    "None of these sums had to be computed exactly.",
    source=lab.theory("amplification of order $\\beta$ on the sphere"),
)
GROWTH = lab.observation(
    "growth",
    "The time of a velocity grows nearly linearly in $n$, not as $n^2$.",
    source=lab.theory("fitted exponent; exact sums have 2"),
)
ENERGY = lab.theorem(
    "energy",
    r"Along the flow of all $n$ tokens the energy $E_\beta$ never falls.",
    "GLPR23, section 3",
    source=lab.theory("smallest increase between saved depths, relative"),
)


@lab.experiment("A million tokens on the sphere", room="numerics", seconds=25)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Check the sums, time them, and flow all tokens."""
    fast, tolerance = mf.Fourier(parameters.tolerance), parameters.tolerance
    nodes = mf.quadrature(mf.UniformSphere(3), int(np.sqrt(parameters.count / 2)))
    uniform = [uniform_error(beta, nodes, fast) for beta in progress.over(BETAS, 0.3)]
    count = nodes.count
    cloud = blobs(count, fast, parameters.seed)
    layer = mf.identity_attention("softmax", 3, parameters.beta)
    for _ in progress.over(range(1), 0.1):
        sample = sample_error(layer, cloud, parameters)
    counts = [count // 16, count // 4, count]
    seconds, exact = [], []
    for n in progress.over(counts, 0.2):
        seconds.append(timed(layer, blobs(n, fast, parameters.seed), n))
        plain = blobs(n, mf.Blocked(), parameters.seed)
        exact.append(timed(layer, plain, QUERIES) * n / QUERIES)
    exponent = np.polyfit(np.log(counts), np.log(seconds), 1)[0]
    for _ in progress.over(range(1), 0.4):
        flow, steps = mf.Flow(layer, space=mf.Sphere()), mf.FixedStep(0.5)
        path = mf.solve(flow, cloud, parameters.depth, save=5, solver=steps)
        clouds = [cloud.moved(points) for points in path.points]
        energies = np.array([mf.observables.energy(layer, one) for one in clouds])
    rises = np.diff(energies) / energies[-1]
    return lab.Outcome(
        findings=[
            UNIFORM.close_to(uniform, 0.0, tolerance=tolerance),
            SAMPLE.close_to(sample, 0.0, tolerance=tolerance),
            FAST.close_to(path.statistics["exact_sums"], 0, tolerance=0),
            GROWTH.inside(exponent, 0.2, 1.2),
            ENERGY.at_least(rises, 0.0, tolerance=tolerance),
        ],
        pictures=[
            draw_flow(path, energies, parameters.beta),
            draw_times(counts, seconds, exact, parameters),
        ],
    )


def uniform_error(beta: float, nodes: mf.TokenCloud, fast: mf.Fourier) -> float:
    """Largest distance from the closed form over the tokens of a product rule."""
    cloud = mf.TokenCloud(nodes.points, nodes.weights, sums=fast)
    found = mf.identity_attention("softmax", 3, beta)(cloud, cloud.points)
    slope = 1 / np.tanh(beta) - 1 / beta
    return float(jnp.abs(found - slope * cloud.points).max()) / 2


def blobs(count: int, sums, seed: int) -> mf.TokenCloud:
    """Tokens around six directions, with unequal weights, some of them zero."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((6, 3))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    points = centres[random.integers(0, 6, count)]
    points = points + 0.6 * random.standard_normal((count, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    weights = random.uniform(0.5, 1.5, count) * (random.uniform(size=count) < 0.99)
    return mf.TokenCloud(points, weights, normalize=True, sums=sums)


def sample_error(layer, cloud: mf.TokenCloud, parameters: Parameters) -> float:
    """Largest error at random tokens, relative to the diameter of the sphere."""
    chosen = np.random.default_rng(parameters.seed + 1).choice(
        cloud.count, parameters.checks, replace=False
    )
    found = np.asarray(layer(cloud, cloud.points))[chosen]
    points, weights = np.asarray(cloud.points), np.asarray(cloud.weights)
    expected = lab.dense_velocity(layer, weights, points, queries=points[chosen])
    return float(np.abs(found - expected).max()) / 2


def timed(layer, cloud: mf.TokenCloud, queries: int) -> float:
    """Seconds of processor time for so many velocities, the least of five."""
    some = cloud.points[:queries]
    layer(cloud, some).block_until_ready()
    found = []
    for _ in range(5):
        start = time.process_time()
        layer(cloud, some).block_until_ready()
        found.append(time.process_time() - start)
    return min(found)


def draw_flow(path, energies: np.ndarray, beta: float) -> lab.Picture:
    """The density of tokens at three depths, and the energy along depth."""
    figure, axes = style.canvas(
        3, panel=(3.4, 2.4), subplot_kw={"projection": "mollweide"}
    )
    for panel, index in zip(axes, (0, len(path) // 2, -1), strict=True):
        mesh = draw_sphere_density(path.cloud(index), panel)
        depth, energy = float(path.depths[index]), energies[index]
        panel.set_title(rf"depth {depth:g}, $E_\beta = {energy:.4g}$")
    bar = figure.colorbar(mesh, ax=axes, shrink=0.7, orientation="horizontal")
    bar.set_label("density of tokens relative to the uniform law")
    return lab.Picture(
        figure,
        f"All {path.points.shape[1]} tokens on the sphere at "
        rf"$\beta = {beta:g}$, on a map that keeps areas: broad groups contract and "
        "leave the rest of the sphere empty.",
    )


def draw_times(counts, seconds, exact, parameters: Parameters) -> lab.Picture:
    """Time against the number of tokens, for fast and exact sums."""
    figure, axes = style.canvas(panel=(5.0, 3.6))
    draw_rate(counts, seconds, axes, label="fast sums", slope=1)
    label = f"exact sums, from {QUERIES} queries"
    draw_rate(counts, exact, axes, label=label, slope=2)
    axes.set(xlabel="tokens $n$", ylabel="processor time of a velocity [s]")
    mark_sizes(counts, axes)
    axes.legend(loc="upper left")
    ratio, nanoseconds = exact[-1] / seconds[-1], 1e9 * seconds[-1] / counts[-1]
    return lab.Picture(
        figure,
        rf"Processor time of one velocity at $\beta = {parameters.beta:g}$, error at "
        rf"most ${parameters.tolerance:g}$. Dashed: growth like $n$ and like $n^2$. "
        f"For all tokens fast sums take {nanoseconds:.0f} nanoseconds per token, and "
        f"exact ones {ratio:.0f} times as long.",
    )
