r"""Weak attention averages.

As $\beta \to 0$ softmax attention with $Q=K=V=I$ returns the mean of the tokens, and it
leaves the mean in the direction $\mathrm{Cov}(\mu)\,x$.
"""

import jax.numpy as jnp
import jax.random as jr

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import style


class Parameters(lab.Parameters):
    """Size of the cloud."""

    count: int = lab.setting(50, full=5000, help="tokens, $n$", at_least=1)
    dimension: int = lab.setting(3, help="dimension, $d$", at_least=1)
    seed: int = lab.setting(0, help="seed of the cloud and the query", at_least=0)


SLOPE = lab.observation(
    "slope",
    r"The derivative of $\Gamma[\mu](x)$ in $\beta$ at $0$ is $\mathrm{Cov}(\mu)\,x$.",
    source=lab.closed_form(r"$\mathrm{Cov}(\mu)\,x$"),
)


@lab.experiment("Weak attention averages", room="attention", seconds=2)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compare a difference quotient with the covariance."""
    key_cloud, key_query = jr.split(jr.key(parameters.seed))
    tokens = jr.normal(key_cloud, (parameters.count, parameters.dimension))
    cloud, query = mf.TokenCloud(tokens), jr.normal(key_query, (1, tokens.shape[1]))
    expected = (query @ cloud.covariance())[0]

    def slope(beta):
        attention = mf.identity_attention("softmax", tokens.shape[1], beta)
        return (attention(cloud, query)[0] - cloud.mean()) / beta

    betas = [10.0**-power for power in range(1, 6)]
    errors = [jnp.abs(slope(beta) - expected).max() for beta in progress.over(betas)]
    figure, axes = style.canvas()
    axes.loglog(betas, errors, "o-")
    axes.set(xlabel=r"$\beta$", ylabel="error of the difference quotient")
    return lab.Outcome(
        findings=[SLOPE.close_to(slope(1e-5), expected, tolerance=1e-3)],
        pictures=[lab.Picture(figure, r"The error vanishes linearly in $\beta$.")],
    )
