"""Clouds on which a layer is as steep as it can be: by theory, and by ascent."""

import math
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractInContextMap, maps_in, parameter_dtype
from meanformer.attention.lipschitz import checked_cloud, local_lipschitz
from meanformer.attention.masked import Masked, in_order
from meanformer.attention.softmax import Softmax
from meanformer.errors import (
    Unsupported,
    as_integer,
    as_key,
    as_number,
    check,
    check_choice,
    is_concrete,
)
from meanformer.measures import TokenCloud
from meanformer.numerics.multiples import multiple_of_identity
from meanformer.typing import Key

SPACES = ("ball", "sphere")


class Maximum(eqx.Module):
    """The steepest cloud that an ascent has found.

    Attributes:
        cloud: the tokens.
        value: the local Lipschitz constant there.
        history: the constant after each step, from the start on.
    """

    cloud: TokenCloud
    value: Float[Array, ""]
    history: Float[Array, " steps"]


def adversarial_cloud(
    gamma: AbstractInContextMap, count: int, radius: float | Float[Array, ""]
) -> TokenCloud:
    r"""Cloud in a ball on which softmax attention has a large Lipschitz constant.

    With $\lambda_{\min}, \lambda_{\max}$ the extreme real eigenvalues of $A$: if
    $\lambda_{\max} > -8\lambda_{\min}$ one token is at $Ru$ and the others at $Ru/2$,
    with $u$ the top eigenvector; otherwise one is at $-Ru$ and the others at $Ru$, with
    $u$ the bottom one [CAP24]. `lipschitz_bounds` has the constant that it guarantees.

    Args:
        gamma: softmax attention whose score matrix has a real eigenvalue.
        count: the number of tokens, at least two.
        radius: the radius $R$ of the ball.
    """
    _check_size(count, radius)
    if not isinstance(gamma, Softmax):
        raise Unsupported(
            f"adversarial clouds are known for Softmax only, not for "
            f"{type(gamma).__name__}; use maximise_lipschitz."
        )
    lowest, highest = _extreme_pairs(gamma)
    attractive = highest[0] > -8 * lowest[0]
    direction = highest[1] if attractive else lowest[1]
    places = np.full(count, 0.5 if attractive else 1.0)
    places[0] = 1.0 if attractive else -1.0
    places = float(radius) * places
    points = jnp.asarray(np.outer(places, direction), gamma.query.dtype)
    return TokenCloud(points)


def lower_bound(
    gamma: Softmax, radius: float | Float[Array, ""], count: int
) -> Float[Array, ""] | None:
    r"""Lipschitz constant that the adversarial cloud reaches, by the theorem.

    $$\frac{|c|\sqrt{n-1}}{1 + (n-1)\,e^{-2\beta R^2\gamma}}, \qquad
      \gamma = \max(-\lambda_{\min}, \lambda_{\max}/8),$$
    for $V = cI$ and $A$ with real eigenvalues only; `None` otherwise, and under `jit`.
    """
    if not (is_concrete(gamma.value) and is_concrete(gamma.query)):
        return None
    factor = multiple_of_identity(gamma.value)
    eigenvalues = np.linalg.eigvals(float(gamma.beta) * gamma.exact_score)
    is_real = bool(_is_real(eigenvalues).all())
    if factor is None or gamma.query_bias is not None or not is_real:
        return None
    real = np.real(eigenvalues)
    strength = float(max(-real.min(), real.max() / 8))
    decay = jnp.exp(-2 * jnp.asarray(radius, gamma.value.dtype) ** 2 * strength)
    return abs(factor) * math.sqrt(count - 1) / (1 + (count - 1) * decay)


def maximise_lipschitz(
    gamma: AbstractInContextMap,
    count: int,
    radius: float,
    *,
    key: Key,
    steps: int = 50,
    space: str = "ball",
    start: TokenCloud | None = None,
) -> Maximum:
    r"""Look for the cloud with the largest local Lipschitz constant, by ascent.

    Projected gradient ascent on the largest singular value of the Jacobian, over $n$
    tokens of equal weight in the ball of radius $R$ or on its sphere; a step that does
    not climb is halved and tried again. A local maximum, hence a lower bound of the
    true one; start from `adversarial_cloud`, or run it with several keys.

    Args:
        gamma: the map; masked maps see the tokens in the order of their rows.
        count: the number $n$ of tokens.
        radius: the radius $R$.
        key: random key of the first cloud.
        steps: how many steps to try.
        space: `"ball"` or `"sphere"`.
        start: the first cloud, instead of a random one.

    Returns:
        The best cloud. Cost: one local Lipschitz constant and its gradient per step.
    """
    _check_size(count, radius)
    key = as_key(key)
    check(steps > 0, f"steps is {steps}; it must be positive.")
    check_choice("space", space, SPACES)
    radius, place = float(radius), _onto_ball if space == "ball" else _onto_sphere
    first = _first_cloud(gamma, count, radius, key) if start is None else start
    cloud = checked_cloud(gamma, first)
    cloud = cloud.moved(place(cloud.points, radius))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def climb(points: Float[Array, "n d"]) -> Float[Array, ""]:
        return local_lipschitz(gamma, cloud.moved(points))

    points, history = _ascend(climb, lambda x: place(x, radius), cloud.points, steps)
    return Maximum(cloud.moved(points), history[-1], history)


def _ascend(climb: Callable, place: Callable, points: Array, steps: int):
    value, slope = climb(points)
    history, size = [value], 0.1
    reach = jnp.linalg.norm(points, axis=1).max()
    for _ in range(steps):
        steepest = jnp.linalg.norm(slope, axis=1).max()
        if not float(steepest) > 0:
            break
        trial = place(points + size * reach / steepest * slope)
        new_value, new_slope = climb(trial)
        if bool(new_value > value):
            points, value, slope, size = trial, new_value, new_slope, 2 * size
        else:
            size /= 2
        history.append(value)
    return points, jnp.stack(history)


def _first_cloud(gamma, count, radius, key) -> TokenCloud:
    dimension = gamma.input_dimension
    check(dimension is not None, "the map takes any dimension; pass start=cloud.")
    normal = jr.normal(key, (count, dimension), parameter_dtype(gamma))
    cloud = TokenCloud(radius / math.sqrt(dimension) * normal)
    needs_order = any(isinstance(part, Masked) for part in maps_in(gamma))
    return in_order(cloud) if needs_order else cloud


def _onto_ball(points: Array, radius: float) -> Array:
    norms = jnp.linalg.norm(points, axis=1, keepdims=True)
    return jnp.where(
        norms > radius, radius / jnp.maximum(norms, radius) * points, points
    )


def _onto_sphere(points: Array, radius: float) -> Array:
    return radius * points / jnp.linalg.norm(points, axis=1, keepdims=True)


def _check_size(count: int, radius) -> None:
    as_integer("count", count, least=2)
    as_number("radius", radius, "positive", above=0)


def _is_real(eigenvalues: np.ndarray) -> np.ndarray:
    rounding = 1e-10 * np.abs(eigenvalues).max(initial=0)
    return np.abs(np.imag(eigenvalues)) <= rounding


def _extreme_pairs(gamma: Softmax) -> tuple[tuple[float, np.ndarray], ...]:
    """Return the smallest and the largest real eigenvalue, with unit eigenvectors."""
    eigenvalues, vectors = np.linalg.eig(float(gamma.beta) * gamma.exact_score)
    real = np.flatnonzero(_is_real(eigenvalues))
    if len(real) == 0:
        raise Unsupported(
            "the score matrix has no real eigenvalue, so no adversarial cloud is "
            "known; use maximise_lipschitz."
        )
    order = real[np.argsort(np.real(eigenvalues)[real])]
    pairs = [
        (float(np.real(eigenvalues[i])), np.real(vectors[:, i]))
        for i in (order[0], order[-1])
    ]
    return tuple((value, vector / np.linalg.norm(vector)) for value, vector in pairs)
