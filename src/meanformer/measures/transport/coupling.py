"""Transport plans stored by their few nonzero entries, and what they cost."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meanformer.measures.transport.atoms import Atoms
from meanformer.numerics.arrays import matmul, safe_norm, safe_root


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
