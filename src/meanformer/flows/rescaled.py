"""Tokens in rescaled coordinates, where exponential growth does not hide the limit."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.attention import AbstractAttention, AbstractInContextMap, Perceptron
from meanformer.attention.stacking import Maps
from meanformer.errors import InvalidInput, Unsupported, check, check_kind, check_square
from meanformer.flows.schedule import (
    AbstractSchedule,
    Constant,
    Schedule,
    as_schedule,
    piece_at,
)
from meanformer.flows.status import AbstractStop, Snapshot, Status
from meanformer.measures import TokenCloud
from meanformer.numerics.arrays import matmul
from meanformer.numerics.growth import ScaledExponential

# Shares this small change nothing that numbers hold: a closed form may take over.
BOOLEAN = 1e-12


class _Piece(eqx.Module):
    """One layer in force from a depth on, and the growth before it."""

    attention: AbstractAttention
    start: Float[Array, ""]
    exponential: ScaledExponential
    before: Float[Array, "d d"]
    log_before: Float[Array, ""]
    value: Float[Array, "d d"]

    def growth(
        self, depth: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, "d d"]]:
        """Return the logarithm of a scale, and the growth matrix over the scale."""
        since = depth - self.start
        log_scale = self.log_before + self.exponential.log_scale(since)
        return log_scale, matmul(self.exponential.at(since), self.before)

    def attention_at(self, depth: Float[Array, ""]) -> AbstractAttention:
        """Return the attention that rescaled tokens pay to each other."""
        log_scale, growth = self.growth(depth)
        # Beyond this scale the largest score wins by more than rounding anyway.
        ceiling = jnp.log(jnp.finfo(growth.dtype).max) / 4
        kept = jnp.minimum(log_scale, ceiling)
        bias = self.attention.query_bias
        return dataclasses.replace(
            self.attention,
            query=matmul(self.attention.query, growth),
            key=matmul(self.attention.key, growth),
            value=self.value,
            beta=self.attention.temperature * jnp.exp(2 * kept),
            query_bias=None if bias is None else bias * jnp.exp(-kept),
        )

    def velocity(self, depth, mu, x):
        context = self.attention_at(depth)(mu, x)
        return context - matmul(x, self.value.T)


class Rescaled(AbstractSchedule):
    r"""The flow of tokens seen in the coordinates that their own growth carries along.

    Under $\dot x_i = \sum_j P_{ij}Vx_j$ tokens grow like $e^{tV}$. In
    $z_i = e^{-tV}x_i$,
    $$\dot z_i = \sum_j P_{ij}V(z_j - z_i), \qquad P_{ij} =
      \operatorname{softmax}_j \beta\langle Qe^{tV}z_i, Ke^{tV}z_j\rangle,$$
    and the limits of the theorems show. Pass it to `Flow` in the place of the
    attention: `Flow(Rescaled(attention))`. With a `Schedule` of layers $V_1, V_2,
    \dots$ the growth is $E(t) = e^{(t-t_k)V_k}\cdots e^{t_2V_1}$, and
    $z = E(t)^{-1}x$. Scales are kept as logarithms, so that no depth is too large:
    where scores leave the range of numbers the largest one wins, as in the limit.

    Args:
        velocity: `Softmax`, `L2` or `Hardmax` with a square value matrix, or a
            `Schedule` of them that holds each one from its depth on.
    """

    pieces: tuple[_Piece, ...]

    def __init__(self, velocity: AbstractInContextMap | AbstractSchedule):
        layers, starts = _layers_of(velocity)
        for layer in layers:
            _check_rescalable(layer)
        self.pieces = _pieces(layers, starts)

    @property
    def attention(self) -> AbstractAttention:
        """The attention of the original coordinates, where it is one for all depths."""
        check(
            len(self.pieces) == 1,
            f"the layers change {len(self.pieces) - 1} times along depth; there is no "
            "single attention.",
        )
        return self.pieces[0].attention

    def seen_at(
        self,
        depth: Float[Array, ""],
        look: Callable[[AbstractAttention], Array],
    ) -> Array:
        """Return what a function makes of the attention between rescaled tokens.

        Args:
            depth: where, perhaps traced.
            look: takes the attention in force there.
        """
        branches = [
            lambda place, piece=piece: look(piece.attention_at(place))
            for piece in self.pieces
        ]
        return jax.lax.switch(self._index(depth), branches, depth)

    def attention_at(self, depth: float | Float[Array, ""]) -> AbstractAttention:
        """Return the attention between rescaled tokens.

        `attention_matrix` of it on rescaled tokens is that of the original ones.

        Args:
            depth: where, a known depth.
        """
        depth = self._as_depth(depth)
        return self.pieces[int(self._index(depth))].attention_at(depth)

    def original(
        self, depth: float | Float[Array, ""], points: Float[Array, "m d"]
    ) -> tuple[Float[Array, ""], Float[Array, "m d"]]:
        r"""Return the tokens before rescaling, $x = e^s y$, as the pair of $s$ and $y$.

        Args:
            depth: where, a known depth.
            points: rescaled tokens $z$.
        """
        depth = self._as_depth(depth)
        log_scale, growth = self.pieces[int(self._index(depth))].growth(depth)
        return log_scale, matmul(points, growth.T)

    def at(self, depth: Float[Array, ""]) -> AbstractInContextMap:
        """Return the map in force at a depth."""
        attention = self.attention_at(depth)
        return attention + Perceptron.affine(-attention.value)

    def kinds(self) -> tuple[AbstractInContextMap, ...]:
        """Return the attention layers."""
        return tuple(piece.attention for piece in self.pieces)

    def velocity(self, depth, mu, x, positions):
        """Return the velocity of rescaled tokens."""
        branches = [
            lambda points, piece=piece: piece.velocity(depth, mu, points)
            for piece in self.pieces
        ]
        return jax.lax.switch(self._index(depth), branches, x)

    def terms(self) -> tuple[AbstractSchedule, ...]:
        """Return itself: it is not split."""
        return (self,)

    @property
    def jumps(self) -> Float[Array, " j"] | None:
        """The depths at which the next layer takes over."""
        later = [piece.start for piece in self.pieces[1:]]
        return jnp.stack(later) if later else None

    def _index(self, depth: Float[Array, ""]) -> Array:
        starts = jnp.stack([piece.start for piece in self.pieces])
        return piece_at(starts, depth)

    def _as_depth(self, depth) -> Float[Array, ""]:
        return jnp.asarray(depth, self.pieces[0].value.dtype)


class BooleanAttention(AbstractStop):
    r"""Stop when every token attends to a single one.

    From then on the flow is that of hardmax attention, and has a closed form:
    `mf.observables.boolean_phase`. Tokens of one place count as one only if they are
    merged first.

    Args:
        velocity: the attention of the flow, or its `Rescaled`.
        tolerance: the largest share that a token may pay to all others.
    """

    velocity: AbstractSchedule = eqx.field(converter=as_schedule)
    tolerance: float = BOOLEAN
    status: ClassVar[PyTree] = Status.condition_met

    def __check_init__(self):
        allowed = "an attention or Rescaled(attention)"
        check_kind("velocity", self.velocity, Rescaled | Constant, allowed)

    def __call__(self, snapshot: Snapshot) -> Bool[Array, ""]:
        """Return whether all rows of the attention matrix have a single entry."""
        cloud = cast(TokenCloud, snapshot.measure)

        def spread(attention) -> Float[Array, ""]:
            shares = attention.matrix(cloud, cloud.points)
            rest = 1 - jnp.max(shares, axis=1)
            return jnp.max(jnp.where(cloud.weights > 0, rest, 0))

        if isinstance(self.velocity, Rescaled):
            return self.velocity.seen_at(snapshot.depth, spread) <= self.tolerance
        return spread(self.velocity.at(snapshot.depth)) <= self.tolerance


def _layers_of(velocity) -> tuple[Maps, Array]:
    if isinstance(velocity, Constant):
        velocity = velocity.gamma
    if isinstance(velocity, AbstractInContextMap):
        return (velocity,), jnp.zeros((1,))
    if isinstance(velocity, Schedule) and not velocity.interpolate:
        return velocity.maps, velocity.depths
    raise InvalidInput(
        f"velocity is {type(velocity).__name__}; it must be an attention, or a "
        "Schedule that holds each of its attentions from its depth on."
    )


def _check_rescalable(layer: AbstractInContextMap) -> None:
    if not (isinstance(layer, AbstractAttention) and layer.is_normalised):
        raise Unsupported(
            f"{type(layer).__name__} has no rescaled flow here: the shares that a "
            "token pays must sum to one; use Softmax, L2 or Hardmax."
        )
    check_square("value", layer.value)
    check(
        layer.value_bias is None,
        "value_bias is set; the rescaled flow is that of linear values.",
    )


def _pieces(layers, starts: Float[Array, " k"]) -> tuple[_Piece, ...]:
    dtype = layers[0].value.dtype
    starts = starts.astype(dtype)
    before = jnp.eye(layers[0].input_dimension, dtype=dtype)
    # A schedule holds its first layer also before its first depth.
    starts = starts.at[0].set(0)
    log_before, pieces = jnp.zeros((), dtype), []
    for index, layer in enumerate(layers):
        exponential = ScaledExponential(layer.value)
        value = layer.value
        if index > 0:
            value = jnp.linalg.solve(before, matmul(layer.value, before))
        piece = _Piece(layer, starts[index], exponential, before, log_before, value)
        pieces.append(piece)
        if index + 1 < len(layers):
            log_before, before = _normalised(*piece.growth(starts[index + 1]))
    return tuple(pieces)


def _normalised(log_scale, matrix):
    size = jnp.linalg.norm(matrix) / np.sqrt(len(matrix))
    return log_scale + jnp.log(size), matrix / size
