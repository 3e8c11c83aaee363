"""Maps made from maps: sums, heads, residuals and the diamond composition."""

from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import (
    OPERATORS,
    AbstractHolder,
    AbstractInContextMap,
    checked_queries,
    parameter,
)
from meanformer.attention.constants import Constants, of_count, of_sum, product, total
from meanformer.attention.stacking import (
    Maps,
    add_images,
    before_last,
    shapes,
    stack_if_alike,
)
from meanformer.errors import (
    InvalidInput,
    Unsupported,
    as_float_array,
    check,
    check_finite,
    check_shape,
)
from meanformer.measures import AbstractContext
from meanformer.numerics.arrays import matmul
from meanformer.typing import Places


def _sequence(name: str):
    """Return a module field holding a tuple of maps, converted from any sequence."""

    def convert(maps):
        if isinstance(maps, Iterable):
            return tuple(maps)
        raise InvalidInput(f"{name} is a {type(maps).__name__}; it must be a list.")

    return eqx.field(converter=convert)


def _matrices(outputs: Any) -> tuple[Array, ...] | None:
    if outputs is None:
        return None
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise InvalidInput(
            f"outputs is {outputs!r}; it must be a list of matrices, one for each head."
        )
    return tuple(as_float_array("outputs", output) for output in outputs)


class Sum(AbstractInContextMap, AbstractHolder):
    r"""The sum of maps: $\Gamma[\mu](x) = \sum_k \Gamma_k[\mu](x)$.

    Args:
        maps: the terms, with agreeing dimensions.
    """

    maps: tuple[AbstractInContextMap, ...] = _sequence("maps")

    def __check_init__(self):
        _check_maps("maps", self.maps)
        agreed("output", self._output_dimensions())

    @property
    def input_dimension(self) -> int | None:
        """Dimension of the points it takes."""
        return agreed("input", [term.input_dimension for term in shapes(self.maps)])

    @property
    def output_dimension(self) -> int | None:
        """Dimension of the points it returns."""
        return agreed("output", self._output_dimensions())

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return the sums of the constants."""
        return of_sum([term.ball_constants(radius, order) for term in self.maps])

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m e"]:
        """Return the sum of the images."""
        return add_images(self.maps, mu, x, positions)

    def stacked(self) -> "Sum":
        """Return the sum with terms that are alike kept as one."""
        return eqx.tree_at(lambda gamma: gamma.maps, self, stack_if_alike(self.maps))

    def _output_dimensions(self) -> list[int | None]:
        """Return what each term returns: what it takes, if it does not say."""
        taken = self.input_dimension
        return [term.output_dimension or taken for term in shapes(self.maps)]


class MultiHead(AbstractInContextMap, AbstractHolder):
    r"""Several heads, of any kinds: $\Gamma[\mu](x) = \sum_h W_h\,\Gamma_h[\mu](x)$.

    Args:
        heads: the attentions $\Gamma_h$.
        outputs: the matrices $W_h$, of shape (d, k'); without them the heads' own
            values already end in the right space.
    """

    heads: tuple[AbstractInContextMap, ...] = _sequence("heads")
    outputs: tuple[Float[Array, "_d _k"], ...] | None = eqx.field(
        default=None,
        converter=_matrices,
    )

    def __check_init__(self):
        _check_maps("heads", self.heads)
        agreed("input", [head.input_dimension for head in self.heads])
        self._check_outputs()
        agreed("output", self._output_dimensions())

    @property
    def input_dimension(self) -> int | None:
        """Dimension of the tokens."""
        return agreed("input", [head.input_dimension for head in shapes(self.heads)])

    @property
    def output_dimension(self) -> int | None:
        """Dimension of the values after the output matrices."""
        return agreed("output", self._output_dimensions())

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return the sums of the constants, output matrices multiplied in."""
        heads: list[AbstractInContextMap] = []
        for index, head in enumerate(self.heads):
            whole = (
                head if self.outputs is None else head.followed_by(self.outputs[index])
            )
            if whole is None:
                raise Unsupported(
                    f"no a priori bound is known for a {type(head).__name__} head."
                )
            heads.append(whole)
        return of_sum([head.ball_constants(radius, order) for head in heads])

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m e"]:
        """Return the sum of the heads' outputs."""
        return add_images(self.projected(), mu, x, positions)

    def stacked(self) -> "MultiHead":
        """Return the heads, output matrices multiplied in, with alike ones as one."""
        heads = stack_if_alike(self.projected())
        bare = self
        if self.outputs is not None:
            bare = eqx.tree_at(lambda gamma: gamma.outputs, self, None)
        return eqx.tree_at(lambda gamma: gamma.heads, bare, heads)

    def projected(self) -> Maps:
        """Return the heads, each followed by its output matrix if there are any."""
        if self.outputs is None:
            return self.heads
        pairs = zip(self.heads, self.outputs, strict=True)
        return tuple(_Projected(head, output) for head, output in pairs)

    def _output_dimensions(self) -> list[int | None]:
        if self.outputs is None:
            return [head.output_dimension for head in shapes(self.heads)]
        return [output.shape[0] for output in self.outputs]

    def _check_outputs(self) -> None:
        if self.outputs is None:
            return
        check(
            len(self.outputs) == len(self.heads),
            f"outputs holds {len(self.outputs)} matrices for {len(self.heads)} heads; "
            "there must be one for each.",
        )
        for head, output in zip(self.heads, self.outputs, strict=True):
            check_shape("outputs", output, (None, head.output_dimension))
            check_finite("outputs", output)


class _Projected(AbstractInContextMap):
    """A head followed by its output matrix."""

    head: AbstractInContextMap
    output: Float[Array, "_d _k"]

    @property
    def input_dimension(self) -> int | None:
        """Dimension of the tokens."""
        return self.head.input_dimension

    @property
    def output_dimension(self) -> int:
        """Dimension of the values after the output matrix."""
        return self.output.shape[0]

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m e"]:
        """Return the output of the head."""
        image = self.head(mu, x, positions=positions)
        return matmul(image, self.output.T).astype(image.dtype)


class Residual(AbstractInContextMap):
    r"""A layer with its skip connection: $x \mapsto x + h\,\Gamma[\mu](x)$.

    Args:
        gamma: the velocity $\Gamma$.
        step: the step $h$; 1 is the usual network.
    """

    gamma: AbstractInContextMap
    step: Float[Array, ""] = parameter("step", is_scalar=True, default=1.0)

    def __check_init__(self):
        _check_maps("gamma", (self.gamma,))
        agreed("residual", [self.gamma.input_dimension, self.gamma.output_dimension])

    @property
    def input_dimension(self) -> int | None:
        """Dimension of the points, the same before and after."""
        return self.gamma.input_dimension

    @property
    def output_dimension(self) -> int | None:
        """Dimension of the points, the same before and after."""
        return self.gamma.output_dimension

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return the constants of a step added to the identity."""
        moved = self.gamma.ball_constants(radius, order)
        step = jnp.abs(jnp.asarray(self.step, radius.dtype))
        one = jnp.ones_like(radius)
        identity = Constants(radius, one, 0 * one, jnp.ones_like)
        scaled = Constants(
            step * moved.speed,
            product(step, moved.in_query),
            product(step, moved.in_measure),
            of_count(product, lambda _: step, moved.by_count),
        )
        return of_sum([identity, scaled])

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m e"]:
        """Return each query moved by one step."""
        x = checked_queries(self, mu, x)
        return x + self.step.astype(x.dtype) * self.gamma(mu, x, positions=positions)


class Composition(AbstractInContextMap, AbstractHolder):
    r"""A network: maps applied one after another, each in the context it finds.

    $$(\Gamma' \diamond \Gamma)[\mu] = \Gamma'[\Gamma[\mu]_\#\mu] \circ \Gamma[\mu].$$
    The context is carried along once per layer: $N$ layers cost $N$ context updates
    and $N$ evaluations at the queries. `compose` builds it.

    Args:
        layers: the maps, in the order in which they act.
    """

    layers: tuple[AbstractInContextMap, ...] = _sequence("layers")

    def __check_init__(self):
        _check_maps("layers", self.layers)
        running = None
        for index, layer in enumerate(self.layers):
            takes = layer.input_dimension
            check(
                None in (running, takes) or running == takes,
                f"layer {index} takes points of dimension {takes}, but the layer "
                f"before it returns dimension {running}.",
            )
            running = layer.output_dimension or takes or running

    @property
    def input_dimension(self) -> int | None:
        """Dimension of the points the first layer takes."""
        for layer in self.layers:
            if layer.input_dimension is not None or layer.output_dimension is not None:
                return layer.input_dimension
        return None

    @property
    def output_dimension(self) -> int | None:
        """Dimension of the points the last layer returns."""
        for layer in reversed(self.layers):
            returned = layer.output_dimension or layer.input_dimension
            if returned is not None:
                return returned
        return None

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return the products of the constants, balls growing with the speed."""
        first, *rest = self.layers
        known = first.ball_constants(radius, order)
        for layer in rest:
            last = layer.ball_constants(known.speed, order)
            through = product(last.in_query, known.in_measure)
            known = Constants(
                last.speed,
                product(last.in_query, known.in_query),
                total(through, product(last.in_measure, known.mean_field)),
                of_count(product, last.by_count, known.by_count),
            )
        return known

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m e"]:
        """Return the queries after all layers; they never join the context."""
        mu, x = before_last(self.layers, mu, x, positions)
        return self.layers[-1](mu, x, positions=positions)

    def stacked(self) -> "Composition":
        """Return the network with layers that are alike kept as one."""
        layers = stack_if_alike(self.layers)
        return eqx.tree_at(lambda gamma: gamma.layers, self, layers)


def compose(*maps: AbstractInContextMap) -> AbstractInContextMap:
    r"""Compose maps in the order of writing $\diamond$: the rightmost acts first.

    Args:
        maps: `last, …, first`; compositions among them are flattened.
    """
    _check_maps("maps", maps)
    layers: list[AbstractInContextMap] = []
    for gamma in reversed(maps):
        layers.extend(gamma.layers if isinstance(gamma, Composition) else [gamma])
    return Composition(tuple(layers)) if len(layers) > 1 else layers[0]


OPERATORS["@"] = compose
OPERATORS["+"] = lambda one, other: Sum((one, other))


def terms_of(
    gamma: AbstractInContextMap, *, with_heads: bool = False
) -> tuple[AbstractInContextMap, ...]:
    """Return the terms of a sum, those of sums inside it too; of others the map.

    Args:
        gamma: the map.
        with_heads: take apart several heads without output matrices as well.
    """
    if isinstance(gamma, Sum):
        parts = gamma.maps
    elif with_heads and isinstance(gamma, MultiHead) and gamma.outputs is None:
        parts = gamma.heads
    else:
        return (gamma,)
    return tuple(
        term for part in parts for term in terms_of(part, with_heads=with_heads)
    )


def agreed(what: str, dimensions: Sequence[int | None]) -> int | None:
    """Return the one dimension that all name, `None` if nobody does, or raise."""
    known = sorted({size for size in dimensions if size is not None})
    check(
        len(known) <= 1,
        f"the {what} dimensions are {list(dimensions)}; they must agree.",
    )
    return known[0] if known else None


def _check_maps(name: str, maps: Sequence) -> None:
    check(len(maps) > 0, f"{name} is empty; at least one map is needed.")
    for gamma in maps:
        if not isinstance(gamma, AbstractInContextMap):
            raise InvalidInput(
                f"{name} holds a {type(gamma).__name__}; it must hold in-context maps."
            )
