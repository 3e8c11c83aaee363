"""Which peak of the potential of a perceptron each atom sits near."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.attention import Perceptron, Sum
from meanformer.errors import Unsupported
from meanformer.flows import Flow
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.observables.critical.extremes import Objective, refined
from meanformer.observables.energy.sphere import check_fits, checked_map
from meanformer.observables.energy.structure import terms_of
from meanformer.observables.linearised.velocity_terms import (
    pointwise_part,
    tangent_basis,
    unit_rows,
)

TOGETHER = 1e-6
# How far a point is pushed off a valley, and what counts as bending upwards.
PUSH, UPWARDS = 1e-3, 1e-4


class Localisation(eqx.Module):
    r"""Peaks of the potential near which atoms sit.

    Attributes:
        peaks: the local maxima of $\Phi$ that were reached, one per row.
        labels: the peak of each atom.
        distances: how far each atom is from it.
        radius: the largest of these distances, of atoms that have a mass.
    """

    peaks: Float[Array, "k d"]
    labels: Int[np.ndarray, " n"]
    distances: Float[Array, " n"]
    radius: float = eqx.field(static=True)


def localisation(flow: Flow, cloud: TokenCloud) -> Localisation:
    r"""Climb the potential of a perceptron from each atom, to the peak it belongs to.

    By damped Newton steps on the sphere, off valleys and saddles by a small push; in a
    flat region an atom stays where it is.

    Args:
        flow: a flow on `Sphere()` with a perceptron that is a gradient.
        cloud: the atoms.
    """
    layer = checked_map(flow)
    blocks = [term for term in terms_of(layer) if isinstance(term, Perceptron)]
    if not blocks or not isinstance(flow.space, Sphere):
        raise Unsupported("localisation needs a flow on Sphere() with a perceptron.")
    check_fits(layer, cloud)
    flow.space.check(cloud.points)
    view = Objective(blocks[0] if len(blocks) == 1 else Sum(blocks), cloud, -1)
    ends = refined(view, cloud.points)
    pushed = _pushed(blocks, cloud.moved(ends))
    if pushed is not None:
        ends = refined(view, pushed)
    eps = float(jnp.finfo(cloud.points.dtype).eps)
    together = max(TOGETHER, 10 * eps**0.5)
    labels, peaks = np.zeros(cloud.count, int), []
    for atom, end in enumerate(np.asarray(ends, np.float64)):
        near = [np.linalg.norm(end - peak) < together for peak in peaks]
        labels[atom] = near.index(True) if True in near else len(peaks)
        peaks += [] if True in near else [end]
    reached = jnp.asarray(np.stack(peaks), cloud.points.dtype)
    distances = Sphere().distance(cloud.points, reached[labels])
    radius = float(jnp.max(jnp.where(cloud.weights > 0, distances, 0)))
    return Localisation(reached, labels, distances, radius)


def _pushed(blocks: list[Perceptron], cloud: TokenCloud) -> Float[Array, "n d"] | None:
    """Move points at which the potential bends upwards along that direction."""
    width = cloud.dimension - 1
    count, every = cloud.count, np.arange(cloud.count)
    bends = sum(pointwise_part(block, cloud).matrix for block in blocks)
    bends = np.asarray(bends).reshape(count, width, count, width)[every, :, every, :]
    levels, columns = np.linalg.eigh((bends + bends.transpose(0, 2, 1)) / 2)
    rises = levels[:, -1] > UPWARDS * np.abs(levels).max(initial=1e-300)
    if not rises.any():
        return None
    points = unit_rows(cloud)
    motions = np.einsum(
        "nda,na->nd", tangent_basis(Sphere(), points), columns[:, :, -1]
    )
    pushed = points + np.where(rises, PUSH, 0.0)[:, None] * motions
    pushed = pushed / np.linalg.norm(pushed, axis=1, keepdims=True)
    return jnp.asarray(pushed, cloud.points.dtype)
