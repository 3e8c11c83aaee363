"""Entropic transport between token clouds: cost and debiased divergence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, ScalarLike

from meanformer.errors import (
    StoppedEarly,
    as_integer,
    as_number,
    check_shape,
    is_concrete,
    warn,
)
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.cloud import AbstractWeightedCloud
from meanformer.measures.transport.atoms import (
    Atoms,
    atoms_of,
    check_clouds,
    check_comparable,
)
from meanformer.measures.transport.potentials import (
    Problem,
    cross_potential,
    self_potential,
    semi_dual,
)
from meanformer.numerics.arrays import matmul, safe_root, widened

RELATIVE_EPSILON = 0.05
ROUNDS = 5000


def entropic_cost(
    mu: AbstractMeasure,
    nu: AbstractMeasure,
    epsilon: ScalarLike,
    *,
    rounds: int = ROUNDS,
) -> Float[Array, ""]:
    r"""Entropic transport cost for the squared distance.

    $$\mathrm{OT}_\varepsilon(\mu, \nu) = \min_{\pi \in \Pi(\mu,\nu)}
      \int |x - y|^2 \,\mathrm{d}\pi + \varepsilon\,
      \mathrm{KL}(\pi \,|\, \mu \otimes \nu).$$

    It is a squared quantity, and positive even for equal clouds. First derivatives in
    points, weights and `epsilon` are those of the optimal value.

    Args:
        mu: a token cloud.
        nu: a token cloud in the same space.
        epsilon: the temperature, positive, in units of squared distance.
        rounds: how many Sinkhorn rounds may be spent before a warning.

    Returns:
        The cost. Cost: $O(nmd)$ a round; memory $O(nm)$ up to four million pairs,
        $O(n + m)$ beyond.
    """
    return _solve(mu, nu, epsilon, rounds).cross.astype(mu.mean().dtype)


def sinkhorn_divergence(
    mu: AbstractMeasure,
    nu: AbstractMeasure,
    epsilon: ScalarLike,
    *,
    rounds: int = ROUNDS,
) -> Float[Array, ""]:
    r"""Entropic transport cost without its bias: zero for equal measures.

    $$S_\varepsilon(\mu, \nu) = \mathrm{OT}_\varepsilon(\mu, \nu)
      - \tfrac12 \mathrm{OT}_\varepsilon(\mu, \mu)
      - \tfrac12 \mathrm{OT}_\varepsilon(\nu, \nu) \ge 0.$$

    A squared quantity: it tends to $W_2^2$ as $\varepsilon \to 0$ and to the squared
    distance of the means as $\varepsilon \to \infty$. A value that does not exceed the
    rounding of its terms is returned as zero.

    Args:
        mu: a token cloud.
        nu: a token cloud in the same space.
        epsilon: the temperature, positive, in units of squared distance.
        rounds: how many Sinkhorn rounds may be spent before a warning.

    Returns:
        The divergence, never negative. Cost: that of three entropic costs.
    """
    costs = _solve(mu, nu, epsilon, rounds)
    divergence = costs.cross - (costs.source + costs.target) / 2
    rounding = 16 * jnp.finfo(divergence.dtype).eps * costs.scale
    return jnp.where(divergence > rounding, divergence, 0).astype(mu.mean().dtype)


def sinkhorn_distance(
    mu: AbstractWeightedCloud, nu: AbstractWeightedCloud, epsilon: ScalarLike | None
) -> Float[Array, ""]:
    r"""Return $\sqrt{S_\varepsilon}$.

    By default, $\varepsilon$ is a twentieth of the mean squared distance.
    """
    if epsilon is None:
        scale = _mean_square(*_centred(mu, nu))
        epsilon = jnp.where(scale > 0, RELATIVE_EPSILON * scale, 1)
    return safe_root(sinkhorn_divergence(mu, nu, epsilon), 2)


class _Costs(NamedTuple):
    cross: Float[Array, ""]
    source: Float[Array, ""]
    target: Float[Array, ""]
    scale: Float[Array, ""]


def _solve(
    mu: AbstractMeasure, nu: AbstractMeasure, epsilon: ScalarLike, rounds: int
) -> _Costs:
    """Find the three potentials, then evaluate the costs with them frozen."""
    rounds = as_integer("rounds", rounds, least=1)
    check_clouds(mu, nu)
    check_comparable(mu, nu)
    source, target = _centred(mu, nu)
    scale = _mean_square(source, target)
    epsilon = _checked_epsilon(epsilon, scale)
    unit = jnp.finfo(scale.dtype).eps
    tolerance = unit**0.6 + 4 * unit * scale / epsilon
    sides = (source, target), (source, source), (target, target)
    problems = tuple(Problem(*side, epsilon, tolerance) for side in sides)
    (cross, *alone), size = jax.lax.stop_gradient((problems, scale))
    own = [self_potential(problem, rounds) for problem in alone]
    potentials = cross_potential(cross, own[1].values, size, rounds), *own
    _warn_unless(jnp.stack([p.has_converged for p in potentials]).all(), rounds)
    costs = (
        semi_dual(problem, jax.lax.stop_gradient(potential.values))
        for problem, potential in zip(problems, potentials, strict=True)
    )
    return _Costs(*costs, scale)


def _centred(
    mu: AbstractWeightedCloud, nu: AbstractWeightedCloud
) -> tuple[Atoms, Atoms]:
    """Return the atoms, the larger cloud first, shifted to keep digits."""
    source, target = widened((atoms_of(mu), atoms_of(nu)))
    if len(source.masses) < len(target.masses):
        source, target = target, source
    means = [matmul(atoms.masses, atoms.points) for atoms in (source, target)]
    centre = jax.lax.stop_gradient(means[0] + means[1]) / 2

    def shifted(atoms: Atoms) -> Atoms:
        is_present = atoms.masses[:, None] > 0
        points = jnp.where(is_present, atoms.points - centre[None, :], 0)
        return Atoms(points, atoms.masses, atoms.labels)

    return shifted(source), shifted(target)


def _mean_square(source: Atoms, target: Atoms) -> Float[Array, ""]:
    r"""Return $\iint |x - y|^2 \mathrm{d}\mu\,\mathrm{d}\nu$ from the moments."""
    means = [matmul(atoms.masses, atoms.points) for atoms in (source, target)]
    squares = [
        jnp.sum(atoms.masses[:, None] * atoms.points**2) for atoms in (source, target)
    ]
    return sum(squares) - 2 * jnp.sum(means[0] * means[1])


def _checked_epsilon(epsilon: ScalarLike, scale: Array) -> Float[Array, ""]:
    if not is_concrete(epsilon):
        check_shape("epsilon", jnp.asarray(epsilon), ())
        return jnp.asarray(epsilon, scale.dtype)
    allowed = (
        'one positive, finite number; for none use wasserstein(mu, nu, method="exact")'
    )
    as_number("epsilon", epsilon, allowed, above=0, below=float("inf"))
    return jnp.asarray(epsilon, scale.dtype)


def _warn_unless(has_converged: Bool[Array, ""], rounds: int) -> None:
    """Warn that a solve has not converged; under `jit`, when it runs."""

    def tell(has_converged):
        if not has_converged:
            warn(
                f"entropic transport has not converged in {rounds} rounds, so each "
                "transport cost in the value is a lower bound only: raise epsilon.",
                StoppedEarly,
            )

    if is_concrete(has_converged):
        tell(bool(has_converged))
    else:
        jax.debug.callback(tell, has_converged)
