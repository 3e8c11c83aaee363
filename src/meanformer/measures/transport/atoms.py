"""Atoms of token clouds, transport plans between them, and what plans cost."""

from typing import SupportsFloat

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meanformer.errors import Unsupported, as_number, check, check_kind
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.cloud import AbstractWeightedCloud
from meanformer.numerics.arrays import matmul, safe_norm, safe_root


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


class Coupling(eqx.Module):
    r"""A transport plan between clouds of $n$ and $m$ atoms.

    An optimal plan moves mass along at most $n + m - 1$ pairs, so it is kept as a list:
    `masses[s]` goes from atom `rows[s]` to atom `columns[s]`. Entries of mass zero are
    padding.
    """

    rows: Int[Array, " s"]
    columns: Int[Array, " s"]
    masses: Float[Array, " s"]
    shape: tuple[int, int] = eqx.field(static=True)

    def matrix(self) -> Float[Array, "n m"]:
        """Return the plan as one dense array; $O(nm)$ memory."""
        empty = jnp.zeros(self.shape, self.masses.dtype)
        return empty.at[self.rows, self.columns].add(self.masses)

    def distances(self, source: Atoms, target: Atoms) -> Float[Array, " s"]:
        """Return how far each entry moves its mass, zero for padding."""
        moves = source.points[self.rows] - target.points[self.columns]
        return safe_norm(jnp.where(self.masses[:, None] > 0, moves, 0))


def largest_or_one(distances: Float[Array, " s"]) -> Float[Array, ""]:
    """Return the unit in which powers of the distances cannot overflow."""
    largest = jax.lax.stop_gradient(distances.max())
    return jnp.where(largest > 0, largest, 1)


def power_mean(
    distances: Float[Array, " s"], masses: Float[Array, " s"], order: float
) -> Float[Array, ""]:
    r"""Return $(\sum_s \pi_s d_s^p)^{1/p}$, with derivative zero where it vanishes."""
    unit = largest_or_one(distances)
    powers = (distances / unit) ** order
    return unit * safe_root(matmul(masses, powers), order)


def check_comparable(mu: AbstractMeasure, nu: AbstractMeasure) -> None:
    """Raise unless two measures live in one space and have one floating-point type."""
    for name, measure in (("mu", mu), ("nu", nu)):
        such = "TokenCloud(points) or Gaussian(mean, covariance)"
        check_kind(name, measure, AbstractMeasure, f"a measure, such as {such}")
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
    return as_number("order", order, allowed, least=1, below=float("inf"))


def check_clouds(mu: AbstractMeasure, nu: AbstractMeasure) -> None:
    """Raise unless both measures are token clouds."""
    advice = (
        "this distance is for token clouds: pass quadrature(measure, order) to make "
        "it one"
    )
    check_both(AbstractWeightedCloud, mu, nu, advice)


def check_both(
    kind: type, mu: AbstractMeasure, nu: AbstractMeasure, advice: str
) -> None:
    """Raise unless both measures are of a kind, telling what to do otherwise."""
    for name, measure in (("mu", mu), ("nu", nu)):
        if not isinstance(measure, kind):
            raise Unsupported(f"{name} is a {type(measure).__name__}; {advice}.")
