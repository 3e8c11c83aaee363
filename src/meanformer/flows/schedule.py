"""Parameters that change with depth: one in-context map for every depth."""

import abc
import inspect
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.attention import AbstractInContextMap, Sum
from meanformer.attention.abstract import AbstractHolder
from meanformer.attention.stacking import (
    Maps,
    Stacked,
    one_of_each_kind,
    shapes,
    stack_if_alike,
    stacked,
)
from meanformer.errors import (
    InvalidInput,
    as_float_array,
    check,
    check_shape,
    is_concrete,
)
from meanformer.flows.status import AbstractStop
from meanformer.geometry import AbstractSpace
from meanformer.measures import AbstractContext, TokenCloud
from meanformer.typing import ArrayLike, Places

_FUNCTIONS = (
    "a function given to Flow takes the depth alone and returns a map: for a velocity "
    "of points write Flow(PointMap(function)), for one of the measure as well subclass "
    "AbstractInContextMap."
)


class AbstractSchedule(eqx.Module):
    """An in-context map at every depth."""

    @abc.abstractmethod
    def at(self, depth: Float[Array, ""]) -> AbstractInContextMap:
        """Return the map in force at a depth; the depth must be known, not traced."""

    @abc.abstractmethod
    def kinds(self) -> tuple[AbstractInContextMap, ...]:
        """Return maps of every kind and shape that occurs, perhaps without numbers."""

    @abc.abstractmethod
    def velocity(
        self,
        depth: Float[Array, ""],
        mu: AbstractContext,
        x: Float[Array, "m d"],
        positions: Places,
    ) -> Float[Array, "m d"]:
        """Return the value of the map in force at this depth."""

    def field(
        self,
        space: AbstractSpace,
        depth: Float[Array, ""],
        cloud: TokenCloud,
        x: Float[Array, "m d"],
        positions: Places,
    ) -> Float[Array, "m d"]:
        """Return the tangent velocity of points of a space in the measure of a cloud.

        Points off the space are first retracted, so the field is constant along the
        normals and a solver's stages may leave the space.
        """
        context, queries = cloud.moved(space.retract(cloud.points)), space.retract(x)
        velocity = self.velocity(depth, context, queries, positions)
        return space.project(queries, velocity)

    @abc.abstractmethod
    def terms(self) -> tuple["AbstractSchedule", ...]:
        """Return the summands, if the maps are sums; splitting treats them in turn."""

    @property
    @abc.abstractmethod
    def jumps(self) -> Float[Array, " j"] | None:
        """Depths at which the map jumps; a solver must not step over them."""

    @property
    def stops(self) -> tuple[AbstractStop, ...]:
        """Conditions under which the maps lose their meaning, and a solve must end."""
        return ()

    def check(self, mu: TokenCloud) -> None:
        """Raise if the maps are known to have no meaning for these tokens."""


class Constant(AbstractSchedule):
    """The same map at every depth: what a plain map given to `Flow` becomes.

    Args:
        gamma: the map.
    """

    gamma: AbstractInContextMap

    def at(self, depth: Float[Array, ""]) -> AbstractInContextMap:
        """Return the map."""
        return self.gamma

    def kinds(self) -> tuple[AbstractInContextMap, ...]:
        """Return the map."""
        return (self.gamma,)

    def velocity(self, depth, mu, x, positions):
        """Return the value of the map."""
        return self.gamma(mu, x, positions=positions)

    def terms(self) -> tuple[AbstractSchedule, ...]:
        """Return one schedule for each summand of a `Sum`."""
        return tuple(Constant(term) for term in summands(self.gamma))

    @property
    def jumps(self) -> None:
        """There are none."""
        return


class FunctionOfDepth(AbstractSchedule):
    """A function that returns the map at a depth; what a callable becomes.

    Args:
        function: takes a depth (a scalar array, perhaps traced) and returns a map.
        jumps: depths at which the function is discontinuous.
    """

    function: Callable[[Array], AbstractInContextMap]
    jumps: Float[Array, " j"] | None = None
    term: int | None = eqx.field(default=None, static=True)

    def at(self, depth: Float[Array, ""]) -> AbstractInContextMap:
        """Return the function's map, or one of its summands."""
        gamma = self.function(depth)
        return gamma if self.term is None else summands(gamma)[self.term]

    def kinds(self) -> tuple[AbstractInContextMap, ...]:
        """Return the shapes of the function's map."""
        try:
            gamma = eqx.filter_eval_shape(self.at, jnp.zeros(()))
        except (TypeError, ValueError, IndexError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise InvalidInput(
                f"velocity is a function that fails when it is given a depth, a scalar "
                f"({reason}); {_FUNCTIONS}"
            ) from error
        if not isinstance(gamma, AbstractInContextMap):
            is_array = isinstance(gamma, jax.ShapeDtypeStruct)
            kind = "an array" if is_array else f"a {type(gamma).__name__}"
            raise InvalidInput(
                f"velocity is a function that returns {kind} when it is given a depth; "
                f"{_FUNCTIONS}"
            )
        return (gamma,)

    def velocity(self, depth, mu, x, positions):
        """Return the value of the function's map."""
        return self.at(depth)(mu, x, positions=positions)

    def terms(self) -> tuple[AbstractSchedule, ...]:
        """Return one schedule for each summand of the function's `Sum`."""
        count = len(summands(*self.kinds()))
        return tuple(
            FunctionOfDepth(self.function, self.jumps, term) for term in range(count)
        )


class Schedule(AbstractSchedule, AbstractHolder):
    r"""A list of maps along depth, held constant between depths or interpolated.

    Without interpolation map $i$ is in force on $[t_i, t_{i+1})$: one $\theta$ per
    layer. With it the parameters are interpolated linearly between the $t_i$. Outside
    the range the nearest map holds.

    Args:
        maps: the maps; to be interpolated they must be of one kind and shape.
        depths: the increasing $t_i$. By default the maps share $[0, 1]$ equally.
        interpolate: interpolate the parameters instead of holding them.
    """

    maps: Maps
    depths: Float[Array, " k"]
    interpolate: bool = eqx.field(static=True)

    def __init__(
        self,
        maps: Sequence[AbstractInContextMap] | Stacked,
        depths: ArrayLike | None = None,
        *,
        interpolate: bool = False,
    ):
        self.maps = maps if isinstance(maps, Stacked) else tuple(maps)
        self.interpolate = interpolate
        check(len(self.maps) > 0, "maps is empty; a schedule needs at least one map.")
        for gamma in shapes(self.maps):
            if not isinstance(gamma, AbstractInContextMap):
                raise InvalidInput(f"maps holds {gamma!r}, which is not a map.")
        self.depths = _checked_depths(len(self.maps), depths, interpolate)
        if interpolate:
            _check_alike(self.maps)

    def at(self, depth: Float[Array, ""]) -> AbstractInContextMap:
        """Return the held or interpolated map."""
        if self.interpolate:
            return self._interpolated(depth)
        return self.maps[int(self._index(depth))]

    def kinds(self) -> tuple[AbstractInContextMap, ...]:
        """Return one map of each kind."""
        return one_of_each_kind(self.maps)

    def velocity(self, depth, mu, x, positions):
        """Return the value of the held or interpolated map."""
        if self.interpolate or is_concrete(self._index(depth)):
            return self.at(depth)(mu, x, positions=positions)
        return stacked(self.maps).at(
            self._index(depth), lambda gamma: gamma(mu, x, positions=positions)
        )

    def terms(self) -> tuple[AbstractSchedule, ...]:
        """Return one schedule for each summand of the maps."""
        split = [summands(gamma) for gamma in self.maps]
        check(
            len({len(parts) for parts in split}) == 1,
            "the maps of the schedule are sums of different numbers of terms.",
        )
        return tuple(
            Schedule(parts, self.depths, interpolate=self.interpolate)
            for parts in zip(*split, strict=True)
        )

    @property
    def jumps(self) -> Float[Array, " j"] | None:
        """The depths at which the next map takes over."""
        return None if self.interpolate or len(self.maps) == 1 else self.depths[1:]

    def stacked(self) -> "Schedule":
        """Return the schedule with maps that are alike kept as one."""
        return eqx.tree_at(lambda s: s.maps, self, stack_if_alike(self.maps))

    def _index(self, depth: Float[Array, ""]) -> Array:
        return piece_at(self.depths, depth)

    def _interpolated(self, depth: Float[Array, ""]) -> AbstractInContextMap:
        index = jnp.clip(self._index(depth), 0, max(len(self.maps) - 2, 0))
        after = jnp.minimum(index + 1, len(self.maps) - 1)
        depths = self.depths.astype(jnp.result_type(depth))
        start, end = depths[index], depths[after]
        width = jnp.where(end > start, end - start, 1)
        share = jnp.clip((depth - start) / width, 0, 1)

        def blend(first, second):
            if not eqx.is_inexact_array(first):
                return first
            fraction = share.astype(first.dtype)
            return (1 - fraction) * first + fraction * second

        return jax.tree.map(blend, self._map(index), self._map(after))

    def _map(self, index: Int[Array, ""]) -> AbstractInContextMap:
        """Return the map at an index that may be traced; the maps are alike."""
        if is_concrete(index):
            return self.maps[int(index)]
        return stacked(self.maps).at(index, lambda gamma: gamma)


def piece_at(starts: Float[Array, " k"], depth: Float[Array, ""]) -> Array:
    """Return the index of the piece in force at a depth, given where pieces start."""
    # A depth of the tokens' type is compared with the starts rounded to it.
    starts = starts.astype(jnp.result_type(depth))
    index = jnp.searchsorted(starts, depth, side="right") - 1
    return jnp.clip(index, 0, len(starts) - 1)


def summands(gamma: AbstractInContextMap) -> tuple[AbstractInContextMap, ...]:
    """Return the terms of a sum, or the map alone."""
    return gamma.maps if isinstance(gamma, Sum) else (gamma,)


def as_schedule(velocity) -> AbstractSchedule:
    """Return the schedule that a map, a function of depth or a schedule stands for."""
    if isinstance(velocity, AbstractSchedule):
        return velocity
    if isinstance(velocity, AbstractInContextMap):
        return Constant(velocity)
    if callable(velocity) and not isinstance(velocity, type):
        _check_takes_a_depth(velocity)
        return FunctionOfDepth(velocity)
    raise InvalidInput(
        f"velocity is {velocity!r}; it must be an in-context map, a Schedule, or a "
        "function from depth to a map."
    )


def _check_takes_a_depth(function: Callable) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None)
    except TypeError:
        raise InvalidInput(
            f"velocity is a function of {signature}; {_FUNCTIONS}"
        ) from None


def _checked_depths(
    count: int, depths: ArrayLike | None, interpolate: bool
) -> Float[Array, " k"]:
    if depths is None:
        return jnp.linspace(0, 1, count, endpoint=interpolate)
    array = as_float_array("depths", depths)
    check_shape("depths", array, (count,))
    if is_concrete(array):
        check(
            bool((np.diff(array) > 0).all()),
            f"depths is {np.asarray(array)}; it must increase strictly.",
        )
    return array


def _check_alike(maps: Maps) -> None:
    check(
        len(one_of_each_kind(maps)) == 1,
        "maps differ in kind, options, shapes or types; only alike maps can be "
        "interpolated.",
    )
