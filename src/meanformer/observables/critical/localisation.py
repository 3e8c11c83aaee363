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
from meanformer.measures.cloud import check_cloud
from meanformer.observables.critical.extremes import View, refined
from meanformer.observables.sphere import checked_map
from meanformer.observables.structure import terms_of

TOGETHER = 1e-6


class Localisation(eqx.Module):
    r"""Peaks of the potential near which atoms sit.

    Attributes:
        peaks: the local maxima of $\Phi$ that were reached, one per row.
        labels: the peak of each atom.
        distances: how far each atom is from it.
        radius: the largest of these distances.
    """

    peaks: Float[Array, "k d"]
    labels: Int[np.ndarray, " n"]
    distances: Float[Array, " n"]
    radius: float = eqx.field(static=True)


def localisation(flow: Flow, cloud: TokenCloud) -> Localisation:
    r"""Climb the potential of a perceptron from each atom, to the peak it belongs to.

    By damped Newton steps on the sphere; in a flat region an atom stays where it is.

    Args:
        flow: a flow on `Sphere()` with a perceptron that is a gradient.
        cloud: the atoms.
    """
    blocks = [t for t in terms_of(checked_map(flow)) if isinstance(t, Perceptron)]
    if not blocks or not isinstance(flow.space, Sphere):
        raise Unsupported("localisation needs a flow on Sphere() with a perceptron.")
    check_cloud("cloud", cloud)
    view = View(blocks[0] if len(blocks) == 1 else Sum(blocks), cloud, -1)
    ends = refined(view, cloud.points)
    labels, peaks = np.zeros(cloud.count, int), []
    for atom, end in enumerate(np.asarray(ends, np.float64)):
        near = [np.linalg.norm(end - peak) < TOGETHER for peak in peaks]
        labels[atom] = near.index(True) if True in near else len(peaks)
        peaks += [] if True in near else [end]
    reached = jnp.asarray(np.stack(peaks), cloud.points.dtype)
    distances = Sphere().distance(cloud.points, reached[labels])
    return Localisation(reached, labels, distances, float(jnp.max(distances)))
