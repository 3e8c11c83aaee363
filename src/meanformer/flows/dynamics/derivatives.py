"""Derivatives of a solve, forward and backward; errors for solves without any.

Diffrax has one loop over steps that can be differentiated backward and another that can
be differentiated forward. Here each derivative is computed through the loop that it
needs: a solve is a primitive of JAX whose derivative, a linear map, is another one,
evaluated by one loop and transposed by the other.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import diffrax
import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

from meanformer.errors import Unsupported

Result = TypeVar("Result")
Method = TypeVar("Method", bound=diffrax.AbstractSolver)
Leaves = Sequence[Array]
Axes = tuple[int | None, ...]

# States kept for the gradient of one stretch. Where there are more steps between two
# saved depths, they are computed again: 561 steps at most twice.
CHECKPOINTS = 32


class Mode(NamedTuple):
    """How the loop over steps can be differentiated.

    Attributes:
        adjoint: the loop of diffrax.
        stages: the kind of its loop over the stages of a step.
    """

    adjoint: diffrax.AbstractAdjoint
    stages: str | None

    def method(self, method: Method) -> Method:
        """Return a method whose steps can be differentiated so."""
        if self.stages is None or not isinstance(method, diffrax.AbstractRungeKutta):
            return method
        return eqx.tree_at(
            lambda m: m.scan_kind, method, self.stages, is_leaf=lambda x: x is None
        )


BACKWARD = Mode(diffrax.RecursiveCheckpointAdjoint(checkpoints=CHECKPOINTS), None)
FORWARD = Mode(diffrax.ForwardMode(), "lax")
# It costs more than either; for second derivatives.
BOTH = Mode(diffrax.DirectAdjoint(), "bounded")


def in_both_modes(advance: Callable[..., Result], *arguments: PyTree) -> Result:
    """Return `advance(*arguments, mode)` with forward and backward derivatives.

    Without derivatives, and for gradients, it is what it is in the mode `BACKWARD`.
    A forward derivative costs a solve of its own beside that of the value.

    Args:
        advance: takes the arguments and a `Mode`, returns a tree of arrays.
        arguments: trees; the derivative is in their floating-point arrays.
    """
    arrays, rest = eqx.partition(arguments, eqx.is_array)
    leaves, tree = jax.tree.flatten(arrays)
    trees = []

    def run(mode: Mode, *leaves: Array) -> tuple[Leaves, Leaves]:
        moved = advance(*eqx.combine(jax.tree.unflatten(tree, leaves), rest), mode)
        parts = eqx.partition(moved, eqx.is_inexact_array)
        (numbers, first), (counts, second) = map(jax.tree.flatten, parts)
        trees[:] = first, second
        return numbers, counts

    run, hidden, program = _opened(run, leaves)
    found = _value.bind(*hidden, *leaves, stretch=_Stretch(run, program))
    count = trees[0].num_leaves
    return eqx.combine(*map(jax.tree.unflatten, trees, (found[:count], found[count:])))


def _opened(run: Callable, leaves: Leaves) -> tuple[Callable, Leaves, ClosedJaxpr]:
    """Return a function with its closure turned into arguments, these, and its jaxpr.

    A function of depth may enclose what somebody differentiates in: such numbers become
    leaves. They are to be had only now, so that all modes are traced, not one.
    """
    program = jax.make_jaxpr(partial(run, BACKWARD))(*leaves)
    if not any(map(_is_traced, program.consts)):
        return run, [], program
    modes = (BACKWARD, FORWARD, BOTH)
    programs = [jax.make_jaxpr(partial(run, mode))(*leaves) for mode in modes]
    enclosed = [const for found in programs for const in found.consts]
    hidden = list({id(const): const for const in filter(_is_traced, enclosed)}.values())
    places = {id(const): place for place, const in enumerate(hidden)}
    count = len(program.out_avals) - len(_numbers(program.out_avals))

    def opened(mode: Mode, *leaves: Array) -> tuple[Leaves, Leaves]:
        found = programs[modes.index(mode)]
        consts = [
            leaves[places[id(const)]] if id(const) in places else const
            for const in found.consts
        ]
        results = jaxpr_as_fun(ClosedJaxpr(found.jaxpr, consts))(*leaves[len(hidden) :])
        numbers = len(results) - count
        return results[:numbers], results[numbers:]

    return opened, hidden, jax.make_jaxpr(partial(opened, BACKWARD))(*hidden, *leaves)


def _is_traced(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


class _Stretch(NamedTuple):
    """A solve, as a function of its leaves.

    Attributes:
        run: takes a mode and leaves, returns floating-point arrays and others.
        program: the same in the mode `BACKWARD`, traced, with one list of results.
        batches: for each `vmap` around it, the axes of the leaves, and its size.
    """

    run: Callable
    program: ClosedJaxpr
    batches: tuple[tuple[Axes, int], ...] = ()

    def __call__(self, *leaves: Array) -> Leaves:
        function = jaxpr_as_fun(self.program)
        for axes, _ in self.batches:
            function = jax.vmap(function, in_axes=axes)
        return function(*leaves)

    @property
    def sizes(self) -> list[int]:
        """The sizes of the batches, outermost first, as results have them."""
        return [size for _, size in reversed(self.batches)]


class _Derivative(NamedTuple):
    """The linear map that is the derivative of a solve in some of its leaves.

    Attributes:
        stretch: the solve.
        moving: the indices of those leaves.
        is_transposed: whether it is the transposed map.
    """

    stretch: _Stretch
    moving: tuple[int, ...]
    is_transposed: bool = False

    def __call__(self, mode: Mode, leaves: Leaves, vectors: Leaves) -> Leaves:
        """Return the map of vectors, at the leaves."""
        function = partial(self._single, mode)
        for axes, _ in self.stretch.batches:
            function = jax.vmap(function, in_axes=(list(axes), 0))
        return function(list(leaves), list(vectors))

    def _single(self, mode: Mode, leaves: Leaves, vectors: Leaves) -> Leaves:
        def numbers(*moved: Array) -> Leaves:
            return self.stretch.run(mode, *_replaced(leaves, self.moving, moved))[0]

        start = [leaves[index] for index in self.moving]
        if self.is_transposed:
            return list(jax.vjp(numbers, *start)[1](vectors))
        return jax.jvp(numbers, start, vectors)[1]

    def transposed(self) -> "_Derivative":
        """Return the transposed map."""
        return self._replace(is_transposed=not self.is_transposed)

    def shapes(self, *, of_results: bool) -> list[jax.core.ShapedArray]:
        """Return the shapes of the vectors that it takes or returns."""
        if of_results != self.is_transposed:
            return _numbers(self.stretch.program.out_avals)
        return [self.stretch.program.in_avals[index] for index in self.moving]

    def split(self, operands: Sequence) -> tuple[Sequence, Sequence]:
        """Return leaves and vectors apart."""
        count = len(self.stretch.program.in_avals)
        return operands[:count], operands[count:]


def _numbers(shapes: Sequence) -> list:
    """Return those of floating-point arrays, which come first."""
    return [shape for shape in shapes if jnp.issubdtype(shape.dtype, jnp.inexact)]


def _replaced(leaves: Leaves, indices: Sequence[int], others: Leaves) -> Leaves:
    whole = list(leaves)
    for index, other in zip(indices, others, strict=True):
        whole[index] = other
    return whole


def _nonzero(tangents: Sequence) -> tuple[int, ...]:
    return tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)


def _batched(operands: Leaves, axes: Sequence[int | None]) -> tuple[Leaves, Axes, int]:
    """Return operands with the batch first, the axes that they have then, its size."""
    moved = [
        operand if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    axes = tuple(None if axis is None else 0 for axis in axes)
    return moved, axes, moved[axes.index(0)].shape[0]


def _with_batches(sizes: Sequence[int], shapes: Sequence) -> list:
    return [
        jax.core.ShapedArray((*sizes, *shape.shape), shape.dtype) for shape in shapes
    ]


_value, _apply = Primitive("solve"), Primitive("derivative_of_solve")
_value.multiple_results = _apply.multiple_results = True


@_value.def_impl
def _evaluate(*leaves, stretch: _Stretch):
    return stretch(*leaves)


@_value.def_abstract_eval
def _shapes_of_value(*leaves, stretch: _Stretch):
    return _with_batches(stretch.sizes, stretch.program.out_avals)


def _value_and_change(leaves, tangents, *, stretch: _Stretch):
    found = _value.bind(*leaves, stretch=stretch)
    derivative = _Derivative(stretch, _nonzero(tangents))
    shapes = derivative.shapes(of_results=False)
    vectors = []
    for index, shape in zip(derivative.moving, shapes, strict=True):
        # The vectors have all batches, also those that the leaf has not.
        axes = reversed([axes[index] for axes, _ in stretch.batches])
        sizes = zip(axes, stretch.sizes, strict=True)
        kept = [1 if axis is None else size for axis, size in sizes]
        vector = tangents[index].reshape(*kept, *shape.shape)
        vectors.append(jnp.broadcast_to(vector, (*stretch.sizes, *shape.shape)))
    changes = _apply.bind(*leaves, *vectors, derivative=derivative)
    rest = [
        ad.Zero(jax.typeof(count).to_tangent_aval()) for count in found[len(changes) :]
    ]
    return found, [*changes, *rest]


def _value_batched(leaves, axes, *, stretch: _Stretch):
    leaves, axes, size = _batched(leaves, axes)
    stretch = stretch._replace(batches=(*stretch.batches, (axes, size)))
    found = _value.bind(*leaves, stretch=stretch)
    return found, [0] * len(found)


@_apply.def_impl
def _evaluate_change(*operands, derivative: _Derivative):
    mode = BACKWARD if derivative.is_transposed else FORWARD
    return derivative(mode, *derivative.split(operands))


@_apply.def_abstract_eval
def _shapes_of_change(*operands, derivative: _Derivative):
    shapes = derivative.shapes(of_results=True)
    return _with_batches(derivative.stretch.sizes, shapes)


def _change_transposed(cotangents, *operands, derivative: _Derivative):
    leaves, _ = derivative.split(operands)
    vectors = map(ad.instantiate_zeros, cotangents)
    found = _apply.bind(*leaves, *vectors, derivative=derivative.transposed())
    return [None] * len(leaves) + found


def _change_of_change(operands, tangents, *, derivative: _Derivative):
    """Return the change by other vectors, and that at other leaves."""
    (leaves, vectors), (moves, changes) = map(derivative.split, (operands, tangents))
    found = _apply.bind(*operands, derivative=derivative)
    changes = map(ad.instantiate_zeros, changes)
    total = _apply.bind(*leaves, *changes, derivative=derivative)
    moving = _nonzero(moves)
    if moving:
        bent = jax.jvp(
            lambda *moved: derivative(BOTH, _replaced(leaves, moving, moved), vectors),
            [leaves[index] for index in moving],
            [moves[index] for index in moving],
        )[1]
        total = [one + other for one, other in zip(total, bent, strict=True)]
    return found, total


def _change_batched(operands, axes, *, derivative: _Derivative):
    """Put the batch first; the vectors all have it, so that the results do."""
    operands, axes, size = _batched(operands, axes)
    (leaves, vectors), axes = derivative.split(operands), derivative.split(axes)
    vectors = [
        jnp.broadcast_to(vector, (size, *vector.shape)) if axis is None else vector
        for vector, axis in zip(vectors, axes[1], strict=True)
    ]
    stretch = derivative.stretch
    stretch = stretch._replace(batches=(*stretch.batches, (axes[0], size)))
    derivative = derivative._replace(stretch=stretch)
    found = _apply.bind(*leaves, *vectors, derivative=derivative)
    return found, [0] * len(found)


ad.primitive_jvps[_value] = _value_and_change
ad.primitive_jvps[_apply] = _change_of_change
ad.primitive_transposes[_apply] = _change_transposed
batching.primitive_batchers[_value] = _value_batched
batching.primitive_batchers[_apply] = _change_batched
for primitive, implementation in ((_value, _evaluate), (_apply, _evaluate_change)):
    lowering = mlir.lower_fun(implementation, multiple_results=True)
    mlir.register_lowering(primitive, lowering)


def without_derivative(tree: PyTree, reason: str) -> PyTree:
    """Return the same; raise with a reason if somebody differentiates through it."""
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(_constant(arrays, reason), rest)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _constant(arrays: PyTree, reason: str) -> PyTree:
    return arrays


@_constant.defjvp
def _refuse(reason, primals, tangents):
    raise Unsupported(reason)
