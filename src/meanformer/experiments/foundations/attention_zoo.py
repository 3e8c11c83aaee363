r"""Every attention on the same four tokens.

All variants take the same four parameters $(Q, K, V, \beta)$ and differ in how a query
weighs the tokens it sees. Here they stand side by side on four weighted tokens in the
plane, with no symmetry to hide behind, and are compared where two of them are one.
"""

import jax.numpy as jnp
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import draw_field, draw_matrix, style


class Parameters(lab.Parameters):
    """What is drawn."""

    resolution: int = lab.setting(
        13, full=25, help="arrows along each side of the vector fields", at_least=3
    )
    hot: float = lab.setting(
        1e4, help=r"$\beta$ at which softmax is compared with hardmax", above=0
    )


COLD = lab.observation(
    "beta-zero",
    r"At $\beta = 0$ softmax, L2 and Sinkhorn attention are $V\int y\,\mathrm{d}\mu$ "
    "at every query.",
    source=lab.closed_form(r"$V m$ with $m = (0.25, 0.3)$"),
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


@lab.experiment("Every attention on the same four tokens", room="attention", seconds=8)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compare variants at the tokens, and draw all of them."""
    cloud = lab.reference_cloud(positions=jnp.array([0.25, 0.5, 0.75, 1.0]))

    def output(kind, **options) -> np.ndarray:
        return np.asarray(lab.reference_attention(kind, **options)(cloud, cloud.points))

    averages = (mf.Softmax, mf.L2, mf.Sinkhorn)
    cold = [output(kind, beta=0.0) for kind in progress.over(averages)]
    mean = np.asarray(lab.reference_attention().value) @ [0.25, 0.3]
    hot, hard = output(mf.Softmax, beta=parameters.hot), output(mf.Hardmax)
    one_pass = output(mf.Sinkhorn, half_steps=1)
    return lab.Outcome(
        findings=[
            COLD.close_to(cold, mean, tolerance=1e-10),
            HOT.close_to(hot, hard, tolerance=1e-12),
            ONE_PASS.close_to(one_pass, output(mf.L2), tolerance=1e-13),
        ],
        pictures=[draw_fields(cloud, parameters.resolution), draw_matrices(cloud)],
    )


def draw_fields(cloud: mf.TokenCloud, resolution: int) -> lab.Picture:
    """The velocity field of six variants."""
    kinds = (mf.Softmax, mf.L2, mf.Sinkhorn, mf.Linear, mf.Unnormalised, mf.Sigmoid)
    figure, grid = style.canvas(3, 2, panel=(3.1, 3.0), sharex=True, sharey=True)
    for kind, axes in zip(kinds, grid.flat, strict=True):
        draw_field(lab.reference_attention(kind), cloud, axes, resolution=resolution)
        axes.set_title(kind.__name__)
    return lab.Picture(
        figure,
        r"The maps $x \mapsto \Gamma[\mu](x)$ in the context of the four reference "
        r"tokens (blue, area by weight). Grey: direction and relative size on a grid; "
        r"orange: the velocities of the tokens themselves, to scale.",
    )


def draw_matrices(cloud: mf.TokenCloud) -> lab.Picture:
    """The attention matrices of six variants."""
    kinds = (mf.Softmax, mf.L2, mf.Sinkhorn, mf.Hardmax, mf.Linear)
    maps = {kind.__name__: lab.reference_attention(kind) for kind in kinds}
    maps["Causally masked softmax"] = mf.Masked(lab.reference_attention())
    figure, grid = style.canvas(3, 2, panel=(2.6, 2.5), sharex=True, sharey=True)
    for (name, gamma), axes in zip(maps.items(), grid.flat, strict=True):
        draw_matrix(mf.attention_matrix(gamma, cloud), axes)
        axes.set_title(name)
        axes.label_outer()
    return lab.Picture(
        figure,
        "Attention matrices $P_{ij}$: the weight of token $j$ as seen from token $i$. "
        "Rows sum to one, except for linear attention, whose weights have both signs.",
    )
