"""Sums over all pairs of queries and tokens, shared among several devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from meanformer.errors import InvalidInput, check
from meanformer.numerics.arrays import padded
from meanformer.numerics.fourier.levels import Devices
from meanformer.numerics.fourier.report import warn_if_exact
from meanformer.numerics.fourier.softmax import fourier_softmax
from meanformer.numerics.fourier.sums import AbstractFastSums, Auto, ladder_of
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import (
    AbstractPairSums,
    Blocked,
    MassAndVectors,
    plan_softmax,
)
from meanformer.numerics.pair_sums.tiles import common_dtype, in_one_precision
from meanformer.numerics.sharded.device_ring import (
    DeviceRing,
    Queries,
    Share,
    ring_hardmax,
    ring_kernel,
    ring_softmax,
)


class Sharded(AbstractFastSums):
    """Sums over several devices, each of which holds its share of queries and tokens.

    Exact sums: shares of tokens go round the devices, and each device adds what they
    contribute to its own queries. No device ever holds more than two shares of the
    tokens, nor a pair that is not of its own queries, in derivatives neither. Fourier
    sums: each device transforms its own tokens, the coefficients are added up, and each
    evaluates its own queries.

    Arrays that `place` has laid out over the devices stay where they are; others are
    laid out at each call.

    Args:
        mesh: the devices, from `jax.make_mesh` for example.
        sums: how each device sums over a share; hardmax, which needs exact ties, is
            always summed in blocks.
        axis: the axis of the mesh to share along; by default the first. Devices along
            other axes do the same work.

    Cost: on each of $p$ devices the time of $1/p$ of the pairs, and the memory of $2/p$
    of the tokens; every token travels $p - 1$ times.
    """

    mesh: Mesh = eqx.field(static=True)
    sums: AbstractPairSums
    axis: str = eqx.field(static=True)

    def __init__(
        self,
        mesh: Mesh,
        sums: AbstractPairSums | None = None,
        *,
        axis: str | None = None,
    ):
        self.mesh = _checked_mesh(mesh)
        self.sums = _checked_sums(sums)
        self.axis = _checked_axis(mesh, axis)

    def place(self, arrays: PyTree) -> PyTree[Array]:
        """Lay out a cloud, or arrays, over the devices, in equal shares of their rows.

        Args:
            arrays: a `TokenCloud`, an array or a tree of arrays, with a number of rows
                that is a multiple of that of the devices; in several processes, the
                same in each.
        """
        size = self.mesh.shape[self.axis]
        for array in jax.tree.leaves(arrays):
            count = len(array) if jnp.ndim(array) else 1
            check(
                count % size == 0,
                f"an array has {count} rows, which {size} devices cannot share "
                "equally; add tokens of weight zero with pad(cloud, count).",
            )
        layout = NamedSharding(self.mesh, PartitionSpec(self.axis))
        return jax.device_put(arrays, layout)

    def softmax(self, pairs, values):
        """Log-mass and mean under the exponential of the score."""
        ladder = self.ladder(pairs, values)
        if ladder is None:
            return spread_softmax(self.mesh, self.axis, self.sums, pairs, values)
        result, report = fourier_softmax(pairs, values, ladder)
        if not isinstance(self.sums, Auto):
            warn_if_exact(report, ladder.tolerance)
        return result

    def ladder(self, pairs, values):
        """Return the levels of the sums that one device does."""
        ladder = ladder_of(self.sums, pairs, values)
        return ladder and ladder.shared(Devices(self.mesh, self.axis, spread_exactly))

    def plan(self, pairs, values):
        """Plan as for one device; the time is shared."""
        plan = plan_softmax(self.sums, pairs, values)
        size = self.mesh.shape[self.axis]
        reason = f"{plan.reason}; {size} devices share the work"
        return plan._replace(reason=reason, seconds=plan.seconds / size)

    def kernel(self, pairs, values, profile):
        """Mass and moment under a function of the score."""
        return _kernel(self, pairs, values, profile)

    def hardmax(self, pairs, values, tolerance):
        """Best score and mean over the tokens that reach it."""
        return _hardmax(self, pairs, values, tolerance)


@eqx.filter_jit
def spread_softmax(
    mesh: Mesh, axis: str, sums: AbstractPairSums, pairs: Pairs, values: Array
) -> MassAndVectors:
    """Log-mass and mean, by shares of the tokens that go round the devices."""
    sharded = Sharded(mesh, sums, axis=axis)
    return _spread(sharded, partial(ring_softmax, sums), pairs, values)


def spread_exactly(
    mesh: Mesh, axis: str, pairs: Pairs, values: Array
) -> MassAndVectors:
    """Log-mass and mean in blocks, on several devices."""
    return spread_softmax(mesh, axis, Blocked(), pairs, values)


@eqx.filter_jit
def _kernel(
    sharded: Sharded, pairs: Pairs, values: Array, profile: Callable
) -> MassAndVectors:
    def on_device(ring, queries, share):
        return ring_kernel(sharded.sums, ring, profile, queries, share)

    return _spread(sharded, on_device, pairs, values)


@eqx.filter_jit
def _hardmax(
    sharded: Sharded, pairs: Pairs, values: Array, tolerance: Any
) -> MassAndVectors:
    def on_device(ring, queries, share):
        return ring_hardmax(ring, tolerance, queries, share)

    return _spread(sharded, on_device, pairs, values)


def _spread(
    sharded: Sharded, on_device: Callable, pairs: Pairs, values: Float[Array, "n v"]
) -> MassAndVectors:
    """Run a sum on all devices, each with its queries and its share of the tokens."""
    _check_layout(pairs, values)
    count, dtype = len(pairs.tilts), common_dtype(pairs, values)
    pairs, values = in_one_precision(pairs, values)
    ring = DeviceRing(sharded.axis, sharded.mesh.shape[sharded.axis])
    queries = Queries(pairs.tilts, pairs.first, pairs.last)
    share = Share(pairs.points, pairs.weights, pairs.offsets, values)
    along = PartitionSpec(sharded.axis)
    # Sums know nothing of the mesh, and cannot say which of their arrays differ
    # between devices; nothing that leaves the devices is claimed to be the same.
    results = jax.shard_map(
        partial(on_device, ring),
        mesh=sharded.mesh,
        in_specs=along,
        out_specs=along,
        check_vma=False,
    )(padded(queries, ring.size), padded(share, ring.size))
    return jax.tree.map(lambda a: a[:count].astype(dtype), results)


def _check_layout(pairs: Pairs, values: Array) -> None:
    """Raise if an array is on a mesh with axes that the program itself must mention."""
    for array in jax.tree.leaves((pairs, values)):
        check(
            AxisType.Explicit not in jax.typeof(array).sharding.mesh.axis_types,
            "an array is laid out over axes of type Explicit; lay it out with "
            "Sharded(mesh).place(array), or make the mesh with axes of type Auto.",
        )


def _checked_mesh(mesh: Any) -> Mesh:
    if isinstance(mesh, Mesh):
        # Axes of type Auto: compilers lay out what the rest of a program computes.
        return Mesh(mesh.devices, mesh.axis_names)
    raise InvalidInput(
        f"mesh is a {type(mesh).__name__}; it must be a jax.sharding.Mesh: "
        'jax.make_mesh((4,), ("tokens",)) makes one of four devices.'
    )


def _checked_sums(sums: Any) -> AbstractPairSums:
    if isinstance(sums, AbstractPairSums) and not isinstance(sums, Sharded):
        return sums
    check(
        sums is None,
        f"sums is a {type(sums).__name__}; it must be what one device does: Auto(…), "
        "Fourier(…) or Blocked(…).",
    )
    return Blocked()


def _checked_axis(mesh: Mesh, axis: Any) -> str:
    names = mesh.axis_names
    check(
        axis is None or axis in names,
        f"axis is {axis!r}; it must be an axis of the mesh: "
        f"{', '.join(map(repr, names))}.",
    )
    return names[0] if axis is None else axis
