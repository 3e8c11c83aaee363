r"""Every attention on the same four tokens.

All variants take the same four parameters $(Q, K, V, \beta)$ and differ in how a query
weighs the tokens it sees. On four weighted tokens in the plane, with no symmetry to
hide behind, each is compared entry by entry with values tabulated from an independent
computation.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import draw_field, draw_matrix, style

TABLE = {
    "softmax": [
        [0.20779589385374142, 0.26075709257100954],
        [0.11570336513508532, 0.36131071831819583],
        [0.12302651098629927, 0.24562379907049642],
        [0.25759354442221544, 0.08429929984470823],
    ],
    "l2": [
        [0.26122530560942525, 0.26924031873547427],
        [0.08194029608934747, 0.45263422467097336],
        [0.09481223803500141, 0.27030307703291623],
        [0.34969028427597787, -0.017430289258360286],
    ],
    "sinkhorn": [
        [0.2641857801929325, 0.1962212334437161],
        [0.08845206479802727, 0.3951577283088587],
        [0.10176143121616284, 0.15192697025661064],
        [0.32437782240186236, -0.12421205921466201],
    ],
    "sinkhorn-three-half-steps": [
        [0.26233499866630977, 0.20235764221178512],
        [0.08644584669011683, 0.4002619706434833],
        [0.09941977762992919, 0.15958225153217542],
        [0.32411543565983036, -0.11894416468484914],
    ],
    "linear": [
        [0.046425, 0.073875],
        [-0.060025, 0.165725],
        [-0.0764375, 0.0089875],
        [0.0832375, -0.1287875],
    ],
    "unnormalised": [
        [0.23626993371168656, 0.2964883464923927],
        [0.1268181943149821, 0.3960193623605182],
        [0.11338374567789157, 0.22637191076115434],
        [0.2742809945235867, 0.08976038530356323],
    ],
    "sigmoid": [
        [0.10406855719888806, 0.12586077963861725],
        [0.07760988150649614, 0.1484639728170922],
        [0.07348499297412439, 0.10971731885479881],
        [0.11309021279638468, 0.07557059117020619],
    ],
    "hardmax": [[0.2, 0.8], [-0.4, 0.5], [-0.4, 0.5], [0.05, -0.85]],
    "two-heads": [
        [0.15354716377444147, 0.3753886360150456],
        [0.009763499294411268, 0.45728647657744337],
        [-0.0075569301181458715, 0.2924668961025575],
        [0.20582181819821221, 0.15613595416994294],
    ],
    "causal": [
        [0.5, -0.1],
        [0.32970144078140645, 0.4108956776557808],
        [0.1316450725610616, 0.37492891097479764],
        [0.25759354442221544, 0.08429929984470823],
    ],
}

TITLES = {
    "softmax": "Softmax",
    "l2": "L2",
    "sinkhorn": "Sinkhorn",
    "sinkhorn-three-half-steps": "Three-half-step Sinkhorn",
    "linear": "Linear",
    "unnormalised": "Unnormalised",
    "sigmoid": "Sigmoid",
    "hardmax": "Hardmax",
    "two-heads": "Two-head softmax",
    "causal": "Causally masked softmax",
}


@dataclass(frozen=True)
class Parameters:
    """What is drawn."""

    resolution: int = lab.setting(
        13, full=25, help="arrows along each side of the vector fields", at_least=3
    )
    hot: float = lab.setting(
        1e4, help=r"$\beta$ at which softmax is compared with hardmax", above=0
    )


CLAIMS = {
    name: lab.observation(
        name,
        f"{title} attention takes its tabulated values on the four reference tokens.",
    )
    for name, title in TITLES.items()
}
COLD = lab.observation(
    "beta-zero",
    r"At $\beta = 0$ softmax, L2 and Sinkhorn attention are $V\int y\,\mathrm{d}\mu$ "
    "at every query.",
)
HOT = lab.observation(
    "beta-infinity",
    r"At large $\beta$ softmax attention is hardmax attention.",
    source=lab.other_method("the token of largest score"),
)
ONE_PASS = lab.theorem(
    "one-half-step",
    "One half-step of Sinkhorn attention is L2 attention.",
    "SABP22, definition of the Sinkformer",
    source=lab.other_method("L2 attention"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Evaluate every variant at the tokens."""
    cloud = lab.reference_cloud(positions=jnp.array([0.25, 0.5, 0.75, 1.0]))
    maps = variants()
    values = {
        name: np.asarray(maps[name](cloud, cloud.points, positions=cloud.positions))
        for name in progress.over(maps)
    }
    source = lab.tabulated("16 digits")
    findings = [
        CLAIMS[name].close_to(values[name], TABLE[name], tolerance=1e-10, source=source)
        for name in TABLE
    ]
    return lab.Outcome(
        findings=[*findings, *limits(cloud, parameters.hot)],
        pictures=[
            draw_fields(maps, cloud, parameters.resolution),
            draw_matrices(maps, cloud),
        ],
    )


def variants() -> dict[str, mf.AbstractInContextMap]:
    """All variants with the reference matrices."""
    attention = lab.reference_attention()
    turned = mf.Softmax(attention.key, attention.query, [[0.0, -0.3], [0.3, 0.0]])
    return {
        "softmax": attention,
        "l2": lab.reference_attention(mf.L2),
        "sinkhorn": lab.reference_attention(mf.Sinkhorn),
        "sinkhorn-three-half-steps": lab.reference_attention(mf.Sinkhorn, half_steps=3),
        "linear": lab.reference_attention(mf.Linear),
        "unnormalised": lab.reference_attention(mf.Unnormalised),
        "sigmoid": lab.reference_attention(mf.Sigmoid),
        "hardmax": lab.reference_attention(mf.Hardmax),
        "two-heads": mf.MultiHead([attention, turned]),
        "causal": mf.Masked(attention),
    }


def limits(cloud: mf.TokenCloud, hot: float):
    """The ends of the range of beta, and Sinkhorn's first half-step."""
    value = np.asarray(lab.reference_attention().value)
    cold = [
        np.asarray(lab.reference_attention(kind, beta=0.0)(cloud, cloud.points))
        for kind in (mf.Softmax, mf.L2, mf.Sinkhorn)
    ]
    hottest = lab.reference_attention(beta=hot)(cloud, cloud.points)
    hard = lab.reference_attention(mf.Hardmax)(cloud, cloud.points)
    single = lab.reference_attention(mf.Sinkhorn, half_steps=1)(cloud, cloud.points)
    distance = lab.reference_attention(mf.L2)(cloud, cloud.points)
    mean = lab.closed_form(r"$V m$ with $m = (0.25, 0.3)$")
    return (
        COLD.close_to(cold, value @ [0.25, 0.3], tolerance=1e-10, source=mean),
        HOT.close_to(np.asarray(hottest), np.asarray(hard), tolerance=1e-12),
        ONE_PASS.close_to(np.asarray(single), np.asarray(distance), tolerance=1e-13),
    )


def draw_fields(maps, cloud: mf.TokenCloud, resolution: int) -> lab.Picture:
    """The velocity field of six variants."""
    names = ("softmax", "l2", "sinkhorn", "linear", "unnormalised", "sigmoid")
    figure, grid = style.canvas(3, 2, panel=(3.1, 3.0), sharex=True, sharey=True)
    for name, axes in zip(names, grid.flat, strict=True):
        draw_field(maps[name], cloud, axes, resolution=resolution)
        axes.set_title(TITLES[name])
    return lab.Picture(
        figure,
        r"The maps $x \mapsto \Gamma[\mu](x)$ in the context of the four reference "
        r"tokens (blue, area by weight). Grey: direction and relative size on a grid; "
        r"orange: the velocities of the tokens themselves, to scale.",
    )


def draw_matrices(maps, cloud: mf.TokenCloud) -> lab.Picture:
    """The attention matrices of six variants."""
    names = ("softmax", "l2", "sinkhorn", "hardmax", "causal", "linear")
    figure, grid = style.canvas(3, 2, panel=(2.6, 2.5), sharex=True, sharey=True)
    for name, axes in zip(names, grid.flat, strict=True):
        draw_matrix(mf.attention_matrix(maps[name], cloud), axes)
        axes.set_title(TITLES[name])
        axes.label_outer()
    return lab.Picture(
        figure,
        "Attention matrices $P_{ij}$: the weight of token $j$ as seen from token $i$. "
        "Rows sum to one, except for linear attention, whose weights have both signs.",
    )


experiment = lab.Experiment(
    name="attention-zoo",
    title="Every attention on the same four tokens",
    room="attention",
    claims=(*CLAIMS.values(), COLD, HOT, ONE_PASS),
    parameters=Parameters,
    run=run,
    seconds=8,
)
