"""Random points of the exponential of a quadratic on an interval."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.special.interval import quadratic_window
from meanformer.numerics.special.quadrature import gauss_legendre

# The density varies by a factor below 2 on a cell, so that few nodes and few steps of
# Newton's method are exact to rounding.
_CELLS = 128
_NODES = 8
_NEWTON_STEPS = 4


@jax.jit
def draw_quadratic(
    choices: Float[Array, " n"],
    fractions: Float[Array, " n"],
    precision: Float[Array, ""],
    low: Float[Array, ""],
    high: Float[Array, ""],
    origin: Float[Array, ""],
) -> Float[Array, " n"]:
    r"""Points of the law with density proportional to $e^{-Py^2/2}$ on an interval.

    One uniform number chooses a cell by its mass, another the place in the cell, where
    Newton's method inverts the distribution function to rounding.

    Args:
        choices: uniform numbers in [0, 1).
        fractions: as many again, independent.
        precision: $P$, of any sign.
        low: lower end.
        high: upper end.
        origin: where the density is largest.

    Returns:
        One point for each pair of numbers; about 50 exponentials each.
    """
    nodes, shares = (jnp.asarray(t, low.dtype) for t in gauss_legendre(_NODES))

    def density(y):
        return jnp.exp(-precision * (y - origin) * (y + origin) / 2)

    def mass(start, width):
        points = start[:, None] + jnp.outer(width, (nodes + 1) / 2)
        return width * (density(points) @ shares)

    starts, widths = _cells(precision, low, high)
    totals = jnp.cumsum(jnp.abs(mass(starts, widths)))
    cell = jnp.searchsorted(totals, totals[-1] * choices, side="right")
    start, width = starts[cell], widths[cell]
    target = fractions * mass(start, width)
    step = fractions * width
    for _ in range(_NEWTON_STEPS):
        step = step - (mass(start, step) - target) / density(start + step)
    return jnp.clip(start + step, low, high)


def _cells(
    precision: Float[Array, ""], low: Float[Array, ""], high: Float[Array, ""]
) -> tuple[Float[Array, " c"], Float[Array, " c"]]:
    """Cut the windows that matter into cells: where they start, and signed widths."""
    fractions = jnp.arange(_CELLS, dtype=low.dtype) / _CELLS
    ends = jnp.stack([low, high])
    starts, reaches = quadratic_window(precision, jnp.zeros_like(low), low, high, ends)
    borders = starts[:, None] + jnp.outer(reaches, fractions)
    return borders.ravel(), jnp.repeat(reaches / _CELLS, _CELLS)
