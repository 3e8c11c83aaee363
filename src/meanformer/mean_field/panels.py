"""Weighted tokens for a density on the circle, more of them where clusters part.

Tokens follow the flow, and a rule of quadrature for the density at the hand-over goes
on being one for as long as their places are a smooth function of those at the
hand-over. Where two clusters part this function becomes a step, exponentially fast: so
the circle is cut into panels with a Gauss rule on each, and panels are halved there.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from meanformer.flows import Flow, solve
from meanformer.measures import FourierDensity, TokenCloud, pad

ORDER = 12
# How many tokens there may be, or for each one at the hand-over.
FEW, GROWTH = 1536, 2
# How many tolerances an error may be; stages that end with a larger one are shortened.
SLACK = 1e3
STAGES, SHORTEST = 16, 4096
# Stages only tell where to halve: so many tolerances are good enough.
ROUGHER = 10
# Stages are solved with multiples of so many tokens, absent ones among them, so that
# compiled programs serve again.
SIZE = 512

_NODES, _MASSES = np.polynomial.legendre.leggauss(ORDER)
_VALUES_TO_SERIES = np.linalg.inv(np.polynomial.legendre.legvander(_NODES, ORDER - 1))
_HALVES = np.concatenate([_NODES / 2 - 0.5, _NODES / 2 + 0.5])
_TO_HALVES = np.polynomial.legendre.legvander(_HALVES, ORDER - 1) @ _VALUES_TO_SERIES


class Panels(NamedTuple):
    """Arcs of the circle at the hand-over, with the places of their nodes later on.

    Attributes:
        starts: the angle at which each arc begins.
        widths: the width of each.
        masses: the mass of each node.
        places: where the nodes are.
    """

    starts: np.ndarray
    widths: np.ndarray
    masses: np.ndarray
    places: np.ndarray

    def cloud(self, dtype, multiple: int = 1) -> TokenCloud:
        """Return the nodes as tokens, and absent ones up to a multiple."""
        cloud = TokenCloud(
            jnp.asarray(self.places.reshape(-1, 2), dtype),
            jnp.asarray(self.masses.ravel(), dtype),
            normalize=True,
        )
        return pad(cloud, -(-cloud.count // multiple) * multiple)

    def errors(self, places: np.ndarray) -> np.ndarray:
        """Return the mass of each panel times the error of its places as a series."""
        series = np.einsum("kj,...jc->...kc", _VALUES_TO_SERIES, places)
        tails = np.linalg.norm(series[..., -2:, :], axis=-1).max(-1)
        return np.minimum(tails, 1) * self.masses.sum(1)


def refined(
    flow: Flow,
    density: FourierDensity,
    count: int,
    span: tuple[float, float],
    *,
    rtol: float,
    atol: float,
) -> Panels:
    """Return panels at the hand-over that are fine enough up to the end of the span.

    Equal ones with so many nodes in all are carried along in stages, and halved where
    the next stage would need it.
    """
    number = -(-count // ORDER)
    width = 2 * np.pi / number
    panels = _begun(density, width * np.arange(number), np.full(number, width))
    most = max(GROWTH * number, FEW // ORDER)
    depth, end = span
    rough = {"rtol": ROUGHER * rtol, "atol": ROUGHER * atol}
    step = (end - depth) / STAGES
    while depth != end and len(panels.starts) <= most:
        goal = depth + step if abs(step) < abs(end - depth) else end
        cloud = panels.cloud(density.moments.dtype, SIZE)
        path = solve(flow, cloud, (depth, goal), save=2, **rough)
        moved = np.asarray(path.points[-1])[: panels.masses.size]
        later = panels._replace(places=moved.reshape(panels.places.shape))
        if (
            later.errors(later.places).max() > SLACK * rtol
            and abs(goal - depth) > abs(end - span[0]) / SHORTEST
        ):
            step = (goal - depth) / 2
            continue
        panels = _halved(density, later, rtol)
        depth, step = goal, 1.5 * (goal - depth)
    return _begun(density, panels.starts, panels.widths)


def _halved(density: FourierDensity, panels: Panels, tolerance: float) -> Panels:
    """Return panels with those halved that would not suffice for long."""
    coarse = panels.errors(panels.places) > tolerance
    if not coarse.any():
        return panels
    widths = np.repeat(panels.widths[coarse] / 2, 2)
    starts = np.repeat(panels.starts[coarse], 2)
    starts[1::2] += widths[1::2]
    places = np.einsum("ij,pjc->pic", _TO_HALVES, panels.places[coarse])
    places = places.reshape(-1, ORDER, 2)
    places /= np.linalg.norm(places, axis=-1, keepdims=True)
    halves = _begun(density, starts, widths)._replace(places=places)
    kept = (array[~coarse] for array in panels)
    return Panels(*map(np.concatenate, zip(kept, halves, strict=True)))


def _begun(density: FourierDensity, starts: np.ndarray, widths: np.ndarray) -> Panels:
    """Return panels at the hand-over."""
    angles = starts[:, None] + widths[:, None] * (_NODES + 1) / 2
    values = np.asarray(density.density(angles.ravel())).reshape(angles.shape)
    # A series that is cut off may fall a little below zero.
    masses = np.maximum(values, 0) * widths[:, None] * _MASSES / 2
    return Panels(
        starts, widths, masses, np.stack([np.cos(angles), np.sin(angles)], -1)
    )
