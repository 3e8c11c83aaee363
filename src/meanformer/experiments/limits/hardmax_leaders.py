r"""Leaders of attention at zero temperature.

Each token moves by the share $\gamma = \alpha/(1+\alpha)$ of the way to the tokens with
which its score $\langle Az_i, z_j\rangle$ is largest. A token that scores highest with
itself is a leader, and stays; the others gather at leaders, or, if they are tied
between several, at a mean of leaders. New leaders may emerge on the way, and whether
they do depends on the step. Ties are unstable under rounding: a follower that has come
to its leader doubles its pull. So everything is compared with a run in exact rational
arithmetic. How softmax attention tends to this is told by `low-temperature`.
"""

from fractions import Fraction

import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import PlaneFrames, draw_leaders, style

STEP, STEPS, SHOWN = Fraction(1, 3), 30, (0, 1, 2, 5, 30)
EMERGING = np.array(  # the published example, in sixtieths
    [(60, 20), (-5, 5), (-60, -60), (0, 15), (-18, -42), (-36, -54), (48, 6), (36, 9)]
) * Fraction(1, 60)
SQUARE = ((1, 1), (1, -1), (-1, -1), (-1, 1))
EXTRA = ((0.2, 0.1), (-0.3, 0.25), (0.05, -0.4), (-0.2, -0.1))


class Parameters(lab.Parameters):
    """Random clouds."""

    clouds: int = lab.setting(10, full=200, help="random clouds and forms")
    tokens: int = lab.setting(40, full=200, help="tokens of each")


EMERGES = lab.observation(
    "emerging-leader",
    "In the published example tokens $1$ and $3$ lead at the start, and tokens $1$, "
    "$2$ and $3$ from step $1$ on.",
    "AFZ24, emerging leaders",
    source=lab.published("the example of the paper"),
)
EXACT = lab.observation(
    "rational",
    "In the four published cases, ties included, tokens and leaders of all $30$ "
    "steps are those of exact rational arithmetic.",
    "AFZ24, dynamics of tokens in the plane",
    source=lab.other_method("rational arithmetic"),
)
LIMITS = lab.observation(
    "limits",
    "Token $2$ stays at $(-1/18, 5/36)$, the others go to $(1, 1/3)$ or to "
    "$(-1, -1)$; tokens in a square go to its corners.",
    source=lab.closed_form("points of leaders"),
)
TIED = lab.observation(
    "ties",
    r"The tokens $(\pm\frac12, 0)$ in the square, tied between two corners, tend to "
    r"$(\pm1, 0)$ for every step $\gamma = 0.2, \frac13, 0.5, 0.7, 1$.",
    "AFZ24, limits in faces of the polytope",
    source=lab.closed_form("midpoints of edges"),
)
CRITICAL = lab.observation(
    "critical-step",
    "Token $2$ of the example becomes a leader only if the step is large enough: "
    r"from $\gamma = (7 - \sqrt{13})/18 = 0.18858$ on.",
    source=lab.closed_form(r"smaller root of $9\gamma^2 - 7\gamma + 1$"),
)
CONTINUOUS = lab.observation(
    "continuous",
    r"In continuous depth, $\dot z_i = z_{j(i)} - z_i$, it does not: it ends at "
    "$(1, 1/3)$ with the others, and in the square $z(t) = v + e^{-t}(z(0) - v)$ for "
    "the corner $v$ of a token.",
    source=lab.closed_form(r"$v + e^{-t}(z(0) - v)$"),
)
STAY = lab.theorem(
    "leaders-stay",
    "Leaders stay leaders, for random clouds and positive definite $A$: the smallest "
    "change of the set of leaders over all steps is not negative.",
    "AFZ24, properties of leaders",
    source=lab.theory("leaders stay"),
)
CONVERGE = lab.observation(
    "converge",
    "Every token of a random cloud follows one leader after $60$ steps: share.",
    "AFZ24, convergence to leaders and to the faces between them",
    source=lab.theory("generic tokens go to leaders"),
)


@lab.experiment("Hardmax attention gathers tokens at leaders", room="flows", seconds=12)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """The four cases, the critical step and random clouds."""
    cases = {name: as_run(points) for name, points in four_cases().items()}
    seeds = progress.over(range(parameters.clouds))
    randoms = [random_run(seed, parameters.tokens) for seed in seeds]
    changes = [np.diff(path.is_leader.astype(int), axis=0).min() for path in randoms]
    shares = [np.mean(path.leader_of >= 0) for path in randoms]
    tied = [*SQUARE, (0.5, 0), (-0.5, 0), (0.2, 0.1)]
    sizes = (0.2, 1 / 3, 0.5, 0.7, 1.0)
    ends = [as_run(tied, 200, step=size).limits[4:6] for size in sizes]

    def emerges(size: float) -> float:
        return 1.0 if as_run(EMERGING, 10, step=size).is_leader[-1, 1] else -1.0

    critical = scipy.optimize.bisect(emerges, 0.1, 0.3, xtol=1e-10)
    near = {size: as_run(EMERGING, 60, step=size) for size in (0.18, 0.2)}
    movie = lab.Movie(
        cases["emerging leader"].to_trajectory(),
        "The published example with an emerging leader, step by step, and the hull.",
        draw=PlaneFrames(hull=True),
        depths=np.linspace(0, 4, 60),
    )
    return lab.Outcome(
        findings=[
            *case_findings(cases),
            TIED.close_to(ends, [(1, 0), (-1, 0)], tolerance=1e-14),
            CRITICAL.close_to(critical, (7 - np.sqrt(13)) / 18, tolerance=1e-9),
            continuous_finding(),
            STAY.at_least(changes, 0),
            CONVERGE.close_to(shares, 1.0, tolerance=0.0),
        ],
        pictures=[picture_of_cases(cases), picture_of_critical_step(near)],
        movies=[movie],
    )


def four_cases() -> dict[str, list]:
    """Tokens of the published cases; extra ones are seeded."""
    uniform = np.random.default_rng(42).uniform
    triangle, halves = [(1, 1), (0.5, -0.5), (-1, -1)], [(-0.5, 0), (0.5, 0)]
    sides = [*uniform(0, 1, (2, 2)), *uniform(-1, 0, (2, 2))]
    return {
        "triangle": [*triangle, *sides, (0.3, -0.2), (0.1, -0.2)],
        "emerging leader": list(EMERGING),
        "square": [*SQUARE, *uniform(-0.5, 0.5, (6, 2))],
        "clusters without a leader": [*SQUARE, *halves, *uniform(-0.5, 0.5, (4, 2))],
    }


def as_run(points, count: int = STEPS, *, step: float = float(STEP), **options):
    """Steps of the library, with the published share of the way by default."""
    cloud = mf.TokenCloud(np.array(points, float))
    return mf.flows.run_hardmax(cloud, count, step=step, **options)


def exact_run(points, count: int, step: Fraction, weights=None):
    """The same by rational arithmetic: tokens and leaders of each step."""
    tokens = np.array([[Fraction(x) for x in point] for point in points])
    masses = [1] * len(tokens) if weights is None else weights
    masses = np.array([Fraction(mass) for mass in masses])
    present, states = np.flatnonzero(masses > 0), []
    for _ in range(count + 1):
        scores = (tokens @ tokens.T)[:, present]
        sets = [present[row == row.max()] for row in scores]
        leads = [(tokens[s] == tokens[i]).all() for i, s in enumerate(sets)]
        states.append((tokens, leads))
        means = np.array([masses[s] @ tokens[s] / masses[s].sum() for s in sets])
        tokens = tokens + step * (means - tokens)
    return states


def case_findings(cases):
    """Leaders, tokens and limits of the published cases."""
    errors = []
    for name, points in four_cases().items():
        exact = exact_run(points, STEPS, STEP)
        tokens = np.array([tokens for tokens, _ in exact], float)
        is_other = cases[name].is_leader != np.array([leads for _, leads in exact])
        errors += [np.abs(cases[name].points - tokens).max(), float(is_other.any())]
    emerging, square = cases["emerging leader"], as_run([*SQUARE, *EXTRA])
    expected = np.zeros((STEPS + 1, len(EMERGING)))
    expected[:, [0, 2]] = expected[1:, [1]] = 1
    near, far, goals = (1, 1 / 3), (-1, -1), [(1, 1), (-1, 1), (1, -1), (-1, -1)]
    return (
        EMERGES.close_to(emerging.is_leader, expected, tolerance=0.0),
        EXACT.close_to(errors, 0.0, tolerance=1e-12),
        LIMITS.close_to(
            np.concatenate([emerging.limits, square.limits[4:]]),
            [near, (-1 / 18, 5 / 36), far, near, far, far, near, near] + goals,
            tolerance=1e-15,
        ),
    )


def continuous_finding():
    """The example and the square in continuous depth."""
    square = np.array([*SQUARE, *EXTRA])
    corners = as_run(square).limits
    expected = [(1, 1 / 3), *(corners + np.exp(-2.0) * (square - corners))]
    layer = mf.identity_attention("hardmax", 2)
    example, ends = (
        mf.flows.hardmax_flow(layer, mf.TokenCloud(points), depth).points([depth])[0]
        for points, depth in ((EMERGING.astype(float), 25.0), (square, 2.0))
    )
    return CONTINUOUS.close_to([example[1], *ends], expected, tolerance=1e-7)


def random_run(seed: int, count: int):
    """Random tokens under a random positive definite form."""
    generator, dimension = np.random.default_rng(seed), 2 + seed % 3
    root = generator.normal(size=(dimension, dimension))
    score = root @ root.T + 0.1 * np.eye(dimension)
    return as_run(generator.normal(size=(count, dimension)), 60, score=score)


def picture_of_cases(cases) -> lab.Picture:
    """The published panels."""
    figure, axes = style.canvas(len(SHOWN), len(cases), panel=(1.75, 1.85))
    for row, (name, path) in zip(axes, cases.items(), strict=True):
        for panel, step in zip(row, SHOWN, strict=True):
            draw_leaders(path, panel, step=step)
            panel.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
        row[0].set_ylabel(name)
    for panel, step in zip(axes[0], SHOWN, strict=True):
        panel.set_title(f"step {step}")
    return lab.Picture(
        figure,
        r"The published cases, $\alpha = 0.5$: leaders are stars, other tokens have "
        "the colour of whom they follow, white ones are tied between two. Second row: "
        "a third leader emerges at step 1. Last row: two tokens end in the middle of "
        "edges, where nobody leads.",
    )


def picture_of_critical_step(near) -> lab.Picture:
    """Paths of the second token just below and above the critical step."""
    figure, axes = style.canvas(panel=(5.2, 3.2))
    for colour, (step, path) in zip(style.PALETTE, near.items(), strict=False):
        second, fourth = path.points[:, 1], path.points[:, 3]
        name = rf"$\gamma = {step}$"
        axes.plot(*second.T, "o-", color=colour, label=name, markersize=3.5)
        axes.plot(*fourth.T, ":", color=colour, linewidth=1)
    for token, place in enumerate(np.array(EMERGING[:4], float)):
        axes.plot(*place, "*", color=style.INK, markersize=8)
        axes.annotate(f"{token + 1}", place, (5, 5), textcoords="offset points")
    axes.set(xlabel="$z_1$", ylabel="$z_2$", xlim=(-0.2, 1.1), ylim=(0.0, 0.42))
    axes.legend(loc="lower right")
    return lab.Picture(
        figure,
        "Whether a leader emerges depends on the step. Just below the critical one "
        "token 2 keeps following 4 (dotted) and goes to token 1; just above it token 4 "
        "gets away, and token 2 leads.",
    )
