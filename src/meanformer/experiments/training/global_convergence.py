r"""From a small loss on independent data training reaches zero, at a known rate.

Where the tangent kernel $K$ of $N$ contexts is injective, $\lambda_{\min}(K)/N \ge
\lambda_*$ in a ball of radius $\rho$ around the start, and
$R(0) \le \lambda_*\rho^2/2$, the gradient flow stays in the ball,
$R(t) \le R(0)\,e^{-2\lambda_*t}$, and its path is no longer than
$\sqrt{2R(0)/\lambda_*}$: the inequality of Polyak and Łojasiewicz, which the kernel
proves on the way. With a large initial loss nothing is proved.
"""

import numpy as np

import meanformer.experiments as lab
from meanformer import training
from meanformer.experiments.helpers.fitting import (
    QUERY,
    independent_contexts,
    network,
    offset_by,
)
from meanformer.plotting import draw_curves, style

OFFSETS = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])


class Parameters(lab.Parameters):
    """How small the loss is at the start, and how long training takes."""

    size: float = lab.setting(
        1e-3, help="size of the offsets from where the network ends", above=0
    )
    time: float = lab.setting(400.0, full=2000.0, help="training time", at_least=100)


BOUND = lab.theorem(
    "bound",
    r"$R(t) \le R(0)\,e^{-2\lambda_* t}$ at every saved time, with $\lambda_*$ the "
    r"least of $\lambda_{\min}(K)/N$ on the way.",
    "BHFP26, global convergence",
    source=lab.theory("eigenvalues of the tangent kernel along the run"),
)
INEQUALITY = lab.theorem(
    "inequality",
    r"$|\nabla R|^2 = r^\top K r/N^2$, so that "
    r"$|\nabla R|^2 \ge 2\,(\lambda_{\min}/N)\,R$.",
    "BHFP26, Polyak-Lojasiewicz inequality",
    source=lab.other_method("residuals and the Jacobian of the network"),
)
LENGTH = lab.theorem(
    "length",
    r"The path is no longer than $\sqrt{2R(0)/\lambda_*}$, and the distance from the "
    "start is no longer than the path.",
    "BHFP26, global convergence; BPV25, conditional optimal transport",
    source=lab.closed_form(r"$\sqrt{2R(0)/\lambda_*}$"),
)
CERTIFIED = lab.observation(
    "certified",
    "The conditions hold in a ball, by the Lipschitz constant of the eigenvalue that "
    "the run shows: $R(0)\\ell^2$ is below $2\\lambda(0)^3/27$.",
    source=lab.theory("condition of the theorem, with an estimated constant"),
)
RATE = lab.observation(
    "rate",
    r"The rate at the end is $2\lambda_{\min}/N$ there.",
    source=lab.other_method("smallest eigenvalue of the tangent kernel at the end"),
)
LAZY = lab.observation(
    "lazy",
    "So close to the start the risk follows the linearised flow, whose kernel stays.",
    source=lab.closed_form(r"$|e^{-Kt/N}r|^2/(2N)$"),
)


@lab.experiment(
    "A small loss on independent data falls to zero", room="training", seconds=9
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Train one layer from a small loss, and look at the kernel on the way."""
    model = network(1, 64, 0)
    queries = np.tile(QUERY, (3, 1))
    offsets = parameters.size * OFFSETS
    data = offset_by(model, independent_contexts(), queries, offsets)
    times = np.linspace(0, parameters.time, 17)
    flowed = training.train(
        model, data, parameters.time, save=times, rtol=1e-9, atol=1e-13
    )
    judged = training.certificate(flowed, data)
    kernels = [training.tangent_kernel(flowed.at(i), data) for i in (0, -1)]
    residual = np.asarray(training.outputs(flowed.model, data) - data.targets).ravel()
    rates = np.asarray(judged.smallest) / len(data)
    risks = np.asarray(flowed.risks)
    lazy = lazy_risks(np.asarray(kernels[0]), -offsets.ravel(), times, len(data))
    envelope = risks[0] * np.exp(-2 * rates.min() * times)
    measured = np.log(risks[-2] / risks[-1]) / (times[-1] - times[-2])
    squared = residual @ np.asarray(kernels[1]) @ residual / len(data) ** 2
    return lab.Outcome(
        findings=[
            BOUND.at_most(np.log(risks), np.log(envelope), tolerance=1e-6),
            INEQUALITY.close_to(
                flowed.squared_norms[-1], squared, relative_tolerance=1e-6
            ),
            LENGTH.at_most(
                [flowed.lengths[-1], judged.distances[-1]],
                [judged.bound, flowed.lengths[-1] * (1 + 1e-9)],
            ),
            CERTIFIED.at_most(risks[0] * judged.lipschitz**2, 2 * rates[0] ** 3 / 27),
            RATE.close_to(measured, 2 * rates[-1], relative_tolerance=0.03),
            LAZY.close_to(np.log(risks), np.log(lazy), tolerance=0.1),
        ],
        pictures=[draw_risk(times, risks, envelope, lazy, judged)],
        notes=[f"The certificate says: {judged}"],
    )


def lazy_risks(kernel, residuals, times, count: int) -> np.ndarray:
    r"""The risk along the flow if the kernel stayed: $|e^{-Kt/N}r|^2/(2N)$."""
    values, vectors = np.linalg.eigh(kernel)
    decays = np.exp(-2 * np.multiply.outer(times, values) / count)
    return decays @ (vectors.T @ residuals) ** 2 / (2 * count)


def draw_risk(times, risks, envelope, lazy, judged) -> lab.Picture:
    """Risk with its envelope, and the eigenvalues along the way."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.4))
    curves = {
        "risk": risks,
        r"$R(0)\,e^{-2\lambda_* t}$": envelope,
        "linearised flow": lazy,
    }
    settings = {"yscale": "log", "xlabel": "time $t$", "ylabel": "risk $R$"}
    draw_curves(times, curves, left, marks=("o", "-", "--"), **settings)
    curves = {
        r"$\lambda_{\max}(K)$": judged.largest,
        r"$\lambda_{\min}(K)$": judged.smallest,
        r"$N|\nabla R|^2/(2R)$": 3 * judged.constants,
    }
    draw_curves(times, curves, right, marks="o-", yscale="log", xlabel="time $t$")
    return lab.Picture(
        figure,
        "Left: the risk, the envelope that the smallest eigenvalue proves, and the "
        "flow with the kernel of the start. Right: extreme eigenvalues of the tangent "
        "kernel; between them the constant of the inequality that was seen.",
    )
