"""Velocities and their derivative in units of their own rows, however small they are.

Tokens far apart pull each other by amounts that differ by hundreds of orders of
magnitude. A zero of the velocities does not mind if each is divided by a number of its
own, so each token is measured by what it feels most.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from meanformer.attention import AbstractInContextMap, Softmax, Unnormalised
from meanformer.attention.pointwise import AbstractPointwise
from meanformer.flows import Flow
from meanformer.measures import TokenCloud
from meanformer.observables.energy.structure import is_gradient_flow, terms_of
from meanformer.observables.linearised.growth import (
    derivative_matrix,
    metric_of,
    parts_of,
)
from meanformer.observables.linearised.velocity_terms import (
    Pairs,
    halves,
    has_parts,
    log_shares,
    norm,
    pointwise_part,
    tangent_basis,
    unit_rows,
)


class Scaled(NamedTuple):
    """Velocities and their derivative, each row over the exponential of its own."""

    velocity: np.ndarray
    matrix: np.ndarray
    log_rows: np.ndarray

    def over(self, log_rows: np.ndarray) -> np.ndarray:
        """Return the velocities in units of given rows."""
        return (
            self.velocity * np.exp(np.minimum(self.log_rows - log_rows, 300))[:, None]
        )


def scaled(
    flow: Flow, layer: AbstractInContextMap, cloud: TokenCloud, *, side: int = 0
) -> Scaled:
    """Return the velocities and their derivative in units of their own rows."""
    terms = terms_of(layer)
    if not has_parts(flow.space, terms):
        return _by_differentiation(flow, cloud)
    fixed = [
        pointwise_part(term, cloud, side=side)
        for term in terms
        if isinstance(term, AbstractPointwise)
    ]
    log_rows = _log_rows(terms, cloud, fixed)
    moved = tuple(t for t in terms if not isinstance(t, AbstractPointwise))
    parts = parts_of(
        moved, cloud, np.zeros(cloud.count), is_exact=len(terms) > 1, log_rows=log_rows
    )
    factors = np.exp(np.minimum(-log_rows, 700))
    width = fixed[0].velocity.shape[1] if fixed else parts[0].velocity.shape[1]
    velocity = sum(part.velocity for part in parts)
    velocity = velocity + sum(factors[:, None] * part.velocity for part in fixed)
    matrix = sum(part.matrix for part in parts)
    repeated = np.repeat(factors, width)[:, None]
    matrix = matrix + sum(repeated * part.matrix for part in fixed)
    return _equilibrated(velocity, matrix, log_rows)


class Rates(NamedTuple):
    """Growth rates over the exponential of `log_unit`, and their resolution."""

    values: np.ndarray
    resolution: float
    log_unit: float
    columns: np.ndarray
    log_masses: np.ndarray


def rates_of(
    flow: Flow, layer: AbstractInContextMap, cloud: TokenCloud, *, side: int = 0
) -> Rates:
    """Return the rates of growth of resting tokens, the largest first."""
    found = scaled(flow, layer, cloud, side=side)
    log_masses = metric_of(layer, cloud)
    unit = float(found.log_rows.max())
    links = halves(log_masses) + (found.log_rows - unit)[:, None]
    width = found.velocity.shape[1]
    links = np.repeat(np.repeat(links, width, axis=0), width, axis=1)
    matrix = found.matrix * np.exp(np.minimum(links, 700))
    eps = float(jnp.finfo(cloud.points.dtype).eps)
    resolution = eps * _steepness(flow, layer, cloud) * norm(matrix)
    structure = is_gradient_flow(layer)
    # At inverse temperature zero there is a symmetry, if no energy.
    is_symmetric = np.abs(matrix - matrix.T).max(initial=0) <= resolution
    if (structure and structure.mobility is None) or is_symmetric:
        values, columns = np.linalg.eigh((matrix + matrix.T) / 2)
    else:
        values, columns = map(np.real, np.linalg.eig(matrix))
        resolution = max(resolution, np.sqrt(eps) * norm(matrix))
    order = np.argsort(-values, kind="stable")
    values, columns = values[order], columns[:, order]
    if abs(unit) < _log_room(cloud):
        grown = np.exp(unit)
        return Rates(values * grown, resolution * grown, 0.0, columns, log_masses)
    return Rates(values, resolution, unit, columns, log_masses)


def splitting_rates(
    flow: Flow, layer: AbstractInContextMap, cloud: TokenCloud
) -> np.ndarray:
    """Return how fast two halves of each atom part, in their fastest direction."""
    twins = TokenCloud(
        jnp.repeat(cloud.points, 2, axis=0), jnp.repeat(cloud.weights / 2, 2)
    )
    found = scaled(flow, layer, twins)
    width = found.velocity.shape[1]
    blocks = found.matrix.reshape(twins.count, width, twins.count, width)
    every = 2 * np.arange(cloud.count)
    inner = blocks[every, :, every, :] - blocks[every, :, every + 1, :]
    rates = np.linalg.eigvals(inner).real.max(axis=1, initial=-np.inf)
    room = _log_room(cloud)
    return rates * np.exp(np.clip(found.log_rows[every], -room, room))


def _log_room(cloud: TokenCloud) -> float:
    """Return how large logarithms of rates may be, in the type of the points."""
    return 0.85 * float(np.log(float(jnp.finfo(cloud.points.dtype).max)))


def _by_differentiation(flow: Flow, cloud: TokenCloud) -> Scaled:
    basis = tangent_basis(flow.space, np.asarray(cloud.points, np.float64))
    start = jnp.zeros((), cloud.points.dtype)
    field = flow.field(start, cloud, cloud.points, cloud.positions)
    velocity = np.einsum("ida,id->ia", basis, np.asarray(field, np.float64))
    none = np.zeros(cloud.count)
    return _equilibrated(velocity, derivative_matrix(flow, cloud, none), none)


def _log_rows(terms, cloud: TokenCloud, fixed) -> np.ndarray:
    """Return the logarithm of the largest that each token feels, of any term."""
    logs = [np.full(cloud.count, -np.inf)]
    for term in terms:
        if isinstance(term, Softmax | Unnormalised):
            seen = log_shares(term, cloud)
            if not Pairs.of(term, unit_rows(cloud)).own.any():
                np.fill_diagonal(seen, -np.inf)
            logs.append(seen.max(axis=1))
    for part in fixed:
        rows = np.abs(part.matrix).reshape(cloud.count, -1).max(axis=1, initial=0)
        sizes = np.maximum(rows, np.abs(part.velocity).max(axis=1, initial=0))
        with np.errstate(divide="ignore"):
            logs.append(np.log(sizes))
    top = np.max(logs, axis=0)
    return np.where(np.isfinite(top), top, 0.0)


def _equilibrated(
    velocity: np.ndarray, matrix: np.ndarray, log_rows: np.ndarray
) -> Scaled:
    """Divide each row by its largest entry."""
    count, width = velocity.shape
    largest = np.abs(matrix).reshape(count, -1).max(axis=1, initial=0)
    largest = np.maximum(largest, np.abs(velocity).max(axis=1, initial=0))
    largest = np.where(largest > 0, largest, 1.0)
    return Scaled(
        velocity / largest[:, None],
        matrix / np.repeat(largest, width)[:, None],
        log_rows + np.log(largest),
    )


def _steepness(flow: Flow, layer: AbstractInContextMap, cloud: TokenCloud) -> float:
    """Return how many roundings of the points the rates may be off."""
    terms = terms_of(layer)
    if not has_parts(flow.space, terms):
        return 1000.0
    tops = [
        np.abs(np.linalg.norm(np.asarray(t.temperature * t.score, np.float64), 2))
        for t in terms
        if isinstance(t, Softmax | Unnormalised)
    ]
    return float(10 * (1 + max(tops, default=0.0)))
