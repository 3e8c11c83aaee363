"""Clouds that rest under a flow: the Hessian of the energy, and what a push does."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.errors import Overflow, as_number, check
from meanformer.flows import Flow
from meanformer.geometry import AbstractSpace
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.observables.energy.sphere import (
    ascent_of,
    check_fits,
    checked_map,
    checked_space,
    present,
    present_indices,
)
from meanformer.observables.energy.structure import terms_of
from meanformer.observables.linearised.rates import linearised, rates_of
from meanformer.observables.linearised.symmetry import rotations
from meanformer.observables.linearised.velocity_terms import (
    kinks_of,
    largest_length,
)


def energy_hessian(
    layer: AbstractInContextMap,
    cloud: TokenCloud,
    *,
    space: AbstractSpace | None = None,
) -> Float[Array, "h h"]:
    r"""Hessian of the exponential energy of a layer, in the space of all tokens.

    The Riemannian Hessian on $(\mathbb{S}^{d-1})^n$ with the metric
    $\sum_i w_i|\xi_i|^2$, in an orthonormal basis of the tangent spaces, $d-1$ numbers
    for each token of positive weight. Its eigenvalues do not depend on the basis: at a
    stationary point they are the rates at which the ascent of $E$ leaves it. Rotations
    that commute with $A$ give zeros. On a kink of a perceptron, where there are several
    one-sided Hessians, it is the one with the derivative that JAX gives.

    Args:
        layer: `Softmax` or `Unnormalised` with a symmetric score, whose value does not
            matter; or a perceptron or `Sum` that is a gradient flow.
        cloud: the tokens, of known weights; those of weight zero are absent.
        space: where they live, `Sphere()` by default.

    Returns:
        A symmetric matrix. Cost: $O(n^2d^3)$ time and $O(n^2d^2)$ memory, on the host
        on the sphere: for few tokens.
    """
    space = checked_space(cloud, space)
    cloud = present(cloud)
    ascent = ascent_of(layer)
    log_masses = np.log(np.asarray(cloud.weights, np.float64))
    found = linearised(Flow(ascent, space=space), ascent, cloud, log_masses)
    matrix = found.matrix * _unit(cloud, found.log_unit, found.matrix)
    return jnp.asarray((matrix + matrix.T) / 2, cloud.points.dtype)


class StationaryReport(eqx.Module):
    r"""Whether tokens rest, and what a small push does to them.

    Attributes:
        verdict: the answer in words: "stationary, index 2", "not stationary: ...", or
            "undecided: ..." if rates are too small to have a sign.
        is_stationary: whether no token moves, to the tolerance.
        speed: the largest speed of a token.
        index: how many directions grow: the number of positive eigenvalues; `None` if
            the tokens move or it is undecided.
        nullity: how many rates cannot be told from zero; rotations are among them.
        eigenvalues: growth rates of small perturbations (their real parts, if the flow
            is not a gradient flow), the largest first; empty if the tokens move.
        direction: the perturbation that grows fastest, one tangent vector for each
            token, the longest of length one; zero if the tokens move.
    """

    verdict: str = eqx.field(static=True)
    is_stationary: bool = eqx.field(static=True)
    speed: float = eqx.field(static=True)
    index: int | None = eqx.field(static=True)
    nullity: int | None = eqx.field(static=True)
    eigenvalues: Float[Array, " h"]
    direction: Float[Array, "n d"]


def stationary_report(
    flow: Flow, cloud: TokenCloud, *, tolerance: float | None = None
) -> StationaryReport:
    r"""Tell whether tokens rest under a flow, and in how many directions they would go.

    Antipodal, regular and uniform clouds are stationary saddles: a solver waits there
    until rounding pushes it off. The linearised flow answers instead. Its eigenvalues
    are those of the Hessian of the energy for a gradient flow, divided by the masses
    $Z_i$ for softmax, which changes rates but not signs.

    On the sphere, softmax and unnormalised attention are linearised without the pull of
    tokens on themselves: the rates of two opposite tokens, $e^{-2\beta}$ of that
    pull, are right at any $\beta$. Rates below the rounding of the largest ones have no
    sign. If they are more than the rotations that commute with score and value, which
    are known for symmetric ones, the verdict is "undecided": a slow direction may hide
    there, or one along which the tokens rest for another reason. On a kink of a
    perceptron it is, if the one-sided Hessians have different indices.

    Args:
        flow: a flow whose map does not change with depth, without noise.
        cloud: the tokens, of known values; those of weight zero are absent.
        tolerance: the tokens rest if none is faster than this share of the size of the
            flow, which is the largest vector before projection or the largest entry of
            the linearised flow; by default $10^{-9}$, or a thousand roundings of the
            type of the points if that is more.

    Returns:
        The report. To leave a saddle, move along `direction`, or use `perturbed`. Cost:
        as `energy_hessian`, and the eigenvalues of that matrix.
    """
    layer = checked_map(flow)
    check_cloud("cloud", cloud)
    least = 1000 * float(jnp.finfo(cloud.points.dtype).eps)
    given = max(1e-9, least) if tolerance is None else as_number("tolerance", tolerance)
    check(given > 0, f"tolerance is {given}; it must be positive.")
    check_fits(layer, cloud)
    flow.space.check(cloud.points)
    kept, tokens = present_indices(cloud), present(cloud)
    found = rates_of(flow, layer, tokens)
    unit = _unit(tokens, found.log_unit, np.append(found.values, found.size))
    speed = unit * found.speed
    vectors = layer(tokens, tokens.points, positions=tokens.positions)
    empty, still = jnp.zeros(0, cloud.points.dtype), jnp.zeros_like(cloud.points)
    if speed > given * max(largest_length(vectors), unit * found.size):
        verdict = f"not stationary: a token moves with speed {speed:.6g}"
        return StationaryReport(verdict, False, speed, None, None, empty, still)
    index, nullity = found.counts(found.resolution + found.drift)
    verdict, is_decided = _verdict(index, nullity - rotations(layer, tokens))
    if is_decided and kinks_of(terms_of(layer), tokens):
        ends = [rates_of(flow, layer, tokens, side=side) for side in (-1, 1)]
        sides = [one.counts(one.resolution + one.drift)[0] for one in ends]
        if sides[0] != sides[1]:
            is_decided = False
            verdict = (
                "undecided: a token sits on a kink of a perceptron, index "
                f"{sides[0]} to {sides[1]}"
            )
    direction = found.direction(flow.space, tokens)
    return StationaryReport(
        verdict,
        True,
        speed,
        index if is_decided else None,
        nullity,
        jnp.asarray(unit * found.values, cloud.points.dtype),
        still.at[kept].set(jnp.asarray(direction, still.dtype)),
    )


def _unit(cloud: TokenCloud, log_unit: float, found: np.ndarray) -> float:
    """Return the unit of what was found, or raise if this would overflow."""
    log_largest = log_unit + float(np.log(max(np.abs(found).max(initial=0), 1e-300)))
    if log_largest > float(np.log(float(jnp.finfo(cloud.points.dtype).max))):
        raise Overflow(
            f"rates of growth overflow: their logarithm is about {log_largest:.6g}; "
            "lower beta, or give Unnormalised a shift."
        )
    return float(np.exp(log_unit))


def _verdict(index: int, unknown: int) -> tuple[str, bool]:
    if unknown <= 0:
        return f"stationary, index {index}", True
    noun = "rate" if unknown == 1 else "rates"
    return f"undecided: {unknown} {noun} below resolution, {index} positive", False
