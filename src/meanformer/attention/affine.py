"""Maps that are affine on a Gaussian, so that its image is one again."""

from collections.abc import Callable
from functools import partial
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params
from jax.interpreters import partial_eval
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractInContextMap, check_function, maps_in
from meanformer.errors import Unsupported, as_finite_array
from meanformer.measures import AbstractMeasure, Gaussian, TokenCloud
from meanformer.numerics.arrays import matmul, widened

MapOfPoints = AbstractInContextMap | Callable[[Array], Array]

_ADVICE = (
    "mf.gaussian.closure_residual(gamma, mu) tells how far from affine a map without "
    "positions is; a TokenCloud, such as quadrature(mu, order), moves under every map."
)

# Functions whose derivative is zero although they are not constant.
_STEPS = frozenset(
    ("sign", "floor", "ceil", "round", "stop_gradient", "argmax", "argmin", "rem")
    + ("eq", "ne", "lt", "le", "gt", "ge", "is_finite", "nextafter")
)


def slope_and_drift(
    gamma: MapOfPoints, mu: Gaussian
) -> tuple[Float[Array, "e d"], Float[Array, " e"]]:
    r"""Return $L$ and $u$ with $\Gamma[\mu](x) = u + L(x - m)$, exactly, or raise.

    Args:
        gamma: a map.
        mu: the Gaussian that is its context, with mean $m$.
    """
    check_affine(gamma, mu)
    return linearised(lambda points: image(gamma, mu, points), mu.mean())


def linearised(
    function: Callable[[Array], Array], mean: Float[Array, " d"]
) -> tuple[Float[Array, "e d"], Float[Array, " e"]]:
    """Return the slope of a function of points, and its value at the mean.

    By automatic differentiation, so that no difference of close numbers is formed.
    """
    drift, along = jax.linearize(lambda x: function(x[None, :])[0], mean)
    return jax.vmap(along, out_axes=1)(jnp.eye(len(mean), dtype=mean.dtype)), drift


def image(
    gamma: MapOfPoints, mu: Gaussian, points: Float[Array, "m d"]
) -> Float[Array, "m e"]:
    """Return the image of points under a map in a context, or a plain function."""
    in_context = isinstance(gamma, AbstractInContextMap)
    return gamma(mu, points) if in_context else gamma(points)


def check_affine(gamma: MapOfPoints, mu: Gaussian) -> None:
    """Raise, with the reason, unless a map is affine on a Gaussian.

    The derivative in the query must not depend on the query, and the value must not
    jump. Both are read off the programs which compute them, so that it holds for all
    queries, or is refused.

    Args:
        gamma: a map; its parameters may be shapes without numbers.
        mu: the Gaussian that is its context.
    """
    for part in maps_in(gamma):
        if part.bends_gaussians:
            raise Unsupported(
                f"{type(part).__name__} is not affine on a Gaussian: "
                f"{part.bends_gaussians}. {_ADVICE}"
            )
    arrays, rest = eqx.partition(gamma, is_array)

    def slope(arrays, mu, x, direction):
        whole = eqx.combine(arrays, rest)
        return jax.jvp(partial(image, whole, mu), (x,), (direction,))[1]

    def value(arrays, mu, x):
        return image(eqx.combine(arrays, rest), mu, x)

    point = mu.mean()[None, :]
    program = jax.make_jaxpr(slope)(arrays, mu, point, point).jaxpr
    name = type(gamma).__name__
    if _used(program)[1][-2]:
        raise Unsupported(
            f"{name} is not affine on a Gaussian: its derivative changes with the "
            f"query. {_ADVICE}"
        )
    program, is_used = _used(jax.make_jaxpr(value)(arrays, mu, point).jaxpr)
    if is_used[-1] and _jumps(program, {program.invars[-1]}):
        raise Unsupported(
            f"{name} is not affine on a Gaussian: its value jumps. {_ADVICE}"
        )


def _used(program: Any) -> tuple[Any, list[bool]]:
    """Return a program without what its results do not need, and what it looks at."""
    return partial_eval.dce_jaxpr(program, [True] * len(program.outvars))


def _jumps(program: Any, tainted: set) -> bool:
    """Whether a program has a step, of derivative zero, on the way of an input."""
    for line in program.eqns:
        marked = [not isinstance(v, Literal) and v in tainted for v in line.invars]
        if not any(marked):
            continue
        if line.primitive.name in _STEPS:
            return True
        for inner in jaxprs_in_params(line.params):
            inputs = inner.invars
            if len(inputs) == len(marked):
                inputs = [v for v, mark in zip(inputs, marked, strict=True) if mark]
            if _jumps(inner, set(inputs)):
                return True
        tainted.update(line.outvars)
    return False


def is_array(leaf) -> bool:
    """Whether a leaf is an array, or the shape of one."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def affine_image(gamma: MapOfPoints, mu: Gaussian) -> Gaussian:
    """Return the image of a Gaussian under a map that is affine on it."""
    wide = widened(mu)
    slope, drift = slope_and_drift(gamma, wide)
    moved = Gaussian(drift, factor=matmul(slope, wide.root()))
    return jax.tree.map(lambda leaf: leaf.astype(mu.mean().dtype), moved)


@overload
def push_forward(gamma: MapOfPoints, mu: TokenCloud) -> TokenCloud: ...


@overload
def push_forward(gamma: MapOfPoints, mu: AbstractMeasure) -> AbstractMeasure: ...


def push_forward(gamma: MapOfPoints, mu: AbstractMeasure) -> AbstractMeasure:
    r"""Move a measure by a map that sees it: $\mu \mapsto \Gamma[\mu]_\#\mu$.

    Atoms move and keep their weights and places. A Gaussian stays one under a map that
    is affine on it: softmax, L2, Sinkhorn and linear attention, perceptrons without
    activation, their sums, heads, residuals and compositions, and the `AffineMap` of a
    transport.

    Args:
        gamma: an in-context map, or a plain function of points of shape (n, d).
        mu: a token cloud, or a Gaussian.

    Returns:
        A token cloud for a cloud, a Gaussian for a Gaussian.
    """
    if isinstance(mu, Gaussian):
        return affine_image(gamma, mu)
    if not isinstance(mu, TokenCloud):
        raise Unsupported(
            f"the image of {type(mu).__name__} has no closed form here; push forward "
            "quadrature(mu, order) or TokenCloud(mu.sample(count, key=key))."
        )
    if isinstance(gamma, AbstractInContextMap):
        return mu.moved(gamma(mu, mu.points, positions=mu.positions))
    check_function("gamma", gamma)
    points = as_finite_array(
        "the image of the points", gamma(mu.points), (mu.count, None)
    )
    return mu.moved(points)
