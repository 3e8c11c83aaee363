"""Exponentials of linear and quadratic functions on an interval, at any steepness."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meanformer.numerics.special.bessel import sphere_functions
from meanformer.numerics.special.quadrature import gauss_legendre

# A factor below exp(-40) is lost in rounding; on a window where the exponent falls by
# no more than that, this many Gauss nodes are exact to rounding.
_DROP = 40.0
_NODES = 32

Pair = tuple[Float[Array, "*#batch"], Float[Array, "*#batch"]]


@jax.jit
def uniform_transform(
    tilt: Float[Array, "*#batch"],
    low: Float[Array, "*#batch"],
    high: Float[Array, "*#batch"],
) -> Pair:
    r"""Log-Laplace transform and tilted mean of the uniform law on intervals.

    With centre $c$, half-length $a$ and $z = au$,
    $$\Lambda(u) = cu + \log\frac{\sinh z}{z}, \qquad
      \Lambda'(u) = c + a\Bigl(\coth z - \frac1z\Bigr).$$

    Near zero these are the functions of the sphere in three dimensions (Archimedes: a
    coordinate of a uniform point of it is uniform); farther out they are measured from
    the end of the interval that dominates, so that nothing cancels.
    """
    is_small = jnp.abs(high - low) * jnp.abs(tilt) <= 2
    near = _from_the_centre(jnp.where(is_small, tilt, 0), low, high)
    sign = jnp.where(tilt > 0, 1, -1).astype(tilt.dtype)
    far = _from_the_end(jnp.where(is_small, 2 * sign / (high - low), tilt), low, high)
    return jnp.where(is_small, near[0], far[0]), jnp.where(is_small, near[1], far[1])


def _from_the_centre(tilt: Array, low: Array, high: Array) -> tuple[Array, Array]:
    centre, half = (low + high) / 2, (high - low) / 2
    log_laplace, ratio, _ = sphere_functions(3, (half * tilt) ** 2)
    return centre * tilt + log_laplace, centre + half**2 * ratio * tilt


def _from_the_end(tilt: Array, low: Array, high: Array) -> tuple[Array, Array]:
    end = jnp.where(tilt > 0, high, low)
    length = high - low
    steepness = length * jnp.abs(tilt)
    other_end = jnp.exp(-steepness)
    log_laplace = end * tilt + jnp.log1p(-other_end) - jnp.log(steepness)
    return log_laplace, end - 1 / tilt + jnp.sign(tilt) * length * other_end / (
        1 - other_end
    )


@jax.jit
def quadratic_moments(
    precision: Float[Array, "*#batch"],
    tilt: Float[Array, "*#batch"],
    low: Float[Array, "*#batch"],
    high: Float[Array, "*#batch"],
    origin: Float[Array, "*#batch"],
) -> tuple[Array, Array, Array]:
    r"""Log-mass, mean and variance of the exponential of a quadratic on intervals.

    $$\log \frac{1}{b-a} \int_a^b e^{uy - P(y^2 - o^2)/2}\,\mathrm{d}y,$$
    for a precision $P$ and tilt $u$ of any sign and size, to rounding: the interval is
    cut at the vertex; on either side the exponent is monotone, and Gauss nodes fill the
    window where it stays close to its largest value. All terms are positive, so that
    nothing cancels in the tails.

    Args:
        precision: $P$.
        tilt: $u$.
        low: the ends $a$.
        high: the ends $b > a$.
        origin: where the quadratic part is taken as zero; a constant. With the place
            of its maximum, the log-mass is of moderate size at $u = 0$.

    Returns:
        The three, of the common shape; 64 exponentials for each entry.
    """
    ends = jnp.stack([low, high], axis=-1)
    given = (precision, tilt, low, high, origin)
    peaks, nodes, weights = _half_rules(*(array[..., None] for array in given), ends)
    top = lax.stop_gradient(jnp.max(peaks, axis=-1))
    masses = jnp.exp(peaks - top[..., None])[..., None] * weights
    mass = jnp.sum(masses, axis=(-2, -1))
    mean = jnp.sum(masses * nodes, axis=(-2, -1)) / mass
    squares = (nodes - mean[..., None, None]) ** 2
    variance = jnp.sum(masses * squares, axis=(-2, -1)) / mass
    return top + jnp.log(mass), mean, variance


def _half_rules(
    precision: Array, tilt: Array, low: Array, high: Array, origin: Array, ends: Array
) -> tuple[Array, Array, Array]:
    """Return largest exponent, nodes and weights, from the vertex to either end."""
    start, reach = lax.stop_gradient(quadratic_window(precision, tilt, low, high, ends))
    share_of_length = jnp.abs(reach) / lax.stop_gradient(_length(low, high))
    start, reach = _attach(start, reach, low, high)
    fractions, shares = gauss_legendre(_NODES)
    steps = jnp.multiply.outer(reach, jnp.asarray((fractions + 1) / 2, reach.dtype))
    peak = tilt * start - precision * (start - origin) * (start + origin) / 2
    slope = (tilt - precision * start)[..., None]
    change = slope * steps - precision[..., None] * steps**2 / 2
    spacing = jnp.multiply.outer(share_of_length, jnp.asarray(shares, reach.dtype))
    return peak, start[..., None] + steps, spacing * jnp.exp(change)


def quadratic_window(
    precision: Array, tilt: Array, low: Array, high: Array, ends: Array
) -> tuple[Array, Array]:
    """Return where the exponent is largest on either side, and how far to go on.

    Args:
        precision: curvature of the exponent.
        tilt: its slope at zero.
        low: lower ends of the intervals.
        high: upper ends.
        ends: the lower or upper ends: the other border of the side of the vertex.

    Returns:
        The start, at the vertex or the end, and the signed distance in which the
        exponent falls by the drop, or that to the other border if it is shorter.
    """
    is_linear = precision == 0
    vertex = tilt / jnp.where(is_linear, 1, precision)
    vertex = jnp.where(is_linear, (low + high) / 2, jnp.clip(vertex, low, high))
    to_end = ends - vertex
    rises = to_end * (tilt - precision * (vertex + ends) / 2) > 0
    start = jnp.where(rises, ends, vertex)
    direction = jnp.where(rises, -to_end, to_end)
    fall = jnp.maximum(-jnp.sign(direction) * (tilt - precision * start), 0)
    bend = jnp.sqrt(2 * _DROP * jnp.abs(precision))
    root_if_convex = jnp.sqrt(jnp.maximum(fall - bend, 0)) * jnp.sqrt(fall + bend)
    root = jnp.where(precision < 0, root_if_convex, jnp.hypot(fall, bend))
    # The exponent falls by the drop at this distance, if the half is that long.
    pace = jnp.maximum((fall + root) / (2 * _DROP), jnp.finfo(root.dtype).tiny)
    return start, jnp.clip(direction, -1 / pace, 1 / pace)


def _attach(start: Array, reach: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Let a window move with the ends of the interval, for differentiation only."""
    still_low, still_high = lax.stop_gradient((low, high))
    length = _length(still_low, still_high)
    place = (start - still_low) / length
    moving_low, moving_high = low - still_low, high - still_high
    start = start + (1 - place) * moving_low + place * moving_high
    return start, reach + reach * (moving_high - moving_low) / length


def _length(low: Array, high: Array) -> Array:
    return jnp.maximum(high - low, jnp.finfo(low.dtype).tiny)
