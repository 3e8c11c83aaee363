"""A Gaussian next to many tokens: how well one stands for the other."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.special import ndtri
from scipy.stats import qmc

from meanformer import flows
from meanformer.errors import InvalidInput, as_integer
from meanformer.gaussian.velocity import check_gaussian
from meanformer.measures import Gaussian, TokenCloud, wasserstein


class Comparison(eqx.Module):
    """Tokens and the Gaussian of their first moments, moved by the same flow.

    Attributes:
        gaussians: the path of the Gaussian.
        tokens: that of the tokens.
        depths: the depths that both reached.
        mean_errors: how far the means are apart.
        covariance_errors: how far the covariances are, relative to the Gaussian's.
        distances: the Wasserstein distance of the Gaussians with these moments,
            relative to the root of the trace.
    """

    gaussians: flows.GaussianTrajectory
    tokens: flows.Trajectory
    depths: Float[Array, " t"]
    mean_errors: Float[Array, " t"]
    covariance_errors: Float[Array, " t"]
    distances: Float[Array, " t"]


def compare_with_particles(
    flow: flows.Flow,
    mu: Gaussian | TokenCloud,
    depth: float,
    count: int = 1024,
    *,
    save: int = 11,
    layers: int | None = None,
    rtol: float = 1e-6,
    seed: int = 0,
    progress: bool | flows.AbstractProgress = False,
) -> Comparison:
    """Flow a Gaussian and tokens with its first two moments side by side.

    From a Gaussian the tokens are quasi-random and have its mean and covariance
    exactly. From a cloud of your own the Gaussian is that of its moments: how long the
    prediction holds tells how far the tokens are from Gaussian.

    Args:
        flow: a flow that keeps Gaussians.
        mu: the Gaussian, or tokens.
        depth: the last depth.
        count: how many tokens.
        save: how many depths to compare.
        layers: compare residual networks of so many layers instead of the flow.
        rtol: relative tolerance of both solves.
        seed: seed of the scrambled quasi-random sequence.
        progress: show a progress bar of the tokens' flow; or an object to report to.
    """
    if isinstance(mu, TokenCloud):
        cloud, gaussian = mu, Gaussian(mu.mean(), mu.covariance())
    elif isinstance(mu, Gaussian):
        cloud, gaussian = matched_tokens(mu, count, seed=seed), mu
    else:
        given = type(mu).__name__
        raise InvalidInput(f"mu is a {given}; it must be a Gaussian or a TokenCloud.")
    if layers is None:
        path = flows.solve(flow, gaussian, depth, save=save, rtol=rtol)
        options = {"save": save, "rtol": rtol, "progress": progress}
        tokens = flows.solve(flow, cloud, depth, **options)
    else:
        path = flows.run_layers(flow, gaussian, layers, step=depth / layers)
        tokens = flows.run_layers(flow, cloud, layers, step=depth / layers)
    length = min(len(path), len(tokens))
    if path.depths[length - 1] != tokens.depths[length - 1]:
        length -= 1  # where one of them ended early, the other one is not known
    rows = [_differences(path.gaussian(i), tokens.cloud(i)) for i in range(length)]
    columns = map(jnp.stack, zip(*rows, strict=True))
    return Comparison(path, tokens, path.depths[:length], *columns)


def matched_tokens(mu: Gaussian, count: int, *, seed: int = 0) -> TokenCloud:
    """Return quasi-random tokens with the mean and the covariance of a Gaussian.

    Args:
        mu: the Gaussian.
        count: how many; a power of two is best, more than the dimension needed.
        seed: seed of the scrambling.
    """
    check_gaussian(mu)
    count = as_integer("count", count, least=mu.dimension + 2)
    root = np.asarray(mu.root(), np.float64)
    sequence = qmc.Sobol(root.shape[1], rng=np.random.default_rng(seed))
    places = sequence.random_base2((count - 1).bit_length())[:count]
    noise = ndtri(np.clip(places, 1e-12, 1 - 1e-12))
    noise -= noise.mean(axis=0)
    # Whitened, so that the moments are right and not only nearly so.
    lower = np.linalg.cholesky(noise.T @ noise / count)
    white = np.linalg.solve(lower, noise.T).T
    points = np.asarray(mu.mean(), np.float64) + white @ root.T
    return TokenCloud(jnp.asarray(points, mu.mean().dtype))


def _differences(mu: Gaussian, cloud: TokenCloud) -> tuple[Array, Array, Array]:
    spread, found = mu.covariance(), cloud.covariance()
    size = jnp.linalg.norm(spread)
    relative = jnp.linalg.norm(found - spread) / jnp.where(size > 0, size, 1)
    scale = jnp.sqrt(jnp.trace(spread))
    distance = wasserstein(mu, Gaussian(cloud.mean(), found))
    apart = jnp.linalg.norm(mu.mean() - cloud.mean())
    return apart, relative, distance / jnp.where(scale > 0, scale, 1)
