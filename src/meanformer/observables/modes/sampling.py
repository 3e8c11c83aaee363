"""Numbers of modes of random tokens, by counting, with error bars."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.errors import as_integer, as_key, as_number, check
from meanformer.geometry import AbstractSpace
from meanformer.observables.modes.counting import is_circle
from meanformer.observables.modes.crossings import Crossings, crossings, sites_of
from meanformer.observables.modes.kernels import (
    AbstractBump,
    CircleBump,
    LineBump,
    checked_beta,
)
from meanformer.typing import Key

_MARGIN = 12.0  # bandwidths beyond which a token does not matter
_STRETCH = 2000.0  # bandwidths of a Poisson process that are counted at once


class ModeSample(eqx.Module):
    """Numbers of modes of independent clouds.

    Attributes:
        counts: the number of modes of each.
        mean: their mean.
        standard_error: of the mean.
        is_certified: whether every count is proved.
    """

    counts: Int[Array, " b"]
    mean: float = eqx.field(static=True)
    standard_error: float = eqx.field(static=True)
    is_certified: bool = eqx.field(static=True)


def sample_modes(
    count: int,
    beta: float | Float[Array, ""],
    samples: int,
    *,
    space: AbstractSpace | None = None,
    key: Key,
) -> ModeSample:
    r"""Count the modes of clouds of random tokens, exactly, and average.

    The tokens are independent: standard normal on the line, uniform on the circle.

    Args:
        count: the number of tokens of a cloud.
        beta: inverse temperature, positive; the square of one over the bandwidth.
        samples: how many clouds, at least two.
        space: `Euclidean()` by default, or `Sphere()` for the circle.
        key: random key.

    Returns:
        The counts, their mean and its standard error. Cost: one count per cloud.
    """
    count = as_integer("count", count, least=1)
    samples = as_integer("samples", samples, least=2)
    beta, on_circle = checked_beta(beta), is_circle(space)
    draws, bump = (jr.uniform, CircleBump) if on_circle else (jr.normal, LineBump)
    places = np.asarray(draws(as_key(key), (samples, count)), np.float64)
    places = 2 * np.pi * places if on_circle else places
    found = [_crossings(row, bump(beta)) for row in places]
    counts = np.array([one.is_mode.sum() for one in found])
    return _sample(counts, counts, found)


def sample_poisson_modes(rate: float, length: float, *, key: Key) -> ModeSample:
    r"""Count the modes of the density of a Poisson process, per bandwidth.

    This estimates $F(\lambda)$ of `poisson_mode_density`: tokens fall on the line at
    the rate $\lambda$ per bandwidth, and each carries a Gaussian of bandwidth one.

    Args:
        rate: the mean number $\lambda > 0$ of tokens per bandwidth.
        length: how many bandwidths to look at, rounded up to a multiple of 2000, and at
            least 4000.
        key: random key.

    Returns:
        The counts of stretches of 2000 bandwidths, and the mean number of modes per
        bandwidth with its standard error. Cost: $O((1 + \lambda)\,\text{length})$.
    """
    rate = as_number("rate", rate, "a positive number")
    check(rate > 0 and np.isfinite(rate), f"rate is {rate}; it must be positive.")
    length = as_number("length", length, "a positive number")
    check(
        length > 0 and np.isfinite(length),
        f"length is {length}; it must be positive and finite.",
    )
    stretches = max(2, int(np.ceil(length / _STRETCH)))
    expected = rate * (_STRETCH + 2 * _MARGIN)
    # More gaps than are ever needed, so that all draws have one shape.
    enough = int(expected + 10 * np.sqrt(expected) + 30)
    found = [
        _crossings(_poisson(rate, enough, one), LineBump(1.0))
        for one in jr.split(as_key(key), stretches)
    ]
    counts = np.array(
        [(one.is_mode & (one.low >= 0) & (one.low < _STRETCH)).sum() for one in found]
    )
    return _sample(counts, counts / _STRETCH, found)


def _poisson(rate: float, enough: int, key: Key) -> np.ndarray:
    gaps = np.asarray(jr.exponential(key, (enough,)), np.float64) / rate
    places = np.cumsum(gaps) - _MARGIN
    inside = places < _STRETCH + _MARGIN
    return places[inside] if inside.any() else places[:1]


def _crossings(places: np.ndarray, bump: AbstractBump) -> Crossings:
    return crossings(sites_of(places, np.full(len(places), 1 / len(places)), bump))


def _sample(
    counts: np.ndarray, values: np.ndarray, found: list[Crossings]
) -> ModeSample:
    return ModeSample(
        jnp.asarray(counts, int),
        float(values.mean()),
        float(values.std(ddof=1) / np.sqrt(len(values))),
        all(len(one.undecided) == 0 for one in found),
    )
