"""Masked attention: each query sees a stretch of the sequence."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from meanformer.attention.abstract import (
    AbstractAttention,
    AbstractInContextMap,
    check_map,
    checked_queries,
    maps_in,
)
from meanformer.attention.composition import Composition, MultiHead, Residual
from meanformer.attention.constants import Constants, product
from meanformer.attention.masks import AbstractMask, Causal
from meanformer.errors import (
    InvalidInput,
    Unsupported,
    check,
    check_choice,
    check_kind,
    is_concrete,
)
from meanformer.measures import AbstractContext, MaskedCloud, TokenCloud
from meanformer.measures.checks import checked_places
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.arrays import any_in_batch
from meanformer.typing import Places


class Masked(AbstractInContextMap):
    r"""An attention behind a mask on positions: the mean-field causal attention.

    The context is a measure on $[0,1]\times\mathbb{R}^d$; a query at place $s$ sees its
    restriction to the places the mask allows,
    $$\Gamma[\bar\mu](s,x) = \Gamma[\bar\mu|_{\tau\le s}](x)$$
    for the causal mask. Places never move. Only their order matters to `Causal`, and
    tokens that share a place see each other. Kinds that are not normalised integrate
    over the visible part without dividing by its mass, unless `divide` is set.

    Args:
        attention: the map to mask, of any kind but Sinkhorn, or a `MultiHead` of them.
        mask: the rule; `Causal()` by default.
        divide: divide by the visible mass, so that the context is a probability again;
            the row-normalised kinds do not see the difference.
        empty: what a query that sees nothing gets: `"error"`, or `"zero"`, which is
            also what masks that hide a token from itself imply. Under `jit`, where what
            a query sees is not known in time, it gets zero in either case.
    """

    bends_gaussians: ClassVar[str | None] = (
        "it has a map for each position, and a Gaussian has no positions. Under plain "
        "linear attention a Gaussian at each position stays one, under other kinds it "
        "does not, since it sees a mixture of Gaussians; compute either with tokens, "
        "TokenCloud(points, positions=s), a quadrature of the Gaussian at each position"
    )

    attention: AbstractInContextMap
    mask: AbstractMask = Causal()
    divide: bool = eqx.field(default=False, kw_only=True, static=True)
    empty: str = eqx.field(default="error", kw_only=True, static=True)

    def __check_init__(self):
        check_choice("empty", self.empty, ("error", "zero"))
        check_map("attention", self.attention)
        check_kind("mask", self.mask, AbstractMask, "a mask, for instance Causal()")
        kind = type(self.attention).__name__
        check(
            not isinstance(self.attention, (Residual, Composition, Masked)),
            f"attention is a {kind}; mask the attentions inside it instead.",
        )
        for part in maps_in(self.attention):
            if part.refuses_masks:
                raise Unsupported(part.refuses_masks)

    @property
    def input_dimension(self) -> int | None:
        """Dimension of the points it takes."""
        return self.attention.input_dimension

    @property
    def output_dimension(self) -> int | None:
        """Dimension of the points it returns."""
        return self.attention.output_dimension

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return those of the attention, with Hardy's factor for averages."""
        inner = self.attention
        if isinstance(inner, MultiHead):
            heads = [
                eqx.tree_at(lambda g: g.attention, self, head) for head in inner.heads
            ]
            return MultiHead(heads, inner.outputs).ball_constants(radius, order)
        known = replace(inner.ball_constants(radius, order), lower=None)
        is_average = isinstance(inner, AbstractAttention) and inner.is_normalised
        if not (is_average or self.divide):
            return known
        in_measure = product(hardy_factor(self.mask, order), known.in_measure)
        return replace(known, in_measure=in_measure, mean_field_published=None)

    def followed_by(self, output: Float[Array, "f e"]) -> "Masked | None":
        """Return the mask of the attention with a matrix multiplied into its values."""
        attention = self.attention.followed_by(output)
        return None if attention is None else replace(self, attention=attention)

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m e"]:
        """Return the attention of each query to what it sees.

        Args:
            mu: a token cloud with positions.
            x: the queries.
            positions: their places; at the end of the sequence ($s = 1$) by default.
        """
        x = checked_queries(self.attention, mu, x)
        if len(x) == 0:
            return self.attention(mu, x)
        view, _ = self.view(mu, x, positions)
        sees = view.seen_by(len(x))
        self._check_sight(sees)
        output = self.attention(view, x, positions=positions)
        return jnp.where(sees[:, None], output, 0)

    def view(
        self, mu: AbstractContext, x: Float[Array, "m d"], positions: Places = None
    ) -> tuple[MaskedCloud, Array]:
        """Return what each query sees, and the order that sorts the tokens."""
        if not isinstance(mu, TokenCloud):
            raise Unsupported(
                f"a mask needs a TokenCloud with positions; the context is "
                f"{type(mu).__name__}."
            )
        if mu.positions is None:
            raise InvalidInput(
                "a mask needs positions; build the cloud as TokenCloud(points, "
                "positions=s) with s in [0, 1], or with in_order(cloud)."
            )
        if positions is None:
            positions = jnp.ones((x.shape[0],), mu.positions.dtype)
        places = checked_places(x, positions).astype(mu.positions.dtype)
        cloud, order, stretch = _sorted(mu, mu.positions, places, self.mask)
        return MaskedCloud(cloud, *stretch, divide=self.divide), order

    def _check_sight(self, sees: Bool[Array, " m"]) -> None:
        allowed = self.empty == "zero" or self.mask.may_be_empty
        if allowed or not is_concrete(sees) or np.all(sees):
            return
        raise InvalidInput(
            f"query {int(np.argmin(sees))} sees no token through "
            f'{type(self.mask).__name__}; pass empty="zero" to give it the value 0.'
        )


@eqx.filter_jit
def _sorted(
    mu: TokenCloud,
    positions: Float[Array, " n"],
    places: Float[Array, " m"],
    mask: AbstractMask,
):
    """Return the tokens in the order of their places, and what each query sees."""
    is_mixed = any_in_batch(jnp.any(jnp.diff(positions) < 0))
    order = jax.lax.cond(
        is_mixed,
        lambda: jnp.argsort(positions, stable=True),
        lambda: jnp.arange(len(positions)),
    )
    cloud = eqx.tree_at(
        lambda c: (c.points, c.weights, c.positions),
        mu,
        (mu.points[order], mu.weights[order], positions[order]),
    )
    return cloud, order, mask.stretch(positions[order], places)


def in_order(cloud: TokenCloud) -> TokenCloud:
    r"""Give token $i$ of $n$ the place $s_i = i/n$, the order of its row."""
    check_cloud("cloud", cloud)
    places = jnp.arange(1, cloud.count + 1) / cloud.count
    return TokenCloud(cloud.points, cloud.weights, positions=places, sums=cloud.sums)


def hardy_factor(mask: AbstractMask, order: float) -> float | None:
    r"""Return $p/(p-1)$, the norm of the running mean on $L^p$; `None` if infinite.

    Once places that see each other are joined, what a query sees is a stretch that ends
    with its own place; the average over it is at most the one-sided maximal function,
    whose norm this is, for any masses. A strict mask leaves the query's own mass out,
    and then no constant holds for all masses.
    """
    if mask.may_be_empty or order == 1:
        return None
    return order / (order - 1)
