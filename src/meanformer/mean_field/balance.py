r"""The equation of stationary densities, discretised: residual, derivative, spectrum.

The unknown is $\varphi = \log\rho$ up to a constant, at Gauss nodes of the height:
$$\varphi = \eta\,\Psi[\rho] + \text{const}, \qquad \rho = e^\varphi/\!\int e^\varphi,
  \qquad \Psi = \sum_l r_l\rho_l p_l \ \text{ or its logarithm},$$
with the coupling $\eta = \kappa/u$ of `Attraction`. All sums are Gauss rules, so the
error falls faster than any power of the number of nodes.

Orthonormal polynomials $p_l$ of the law of the height $z$ are zonal harmonics of degree
$l$; on the circle, $\cos l\theta$ up to a factor. A harmonic of degree $l = m + j$ with
$m$ waves around the axis is $(1-z^2)^{m/2}\,q_j(z)\,Y_m(\omega)$, where $q_j$ are the
polynomials of dimension $d + 2m$. The exponential kernel and the Laplacian are diagonal
in all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from meanformer.errors import InvalidInput
from meanformer.mean_field.noise import Attraction
from meanformer.numerics.special.bessel import sphere_functions
from meanformer.numerics.special.quadrature import gauss_gegenbauer
from meanformer.numerics.special.zonal import log_zonal_mass

Nodes = Float[np.ndarray, " n"]
Table = Float[np.ndarray, "l n"]

NEWTON_STEPS = 40
SECTORS = 3  # waves around the axis: 0, 1, 2
RESOLVED = 1e-10  # largest share of the last coefficients


class NoConvergence(InvalidInput):
    """Newton's method did not arrive; the message says what to change."""


class ZonalBasis:
    """Gauss nodes on the axis of a sphere, and as many harmonics there."""

    def __init__(self, dimension: int, count: int):
        self.dimension, self.count = dimension, count
        self.heights, self.masses = gauss_gegenbauer(count, dimension)
        self.polynomials = orthonormal(self.heights, dimension, count)[0]
        # Height squared is not subtracted from one: nodes come close to the poles.
        self.radii_squared = (1 - self.heights) * (1 + self.heights)

    def coefficients(self, values: Nodes) -> Float[np.ndarray, " l"]:
        """Return the coefficients of a function given at the nodes."""
        return self.polynomials @ (self.masses * values)

    def sector(self, waves: int, count: int) -> tuple[Table, Table]:
        r"""Return harmonics with so many waves around the axis, and their slopes.

        These are $e_j = (1-z^2)^{m/2} q_j$ and $(1-z^2)^{1/2}\,\partial_z e_j$ at the
        nodes, normalised in the law of $z$, for the degrees from $m$ on.
        """
        values, slopes = orthonormal(self.heights, self.dimension + 2 * waves, count)
        radii = np.sqrt(self.radii_squared)
        envelope = radii**waves
        size = np.sqrt(self.masses @ envelope**2)
        steep = radii * envelope * slopes
        if waves > 0:
            steep = steep - waves * self.heights * radii ** (waves - 1) * values
        return envelope * values / size, steep / size


@functools.lru_cache(maxsize=16)
def zonal_basis(dimension: int, count: int) -> ZonalBasis:
    """Return the basis, from a small store of those used last."""
    return ZonalBasis(dimension, count)


def orthonormal(
    heights: Float[np.ndarray, " m"], dimension: int, count: int
) -> tuple[Float[np.ndarray, "l m"], Float[np.ndarray, "l m"]]:
    r"""Return the orthonormal polynomials of one coordinate, and their derivatives.

    The recurrence is $z p_l = b_{l+1} p_{l+1} + b_l p_{l-1}$ with $b_1^2 = 1/d$ and
    $b_l^2 = \frac{l(l+d-3)}{(2l+d-2)(2l+d-4)}$, $d \ge 2$.
    """
    degrees = np.arange(2, max(count, 3))
    squares = degrees * (degrees + dimension - 3.0)
    squares /= (2 * degrees + dimension - 2.0) * (2 * degrees + dimension - 4.0)
    factors = np.sqrt(np.concatenate([[0.0, 1 / dimension], squares]))
    values = np.zeros((max(count, 2), len(heights)))
    slopes = np.zeros_like(values)
    values[0] = 1.0
    values[1], slopes[1] = heights / factors[1], 1 / factors[1]
    for last in range(1, count - 1):
        below, above = factors[last], factors[last + 1]
        values[last + 1] = (heights * values[last] - below * values[last - 1]) / above
        slopes[last + 1] = (
            values[last] + heights * slopes[last] - below * slopes[last - 1]
        ) / above
    return values[:count], slopes[:count]


class Balance:
    """The discretised equation of stationary densities with an axis of symmetry."""

    def __init__(self, model: Attraction, count: int):
        self.model = model
        self.basis = zonal_basis(model.dimension, count)
        self.ratios = model.ratios(count)
        kernel, slopes = ring_kernel(model, self.basis.heights, self.basis.heights)
        self.kernel = kernel * self.basis.masses
        self.kernel_slopes = slopes * self.kernel

    def density(self, logarithm: Nodes) -> Nodes:
        """Return the density of a logarithm, of mass one."""
        raised = np.exp(logarithm - logarithm.max())
        return raised / (self.basis.masses @ raised)

    def potential(self, density: Nodes) -> Nodes:
        r"""Return $\Psi$ at the nodes."""
        seen = self.kernel @ density
        return np.log(seen) if self.model.is_softmax else seen

    def centred(self, values: Float[np.ndarray, "n ..."]) -> np.ndarray:
        """Return values less their mean in the uniform law."""
        return values - np.tensordot(self.basis.masses, values, 1)

    def residual(self, logarithm: Nodes, coupling: float) -> Nodes:
        """Return by how much the balance is missed."""
        pushed = coupling * self.potential(self.density(logarithm))
        return logarithm - self.centred(pushed)

    def derivatives(
        self, logarithm: Nodes, coupling: float
    ) -> tuple[Float[np.ndarray, "n n"], Nodes]:
        """Return those of the residual in the logarithm and in that of the coupling."""
        density = self.density(logarithm)
        answer = self.kernel.copy()
        if self.model.is_softmax:
            answer /= (self.kernel @ density)[:, None]
        shares = self.basis.masses * density
        # A change of the logarithm moves the density by rho (change - its mean).
        moved = answer * density - np.outer(answer @ density, shares)
        slope = np.eye(len(density)) - coupling * self.centred(moved)
        return slope, -coupling * self.centred(self.potential(density))

    def order(self, density: Nodes, degree: int) -> float:
        r"""Return the mean of the zonal harmonic of a degree, one at the pole."""
        at_pole = orthonormal(np.ones(1), self.model.dimension, degree + 1)[0][
            degree, 0
        ]
        zonal = self.basis.polynomials[degree]
        return float(zonal @ (self.basis.masses * density) / at_pole)

    def excess_free_energy(self, density: Nodes, coupling: float) -> float:
        r"""Return $\kappa(F - F_\text{uniform})$, for unnormalised attention."""
        positive = np.where(density > 0, density, 1)
        entropy = self.basis.masses @ (density * np.log(positive))
        squares = self.ratios[1:] * self.basis.coefficients(density)[1:] ** 2
        return float(entropy - coupling / 2 * squares.sum())

    def is_resolved(self, density: Nodes) -> bool:
        """Whether the last coefficients of a density are negligible."""
        sizes = np.abs(self.basis.coefficients(density))
        tail = sizes[-max(4, len(sizes) // 16) :].max()
        return bool(tail <= RESOLVED * sizes.max())

    def growth(self, density: Nodes, coupling: float) -> float:
        r"""Return the largest growth rate of a perturbation, times $\kappa$.

        Perturbations have up to two waves around the axis (on the circle: even and odd
        ones, which are all). The rotation of a density, a zero, is left out.
        """
        last = 2 if self.model.dimension == 2 else SECTORS
        spectra = [self.spectrum(density, coupling, waves) for waves in range(last)]
        if np.ptp(density) > 1e-7 * density.max():
            spectra[1] = np.delete(spectra[1], np.abs(spectra[1]).argmin())
        return float(max(np.real(rates).max() for rates in spectra))

    def spectrum(self, density: Nodes, coupling: float, waves: int) -> np.ndarray:
        r"""Return eigenvalues of the linearised equation in a sector, times $\kappa$.

        The weak form of $\Delta h - \eta\,\mathrm{div}(h\nabla\Psi)
        - \eta\,\mathrm{div}(\rho\nabla\Psi'h)$ in harmonics $e_j$; the constant is left
        out. Half as many harmonics as nodes, whose products the rule still integrates.
        """
        basis, d = self.basis, self.model.dimension
        count = basis.count // 2
        values, slopes = basis.sector(waves, count)
        degrees = waves + np.arange(count)
        ratios = self.ratios[degrees]
        seen = self.kernel @ density
        # Of the potential and of what a harmonic adds to it: values, steep slopes.
        rise = np.sqrt(basis.radii_squared) * (self.kernel_slopes @ density)
        added, leaning = ratios[:, None] * values, ratios[:, None] * slopes
        if self.model.is_softmax:
            added, leaning = added / seen, leaning / seen - added * (rise / seen**2)
            rise = rise / seen
        flux = basis.masses * (values * rise + density * leaning)
        matrix = coupling * slopes @ flux.T
        if waves > 0:
            around = waves * (waves + d - 3) / basis.radii_squared
            matrix += coupling * (values * around) @ (basis.masses * density * added).T
        matrix -= np.diag(degrees * (degrees + d - 2.0))
        start = int(waves == 0)
        return np.linalg.eigvals(matrix[start:, start:])


def ring_kernel(
    model: Attraction, queries: Float[np.ndarray, " m"], heights: Nodes
) -> tuple[Float[np.ndarray, "m n"], Float[np.ndarray, "m n"]]:
    r"""Return the kernel averaged over rings, and its logarithmic slope in the query.

    With the log-Laplace transform $L$ of the uniform law on $\mathbb{S}^{d-2}$,
    $$\log\frac{1}{\kappa_0}\,\mathbb{E}\,e^{\beta\langle x,y\rangle}
      = \beta zz' + L(\beta^2(1-z^2)(1-z'^2)) - \log\kappa_0.$$
    All entries have the digits of the arithmetic, however small, so that a logarithm
    may be taken; a series of harmonics would lose them.
    """
    with jax.enable_x64(True):
        beta = jnp.asarray(model.beta, float)
        places = jnp.asarray(queries), jnp.asarray(heights)
        logarithms, slopes = _log_kernel(model.dimension, beta, *places)
        return np.exp(np.asarray(logarithms)), np.asarray(slopes)


@functools.partial(jax.jit, static_argnums=0)
def _log_kernel(dimension: int, beta, queries, heights):
    """Return the logarithm of the kernel and its slope, as one program."""
    # Factored, so that nothing cancels near the poles.
    seen_from, radii_squared = ((1 - z) * (1 + z) for z in (queries, heights))
    squares = beta**2 * seen_from[:, None] * radii_squared[None, :]
    around, means, _ = sphere_functions(dimension - 1, squares)
    score = beta * queries[:, None] * heights[None, :]
    ring = beta**2 * means * queries[:, None] * radii_squared[None, :]
    logarithms = score + around - log_zonal_mass(dimension, beta)
    return logarithms, beta * heights[None, :] - ring


def newton(
    balance: Balance, logarithm: Nodes, log_coupling: float, condition
) -> tuple[Nodes, float]:
    """Solve the balance together with one scalar condition, starting from a guess.

    The condition takes the logarithms of the density and of the coupling, and returns
    its value and its derivatives in both. Raises `NoConvergence` after too many steps.
    """
    previous = np.inf
    for _ in range(NEWTON_STEPS):
        coupling = np.exp(log_coupling)
        slope, in_coupling = balance.derivatives(logarithm, coupling)
        value, along, across = condition(logarithm, log_coupling)
        system = np.block([[slope, in_coupling[:, None]], [along[None, :], across]])
        missing = np.append(balance.residual(logarithm, coupling), value)
        try:
            change = np.linalg.solve(system, -missing)
        except np.linalg.LinAlgError:
            break
        size = np.abs(change).max()
        if not np.isfinite(size) or np.abs(change[-1]) > 50:
            break
        scale = min(1.0, 4.0 / max(size, 1e-300))
        logarithm = logarithm + scale * change[:-1]
        log_coupling = log_coupling + scale * float(change[-1])
        settled = 1e-12 * (1 + np.abs(logarithm).max())
        # Rounding may stop it a little earlier: then steps no longer shrink.
        if size <= settled or (size <= 1e4 * settled and size >= previous / 2):
            return logarithm, log_coupling
        previous = size
    raise NoConvergence(
        "Newton's method for a stationary state did not converge; give a start closer "
        "to one, or smaller steps along the branch."
    )


def fixed_coupling(log_coupling: float):
    """Return the condition that the coupling is given."""

    def condition(logarithm, guess):
        return guess - log_coupling, np.zeros_like(logarithm), 1.0

    return condition


def fixed_amplitude(balance: Balance, degree: int, amplitude: float):
    """Return the condition that the logarithm has a given share of a degree."""
    weighted = balance.basis.polynomials[degree] * balance.basis.masses

    def condition(logarithm, _):
        return weighted @ logarithm - amplitude, weighted, 0.0

    return condition
