"""The atoms of a token cloud, as all transport between clouds sees them."""

from typing import SupportsFloat

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput, Unsupported, as_number, check
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.cloud import AbstractWeightedCloud


class Atoms(eqx.Module):
    """Points with masses of total one, and labels that transport may not change."""

    points: Float[Array, "n d"]
    masses: Float[Array, " n"]
    labels: Float[Array, " n"]


def atoms_of(
    cloud: AbstractWeightedCloud, labels: Float[Array, " n"] | None = None
) -> Atoms:
    """Read a cloud; an atom of weight zero is absent in value and in gradient."""
    masses = jnp.where(cloud.weights > 0, cloud.weights, 0)
    labels = jnp.zeros_like(masses) if labels is None else labels
    return Atoms(cloud.points, masses / masses.sum(), labels)


def check_comparable(mu: AbstractMeasure, nu: AbstractMeasure) -> None:
    """Raise unless two measures live in one space and have one floating-point type."""
    for name, measure in (("mu", mu), ("nu", nu)):
        if not isinstance(measure, AbstractMeasure):
            raise InvalidInput(
                f"{name} is a {type(measure).__name__}; it must be a measure, such as "
                "TokenCloud(points) or Gaussian(mean, covariance)."
            )
    check(
        mu.dimension == nu.dimension,
        f"mu lives in dimension {mu.dimension}, nu in dimension {nu.dimension}; "
        "a transport distance needs one common space.",
    )
    first, second = mu.mean().dtype, nu.mean().dtype
    check(
        first == second,
        f"mu is {first}, nu is {second}; convert one so that both have one type.",
    )


def checked_order(order: SupportsFloat) -> float:
    """Return the order, a finite number from one on, or raise."""
    allowed = "a finite number, at least 1"
    number = as_number("order", order, allowed)
    check(1 <= number < float("inf"), f"order is {order!r}; it must be {allowed}.")
    return number


def check_clouds(mu: AbstractMeasure, nu: AbstractMeasure) -> None:
    """Raise unless both measures are token clouds."""
    for name, measure in (("mu", mu), ("nu", nu)):
        if not isinstance(measure, AbstractWeightedCloud):
            raise Unsupported(
                f"{name} is a {type(measure).__name__}; this distance is for token "
                "clouds: pass quadrature(measure, order) to make it one."
            )
