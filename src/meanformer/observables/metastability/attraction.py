"""Tokens that attract each other by inner products: which layers do so, and groups."""

from collections.abc import Iterator
from typing import NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from meanformer.attention import AbstractExponential, AbstractInContextMap
from meanformer.attention.exponential import isotropic_factors
from meanformer.errors import Unsupported, check, is_concrete
from meanformer.flows import Constant, Flow, Trajectory
from meanformer.flows.trajectories.atoms import Merges
from meanformer.geometry import Sphere
from meanformer.observables.order import check_trajectory


class Attraction(NamedTuple):
    r"""Attention with scores $\beta\langle x, y\rangle$ and values $cx$, in numbers."""

    is_softmax: bool  # whether attention is divided by its mass
    beta: float  # the inverse temperature $\beta$, whatever matrices it comes from
    speed: float  # the factor $c > 0$ of the values
    shift: float  # the number taken off every score, for unnormalised attention


def attraction_of(
    layer: AbstractInContextMap, topic: str, *, with_flat: bool = False
) -> Attraction:
    """Return the numbers of a layer under which tokens attract each other, or raise.

    Scores and values must be positive multiples of inner products and of tokens, or
    scores zero if that is allowed; the topic, a plural, is for the message.
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


def attraction_along(
    trajectory: Trajectory, flow: Flow | None, topic: str
) -> tuple[Flow, AbstractExponential, Attraction]:
    """Return the flow of a trajectory on the sphere, its layer and numbers, or raise.

    The flow is the given one, or the trajectory's own; its map must not change.
    """
    check_trajectory(trajectory)
    flow = trajectory.flow if flow is None else flow
    check(
        flow is not None,
        "this trajectory does not know its flow (one from a file, or under jit); "
        "pass flow.",
    )
    check(isinstance(flow, Flow), f"flow is a {type(flow).__name__}; give a Flow.")
    flow = cast(Flow, flow)
    if not isinstance(flow.space, Sphere):
        raise Unsupported(
            f"the flow is on {type(flow.space).__name__}(); {topic} are for Sphere()."
        )
    if not isinstance(flow.velocity, Constant) or flow.noise is not None:
        raise Unsupported(
            f"{topic} are for a flow whose map does not change, without noise."
        )
    layer = flow.velocity.gamma
    attraction = attraction_of(layer, topic)
    return flow, cast(AbstractExponential, layer), attraction


def atoms_at(
    trajectory: Trajectory, index: int
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Return masses and numbers of tokens of the atoms at a saved depth."""
    cloud = trajectory.cloud(index)
    if trajectory.atoms is None:
        return cloud.weights, (cloud.weights > 0).astype(cloud.weights.dtype)
    atoms = jax.tree.map(lambda leaf: leaf[index], trajectory.atoms)
    return atoms.weights(cloud), atoms.counts(cloud)


def masses_along(
    trajectory: Trajectory, merges: Merges
) -> Iterator[Float[np.ndarray, " n"]]:
    """Yield the masses of the atoms before the first join and after each."""
    masses = np.array(trajectory.weights, np.float64)
    yield masses
    for leader, token in zip(
        np.asarray(merges.leaders), np.asarray(merges.tokens), strict=True
    ):
        masses[leader] += masses[token]
        masses[token] = 0
        yield masses


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
