"""Stationary measures of tokens with noise: densities held together by attraction."""

from typing import SupportsIndex

import equinox as eqx
import numpy as np
from jaxtyping import Float

from meanformer.attention import AbstractExponential
from meanformer.errors import as_doubles, as_integer, as_number, check
from meanformer.mean_field.balance import (
    Balance,
    NoConvergence,
    fixed_coupling,
    newton,
    orthonormal,
    ring_kernel,
)
from meanformer.mean_field.noise import Attraction, attraction, checked_kappa
from meanformer.typing import ArrayLike

SWEEPS = 20_000
# Up to here OpenBLAS solves with one thread, however busy the machine is.
NODES, MOST_NODES = 96, 768
NEUTRAL = 1e-9  # growth rates, times kappa, that are zero but for rounding


class StationaryState(eqx.Module):
    r"""A stationary density on the sphere that has an axis.

    Densities are taken with respect to the uniform probability, so that the uniform
    measure has density one.

    Attributes:
        kappa: the inverse noise.
        dimension: dimension of the space around the sphere.
        heights: Gauss nodes $z$ of the height along the axis.
        masses: their masses in the uniform law, of total one.
        densities: the density at the nodes.
        order: $\int z\,\mathrm{d}\rho$, the mean along the axis.
        free_energy: $\tfrac1\kappa\int\rho\log\rho - E(\rho)$ less that of the uniform
            measure; none for softmax attention, whose noisy flow descends no known
            free energy.
        growth: largest growth rate of a small perturbation, rotations apart; the state
            is stable if it is negative.
        model: the attraction that noise balances.
    """

    kappa: float
    dimension: int
    heights: Float[np.ndarray, " n"]
    masses: Float[np.ndarray, " n"]
    densities: Float[np.ndarray, " n"]
    order: float
    free_energy: float | None
    growth: float
    model: Attraction = eqx.field(static=True)

    def __str__(self) -> str:
        """Return where it is, how ordered, and whether it is stable."""
        kind = "stable" if self.is_stable else "unstable"
        parts = [f"kappa {self.kappa:.10g}: order {self.order:.10g}"]
        if self.free_energy is not None:
            parts.append(f"free energy {self.free_energy:.6g}")
        return ", ".join([*parts, kind])

    @property
    def is_stable(self) -> bool:
        """Whether all perturbations but rotations decay."""
        return self.kappa * self.growth < -NEUTRAL

    def density(self, heights: ArrayLike) -> Float[np.ndarray, " m"]:
        r"""Return the density at other heights; on the circle $z = \cos\theta$.

        By the balance that it solves, $\log\rho = \tfrac\kappa u\Psi + \text{const}$:
        with the potential $\Psi$ of the density at the nodes it holds at all heights,
        also in high dimension, where the nodes lie about the equator.

        Args:
            heights: the heights, from -1 to 1.
        """
        at = as_doubles("heights", heights)
        check(at.ndim == 1, f"heights has shape {at.shape}; it must be a list.")
        check(
            bool((np.abs(at) <= 1).all()),
            "heights must lie between -1 and 1; on the circle they are cos(angle).",
        )
        top = int(np.argmax(self.densities))
        kernel, _ = ring_kernel(
            self.model, np.append(at, self.heights[top]), self.heights
        )
        seen = kernel @ (self.masses * self.densities)
        potential = np.log(seen) if self.model.is_softmax else seen
        coupling = self.kappa / self.model.unit
        return self.densities[top] * np.exp(coupling * (potential[:-1] - potential[-1]))

    def moment(self, degree: SupportsIndex) -> float:
        r"""Return the mean of the zonal harmonic of a degree, one at the pole.

        On the circle $\int\cos l\theta\,\mathrm{d}\rho$; degree one gives `order`.

        Args:
            degree: the degree $l$, below the number of nodes.
        """
        degree = as_integer("degree", degree, least=0)
        check(
            degree < len(self.heights),
            f"degree is {degree}; it must be from 0 to {len(self.heights) - 1}.",
        )
        at = np.append(self.heights, 1.0)
        zonal = orthonormal(at, self.dimension, degree + 1)[0][degree]
        return float(zonal[:-1] @ (self.masses * self.densities) / zonal[-1])


def stationary_state(
    attention: AbstractExponential,
    kappa: float,
    *,
    dimension: SupportsIndex | None = None,
    start: float = 0.9,
) -> StationaryState:
    r"""Find the stationary density that a concentrated start settles to.

    A stationary density of the flow with noise $\sigma = \sqrt{2/\kappa}$ solves
    $$\rho \propto e^{\kappa G/\beta} \ \text{(unnormalised)}, \qquad
      \rho \propto G^{\kappa/\beta} \ \text{(softmax)}, \qquad
      G = \int e^{\beta\langle x,y\rangle}\,\mathrm{d}\rho(y).$$
    The right-hand side is applied again and again, which never increases the free
    energy $F = \tfrac1\kappa\int\rho\log\rho - E$ of unnormalised attention (the kernel
    is positive definite, so $-E$ is concave), and for softmax attention never decreases
    $\iint e^{\beta\langle x,y\rangle}\rho\rho\,/\,\lVert\rho\rVert_q^2$ with
    $q = 1 + \beta/\kappa$, of which its stationary states are the critical points.
    Newton's method finishes. States that are unstable are on a `stationary_branch`.

    Args:
        attention: `Softmax` or `Unnormalised` with scores $b\langle x,y\rangle$ and
            values $cy$, $b, c > 0$.
        kappa: the inverse noise $\kappa = 2/\sigma^2$.
        dimension: dimension of the space around the sphere, if not the attention's.
        start: mean height of the start, which is a von Mises-Fisher density, between -1
            and 1; from 0 the uniform density is found.

    Returns:
        The state, to rounding. Cost: a second at most, on the host.
    """
    model, kappa = attraction(attention, dimension), checked_kappa(kappa)
    start = as_number("start", start, "a number between -1 and 1", above=-1, below=1)
    slope = start * (model.dimension - start**2) / (1 - start**2)
    count = NODES
    while count <= MOST_NODES:
        balance = Balance(model, count)
        logarithm = _swept(balance, slope * balance.basis.heights, kappa)
        if balance.is_resolved(balance.density(logarithm)):
            # Newton's method finds the solution nearby.
            target = float(np.log(kappa / model.unit))
            condition = fixed_coupling(target)
            logarithm, _ = newton(balance, logarithm, target, condition)
            if balance.is_resolved(balance.density(logarithm)):
                return state_of(balance, logarithm, kappa)
        count *= 2
    raise too_narrow(kappa)


def too_narrow(kappa: float) -> NoConvergence:
    """Return the error that a state is too concentrated for the nodes."""
    return NoConvergence(
        f"the stationary state at kappa {kappa:.6g} is too concentrated for "
        f"{MOST_NODES} nodes; ask for a smaller kappa, that is more noise."
    )


def state_of(
    balance: Balance, logarithm: Float[np.ndarray, " n"], kappa: float
) -> StationaryState:
    """Return the state of a solution."""
    model, basis = balance.model, balance.basis
    density, coupling = balance.density(logarithm), kappa / model.unit
    energy = None
    if not model.is_softmax:
        energy = balance.excess_free_energy(density, coupling) / kappa
    return StationaryState(
        float(kappa),
        model.dimension,
        basis.heights,
        basis.masses,
        density,
        balance.order(density, 1),
        energy,
        balance.growth(density, coupling) / kappa,
        model,
    )


def _swept(balance: Balance, logarithm: np.ndarray, kappa: float) -> np.ndarray:
    """Return where repeated balancing leads."""
    coupling = kappa / balance.model.unit
    logarithm = balance.centred(logarithm)
    for _ in range(SWEEPS):
        change = balance.residual(logarithm, coupling)
        logarithm = logarithm - change
        if np.abs(change).max() <= 1e-6 * (1 + np.abs(logarithm).max()):
            break
    return logarithm
