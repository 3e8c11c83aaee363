r"""Orthonormal functions of the sphere that see one axis, at Gauss nodes of its height.

A function of the height $z = \langle x, e\rangle$ of a point of $\mathbb{S}^{d-1}$ is a
series in orthonormal polynomials $p_l$ of the law of $z$, which are zonal harmonics of
degree $l$; on the circle, $\cos l\theta$ up to a factor. More generally a harmonic of
degree $l = m + j$ with $m$ waves around the axis is
$(1-z^2)^{m/2}\,q_j(z)\,Y_m(\omega)$, where $q_j$ are the polynomials of dimension
$d + 2m$. The exponential kernel and the Laplacian are diagonal in all of them.
"""

import functools

import numpy as np
from jaxtyping import Float

from meanformer.numerics.special.quadrature import gauss_gegenbauer

Nodes = Float[np.ndarray, " n"]
Table = Float[np.ndarray, "l n"]


class ZonalBasis:
    """Gauss nodes on the axis of a sphere, and harmonics of its sectors there.

    Args:
        dimension: dimension of the space around the sphere, 2 or more.
        count: number of nodes, and of polynomials.
    """

    def __init__(self, dimension: int, count: int):
        self.dimension, self.count = dimension, count
        self.heights, self.masses = gauss_gegenbauer(count, dimension)
        self.polynomials = orthonormal(self.heights, dimension, count)[0]
        # Height squared is not subtracted from one: nodes come close to the poles.
        self.radii_squared = (1 - self.heights) * (1 + self.heights)

    def coefficients(self, values: Nodes) -> Float[np.ndarray, " l"]:
        """Return the coefficients of a function given at the nodes."""
        return self.polynomials @ (self.masses * values)

    def at_pole(self, degree: int) -> float:
        """Return the value of the polynomial of a degree at height one."""
        return float(orthonormal(np.ones(1), self.dimension, degree + 1)[0][degree, 0])

    def sector(self, waves: int, count: int) -> tuple[Table, Table]:
        r"""Return harmonics with so many waves around the axis, and their slopes.

        Args:
            waves: the number $m$ of waves; zero for functions of the height.
            count: how many harmonics, of the degrees from $m$ on.

        Returns:
            At the nodes $e_j = (1-z^2)^{m/2} q_j$ and
            $(1-z^2)^{1/2}\,\partial_z e_j$, normalised in the law of $z$.
        """
        size = self.dimension + 2 * waves
        values, slopes = orthonormal(self.heights, size, count)
        radii = np.sqrt(self.radii_squared)
        envelope = radii**waves
        mass = float(self.masses @ envelope**2)
        harmonics = envelope * values
        steep = radii * envelope * slopes
        if waves > 0:
            steep = steep - waves * self.heights * radii ** (waves - 1) * values
        return harmonics / np.sqrt(mass), steep / np.sqrt(mass)


@functools.lru_cache(maxsize=16)
def zonal_basis(dimension: int, count: int) -> ZonalBasis:
    """Return the basis, from a small store of those used last."""
    return ZonalBasis(dimension, count)


def orthonormal(
    heights: Float[np.ndarray, " m"], dimension: int, count: int
) -> tuple[Float[np.ndarray, "l m"], Float[np.ndarray, "l m"]]:
    r"""Return the orthonormal polynomials of one coordinate, and their derivatives.

    The recurrence is $z p_l = b_{l+1} p_{l+1} + b_l p_{l-1}$ with $b_1^2 = 1/d$ and
    $b_l^2 = \frac{l(l+d-3)}{(2l+d-2)(2l+d-4)}$.

    Args:
        heights: where.
        dimension: dimension $d \ge 2$ of the space around the sphere.
        count: how many, of the degrees from zero on.
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
