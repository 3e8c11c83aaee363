"""Many tokens: how fast attention on a sample approaches attention on a measure."""

import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap, Softmax
from meanformer.errors import Unsupported, as_float_array, as_key, check, check_kind
from meanformer.flows import AbstractIntegrator, Flow, solve
from meanformer.measures import AbstractMeasure, TokenCloud
from meanformer.typing import ArrayLike, Key

Sampler = Callable[[int, Key], Array]


class TokenConvergence(eqx.Module):
    r"""Errors of attention on samples, with the rate and constant they suggest.

    Attributes:
        counts: the numbers $n$ of tokens.
        errors: root mean square of the error at the probes, one row per count and one
            column per repeat.
        slope: fitted exponent of $n$; theory says $-1/2$.
        slope_interval: its 95% confidence interval.
        fitted_constant: the constant $C$ of $C n^{-1/2}$, fitted with this exponent.
        predicted_constant: the same from the central limit theorem; `None` if unknown.
    """

    counts: tuple[int, ...] = eqx.field(static=True)
    errors: Float[Array, "k r"]
    slope: float = eqx.field(static=True)
    slope_interval: tuple[float, float] = eqx.field(static=True)
    fitted_constant: float = eqx.field(static=True)
    predicted_constant: float | None = eqx.field(static=True)

    @property
    def table(self) -> Float[Array, " k"]:
        """Root mean square error for each count, over probes and repeats."""
        return jnp.sqrt(jnp.mean(self.errors**2, axis=1))

    def count_for(self, error: float) -> int:
        """Return how many tokens are needed for a root mean square error."""
        check(error > 0, f"error is {error}; it must be positive.")
        constant = self.predicted_constant or self.fitted_constant
        return math.ceil((constant / error) ** 2)


def token_convergence(
    source: AbstractMeasure | Sampler,
    layer: AbstractInContextMap | Flow,
    counts: Sequence[int],
    probes: ArrayLike,
    repeats: int,
    *,
    key: Key,
    reference: AbstractMeasure | None = None,
    depth: float = 1.0,
    solver: AbstractIntegrator | None = None,
) -> TokenConvergence:
    r"""Measure how attention on $n$ random tokens approaches its mean-field limit.

    At each count clouds of $n$ independent tokens are drawn, and the map, or the flow
    up to a depth, is evaluated at the probes and compared with the limit. At fixed
    points softmax obeys a central limit theorem, so the error is
    $C n^{-1/2}$ in any dimension, with $C^2$ the mean over the probes of the trace
    of the `asymptotic_covariance`; $n$ must be large against $e^q$,
    $q = \beta^2 x^\top A^\top S A x$, before this is seen.

    Args:
        source: a measure, or a function of a count and a key that returns points.
        layer: the map; or a flow, whose probes are carried along as passive points.
        counts: the numbers of tokens, at least two different ones.
        probes: points at which to compare, one per row.
        repeats: independent clouds per count.
        key: random key.
        reference: the limit measure; `source` itself by default. For a sampler, or a
            measure for which the map has no closed form, pass `quadrature(mu, order)`
            or a much larger sample.
        depth: how far to solve, for a flow.
        solver: how to solve, for a flow; see `solve`.

    Returns:
        Errors, fitted slope, and the constant that theory predicts (for maps): exact
        if the reference has a closed form, otherwise from the influence of each token.
    """
    probes = as_float_array("probes", probes)
    check(probes.ndim == 2, f"probes has shape {probes.shape}; it must be (m, d).")
    check(
        len(set(counts)) >= 2 and min(counts) > 0,
        f"counts is {counts}; it must hold at least two different positive numbers.",
    )
    check(repeats >= 2, f"repeats is {repeats}; at least two are needed.")
    check_kind("layer", layer, AbstractInContextMap | Flow, "a map or a Flow")
    limit = source if reference is None else reference
    check(
        isinstance(limit, AbstractMeasure),
        "source is a sampler, so the limit is not known; pass reference=measure.",
    )
    evaluate = _AtProbes(layer, probes, depth, solver)
    exact = evaluate(limit)
    keys = jr.split(as_key(key), (len(counts), repeats))
    pairs = zip(counts, keys, strict=True)
    errors = jnp.stack([_errors(evaluate, source, n, exact, row) for n, row in pairs])
    fit = fitted_slope(np.asarray(counts), np.asarray(errors))
    scaled = np.asarray(counts)[:, None] * np.asarray(errors) ** 2
    constants = float(np.sqrt(scaled.mean())), _predicted(layer, limit, probes)
    return TokenConvergence(tuple(counts), errors, *fit, *constants)


@eqx.filter_jit
def _errors(evaluate, source, count: int, exact, keys) -> Float[Array, " r"]:
    """Root mean square over the probes, for each repeat."""
    is_measure = isinstance(source, AbstractMeasure)

    def error(key):
        drawn = source.sample(count, key=key) if is_measure else source(count, key)
        difference = evaluate(TokenCloud(drawn)) - exact
        return jnp.sqrt(jnp.mean(jnp.sum(difference**2, axis=1)))

    return jax.lax.map(error, keys)


class _AtProbes(eqx.Module):
    """A map at the probes, or where a flow carries them; one compilation serves all."""

    layer: AbstractInContextMap | Flow
    probes: Float[Array, "p d"]
    depth: float
    solver: AbstractIntegrator | None

    def __call__(self, mu: AbstractMeasure) -> Float[Array, "p e"]:
        if isinstance(self.layer, AbstractInContextMap):
            return self.layer(mu, self.probes)
        options = {"probes": self.probes, "save": 2, "solver": self.solver}
        path = solve(self.layer, mu, self.depth, **options)
        assert path.probes is not None, "they are carried along"
        return path.probes[-1]


def _predicted(layer, limit, probes) -> float | None:
    if isinstance(layer, Flow):
        return None
    try:
        covariances = asymptotic_covariance(layer, limit, probes)
    except Unsupported:
        return None
    return float(jnp.sqrt(jnp.trace(covariances, axis1=1, axis2=2).mean()))


def asymptotic_covariance(
    gamma: AbstractInContextMap, mu: AbstractMeasure, x: ArrayLike
) -> Float[Array, "m e e"]:
    r"""Covariance in the central limit theorem of a map on random tokens.

    For $n$ independent tokens, $\sqrt n\,(\Gamma[\mu_n](x) - \Gamma[\mu](x))$ tends to
    a normal law; for softmax, with $u = \beta A x$, its covariance is
    $$V\,\mathbb{E}\bigl[e^{2\langle u,y\rangle - 2\Lambda(u)}(y-\bar y)(y-\bar y)^\top
      \bigr]V^\top = e^{\Lambda(2u) - 2\Lambda(u)}\, V\bigl[\nabla^2\Lambda(2u)
      + \delta\delta^\top\bigr]V^\top, \quad
      \delta = \nabla\Lambda(2u) - \nabla\Lambda(u),$$
    exact for every measure that knows its log-Laplace transform: for
    $\mathcal{N}(m, S)$ it is $e^{q}V(S + Su\,u^\top S)V^\top$ with $q = u^\top S u$.
    For other maps it is $\int I I^\top\mathrm{d}\mu$ with the influence $I$ of a token,
    the derivative of the output with respect to its mass; this needs a `TokenCloud`.

    Args:
        gamma: the map.
        mu: the law of the tokens; for maps other than softmax a cloud.
        x: the points at which to evaluate, one per row.

    Returns:
        One covariance matrix for each point. Cost on a cloud, for other maps: one
        derivative per coordinate of each output, $O(m e n)$ memory.
    """
    x = as_float_array("x", x)
    if isinstance(gamma, Softmax):
        return _of_softmax(gamma, mu, x)
    if isinstance(mu, TokenCloud):
        return _from_influences(gamma, mu, x)
    raise Unsupported(
        f"{type(gamma).__name__} has a known covariance on a TokenCloud only; use "
        "quadrature(mu, order) or a sample."
    )


def _of_softmax(gamma: Softmax, mu: AbstractMeasure, x: Float[Array, "m d"]):
    tilts = gamma.tilts(x)
    growth = mu.log_laplace(2 * tilts) - 2 * mu.log_laplace(tilts)
    shift = mu.tilted_mean(2 * tilts) - mu.tilted_mean(tilts)

    def tilted_covariance(tilt: Float[Array, " d"]) -> Float[Array, "d d"]:
        return jax.jacfwd(lambda u: mu.tilted_mean(u[None, :])[0])(tilt)

    spread = jax.vmap(tilted_covariance)(2 * tilts)
    spread = spread + shift[:, :, None] * shift[:, None, :]
    covariance = jnp.einsum("fd,mde,ge->mfg", gamma.value, spread, gamma.value)
    return jnp.exp(growth)[:, None, None] * covariance


def _from_influences(gamma, mu: TokenCloud, x: Float[Array, "m d"]):
    def output(weights: Float[Array, " n"]) -> Float[Array, "m e"]:
        own = {"positions": mu.positions, "sums": mu.sums}
        return gamma(TokenCloud(mu.points, weights, **own), x)

    slopes = jax.jacrev(output)(mu.weights)
    influences = slopes - (slopes @ mu.weights)[:, :, None]
    return jnp.einsum("mfn,mgn,n->mfg", influences, influences, mu.weights)


def fitted_slope(
    counts: np.ndarray, errors: np.ndarray
) -> tuple[float, tuple[float, float]]:
    """Return the exponent of the count and its interval, by weighted least squares."""
    squares = errors**2
    means = squares.mean(axis=1)
    check(bool((means > 0).all()), "the map has no error at the probes to fit.")
    # Sampling errors: the logarithm of a root has half the relative one of the square.
    spread = squares.std(axis=1, ddof=1) / np.sqrt(errors.shape[1]) / means / 2
    (slope, _), covariance = np.polyfit(
        np.log(counts), np.log(means) / 2, 1, w=1 / spread, cov="unscaled"
    )
    margin = 1.96 * float(np.sqrt(covariance[0, 0]))
    return float(slope), (float(slope) - margin, float(slope) + margin)
