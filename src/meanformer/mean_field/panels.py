"""Weighted tokens for a density on the circle, more of them where clusters part.

Tokens follow the flow, and a rule of quadrature for the density at the hand-over goes
on being one for as long as their places are a smooth function of those at the
hand-over. Where two clusters part this function becomes a step, exponentially fast: so
the circle is cut into panels with a Gauss rule on each, and panels are halved there.
"""

from typing import Any, ClassVar, NamedTuple, cast

import diffrax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.flows import Flow, Trajectory, solve
from meanformer.flows.dynamics.recorder import NoProgress
from meanformer.flows.solvers import AbstractAdaptive
from meanformer.flows.status import AbstractStop, Snapshot, Status
from meanformer.measures import FourierDensity, TokenCloud
from meanformer.typing import ArrayLike

ORDER = 12
# There are so many panels at first, and then as many as the density needs.
FEWEST = 16
# Panels whose error is a tolerance are halved when that of another one is so many.
LATEST = 10
# Where to halve is found with so many times the tolerance of the steps.
ROUGHER = 10
# Numbers of tokens, absent ones among them, are multiples of this, from the second on:
# a compiled program then serves again.
SIZE = 42 * ORDER
TINY = np.finfo(np.float64).tiny

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
        losses: the error of the mass of each arc.
        places: where the nodes are.
    """

    starts: np.ndarray
    widths: np.ndarray
    masses: np.ndarray
    losses: np.ndarray
    places: np.ndarray

    def cloud(self, dtype) -> TokenCloud:
        """Return the nodes as tokens, and absent ones after them."""
        absent = _size(self.masses.size) - self.masses.size
        points = np.pad(self.places.reshape(-1, 2), ((0, absent), (0, 0)), "edge")
        masses = np.pad(self.masses.ravel() / self.masses.sum(), (0, absent))
        return TokenCloud(jnp.asarray(points, dtype), jnp.asarray(masses, dtype))

    def errors(self, places: np.ndarray) -> np.ndarray:
        """Return the error of each panel with its nodes at these places."""
        return self.losses + _errors(self.masses, places)


class FirstStepGiven(AbstractAdaptive):
    """Adaptive steps of order 8, the first of every stretch given."""

    step: Float[Array, ""]
    method: diffrax.AbstractSolver = diffrax.Dopri8()

    def first_step(self, start, end) -> Float[Array, ""]:
        """Return the step, in the direction of the stretch."""
        return jnp.where(start < end, self.step, -self.step)


class Unresolved(AbstractStop):
    """Stop when a panel has a larger error than this."""

    limit: Float[Array, ""]
    status: ClassVar[PyTree] = Status.condition_met

    def __call__(self, snapshot: Snapshot) -> Bool[Array, ""]:
        """Return whether one has."""
        cloud = cast(TokenCloud, snapshot.measure)
        masses = cloud.weights.reshape(-1, ORDER)
        errors = _errors(masses, cloud.points.reshape(*masses.shape, 2))
        return jnp.max(errors) > self.limit


def carried(
    flow: Flow,
    panels: Panels,
    depths: ArrayLike,
    *,
    step: float,
    limit: float = np.inf,
    **options: Any,
) -> Trajectory:
    """Return the panels' tokens along depth, up to where an error is too large.

    The options are the tolerances of `solve` and its progress.
    """
    depths = jnp.asarray(depths)
    return solve(
        flow,
        panels.cloud(depths.dtype),
        (float(depths[0]), float(depths[-1])),
        save=depths,
        solver=FirstStepGiven(jnp.asarray(step, depths.dtype)),
        stop=Unresolved(jnp.asarray(limit, depths.dtype)),
        # Reported one by one, any number of depths is visited by one program.
        **options,
    )


def refined(
    flow: Flow,
    density: FourierDensity,
    count: int,
    span: tuple[Any, Any],
    *,
    rtol: float,
    atol: float,
    step: float,
) -> Panels:
    """Return panels at the hand-over that are fine enough up to the end of the span.

    They are carried along, and halved where they soon would not be; there are at most
    so many nodes in all.
    """
    most = max(count // ORDER, 1)
    number = min(FEWEST, most)
    width = 2 * np.pi / number
    panels = _begun(density, width * np.arange(number), np.full(number, width))
    finer = _halved(density, panels, rtol, most)
    while len(finer.starts) > len(panels.starts):
        panels, finer = finer, _halved(density, finer, rtol, most)
    depth, end = span
    rougher = {"rtol": ROUGHER * rtol, "atol": ROUGHER * atol, "progress": NoProgress()}
    while depth != end and len(panels.starts) < most:
        options = {"step": step, "limit": LATEST * rtol, **rougher}
        path = carried(flow, panels, [depth, end], **options)
        is_unresolved = bool(path.status == Status.condition_met)
        depth = path.depths[-1] if is_unresolved else end
        moved = np.asarray(path.points[-1])[: panels.masses.size]
        panels = panels._replace(places=moved.reshape(panels.places.shape))
        panels = _halved(density, panels, rtol, most)
    return _begun(density, panels.starts, panels.widths)


def _halved(
    density: FourierDensity, panels: Panels, tolerance: float, most: int
) -> Panels:
    """Return panels with those halved whose error is larger, the worst if too many."""
    errors = panels.errors(panels.places)
    room = most - len(errors)
    if room < len(errors):
        tolerance = max(tolerance, np.sort(errors)[-1 - room])
    coarse = errors > tolerance
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
    padded = np.resize(angles, _size(angles.size))
    values = np.asarray(density.density(padded), np.float64)[: angles.size]
    # A series that is cut off may fall a little below zero.
    values = np.maximum(values.reshape(angles.shape), 0)
    masses = values * widths[:, None] * _MASSES / 2
    places = np.stack([np.cos(angles), np.sin(angles)], -1)
    # The rule is exact for twice the degree of the series: its error is a square.
    tails = np.abs(values @ _VALUES_TO_SERIES[-2:].T).max(1)
    losses = masses.sum(1) * (tails / np.maximum(values.max(1), tails + TINY)) ** 2
    return Panels(starts, widths, masses, losses, places)


def _errors(masses: Any, places: Any) -> Any:
    """Return the mass of each panel times the error of its places as a series."""
    xp: Any = np if isinstance(places, np.ndarray) else jnp
    last = xp.asarray(_VALUES_TO_SERIES[-2:], places.dtype)
    tails = xp.einsum("kj,...jc->...kc", last, places)
    tails = xp.linalg.norm(tails, axis=-1).max(-1)
    return xp.minimum(tails, 1) * masses.sum(-1)


def _size(count: int) -> int:
    """Return a size with room for so many tokens."""
    return SIZE * max(-(-count // SIZE), 2)
