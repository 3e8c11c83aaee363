"""Exponentials of linear and quadratic functions on an interval, at any steepness."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.bessel import sphere_functions
from meanformer.numerics.quadrature import gauss_legendre

# A factor below exp(-40) is lost in rounding; on a window where the exponent falls by
# no more than that, this many Gauss nodes are exact to rounding.
_DROP = 40.0
_NODES = 32

Pair = tuple[Float[Array, "*#batch"], Float[Array, "*#batch"]]


def uniform_transform(
    tilt: Float[Array, "*#batch"], low: Float[Array, "*#batch"], high: Float[Array, "*#batch"]
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
    log_laplace, ratio = sphere_functions(3, (half * tilt) ** 2)
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


def quadratic_rule(
    curvature: Float[Array, "*#batch"], slope: Float[Array, "*#batch"]
) -> tuple[Float[Array, "*#batch q"], Float[Array, "*#batch q"]]:
    r"""Nodes and log-weights for the exponential of a quadratic on [-1, 1].

    $$\tfrac12\int_{-1}^{1} f(s)\, e^{gs - \kappa s^2/2}\,\mathrm{d}s
      \approx \sum_j e^{l_j} f(s_j),$$
    for any real curvature $\kappa$ and slope $g$, however large, to rounding for
    polynomials $f$ of moderate degree. The interval is cut at the vertex; on either
    side the exponent is monotone, and Gauss nodes fill the window in which it stays
    close to its largest value. All terms are positive: nothing cancels in the tails.

    Args:
        curvature: $\kappa$, of any sign.
        slope: $g$.

    Returns:
        The nodes, constants for differentiation, and the log-weights.
    """
    sides = [_half_rule(curvature, slope, side) for side in (-1.0, 1.0)]
    nodes, log_weights = zip(*sides, strict=True)
    return jnp.concatenate(nodes, axis=-1), jnp.concatenate(log_weights, axis=-1)


def _half_rule(curvature: Array, slope: Array, side: float) -> tuple[Array, Array]:
    """Return the rule between the vertex and one end of the interval."""
    start, reach = jax.lax.stop_gradient(_window(curvature, slope, side))
    fractions, shares = gauss_legendre(_NODES)
    steps = reach[..., None] * jnp.asarray((fractions + 1) / 2, slope.dtype)
    at_start = start * (slope - curvature * start / 2)
    change = (slope - curvature * start)[..., None] * steps - (
        curvature[..., None] * steps**2 / 2
    )
    spacing = jnp.abs(reach)[..., None] * jnp.asarray(shares / 2, slope.dtype)
    return start[..., None] + steps, at_start[..., None] + change + jnp.log(spacing)


def _window(curvature: Array, slope: Array, side: float) -> tuple[Array, Array]:
    """Return where the exponent is largest on one side, and how far to go from there."""
    safe_curvature = jnp.where(curvature == 0, 1, curvature)
    vertex = jnp.where(curvature == 0, 0, jnp.clip(slope / safe_curvature, -1, 1))
    to_end = side - vertex
    rises = to_end * (slope - curvature * (vertex + side) / 2) > 0
    start = jnp.where(rises, side, vertex)
    direction = jnp.where(rises, -side, side)
    fall = jnp.maximum(-direction * (slope - curvature * start), 0)
    bend = jnp.sqrt(2 * _DROP * jnp.abs(curvature))
    root_if_convex = jnp.sqrt(jnp.maximum(fall - bend, 0)) * jnp.sqrt(fall + bend)
    root = jnp.where(curvature < 0, root_if_convex, jnp.hypot(fall, bend))
    # Below this the exponent falls by less than the drop on all of the half.
    slowest = 2 * _DROP / jnp.maximum(jnp.abs(to_end), jnp.finfo(slope.dtype).tiny)
    distance = 2 * _DROP / jnp.maximum(fall + root, slowest)
    return start, direction * distance
