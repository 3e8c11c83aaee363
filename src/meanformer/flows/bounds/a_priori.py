"""Bounds on a flow before it is solved: how far it spreads, how fast flows part."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from meanformer.attention import AbstractInContextMap
from meanformer.attention.bounds import speed_bound, stability_constant
from meanformer.errors import Unsupported, check
from meanformer.flows.flow import Flow
from meanformer.flows.schedule import Constant, Schedule
from meanformer.geometry import Euclidean, Sphere
from meanformer.typing import ArrayLike

ACCURACY = 1e-12


def radius_bound(
    flow: Flow | AbstractInContextMap, radius: float, depth: ArrayLike
) -> float | np.ndarray:
    r"""Bound on the radius of the tokens at a depth, from the radius at the start.

    $$R(t) \le \exp\Bigl(\int_0^t |V(s)|\,\mathrm{d}s\Bigr) R_0$$
    for all kinds that average values with total mass at most one. In general it is the
    solution of $\dot R = \sup |\Gamma_t|$ over the ball of radius $R$ (`speed_bound`);
    for linear attention $R_0(1 - 2\beta|V||A|R_0^2 t)^{-1/2}$, up to the depth where
    this blows up. On the sphere nothing moves out.

    Args:
        flow: the flow, or a map for the flow that it drives.
        radius: the radius $R_0$ of the tokens at depth 0.
        depth: the depth, or several in order; negative for the flow backward.

    Returns:
        The bound at each depth. Raises `Unsupported` beyond a blow-up of the bound.
    """
    return _integrate(flow, radius, depth, None)[0]


def stability_bound(
    flow: Flow | AbstractInContextMap,
    radius: float,
    depth: ArrayLike,
    *,
    order: float = 2.0,
) -> float | np.ndarray:
    r"""Logarithm of the a priori bound on how far two flows part.

    $$W_p(\mu_t, \nu_t) \le e^{\ell(t)}\, W_p(\mu_0, \nu_0), \qquad
      \ell(t) = \int_0^t L(R(s))\,\mathrm{d}s,$$
    with $R(s)$ the radius bound and $L$ the `stability_constant`. It is true and
    enormous; see `growth_factor` for what happens along a path. On the sphere the
    distance is the geodesic one and the projection adds $\sup|\Gamma|$ to $L$.

    Args:
        flow: the flow, or a map for the flow that it drives.
        radius: the larger radius of the two clouds at depth 0.
        depth: the depth, or several in order; negative for the flow backward.
        order: the order $p$; it matters for masked maps only.

    Returns:
        $\ell$ at each depth.
    """
    largest = float(np.atleast_1d(radius_bound(flow, radius, depth))[-1])
    schedule = flow.velocity if isinstance(flow, Flow) else Constant(flow)
    # Raises at once if the constant at the end is too large to be integrated.
    last = schedule.at(jnp.asarray(float(np.ravel(depth)[-1])))
    stability_constant(last, largest, order=order)
    return _integrate(flow, radius, depth, order)[1]


def _integrate(flow, radius, depth, order: float | None):
    """Return radius bound and logarithmic growth at the depths asked for."""
    flow = flow if isinstance(flow, Flow) else Flow(flow)
    check(flow.noise is None, "a flow with noise has no a priori bound.")
    check(0 <= radius < np.inf, f"radius is {radius}; it must be finite and >= 0.")
    if not isinstance(flow.space, Euclidean | Sphere):
        raise Unsupported(f"no bound is known on {type(flow.space).__name__}.")
    depths = np.atleast_1d(np.asarray(depth, np.float64))
    lengths = np.abs(depths)
    check(
        depths.ndim == 1
        and bool(np.isfinite(depths).all() and (np.diff(lengths) >= 0).all())
        and bool((depths >= 0).all() or (depths <= 0).all()),
        f"depth is {depth}; it must be a finite number, or several going away from 0.",
    )
    direction = -1.0 if depths[-1] < 0 else 1.0
    state, reached, states = np.array([float(radius), 0.0]), 0.0, []
    for target in lengths:
        for piece in _pieces(flow.velocity, reached, target, direction):
            state = _advance(flow, state, piece, direction, order)
        reached = target
        states.append(state)
    columns = np.stack(states).T
    return tuple(row.item() if np.ndim(depth) == 0 else row for row in columns)


def _pieces(schedule, start, end, direction) -> list[tuple[float, float]]:
    """Return the stretches of a range on which a schedule is smooth."""
    nodes = schedule.depths if isinstance(schedule, Schedule) else schedule.jumps
    nodes = [] if nodes is None else (direction * np.asarray(nodes)).tolist()
    inner = sorted(node for node in nodes if start < node < end)
    ends = [start, *inner, end]
    return [pair for pair in zip(ends[:-1], ends[1:], strict=True) if pair[0] < pair[1]]


def _advance(flow, state, piece, direction, order) -> np.ndarray:
    """Return the radius and the logarithmic growth at the end of one stretch."""
    from scipy.integrate import solve_ivp

    start, end = piece
    margin = 1e-12 * (end - start)
    on_sphere = isinstance(flow.space, Sphere)

    def rates(length: float, state: np.ndarray) -> np.ndarray:
        inside = np.clip(length, start + margin, end - margin)
        gamma = flow.velocity.at(jnp.asarray(float(direction * inside)))
        speed, growth = _constants(gamma, jnp.asarray(state[0]), order)
        outward = 0.0 if on_sphere else float(speed)
        return np.array([outward, float(growth + speed if on_sphere else growth)])

    with np.errstate(all="ignore"):
        result = solve_ivp(
            rates, piece, state, method="DOP853", rtol=ACCURACY, atol=1e-14
        )
    if result.status != 0 or not np.isfinite(result.y[:, -1]).all():
        raise Unsupported(
            f"the bound blows up near depth {direction * result.t[-1]:.6g}; ask for a "
            "smaller depth."
        )
    return result.y[:, -1]


@eqx.filter_jit
def _constants(gamma, radius, order: float | None):
    """Return the bounds on speed and stability; zero for the latter if not asked."""
    speed = speed_bound(gamma, radius)
    if order is None:
        return speed, jnp.zeros_like(speed)
    return speed, stability_constant(gamma, radius, order=order)
