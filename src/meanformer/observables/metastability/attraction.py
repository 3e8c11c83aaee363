"""Tokens that attract each other by their inner products alone: which layers do so."""

from typing import NamedTuple, cast

import numpy as np
from jaxtyping import ArrayLike

from meanformer.attention import AbstractExponential, AbstractInContextMap
from meanformer.attention.isotropic import isotropic_factors
from meanformer.errors import Unsupported, check, is_concrete
from meanformer.flows import Constant, Flow
from meanformer.geometry import Sphere


class Attraction(NamedTuple):
    r"""Attention with scores $\beta\langle x, y\rangle$ and values $cx$, in numbers.

    Attributes:
        is_softmax: whether attention is divided by its mass.
        beta: the inverse temperature $\beta$, whatever matrices it comes from.
        speed: the factor $c > 0$ of the values.
        shift: the number taken off every score, for unnormalised attention.
    """

    is_softmax: bool
    beta: float
    speed: float
    shift: float


def attraction_of(
    layer: AbstractInContextMap, topic: str, *, with_flat: bool = False
) -> Attraction:
    """Return the numbers of a layer under which tokens attract each other, or raise.

    Args:
        layer: `Softmax` or `Unnormalised` whose scores are positive multiples of inner
            products and whose values are positive multiples of the tokens.
        topic: what needs it, in the plural, for the message.
        with_flat: allow scores that are zero.
    """
    beta, speed = isotropic_factors(
        layer, topic, is_attracting=True, with_flat=with_flat
    )
    check(
        is_concrete(beta) and is_concrete(speed),
        f"{topic} need known matrices; call this outside of jit.",
    )
    kernel = cast(AbstractExponential, layer)
    return Attraction(
        kernel.is_normalised, float(beta), float(speed), kernel.shift_number
    )


def attraction_on_sphere(flow: Flow, topic: str) -> Attraction:
    """Return the numbers of a flow on the sphere that does not change, or raise."""
    check(isinstance(flow, Flow), f"flow is a {type(flow).__name__}; give a Flow.")
    if not isinstance(flow.space, Sphere):
        raise Unsupported(
            f"the flow is on {type(flow.space).__name__}(); {topic} are for Sphere()."
        )
    if not isinstance(flow.velocity, Constant) or flow.noise is not None:
        raise Unsupported(
            f"{topic} are for a flow whose map does not change, without noise."
        )
    return attraction_of(flow.velocity.gamma, topic)


def first_share(is_softmax: bool, first: float, second: float) -> float:
    r"""Return which part of their distance the first of two groups goes.

    As $\beta \to \infty$: $m_2/(m_1+m_2)$ for unnormalised attention, which keeps the
    barycentre, and $m_2^2/(m_1^2+m_2^2)$ for softmax.
    """
    power = 2 if is_softmax else 1
    return second**power / (first**power + second**power)


def pull(is_softmax: bool, on: ArrayLike, by: ArrayLike) -> np.ndarray:
    r"""Return how fast one group moves towards another, by their masses.

    As $\beta \to \infty$, beside a factor of the angle alone: $m_2$ for unnormalised
    attention, $m_2/m_1$ for softmax.
    """
    return np.asarray(np.divide(by, on if is_softmax else 1))
