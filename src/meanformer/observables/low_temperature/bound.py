"""The published form of a bound at low temperature, fitted to what was measured."""

import equinox as eqx
import numpy as np
from jaxtyping import Float

from meanformer.errors import as_doubles, check
from meanformer.observables.low_temperature.comparison import (
    checked_betas,
    checked_depths,
)
from meanformer.typing import ArrayLike


class BoundFit(eqx.Module):
    r"""The published form of a bound, with constants that were fitted to a run.

    $$a\sqrt{\frac{\log(\beta+1)}{\beta}}\,e^{Ct} + b\,e^{-ct}$$

    Attributes:
        growth: the rate $C$.
        decay: the rate $c$.
        rough: the factor $a$.
        far: the factor $b$.
        excess: the largest ratio of a distance to the fitted form; a multiple of the
            form by this factor is a bound on the distances that were measured.
    """

    growth: float
    decay: float
    rough: float
    far: float
    excess: float

    def __call__(
        self, betas: Float[np.ndarray, " b"], depths: Float[np.ndarray, " t"]
    ) -> Float[np.ndarray, "b t"]:
        """Return the fitted form for inverse temperatures and depths."""
        logs = np.log([self.rough, self.far])
        return np.exp(_log_form((self.growth, self.decay, *logs), betas, depths))


def fit_low_temperature_bound(
    betas: ArrayLike, depths: ArrayLike, distances: ArrayLike
) -> BoundFit:
    r"""Fit the published form of the bound to distances that were measured.

    Least squares of the logarithms of $W_2(\mu_t^\beta, \mu_\infty^\infty)$, with
    $C, c \ge 0$. A fit and no theorem: the constants of [ABRR26] are not known here.

    Args:
        betas: inverse temperatures, two or more.
        depths: increasing depths, three or more.
        distances: to the limit of hardmax at infinite depth, positive, a row for each
            temperature; such as `LowTemperature.end_distances`.
    """
    from scipy.optimize import least_squares

    betas, depths = checked_betas(betas), checked_depths(depths)
    distances = as_doubles("distances", distances)
    check(
        len(betas) >= 2 and len(depths) >= 3,
        f"there are {len(betas)} temperatures and {len(depths)} depths; a fit of four "
        "constants needs 2 and 3 or more.",
    )
    check(
        distances.shape == (len(betas), len(depths)),
        f"distances has shape {distances.shape}; it must be {len(betas)} by "
        f"{len(depths)}, one row for each temperature.",
    )
    check(
        bool((np.isfinite(distances) & (distances > 0)).all()),
        "a distance is not positive and finite; the fit is one of logarithms.",
    )
    logs = np.log(distances)
    low = [0.0, 0.0, -np.inf, -np.inf]

    def residual(constants):
        return (_log_form(constants, betas, depths) - logs).ravel()

    found = least_squares(residual, [0.1, 1.0, -1.0, 0.0], bounds=(low, np.inf)).x
    excess = float(np.exp(-residual(found).min()))
    return BoundFit(*map(float, (*found[:2], *np.exp(found[2:]))), excess)


def _log_form(constants, betas: np.ndarray, depths: np.ndarray) -> np.ndarray:
    growth, decay, log_rough, log_far = constants
    rough = log_rough + np.log(np.log1p(betas) / betas)[:, None] / 2
    return np.logaddexp(rough + growth * depths, log_far - decay * depths)
