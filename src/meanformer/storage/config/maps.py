"""The map that drives a flow, as a file describes it: heads, mask, perceptron."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from meanformer import attention, flows
from meanformer.attention.kinds import KINDS
from meanformer.errors import InvalidInput, check
from meanformer.geometry import Euclidean, Sphere
from meanformer.measures import AbstractMeasure, TokenCloud
from meanformer.storage.config.sections import MUST, Section, is_number, numbers, shown

SPACES = {"euclidean": Euclidean, "sphere": Sphere}
MASKS = {
    "causal": attention.Causal,
    "strict": attention.StrictCausal,
    "window": attention.Window,
    "prefix": attention.Prefix,
    "blocks": attention.Blocks,
}
SCHEMES: dict[str, type[flows.AbstractScheme]] = {
    "post": flows.PostNorm,
    "pre": flows.PreNorm,
    "peri": flows.PeriNorm,
    "ngpt": flows.NGPT,
    "mix": flows.MixNorm,
    "sqrt": flows.SqrtScaling,
}
ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def velocity_of(
    heads: Section, perceptron: Section, measure: AbstractMeasure
) -> attention.AbstractInContextMap:
    """Return attention, masked or not, with a perceptron beside it if there is one."""
    mask = _mask(heads.take("mask"), measure)
    velocity = _attention(heads, measure.dimension)
    if mask is not None:
        velocity = attention.Masked(velocity, mask)
    extra = _perceptron(perceptron)
    return velocity if extra is None else attention.Sum((velocity, extra))


def _mask(value: Any, measure: AbstractMeasure) -> attention.AbstractMask | None:
    if value is None:
        return None
    table = {"kind": value} if isinstance(value, str) else value
    section = Section("attention.mask", table)
    kind = MASKS[section.choose("kind", MASKS)]
    mask = kind(**section.take_fields(kind))
    section.finish()
    is_cloud = isinstance(measure, TokenCloud)
    check(
        is_cloud,
        "attention.mask is for tokens, which have places in a sequence, and the file "
        f"has a {type(measure).__name__}; leave the mask out.",
    )
    check(
        is_cloud and measure.positions is not None,
        "attention.mask needs the places of the tokens; give tokens.in_order = true, "
        "or tokens.positions.",
    )
    return mask


def _attention(section: Section, dimension: int) -> attention.AbstractInContextMap:
    tables = section.take("heads")
    if tables is None:
        return _head(section, dimension)
    check(
        isinstance(tables, list) and tables != [],
        f"attention.heads is {shown(tables)}; it must be a list of tables, one for "
        "each head.",
    )
    sections = [
        Section(f"attention.heads[{index}]", table)
        for index, table in enumerate(tables)
    ]
    heads = [_head(head, dimension) for head in sections]
    for head in sections:
        head.finish()
    return attention.MultiHead(heads)


def _head(section: Section, dimension: int) -> attention.AbstractAttention:
    kind = KINDS[section.choose("kind", KINDS, "softmax")]
    names = ("query", "key", "value")
    matrices = [_matrix(section, name, dimension) for name in names]
    beta = section.take("beta", float, 1.0)
    options = section.take_fields(kind, *names, "beta", "feature_map")
    return kind(*matrices, beta=beta, **options)


def _matrix(section: Section, key: str, dimension: int) -> Float[Array, "k d"]:
    name, value = f"{section.name}.{key}", section.take(key, default="identity")
    if value == "identity":
        return jnp.eye(dimension)
    if is_number(value):
        return float(value) * jnp.eye(dimension)
    if isinstance(value, dict):
        table = Section(name, value)
        rows = table.take("rows", int, dimension, positive=True)
        scale = table.take("scale", float, dimension**-0.5)
        seed = table.take("seed", int, MUST)
        table.finish()
        return scale * jr.normal(jr.key(seed), (rows, dimension))
    if isinstance(value, list):
        return numbers(name, value)
    raise InvalidInput(
        f'{name} is {shown(value)}; it must be "identity", a number (a multiple of the '
        "identity), the rows of a matrix, or { seed = …, rows = …, scale = … }."
    )


def _perceptron(section: Section) -> attention.Perceptron | None:
    names = ("weights_in", "bias_in", "weights_out", "bias_out")
    arrays = [section.take(name, Array) for name in names]
    activation = section.choose("activation", ACTIVATIONS, "gelu")
    section.finish()
    if all(array is None for array in arrays):
        return None
    for name, array in zip(names[:3], arrays, strict=False):
        check(array is not None, f"perceptron.{name} is missing; it must be given.")
    return attention.Perceptron(*arrays, activation=ACTIVATIONS[activation])
