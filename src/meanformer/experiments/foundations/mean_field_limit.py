r"""Many tokens: attention on a sample tends to attention on the law.

For $n$ independent tokens the output of softmax attention at a point obeys a central
limit theorem around the output for the law itself, so the error decays as $n^{-1/2}$ in
every dimension. For a Gaussian law the covariance is explicit,
$e^{q}\,V(S + uu^\top)V^\top$ with $u = \beta SAx$ and $q = \beta^2x^\top A^\top SAx$:
the rate does not see the dimension, but the constant grows like $e^{q/2}$, and
$n \gg e^q$ tokens are needed before the limit shows.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import token_convergence
from meanformer.plotting import draw_rate, draw_slope, mark_sizes, style

MEAN = (0.3, -0.4)
COVARIANCE = ((1.0, 0.3), (0.3, 0.6))
PROBE = (1.0, -0.5)


class Parameters(lab.Parameters):
    """Sizes of the samples."""

    smallest: int = lab.setting(128, help="smallest number of tokens", at_least=64)
    doublings: int = lab.setting(
        6, full=8, help="sizes, each twice the one before", at_least=5
    )
    repeats: int = lab.setting(
        64, full=400, help="independent clouds per size", at_least=48
    )
    samples: int = lab.setting(
        2000, full=4000, help="clouds for the covariance of the limit", at_least=100
    )
    seed: int = lab.setting(0, help="seed of all samples", at_least=0)


NEAR_HALF = lab.theory("fitted exponent over all sizes")
RATE = lab.theorem(
    "rate",
    "The error of softmax attention on $n$ tokens decays as $n^{-1/2}$.",
    "CACP25, mean-field limit (the rate by the central limit theorem: theory page on "
    "flows)",
    source=NEAR_HALF,
)
DIMENSION = lab.observation(
    "any-dimension", "The rate is the same in dimension $16$.", source=NEAR_HALF
)
FLOW = lab.observation(
    "flow-rate",
    "A probe carried by the flow to depth $1$ has the same rate.",
    source=NEAR_HALF,
)
VARIANCE = lab.observation(
    "variance",
    r"Its covariance, times $n$, is $e^{q}\,V(S + uu^\top)V^\top$.",
    source=lab.closed_form(r"$e^{q}V(S + uu^\top)V^\top$; five standard errors"),
)
CONSTANT = lab.observation(
    "constant",
    r"For $\beta = 0.5, 1, 2$ the observed errors have the constants that the central "
    "limit theorem predicts.",
    source=lab.closed_form("the trace of the limit covariance"),
)


@lab.experiment(
    "Attention on many tokens tends to attention on their law",
    room="observables",
    seconds=25,
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Sample clouds of growing size and compare with the Gaussian closed form."""
    counts = [parameters.smallest * 2**k for k in range(parameters.doublings)]
    law = mf.Gaussian(jnp.array(MEAN), jnp.array(COVARIANCE))

    def convergence(layer, *, measure=law, probe=PROBE, counts=counts, **options):
        probes, key = jnp.array([probe]), jr.key(parameters.seed)
        some = counts, probes, parameters.repeats
        return token_convergence(measure, layer, *some, key=key, **options)

    rates = {
        beta: convergence(lab.reference_attention(beta=beta))
        for beta in progress.over((0.5, 1.0, 2.0), 0.5)
    }
    for _ in progress.over(range(1), 0.5):
        high = convergence(
            mf.identity_attention("softmax", 16, 0.5),
            measure=mf.Gaussian(jnp.zeros(16), jnp.eye(16)),
            probe=np.full(16, 0.25),
        )
        flow = convergence(
            mf.Flow(lab.reference_attention()),
            counts=counts[::2],
            reference=mf.quadrature(law, 24),
            solver=mf.FixedStep(0.25),
        )
        covariance, exact = limit_covariance(law, parameters)
    error = 5 * np.abs(exact).max() * np.sqrt(2 / parameters.samples)
    ratios = [r.fitted_constant / float(r.predicted_constant) for r in rates.values()]
    return lab.Outcome(
        findings=[
            RATE.inside(rates[1.0].slope, -0.6, -0.4),
            DIMENSION.inside(high.slope, -0.6, -0.4),
            FLOW.inside(flow.slope, -0.6, -0.4),
            VARIANCE.close_to(covariance, exact, tolerance=error),
            CONSTANT.close_to(ratios, 1.0, tolerance=0.15),
        ],
        pictures=[draw(rates, {"dimension 16": high, "flow": flow})],
        tables=[table(rates)],
    )


def limit_covariance(law, parameters: Parameters) -> tuple[np.ndarray, np.ndarray]:
    """The covariance of many samples of 2000 tokens, and its closed form."""
    attention, count = lab.reference_attention(), 2000

    def output(key):
        cloud = mf.TokenCloud(law.sample(count, key=key))
        return attention(cloud, jnp.array([PROBE]))[0]

    keys = jr.split(jr.key(parameters.seed + 1), parameters.samples)
    outputs = jax.jit(lambda keys: jax.lax.map(output, keys))(keys)
    measured = count * np.cov(np.asarray(outputs).T)
    score, value = np.asarray(attention.score), np.asarray(attention.value)
    tilt = np.array(COVARIANCE) @ score @ PROBE
    q = np.array(PROBE) @ score.T @ tilt
    spread = np.array(COVARIANCE) + np.outer(tilt, tilt)
    return measured, np.exp(q) * value @ spread @ value.T


def table(rates) -> lab.Table:
    """Slopes and constants for each temperature."""
    rows = []
    for beta, rate in rates.items():
        constants = rate.fitted_constant, rate.predicted_constant
        rows.append([beta, rate.slope, *rate.slope_interval, *constants])
    columns = [r"$\beta$", "slope", "from", "to", "constant", "predicted"]
    caption = "Fitted exponent with its 95% interval, and the constant of $n^{-1/2}$."
    return lab.Table(columns, rows, caption)


def draw(rates, others) -> lab.Picture:
    """Errors against the number of tokens, with the predicted lines."""
    figure, axes = style.canvas(panel=(6.0, 4.2))
    for beta, rate in rates.items():
        draw_rate(rate.counts, rate.table, axes, label=rf"$\beta = {beta}$")
        colour = axes.lines[-1].get_color()
        last = rate.predicted_constant / np.sqrt(rate.counts[-1])
        draw_slope(rate.counts, last, -0.5, axes, color=colour)
    for name, rate in others.items():
        draw_rate(rate.counts, rate.table, axes, label=name, slope=-0.5)
    mark_sizes(rates[1.0].counts, axes)
    axes.set(xlabel="tokens $n$", ylabel="root mean square error at the probe")
    axes.legend()
    return lab.Picture(
        figure,
        r"Error of attention on $n$ random tokens at one probe. Dashed: the central "
        r"limit theorem's $Cn^{-1/2}$, with the constant from the closed form for the "
        r"three values of $\beta$, and through the last point for the others.",
    )
