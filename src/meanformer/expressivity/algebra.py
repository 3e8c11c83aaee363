r"""The cylindrical algebra: sums of products of softmax blocks.

A block sees one tilted mean of the context. Sums of products of blocks are dense in the
continuous in-context maps of a compact set, and each of them is computed by a
transformer with explicit weights: `compile_transformer`.
"""

import itertools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractInContextMap, checked_queries
from meanformer.errors import InvalidInput, as_finite_array, as_number, check
from meanformer.measures import AbstractContext
from meanformer.typing import ArrayLike


class Blocks(eqx.Module):
    r"""Blocks $\langle u, x\rangle + c + \langle v, \nabla\Lambda_\mu(Ax + b)\rangle$.

    Attributes:
        score: the matrices $A$.
        shift: the vectors $b$.
        direct: the vectors $u$, for the query itself.
        value: the vectors $v$, for what it sees.
        constant: the numbers $c$.
    """

    score: Float[Array, "... d d"]
    shift: Float[Array, "... d"]
    direct: Float[Array, "... d"]
    value: Float[Array, "... d"]
    constant: Float[Array, "..."]

    def bounds(self, radius: float) -> Float[Array, "..."]:
        """Return how large they are at most for queries and tokens in a ball."""
        lengths = [jnp.linalg.norm(a, axis=-1) for a in (self.direct, self.value)]
        return radius * (lengths[0] + lengths[1]) + jnp.abs(self.constant)

    def scaled(self, factors: Float[Array, "..."]) -> "Blocks":
        """Return the blocks times numbers."""
        direct, value = (factors[..., None] * a for a in (self.direct, self.value))
        return Blocks(self.score, self.shift, direct, value, factors * self.constant)


class AlgebraElement(AbstractInContextMap):
    r"""A sum of products of blocks, as an in-context map.

    $$\Gamma[\mu](x)_i = \sum_k a_{k,i}\prod_{j\le N_k}\gamma_{k,j,i}[\mu](x), \qquad
      \gamma[\mu](x) = \langle u, x\rangle + c
      + \langle v, \nabla\Lambda_\mu(Ax + b)\rangle.$$

    Made of `block`s by `+`, `-` and `*`, with each other and with numbers; `stack` puts
    components side by side.

    Attributes:
        coefficients: the numbers $a$, one row for each term.
        factors: the blocks, term after term, one for each component.
        lengths: how many factors each term has.
    """

    coefficients: Float[Array, "k e"]
    factors: Blocks
    lengths: tuple[int, ...] = eqx.field(static=True)

    @property
    def input_dimension(self) -> int:
        """Dimension of tokens and queries."""
        return self.factors.shift.shape[-1]

    @property
    def output_dimension(self) -> int:
        """How many components it has."""
        return self.coefficients.shape[1]

    @property
    def starts(self) -> tuple[int, ...]:
        """The index of the first factor of each term, and one past the last factor."""
        return tuple(itertools.accumulate(self.lengths, initial=0))

    def __call__(
        self,
        mu: AbstractContext,
        x: Float[Array, "m d"],
        *,
        positions: Float[Array, " m"] | None = None,
    ) -> Float[Array, "m e"]:
        """Return its value at each query; $O(nmF)$ for F factors."""
        x = checked_queries(self, mu, x)
        values = self.factor_values(mu, x)
        # Terms have the same length once they are filled up by ones.
        ones = jnp.ones((1, *values.shape[1:]), values.dtype)
        index = np.full((len(self.lengths), max(self.lengths)), len(values))
        for row, start, length in zip(index, self.starts, self.lengths, strict=False):
            row[:length] = np.arange(start, start + length)
        products = jnp.concatenate([values, ones])[index].prod(axis=1)
        return jnp.einsum("kme,ke->me", products, self.coefficients)

    def factor_values(
        self, mu: AbstractContext, x: Float[Array, "m d"]
    ) -> Float[Array, "f m e"]:
        """Return the value of every block at each query."""
        parts = self.factors
        tilts = jnp.einsum("feij,mj->fmei", parts.score, x) + parts.shift[:, None]
        seen = mu.tilted_mean(tilts.reshape(-1, x.shape[1])).reshape(tilts.shape)
        direct = jnp.einsum("fej,mj->fme", parts.direct, x)
        return (
            direct + parts.constant[:, None] + jnp.sum(parts.value[:, None] * seen, -1)
        )

    def __add__(self, other):
        if not isinstance(other, AlgebraElement | int | float):
            return super().__add__(other)
        other = self._lifted(other)
        joined = jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves),
            (self.coefficients, self.factors),
            (other.coefficients, other.factors),
        )
        return AlgebraElement(*joined, self.lengths + other.lengths)

    def __mul__(self, other):
        other = self._lifted(other)
        pairs = list(itertools.product(range(len(self)), range(len(other))))
        coefficients = jnp.stack(
            [self.coefficients[i] * other.coefficients[j] for i, j in pairs]
        )
        factors = [part for i, j in pairs for part in (self.term(i), other.term(j))]
        joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *factors)
        lengths = tuple(self.lengths[i] + other.lengths[j] for i, j in pairs)
        return AlgebraElement(coefficients, joined, lengths).simplified()

    def __neg__(self):
        return eqx.tree_at(lambda f: f.coefficients, self, -self.coefficients)

    def __sub__(self, other):
        return self + -other

    def __rsub__(self, other):
        return -self + other

    __radd__, __rmul__ = __add__, __mul__

    def __len__(self) -> int:
        return len(self.lengths)

    def term(self, index: int) -> Blocks:
        """Return the factors of a term."""
        start, end = self.starts[index : index + 2]
        return jax.tree.map(lambda leaf: leaf[start:end], self.factors)

    def simplified(self) -> "AlgebraElement":
        """Return the same map with like terms joined and constant factors taken out."""
        terms: dict[tuple, tuple[np.ndarray, list]] = {}
        parts = jax.tree.map(np.asarray, self.factors)
        coefficients = np.asarray(self.coefficients)
        for start, length, factor in zip(
            self.starts, self.lengths, coefficients, strict=False
        ):
            kept = []
            for index in range(start, start + length):
                one = jax.tree.map(lambda leaf, i=index: leaf[i], parts)
                if not one.direct.any() and not one.value.any():
                    factor = factor * one.constant
                else:
                    kept.append(one)
            kept.sort(key=_name)
            name = tuple(map(_name, kept))
            known = terms.get(name, (0 * factor, kept))[0]
            terms[name] = known + factor, kept
        some = {name: pair for name, pair in terms.items() if pair[0].any()}
        some = some or dict(itertools.islice(terms.items(), 1))
        one = _constant_blocks(*parts.shift.shape[1:], parts.shift.dtype)
        chosen = [kept or [one] for _, kept in some.values()]
        factors = [part for kept in chosen for part in kept]
        return AlgebraElement(
            jnp.stack([factor for factor, _ in some.values()]),
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *factors),
            tuple(len(kept) for kept in chosen),
        )

    def _lifted(self, other) -> "AlgebraElement":
        """Return a number as a constant element, and one of another size refused."""
        size, width = self.input_dimension, self.output_dimension
        if not isinstance(other, AlgebraElement):
            given = as_number("a factor or summand", other, "a number or an element")
            found = block(size, constant=given)
            return stack([found] * width) if width > 1 else found
        sizes = other.input_dimension, other.output_dimension
        check(
            sizes == (size, width),
            f"one element takes dimension {size} and returns {width}, the other takes "
            f"{sizes[0]} and returns {sizes[1]}; they must agree.",
        )
        return other


def block(
    dimension: int,
    *,
    score: ArrayLike | None = None,
    shift: ArrayLike | None = None,
    direct: ArrayLike | None = None,
    value: ArrayLike | None = None,
    constant: ArrayLike = 0.0,
) -> AlgebraElement:
    r"""Return the elementary block of the algebra, a scalar in-context map.

    $$\gamma[\mu](x) = \langle u, x\rangle + c
      + \langle v, \nabla\Lambda_\mu(Ax + b)\rangle,$$
    with $\nabla\Lambda_\mu(z)$ the mean of the context under $e^{\langle z, y\rangle}$.
    What is left out is zero.

    Args:
        dimension: the dimension $d$ of the tokens.
        score: the matrix $A$, of shape (d, d).
        shift: the vector $b$.
        direct: the vector $u$.
        value: the vector $v$.
        constant: the number $c$.
    """
    shapes = {"score": (dimension,) * 2}
    given = {"score": score, "shift": shift, "direct": direct, "value": value}
    arrays = {
        name: jnp.zeros(shapes.get(name, (dimension,)))
        if array is None
        else as_finite_array(name, array, shapes.get(name, (dimension,)))
        for name, array in given.items()
    }
    dtype = jnp.result_type(*arrays.values())
    parts = Blocks(**arrays, constant=as_finite_array("constant", constant, ()))
    parts = jax.tree.map(lambda leaf: leaf.astype(dtype)[None, None], parts)
    return AlgebraElement(jnp.ones((1, 1), dtype), parts, (1,))


def coordinate(dimension: int, index: int) -> AlgebraElement:
    """Return the map that takes one coordinate of the query."""
    return block(dimension, direct=jnp.eye(dimension)[index])


def stack(elements: Sequence[AlgebraElement]) -> AlgebraElement:
    """Return the map whose components are those of some maps, side by side."""
    if not elements or not all(isinstance(f, AlgebraElement) for f in elements):
        raise InvalidInput("elements must be a list of elements of the algebra.")
    sizes = sorted({f.input_dimension for f in elements})
    check(len(sizes) == 1, f"elements take the dimensions {sizes}; they must agree.")
    count = max(len(f) for f in elements)
    lengths = tuple(
        max(f.lengths[k] for f in elements if k < len(f)) for k in range(count)
    )
    padded = [_filled(f, lengths) for f in elements]
    factors = jax.tree.map(
        lambda *a: jnp.concatenate(a, 1), *[f.factors for f in padded]
    )
    coefficients = jnp.concatenate([f.coefficients for f in padded], axis=1)
    return AlgebraElement(coefficients, factors, lengths)


def _filled(element: AlgebraElement, lengths: tuple[int, ...]) -> AlgebraElement:
    """Return an element with terms of these lengths: factors one and terms zero."""
    dtype = element.coefficients.dtype
    shape = element.factors.shift.shape[1:]
    one = jax.tree.map(lambda a: a[None], _constant_blocks(*shape, dtype))
    parts = []
    for index, length in enumerate(lengths):
        known = [element.term(index)] if index < len(element) else []
        missing = length - sum(len(part.shift) for part in known)
        parts += known + [one] * missing
    missing = (0, len(lengths) - len(element))
    coefficients = jnp.pad(element.coefficients, (missing, (0, 0)))
    factors = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    return AlgebraElement(coefficients, factors, lengths)


def _constant_blocks(width: int, size: int, dtype) -> Blocks:
    """Return blocks that are one, for each component."""
    none = jnp.zeros((width, size), dtype)
    score = jnp.zeros((width, size, size), dtype)
    return Blocks(score, none, none, none, jnp.ones((width,), dtype))


def _name(part: Blocks) -> tuple[bytes, ...]:
    # Zero has no sign.
    return tuple((leaf + 0.0).tobytes() for leaf in jax.tree.leaves(part))
