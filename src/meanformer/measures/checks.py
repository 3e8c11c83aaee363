"""Checks of weights, positions and closed forms, shared by all measures."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from meanformer.errors import Unsupported, as_finite_array, check, is_concrete
from meanformer.typing import ArrayLike

WEIGHT_TOLERANCE = 1e-6


def checked_weights(
    points: Float[Array, "n ..."], weights: ArrayLike | None, *, normalize: bool
) -> Float[Array, " n"]:
    """Return masses of the points' type, equal ones by default, or raise."""
    count = points.shape[0]
    if weights is None:
        return jnp.full((count,), 1 / count, points.dtype)
    masses = as_finite_array("weights", weights, (count,))
    if is_concrete(masses):
        rounding = float(jnp.finfo(masses.dtype).eps)
        _check_masses(np.asarray(masses, np.float64), normalize, rounding)
    masses = masses / masses.sum() if normalize else masses
    return masses.astype(points.dtype)


def _check_masses(masses: np.ndarray, normalize: bool, rounding: float) -> None:
    lowest, total = float(masses.min()), float(masses.sum())
    tolerance = max(WEIGHT_TOLERANCE, rounding)
    check(
        lowest >= 0,
        f"weights holds {lowest} at index {masses.argmin()}; none may be negative.",
    )
    check(total > 0, "weights are all zero; at least one must be positive.")
    check(
        normalize or abs(total - 1) <= tolerance,
        f"weights sum to {total}; they must sum to 1 within {tolerance}, or pass "
        "normalize=True.",
    )


def checked_positions(
    points: Float[Array, "n d"], positions: ArrayLike | None
) -> Float[Array, " n"] | None:
    """Return places in [0, 1], one per point, or raise; `None` if there are none."""
    return None if positions is None else checked_places(points, positions)


def checked_places(
    points: Float[Array, "n d"], positions: ArrayLike
) -> Float[Array, " n"]:
    """Return places in [0, 1], one per point, or raise."""
    # Their own type: rounded to the points' half precision, places would coincide.
    places = as_finite_array("positions", positions, (points.shape[0],))
    if is_concrete(places):
        known = np.asarray(places)
        low, high = float(known.min()), float(known.max())
        check(
            low >= 0 and high <= 1,
            f"positions range over [{low}, {high}]; they must lie in [0, 1].",
        )
    return places


def require(holds: Bool[Array, ""], value: Array, need: str) -> Array:
    """Return the value if the closed form it is for exists; refuse otherwise.

    A condition that is only known at run time fails when the value is used.
    """
    message = f"{need}; use quadrature(measure, order) to turn it into a TokenCloud."
    if not is_concrete(holds):
        return eqx.error_if(value, ~holds, message)
    if not holds:
        raise Unsupported(message)
    return value
