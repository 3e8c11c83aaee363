"""Flowing a measure that has no tokens, as the cloud of the nodes of a quadrature."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import QuadratureWarning, is_concrete, warn
from meanformer.flows.dynamics.recorder import AbstractRecorder
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.measures import AbstractMeasure, Gaussian, wasserstein
from meanformer.measures.quadrature import quadratures_within

NODES = 500


def by_quadrature(
    mu: AbstractMeasure,
    solve: Callable[..., Trajectory],
    store: AbstractRecorder | None,
) -> Trajectory:
    """Flow the finest quadrature of few nodes, and tell how far a coarser one is.

    Args:
        mu: the measure.
        solve: flows a cloud, the keyword argument `mu`.
        store: where to write the trajectory of the finer one.
    """
    fine, coarse = quadratures_within(mu, NODES)
    path, rough = solve(mu=fine, store=store), solve(mu=coarse)
    error = _moment_distances(path, rough)
    largest = error.max()
    if is_concrete(largest):
        warn(
            f"a {type(mu).__name__} flows as {fine.count} tokens, the nodes of its "
            f"quadrature; the flow of {coarse.count} nodes is up to "
            f"{float(largest):.2g} away in mean and covariance: pass "
            "quadrature(mu, order) for other nodes.",
            QuadratureWarning,
        )
    return dataclasses.replace(path, quadrature_error=error)


def _moment_distances(path: Trajectory, other: Trajectory) -> Float[Array, " t"]:
    """Return the distance between Gaussians of the same moments at each depth."""
    # One may have ended before the other: then its end is compared.
    same = jnp.minimum(jnp.arange(len(path)), len(other) - 1)
    series = ("mean", "covariance")
    here = [path.statistics[name] for name in series]
    there = [other.statistics[name][same] for name in series]

    def distance(mean, covariance, other_mean, other_covariance):
        return wasserstein(
            Gaussian(mean, covariance), Gaussian(other_mean, other_covariance)
        )

    return jax.vmap(distance)(*here, *there)
