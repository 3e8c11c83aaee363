r"""Two contexts told apart by one block, and moments read off attention.

Along a unit vector $\omega$ a block sees the mean of the projected context under
$e^{ts}$, $L_1(t) = \langle\omega, \nabla\Lambda_\mu(t\omega)\rangle$. As
$L_{k+1} = L_k' + L_kL_1$ for $L_k(t)$ the mean of $s^k$ under $e^{ts}$, this one
function knows all moments of the projection, and all projections know the measure.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import as_finite_array, as_integer, as_key, as_number, check
from meanformer.expressivity.algebra import AlgebraElement, block
from meanformer.measures import AbstractMeasure, UniformSphere
from meanformer.typing import ArrayLike, Key

# Errors grow about thirty times from one moment to the next.
MOST_MOMENTS = 10
# Differences of so many roundings of the tokens are none.
ROUNDINGS = 1e3
# Directions and strengths that are tried first, and how many of them are improved.
DIRECTIONS, STRENGTHS, IMPROVED = 256, 65, 8


def seen_along(
    mu: AbstractMeasure, directions: ArrayLike, strengths: ArrayLike
) -> Float[Array, "w t"]:
    r"""Return $\langle\omega, \nabla\Lambda_\mu(t\omega)\rangle$.

    For large strengths it tends to the largest $\langle\omega, y\rangle$ of the
    support: then only the convex hull is seen.

    Args:
        mu: the context.
        directions: the vectors $\omega$, one per row.
        strengths: the numbers $t$.
    """
    rows = as_finite_array("directions", directions, (None, mu.dimension))
    sizes = as_finite_array("strengths", strengths, (None,))
    tilts = sizes[None, :, None] * rows[:, None, :]
    means = mu.tilted_mean(tilts.reshape(-1, mu.dimension)).reshape(tilts.shape)
    return jnp.einsum("wtd,wd->wt", means, rows)


def moments_from_attention(
    seen: Callable[[np.ndarray], ArrayLike], order: int = 5, *, nodes: int = 24
) -> Float[np.ndarray, " k"]:
    r"""Return the moments of a measure on a line from its tilted means alone.

    $$L_k(0) = \int s^k\,\mathrm d\mu(s), \qquad L_{k+1} = L_k' + L_kL_1.$$

    Args:
        seen: takes numbers $t$ between -1 and 1, returns $L_1(t)$: what attention
            with score $ts$ answers.
        order: how many moments; each costs one to two digits, ten are the most.
        nodes: at how many Chebyshev points to ask.
    """
    order, nodes = (
        as_integer("order", order, least=1),
        as_integer("nodes", nodes, least=2),
    )
    check(
        order <= MOST_MOMENTS,
        f"order is {order}; more than {MOST_MOMENTS} moments have no digits left.",
    )

    def checked(places: np.ndarray) -> np.ndarray:
        return np.asarray(as_finite_array("what is seen", seen(places), places.shape))

    first = np.polynomial.Chebyshev.interpolate(checked, nodes - 1)
    means = [first]
    for _ in range(order - 1):
        # What lies beyond the degree that was asked for is rounding, which grows.
        means.append((means[-1].deriv() + means[-1] * first).cutdeg(nodes - 1))
    return np.array([mean(0.0) for mean in means])


class Separation(NamedTuple):
    """The block that tells two pairs of context and query apart the best.

    Attributes:
        block: the block, an in-context map.
        values: its values at the two pairs.
        direction: the unit vector it looks along.
        strength: the factor of the exponent.
        is_separated: whether the values differ by more than rounding.
    """

    block: AlgebraElement
    values: tuple[float, float]
    direction: Float[np.ndarray, " d"]
    strength: float
    is_separated: bool

    @property
    def difference(self) -> float:
        """The size of the difference of the values."""
        return abs(self.values[0] - self.values[1])

    def __str__(self) -> str:
        if not self.is_separated:
            return f"not separated: no block differs by more than {self.difference:.3g}"
        where = ", ".join(f"{x:.3g}" for x in self.direction)
        return (
            f"separated by {self.difference:.6g}: {self.values[0]:.6g} against "
            f"{self.values[1]:.6g} along ({where}), strength {self.strength:.3g}"
        )


def separate(
    first: AbstractMeasure,
    second: AbstractMeasure,
    queries: tuple[ArrayLike, ArrayLike] | None = None,
    *,
    key: Key,
    most: float | None = None,
) -> Separation:
    r"""Return the block that tells two contexts apart the best.

    It looks along a direction, $\gamma[\mu] = \langle\omega,
    \nabla\Lambda_\mu(t\omega)\rangle$, or at the query alone, whichever differs more.
    Different pairs are told apart by some block [FHP25].

    Args:
        first: one context.
        second: another one.
        queries: the query of each; they are the same by default.
        key: random key of the directions that are tried first.
        most: the largest strength $|t|$; by default the exponent is at most 8.
    """
    size = first.dimension
    check(
        size == second.dimension,
        f"the contexts have dimensions {size} and {second.dimension}; they must agree.",
    )
    scale = math.sqrt(max(float(_square_size(one)) for one in (first, second)))
    most = 8 / max(scale, 1e-300) if most is None else most
    most = as_number("most", most, "a positive number", above=0, below=math.inf)
    along, strength = _best_tilt(first, second, as_key(key), most)
    shift = strength * along
    found = block(size, shift=shift, value=along)
    if queries is not None:
        places = [as_finite_array("queries", x, (size,)) for x in queries]
        gap = np.asarray(places[0] - places[1])
        length = float(np.linalg.norm(gap))
        if length > abs(float(np.subtract(*_values(found, first, second)))):
            along = gap / length
            ends = float(along @ places[0]), float(along @ places[1])
            return Separation(block(size, direct=along), ends, along, 0.0, True)
    values = _values(found, first, second)
    rounding = ROUNDINGS * np.finfo(np.asarray(shift).dtype).eps * scale
    is_separated = abs(values[0] - values[1]) > rounding
    return Separation(found, values, along, strength, is_separated)


def _values(found: AlgebraElement, first, second) -> tuple[float, float]:
    nowhere = jnp.zeros((1, first.dimension))
    return float(found(first, nowhere)[0, 0]), float(found(second, nowhere)[0, 0])


def _square_size(mu: AbstractMeasure) -> Array:
    mean = mu.mean()
    return mean @ mean + jnp.trace(mu.covariance())


def _best_tilt(first, second, key: Key, most: float) -> tuple[np.ndarray, float]:
    """Return direction and strength of the largest difference."""
    from scipy.optimize import minimize

    size = first.dimension
    starts = np.ones((1, 1))
    if size > 1:
        starts = UniformSphere(size).sample(DIRECTIONS, key=jr.split(key)[0])
    strengths = np.linspace(-most, most, STRENGTHS)
    seen = [seen_along(mu, starts, strengths) for mu in (first, second)]
    gaps = np.abs(seen[0] - seen[1])

    def both(flat):
        found = _loss(jnp.asarray(flat), first, second)
        return [np.asarray(a, np.float64) for a in found]

    bounds = [(None, None)] * size + [(-most, most)]
    ends = []
    for row in gaps.max(axis=1).argsort()[::-1][:IMPROVED]:
        start = np.append(starts[row], strengths[gaps[row].argmax()])
        ends.append(minimize(both, start, jac=True, method="L-BFGS-B", bounds=bounds))
    best = min(ends, key=lambda end: end.fun).x
    return best[:-1] / np.linalg.norm(best[:-1]), float(best[-1])


@eqx.filter_jit
@eqx.filter_value_and_grad
def _loss(flat: Float[Array, " s"], first, second) -> Float[Array, ""]:
    """Return minus the squared difference, for a direction and a strength."""
    along = flat[:-1] / jnp.linalg.norm(flat[:-1])
    given = along[None], flat[-1:]
    return -((seen_along(first, *given) - seen_along(second, *given))[0, 0] ** 2)
