"""Other networks of the same measure: other depth grids, other numbers of heads."""

from typing import SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PyTree

from meanformer import measures
from meanformer.errors import Unsupported, as_integer, as_key
from meanformer.measures import TokenCloud
from meanformer.training.data import Dataset, Loss, squared_error
from meanformer.training.gradients import check_fits, risk
from meanformer.training.layer import Parameters
from meanformer.training.transformer import MeanFieldTransformer, check_transformer
from meanformer.typing import Key


def refined(model: MeanFieldTransformer, factor: SupportsIndex) -> MeanFieldTransformer:
    r"""Return the same heads on a finer grid: each layer becomes several thin ones.

    The measure $\nu$ is the same; the network makes smaller steps and tends to the flow
    as the factor grows, by $O(1/\text{factor})$ with Euler steps.

    Args:
        model: a transformer that holds its heads between depths.
        factor: how many equal layers each one becomes.
    """
    check_held("model", model)
    factor = as_integer("factor", factor, least=1)
    shares = jnp.arange(factor, dtype=model.depths.dtype) / factor
    starts = model.depths[:-1, None] + jnp.diff(model.depths)[:, None] * shares[None]
    return on_grid(model, jnp.append(starts.ravel(), model.depths[-1]))


def resample(
    model: MeanFieldTransformer,
    layers: SupportsIndex,
    heads: SupportsIndex,
    *,
    key: Key,
    neurons: SupportsIndex | None = None,
) -> MeanFieldTransformer:
    r"""Draw a network with other numbers of layers and heads from the same measure.

    The new layers have equal lengths, or those of the model if their number is the
    same. Each draws its heads from the law of $\theta\sim\nu_s$ with $s$ uniform in its
    stretch $I$ of depth,
    $$\frac{1}{|I|}\int_I\nu_s\,\mathrm ds,$$
    by a systematic sample through heads in random order, layer after layer: a head of
    share $w$ of the stretch is drawn $\lfloor wM'\rfloor$ or $\lceil wM'\rceil$ times.
    So fewer heads are a subset without repetition, a multiple repeats each equally
    often, and the same numbers give the same network. The mean of the velocity over
    draws is that of the stretch.

    Args:
        model: a transformer that holds its heads between depths.
        layers: how many layers to make.
        heads: how many heads $M'$ each of them draws.
        key: a random key.
        neurons: how many neurons each draws; as many as there are by default.

    Returns:
        The network. Cost: a sort of all heads for each new layer.
    """
    check_held("model", model)
    layers = as_integer("layers", layers, least=1)
    counts = [as_integer("heads", heads, least=1)]
    families = [model.parameters.heads]
    if model.parameters.neurons is not None:
        families.append(model.parameters.neurons)
        there = model.parameters.neurons.bias_in.shape[1]
        counts.append(
            as_integer("neurons", there if neurons is None else neurons, least=1)
        )
    old = model.depths
    new = old
    if layers != model.layers:
        new = jnp.linspace(old[0], old[-1], layers + 1, dtype=old.dtype)
    ends = jnp.minimum(new[1:, None], old[None, 1:])
    shares = jnp.maximum(ends - jnp.maximum(new[:-1, None], old[None, :-1]), 0)
    keys = jr.split(as_key(key), len(families))
    drawn = map(_drawn, families, counts, keys, [shares] * len(families))
    return eqx.tree_at(
        lambda one: (one.parameters, one.depths), model, (Parameters(*drawn), new)
    )


def resampling_gaps(
    model: MeanFieldTransformer,
    data: Dataset,
    layers: SupportsIndex,
    heads: SupportsIndex,
    *,
    draws: SupportsIndex,
    key: Key,
    loss: Loss = squared_error,
) -> Float[Array, " draws"]:
    """Return how much more a resampled network loses: how many heads does it need?

    Args:
        model: a transformer, such as a trained one.
        data: contexts, queries and targets.
        layers: how many layers the resampled networks have.
        heads: how many heads in each.
        draws: how many networks to draw.
        key: a random key.
        loss: as for `risk`.

    Returns:
        Their risks less that of the model.
    """
    check_fits(model, data)
    keys = jr.split(as_key(key), as_integer("draws", draws, least=1))

    def of_one(key):
        return risk(resample(model, layers, heads, key=key), data, loss=loss)

    return jax.lax.map(of_one, keys) - risk(model, data, loss=loss)


@eqx.filter_jit
def on_grid(
    model: MeanFieldTransformer, depths: Float[Array, " s"]
) -> MeanFieldTransformer:
    """Return the heads that are held in the middle of each layer of another grid."""
    middles = (depths[1:] + depths[:-1]) / 2
    rows = jnp.searchsorted(model.depths, middles, side="right") - 1
    rows = jnp.clip(rows, 0, model.layers - 1)
    held = jax.tree.map(lambda leaf: leaf[rows], model.parameters)
    return eqx.tree_at(lambda one: (one.parameters, one.depths), model, (held, depths))


def check_held(name: str, model: MeanFieldTransformer) -> None:
    """Raise unless this is a transformer that holds its heads between depths."""
    check_transformer(name, model)
    if model.interpolate:
        raise Unsupported(
            f"{name} interpolates its heads between depths, and this needs heads that "
            "are held; use a transformer with interpolate=False."
        )


@eqx.filter_jit
def _drawn(particles: PyTree, count: int, key: Key, shares: Float[Array, "t l"]):
    """Draw particles for each new layer, from old layers with these shares."""
    layers, size = jax.tree.leaves(particles)[0].shape[:2]
    table = jnp.arange(layers * size).reshape(layers, size)

    def of_layer(key, shares):
        order, start = jr.split(key)
        places = jr.permutation(order, table, axis=1, independent=True)
        # The points of this cloud are the numbers of the particles.
        atoms = TokenCloud(
            places.reshape(-1, 1).astype(shares.dtype),
            jnp.repeat(shares / (size * shares.sum()), size),
            normalize=True,
        )
        chosen = measures.resample(atoms, count, key=start, method="systematic")
        return chosen.points[:, 0].astype(int)

    rows = jax.vmap(of_layer)(jr.split(key, len(shares)), shares)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[rows], particles)
