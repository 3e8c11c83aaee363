"""How far apart two networks are: as measures of heads at each depth, as functions."""

import math
from typing import SupportsFloat

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer import attention
from meanformer.errors import Unsupported, as_number, check, is_concrete
from meanformer.measures import (
    Coupling,
    TokenCloud,
    conditional_wasserstein,
    transport_plan,
)
from meanformer.numerics.arrays import safe_root
from meanformer.training.data import Dataset
from meanformer.training.gradients import check_fits, ends_of
from meanformer.training.layer import Parameters
from meanformer.training.limits import check_held, on_grid
from meanformer.training.transformer import MeanFieldTransformer

# Attentions that see queries and keys through the product of their matrices alone.
OF_PRODUCTS = (attention.Softmax, attention.Unnormalised, attention.Linear)
OF_PRODUCTS += (attention.Sigmoid, attention.Hardmax, attention.Sinkhorn)
MOST_HEADS = 1024
ROUNDING = 8


def cot_distance(
    nu: MeanFieldTransformer, nu_prime: MeanFieldTransformer, *, gauge: bool = False
) -> Float[Array, ""]:
    r"""Return the conditional optimal transport distance of two networks.

    $$d(\nu, \nu')^2 = \int_0^1 W_2(\nu_s, \nu'_s)^2\,\mathrm ds:$$
    heads are moved to heads of the same depth, never along depth. Training is the
    gradient flow of this metric [BHFP26]. Numbers of heads and depth grids may differ:
    both networks are cut to the common grid, which changes neither measure. Neurons are
    a second family; its squared distance is added.

    It compares parameters, not functions: heads $(RQ, R^{-\top}K, V)$ act alike and can
    be far apart. See `balanced` and `function_distance`.

    Args:
        nu: a transformer that holds its heads between depths.
        nu_prime: another one, with heads of the same shapes.
        gauge: compare `balanced(nu)` with `balanced(nu_prime)`.

    Returns:
        The distance, differentiable as `conditional_wasserstein` is. Cost: for L layers
        of M heads $O(LM^2)$ distances of heads and $O(LM^3)$ for the transport; POT
        where numbers of heads differ.
    """
    first, second = common_grid(nu, nu_prime)
    if gauge:
        first, second = balanced(first), balanced(second)
    square = jnp.zeros((), first.depths.dtype)
    for family in _families(nu):
        sides = (one.measure(neurons=family) for one in (first, second))
        square += conditional_wasserstein(*sides) ** 2
    return safe_root((first.depths[-1] - first.depths[0]) * square, 2)


def cot_plans(
    nu: MeanFieldTransformer, nu_prime: MeanFieldTransformer, *, neurons: bool = False
) -> list[Coupling]:
    """Return the optimal plan between the heads of two networks for each depth.

    Args:
        nu: a transformer that holds its heads between depths.
        nu_prime: another one, with heads of the same shapes.
        neurons: plans between the neurons in place of the heads.

    Returns:
        One plan for each layer of `common_grid(nu, nu_prime)`, for heads of equal
        masses of total one.
    """
    clouds = [one.measure(neurons=neurons) for one in common_grid(nu, nu_prime)]
    check(
        all(is_concrete(leaf) for leaf in jax.tree.leaves(clouds)),
        "plans between traced networks are not known; call this outside of jit.",
    )
    layers = len(np.unique(clouds[0].positions))
    sides = (one.points.reshape(layers, -1, one.dimension) for one in clouds)
    return [
        transport_plan(TokenCloud(one), TokenCloud(other))
        for one, other in zip(*sides, strict=True)
    ]


def cot_geodesic(
    nu: MeanFieldTransformer, nu_prime: MeanFieldTransformer, share: SupportsFloat
) -> MeanFieldTransformer:
    r"""Return the network at some share of the shortest way from one to another.

    Each head goes straight, at constant speed, to the one that the optimal plan of its
    depth matches it with: $d(\nu, \nu_t) = t\,d(\nu, \nu')$ for the share $t$.

    Heads of a layer have equal masses. Where their numbers M and M' differ, each head
    is repeated, up to the least common multiple; the networks and the distance are the
    same. Likewise neurons.

    Args:
        nu: where the way begins.
        nu_prime: where it ends.
        share: from 0, `nu` on the common depth grid, to 1, `nu_prime`.

    Returns:
        The network; temperature, kind and method are those of `nu`. Cost: that of the
        distance of the repeated heads, of which at most 1024 are allowed.
    """
    share = as_number("share", share, "a number from 0 to 1", least=0)
    check(share <= 1, f"share is {share}; it must be a number from 0 to 1.")
    first, second = common_grid(nu, nu_prime)
    first, second = _repeated(first, second), _repeated(second, first)
    moved = [_blended(first, second, family, share) for family in _families(nu)]
    return first.with_parameters(Parameters(*moved))


def common_grid(
    nu: MeanFieldTransformer, nu_prime: MeanFieldTransformer
) -> tuple[MeanFieldTransformer, MeanFieldTransformer]:
    """Return two networks cut where either has a new layer; the measures are the same.

    Of traced depths nothing is known, so that layers of length zero may remain.
    """
    _check_pair(nu, nu_prime)
    edges = jnp.sort(jnp.concatenate([nu.depths, nu_prime.depths]))
    if is_concrete(edges):
        known = np.asarray(edges)
        shortest = ROUNDING * jnp.finfo(edges.dtype).eps * np.abs(known).max()
        edges = edges[np.append(True, np.diff(known) > shortest)]
    return on_grid(nu, edges), on_grid(nu_prime, edges)


@eqx.filter_jit
def balanced(model: MeanFieldTransformer) -> MeanFieldTransformer:
    r"""Return the same function with every head in the balanced gauge.

    There $QQ^\top = KK^\top$, which gradient flows keep; see `Heads.balanced`.

    Args:
        model: a transformer whose attention sees $Q$ and $K$ through $K^\top Q$ alone.
    """
    heads, kind = model.parameters.heads, model.layer.kind
    if kind not in OF_PRODUCTS:
        names = ", ".join(one.__name__ for one in OF_PRODUCTS)
        raise Unsupported(
            f"kind is {getattr(kind, '__name__', kind)}; the balanced gauge is for "
            f"attentions that see queries and keys through their product: {names}."
        )
    changed = Parameters(heads.balanced(), model.parameters.neurons)
    return model.with_parameters(changed)


@eqx.filter_jit
def function_distance(
    nu: MeanFieldTransformer, nu_prime: MeanFieldTransformer, data: Dataset
) -> Float[Array, ""]:
    r"""Return the distance of two networks as functions, on a data set.

    $$\Bigl(\frac1N\sum_k\bigl|T_\nu[\mu^k](x^k) - T_{\nu'}[\mu^k](x^k)\bigr|^2
      \Bigr)^{1/2},$$
    with the mean over the queries of a context, or over its tokens if it has none.

    Args:
        nu: a transformer.
        nu_prime: another one.
        data: contexts and queries.
    """
    check_fits(nu, data)
    check_fits(nu_prime, data)
    squares = jnp.sum((ends_of(nu, data) - ends_of(nu_prime, data)) ** 2, axis=2)
    if data.queries.shape[1] == 0:
        return safe_root(jnp.sum(data.weights * squares, axis=1).mean(), 2)
    return safe_root(squares[:, data.tokens.shape[1] :].mean(), 2)


def _families(model: MeanFieldTransformer) -> tuple[bool, ...]:
    """Return whether each family of particles is that of the neurons."""
    return (False,) if model.parameters.neurons is None else (False, True)


def _repeated(
    model: MeanFieldTransformer, other: MeanFieldTransformer
) -> MeanFieldTransformer:
    """Repeat particles up to the least common multiple of their numbers in both."""

    def of_leaf(leaf, beside):
        counts = leaf.shape[1], beside.shape[1]
        common = math.lcm(*counts)
        check(
            common <= MOST_HEADS,
            f"layers have {counts[0]} and {counts[1]} heads or neurons; they would be "
            f"repeated to the common multiple {common}, beyond {MOST_HEADS}: resample "
            "one of the networks.",
        )
        return leaf.repeat(common // counts[0], axis=1)

    return model.with_parameters(
        jax.tree.map(of_leaf, model.parameters, other.parameters)
    )


def _blended(first, second, neurons: bool, share: float):
    """Move particles towards those that permutations match them with."""
    plans = cot_plans(first, second, neurons=neurons)
    order = jnp.stack([plan.matrix().argmax(axis=1) for plan in plans])
    layers = jnp.arange(len(plans))[:, None]
    sides = [one.parameters for one in (first, second)]
    return jax.tree.map(
        lambda one, other: (1 - share) * one + share * other[layers, order],
        *[one.neurons if neurons else one.heads for one in sides],
    )


def _check_pair(nu: MeanFieldTransformer, nu_prime: MeanFieldTransformer) -> None:
    """Raise unless two networks differ in numbers, places and depths of particles."""
    check_held("nu", nu)
    check_held("nu_prime", nu_prime)
    pair = (nu, nu_prime)
    shapes = [
        [(*leaf.shape[2:], str(leaf.dtype)) for leaf in jax.tree.leaves(one.parameters)]
        for one in pair
    ]
    check(
        shapes[0] == shapes[1],
        f"heads and neurons of nu have the shapes {shapes[0]}, those of nu_prime "
        f"{shapes[1]}; they must be the same, biases and neurons included.",
    )
    kinds = [
        (one.layer.kind, one.layer.activation, one.layer.is_frozen) for one in pair
    ]
    check(
        kinds[0] == kinds[1],
        "nu and nu_prime differ in kind, activation or context; they must not.",
    )
    names = "beta", "the first depth", "the last depth"
    numbers = [(one.layer.beta, one.depths[0], one.depths[-1]) for one in pair]
    for name, first, second in zip(names, *numbers, strict=True):
        check(
            not (is_concrete(first) and is_concrete(second))
            or bool(np.isclose(first, second)),
            f"{name} of nu is {first}, that of nu_prime {second}; make them equal.",
        )
