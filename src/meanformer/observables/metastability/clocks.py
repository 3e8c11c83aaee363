"""Clocks along a trajectory, in which metastable phases take ordinary time."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from meanformer.attention import AbstractInContextMap
from meanformer.attention.log_domain import scaled_velocity
from meanformer.flows import Flow, Trajectory
from meanformer.flows.trajectories.atoms import Atoms
from meanformer.flows.trajectories.interpolation import Place, hermite
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.numerics.special.quadrature import gauss_legendre
from meanformer.observables.metastability.attraction import atoms_at, attraction_along

NODES = 8
# By how much the way of a stretch may be longer than the distance it leads.
BEND = 0.01
ROUNDINGS = 64


class Clocks(eqx.Module):
    r"""Six readings of time at the saved depths.

    Arc lengths and exponential clocks are zero at the first of them.

    Attributes:
        depths: depth itself.
        log_depths: its logarithm, from the second saved depth on.
        arc_lengths: length of the path of all tokens in $\mathbb{R}^{nd}$, each token
            of positive weight counted once.
        published: arc length over $\log\beta$, the abscissa of the published staircase;
            arc length is what their division by the norm of the velocity amounts to.
            `None` unless $\beta > 1$.
        exponential: $s$ with $\mathrm{d}t = e^{\beta(1-\max_{i\ne j}\langle x_i,
            x_j\rangle)}\,\mathrm{d}s$, the largest inner product being that of the
            moment, of tokens that have not been joined.
        initial_exponential: the same with the largest inner product at the first saved
            depth, as it is also found in print: there all happens at times of order
            $1/\beta$.
        is_smooth: whether no tokens were joined since the saved depth before, and the
            length of the way is the distance, to one per cent. Elsewhere saved depths
            are too far apart: there the exponential clock is a rough guess, and so is
            arc length without `LongDepth`.
    """

    depths: Float[Array, " t"]
    log_depths: Float[Array, " u"]
    arc_lengths: Float[Array, " t"]
    published: Float[Array, " t"] | None
    exponential: Float[Array, " t"]
    initial_exponential: Float[Array, " t"]
    is_smooth: Bool[Array, " t"]


def clocks(trajectory: Trajectory, flow: Flow | None = None) -> Clocks:
    r"""Read all clocks along a trajectory on the sphere.

    Arc length is the solver's own with `LongDepth`. Otherwise, and for the exponential
    clock, it is integrated by Gauss rules between saved depths, on a cubic
    interpolation of the tokens in arc length (in depth without `LongDepth`): accurate
    where saved depths are close to each other on that scale. Stretches where they are
    not are marked: save depths around joins, and, without `LongDepth`, wherever tokens
    move.

    Args:
        trajectory: the solution of a flow with scores $\beta\langle x, y\rangle$ and
            values $cx$, $c > 0$.
        flow: the flow, for a trajectory that does not know it.

    Returns:
        The clocks. Cost: some velocities for each saved depth.
    """
    _, layer, (_, beta, *_) = attraction_along(trajectory, flow, "clocks")
    readings = _read_stretches(layer, trajectory, beta)
    arcs = np.append(0, np.cumsum(readings[0]))
    if trajectory.atoms is not None and trajectory.atoms.arc_length is not None:
        arcs = np.asarray(trajectory.atoms.arc_length, np.float64)
        arcs = arcs - arcs[0]
    lengths = np.diff(arcs)
    rounding = ROUNDINGS * float(jnp.finfo(trajectory.points.dtype).eps)
    is_smooth = np.abs(lengths - readings[2]) <= BEND * lengths + rounding
    first = beta * float(_rise(trajectory.points[0], atoms_at(trajectory, 0)[0]))
    elapsed = np.asarray(trajectory.depths, np.float64)
    with np.errstate(divide="ignore"):
        logs = np.log(elapsed - elapsed[0]) - first
    dtype = trajectory.points.dtype
    return Clocks(
        trajectory.depths,
        jnp.log(trajectory.depths[1:]),
        jnp.asarray(arcs, dtype),
        jnp.asarray(arcs / np.log(beta), dtype) if beta > 1 else None,
        jnp.asarray(np.append(0, np.cumsum(readings[1])), dtype),
        jnp.asarray(np.exp(np.minimum(logs, np.log(np.finfo(dtype).max))), dtype),
        jnp.asarray(np.append(True, is_smooth) & ~_joined(trajectory)),
    )


def _read_stretches(layer, trajectory: Trajectory, beta: float) -> np.ndarray:
    """Return length, exponential time and distance of every stretch, as three rows."""
    atoms, dtype = trajectory.atoms, trajectory.points.dtype
    readings = trajectory.depths
    if atoms is not None and atoms.arc_length is not None:
        readings = atoms.arc_length
    widths = jnp.diff(readings).astype(dtype)
    before = jax.tree.map(lambda leaf: leaf[:-1], atoms)
    ends = jnp.stack([trajectory.points[:-1], trajectory.points[1:]], axis=1)
    cloud, number = trajectory.cloud(0), jnp.asarray(beta, dtype)
    found = _integrated(layer, cloud, number, ends, widths, before)
    return np.asarray(found, np.float64).T.reshape(3, -1)


@eqx.filter_jit
def _integrated(
    layer: AbstractInContextMap,
    cloud: TokenCloud,
    beta: Float[Array, ""],
    ends: Float[Array, "u 2 n d"],
    widths: Float[Array, " u"],
    before: Atoms | None,
) -> Float[Array, "u 3"]:
    """Integrate the readings of all stretches, with the atoms at their beginnings."""
    has_length = before is not None and before.arc_length is not None
    nodes, shares = (jnp.asarray(a, widths.dtype) for a in gauss_legendre(NODES))

    def rates(points, weights, counts):
        """Return tangents, speed and exponential rate per unit of the variable."""
        pull = scaled_velocity(layer, points, weights)
        speed = jnp.sqrt(counts @ jnp.sum(pull.velocities**2, axis=1))
        log_rate = -beta * _rise(points, weights)
        if not has_length:
            scale = jnp.exp(pull.log_scale)
            return scale * pull.velocities, scale * speed, jnp.exp(log_rate)
        safe = jnp.where(speed > 0, speed, 1)
        rate = jnp.exp(log_rate - pull.log_scale) / safe
        return pull.velocities / safe, speed / safe, jnp.where(speed > 0, rate, 0)

    def readings(ends, width, before):
        counts = (cloud.weights > 0).astype(cloud.weights.dtype)
        atoms = cloud.weights, counts
        if before is not None:
            atoms = before.weights(cloud), before.counts(cloud)
        tangents = jax.vmap(lambda points: rates(points, *atoms)[0])(ends)

        def at(node):
            place = Place(1, (1 + node) / 2, width)
            points = Sphere().retract(hermite(place, ends, tangents))
            return jnp.stack(rates(points, *atoms)[1:])

        distance = jnp.sqrt(atoms[1] @ Sphere().distance(*ends) ** 2)
        return jnp.append(width * shares @ jax.vmap(at)(nodes), distance)

    axes = (0, 0, None if before is None else 0)
    return jax.vmap(readings, axes)(ends, widths, before)


def _rise(points: Float[Array, "n d"], weights: Float[Array, " n"]) -> Array:
    r"""Return $1 - \max_{i\ne j}\langle x_i, x_j\rangle$ over tokens that are there."""
    squares = jnp.sum((points[:, None, :] - points[None, :, :]) ** 2, axis=2)
    present = weights > 0
    apart = present[:, None] & present[None, :] & ~jnp.eye(len(points), dtype=bool)
    # A lone atom has no other: two is as far as it gets.
    return jnp.min(jnp.where(apart, squares / 2, 2))


def _joined(trajectory: Trajectory) -> np.ndarray:
    """Return at which saved depths tokens had been joined since the one before."""
    if trajectory.atoms is None:
        return np.zeros(len(trajectory), bool)
    leaders = np.asarray(trajectory.atoms.leaders)
    return np.append(False, (leaders[1:] != leaders[:-1]).any(axis=1))
