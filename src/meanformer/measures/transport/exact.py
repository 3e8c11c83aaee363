"""Exact transport in any dimension: network simplex or assignment, on the host."""

import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from meanformer.errors import Unsupported, check, is_concrete
from meanformer.measures.transport.atoms import Atoms, Coupling, largest_or_one
from meanformer.numerics.arrays import matmul, safe_root

EXACT_LIMIT = 4000
MOST_PIVOTS = 10**9
LABEL_TOLERANCE = 1e-6
NOISE = 8


def exact_distance(source: Atoms, target: Atoms, order: float) -> Float[Array, ""]:
    r"""Wasserstein distance that keeps labels fixed, from an optimal plan.

    The derivative is that of the envelope: in the points the plan is frozen; in the
    masses it is the pair of dual potentials, a subgradient where they are not unique.
    """
    return _cost_of_plan(source, target, exact_coupling(source, target, order), order)


@eqx.filter_jit
def _cost_of_plan(
    source: Atoms, target: Atoms, coupling: Coupling, order: float
) -> Float[Array, ""]:
    distances = coupling.distances(source, target)
    unit = largest_or_one(distances)
    moved = matmul(coupling.masses, (distances / unit) ** order)
    frozen = jax.lax.stop_gradient((source, target, coupling, unit))
    moved += _mass_response((source.masses, target.masses), frozen, order)
    return unit * safe_root(moved, order)


def exact_coupling(source: Atoms, target: Atoms, order: float) -> Coupling:
    """Return an optimal plan among those that keep labels fixed; no derivative."""
    shape = (len(source.masses), len(target.masses))
    index = jax.ShapeDtypeStruct((sum(shape),), np.int32)
    mass = jax.ShapeDtypeStruct((sum(shape),), source.masses.dtype)
    rounding = float(jnp.finfo(source.masses.dtype).eps)
    solve = partial(_solve, order=float(order), rounding=rounding)
    rows, columns, masses = _on_host(solve, (index, index, mass), source, target)
    return Coupling(rows, columns, masses, shape)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _mass_response(masses: tuple[Array, Array], frozen: Any, order: float) -> Array:
    """Return zero; only the derivative in the masses matters."""
    return jnp.zeros((), masses[0].dtype)


@partial(_mass_response.defjvp, symbolic_zeros=True)
def _mass_response_jvp(order, primals, tangents):
    (masses, frozen), (moving, _) = primals, tangents
    nothing = jnp.zeros((), masses[0].dtype)
    if all(isinstance(change, SymbolicZero) for change in moving):
        return nothing, nothing
    shapes = tuple(jax.ShapeDtypeStruct(m.shape, m.dtype) for m in masses)
    solve = partial(_solve_dual, order=float(order))
    potentials = _on_host(solve, shapes, *frozen)
    responses = [
        matmul(potential, change)
        for potential, change in zip(potentials, moving, strict=True)
        if not isinstance(change, SymbolicZero)
    ]
    return nothing, sum(responses, nothing)


def _on_host(function: Callable, shapes: Any, *arguments: Any) -> Any:
    """Run a numpy function; at once on known values, as a callback on traced ones."""
    frozen = jax.lax.stop_gradient(arguments)

    def call(*arguments):
        results = function(*arguments)
        return jax.tree.map(lambda a, s: np.asarray(a, s.dtype), results, shapes)

    if all(is_concrete(leaf) for leaf in jax.tree.leaves(frozen)):
        return jax.tree.map(jnp.asarray, call(*frozen))
    return jax.pure_callback(call, shapes, *frozen, vmap_method="sequential")


def _solve(source: Atoms, target: Atoms, *, order: float, rounding: float) -> tuple:
    """Solve label by label; return the entries of the plan, padded to $n + m$."""
    source, target = _as_numpy(source), _as_numpy(target)
    entries = []
    for first, second in _blocks(source, target):
        count = max(len(first), len(second))
        check(
            count <= EXACT_LIMIT,
            f"exact transport is limited to {EXACT_LIMIT} tokens, and these clouds "
            f'have {count}; use method="sinkhorn" or method="sliced".',
        )
        cost = _ground_cost(source.points[first], target.points[second], order)
        sides = source.masses[first], target.masses[second]
        rows, columns, masses = _solve_block(cost, *sides)
        # Where atoms are split, the rounding of the masses makes entries of its own:
        # beyond the precision of the masses, and next to nothing for both atoms.
        whole = np.minimum(sides[0][rows], sides[1][columns])
        kept = (masses > NOISE * rounding) | (masses > whole / 1000)
        entries.append((first[rows[kept]], second[columns[kept]], masses[kept]))
    rows, columns, masses = (
        np.concatenate(parts) for parts in zip(*entries, strict=True)
    )
    missing = (0, len(source.masses) + len(target.masses) - len(rows))
    return np.pad(rows, missing), np.pad(columns, missing), np.pad(masses, missing)


def _solve_dual(
    source: Atoms, target: Atoms, coupling: Coupling, unit: Array, *, order: float
) -> tuple:
    """Return dual potentials of the cost in the given unit, zero at absent atoms."""
    source, target = _as_numpy(source), _as_numpy(target)
    moves = map(np.asarray, (coupling.rows, coupling.columns, coupling.masses))
    rows, columns, masses = moves
    plan = np.zeros(coupling.shape, bool)
    plan[rows[masses > 0], columns[masses > 0]] = True
    potentials = np.zeros(len(source.masses)), np.zeros(len(target.masses))
    for first, second in _blocks(source, target):
        cost = _ground_cost(
            source.points[first], target.points[second], order, float(unit)
        )
        block = _block_potentials(cost, plan[np.ix_(first, second)])
        potentials[0][first], potentials[1][second] = block
    return potentials


def _as_numpy(atoms: Atoms) -> Atoms:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), atoms)


def _blocks(source: Atoms, target: Atoms) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the present atoms of each label, after checking that the masses agree."""
    present = [np.flatnonzero(atoms.masses > 0) for atoms in (source, target)]
    labels = np.unique(
        np.concatenate([source.labels[present[0]], target.labels[present[1]]])
    )
    for label in labels:
        first = present[0][source.labels[present[0]] == label]
        second = present[1][target.labels[present[1]] == label]
        masses = float(source.masses[first].sum()), float(target.masses[second].sum())
        check(
            abs(masses[0] - masses[1]) <= LABEL_TOLERANCE,
            f"at position {label} mu has mass {masses[0]:.6g} and nu {masses[1]:.6g}; "
            "with different masses the distance that keeps positions is infinite: "
            "give both the same positions and weights, or use wasserstein.",
        )
        yield first, second


def _ground_cost(
    points: np.ndarray, targets: np.ndarray, order: float, unit: float | None = None
) -> np.ndarray:
    """Return the powers of all distances, in units of the largest by default."""
    from scipy.spatial.distance import cdist

    distances = cdist(points, targets)
    with np.errstate(over="ignore"):
        return (distances / (unit or distances.max() or 1.0)) ** order


def _solve_block(cost: np.ndarray, masses: np.ndarray, targets: np.ndarray) -> tuple:
    """Solve without labels: nothing to choose, network simplex, or assignment."""
    if 1 in cost.shape:
        rows, columns = np.nonzero(np.ones(cost.shape, bool))
        return rows, columns, masses if cost.shape[1] == 1 else targets
    is_square = cost.shape[0] == cost.shape[1]
    if not (is_square and _is_uniform(masses) and _is_uniform(targets)):
        return _network_simplex(cost, masses, targets)
    ones = np.ones(len(masses))
    if find_spec("ot") is None:
        from scipy.optimize import linear_sum_assignment

        # It needs no extra, but can be ten times slower.
        return *linear_sum_assignment(cost), ones * masses[0]
    rows, columns, shares = _network_simplex(cost, ones, ones)
    return rows, columns, shares * masses[0]


def _is_uniform(masses: np.ndarray) -> bool:
    return bool(np.ptp(masses) <= 1e-12 * masses.max())


def _network_simplex(
    cost: np.ndarray, masses: np.ndarray, targets: np.ndarray
) -> tuple:
    solver = _import_pot()
    shares = targets * (masses.sum() / targets.sum())
    plan, log = solver.emd(masses, shares, cost, numItermax=MOST_PIVOTS, log=True)
    check(
        log["warning"] is None,
        f"the network simplex did not finish: {log['warning']}; "
        'use method="sinkhorn" or "sliced".',
    )
    rows, columns = np.nonzero(plan)
    return rows, columns, plan[rows, columns]


def _import_pot() -> ModuleType:
    """Import POT; what it imports itself may be deprecated, no concern of the user."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module("ot")
    except ImportError as error:
        raise Unsupported(
            "exact transport of weighted clouds needs POT, which is not installed; pip "
            "install 'meanformer[transport]'."
        ) from error


def _block_potentials(cost: np.ndarray, plan: np.ndarray) -> tuple:
    r"""Potentials $f_i + g_j \le c_{ij}$, with equality where the plan has mass.

    Shortest paths in the residual graph, by sweeps of Bellman and Ford.
    """
    used = np.where(plan, cost, -np.inf)
    target = np.zeros(cost.shape[1])
    for _ in range(sum(cost.shape)):
        source = (used - target[None, :]).max(axis=1)
        lowered = np.minimum(target, (cost - source[:, None]).min(axis=0))
        has_settled = np.abs(lowered - target).max() <= 1e-14
        target = lowered
        if has_settled:
            break
    return (cost - target[None, :]).min(axis=1), target
