"""Flows of a few tokens on the circle through exponentially long depths.

All have five tokens, some of weight zero, and the same number of saved depths, so that
one compiled program serves every experiment.
"""

from collections.abc import Sequence
from typing import cast

import jax.numpy as jnp
import numpy as np

import meanformer as mf
from meanformer.flows import Merges

TOKENS = 5
SAVED = 61
# Angles of the published run of five tokens, at beta 4 [GKPR24].
FIVE = np.array([0.0621971438, 0.2143229734, 1.8191226208, 2.9110710095, 3.1879369617])


def attention_on_circle(kind: str, beta: float) -> mf.Softmax | mf.Unnormalised:
    """Attention with matrices that are the identity; unnormalised over e to the beta.

    With that shift depths stay within numbers.
    """
    eye = jnp.eye(2)
    if kind == "softmax":
        return mf.Softmax(eye, eye, eye, beta=float(beta))
    return mf.Unnormalised(eye, eye, eye, beta=float(beta), shift=float(beta))


def walk_on_circle(
    angles: Sequence[float] | np.ndarray,
    beta: float,
    depths: np.ndarray,
    *,
    kind: str = "softmax",
    weights: Sequence[float] | None = None,
    merge: float | None = None,
    rtol: float = 1e-10,
) -> mf.Trajectory:
    """Walk at most five tokens through exponentially long depths."""
    missing = TOKENS - len(angles)
    masses = np.full(len(angles), 1 / len(angles)) if weights is None else weights
    cloud = mf.TokenCloud.from_angles(
        np.append(angles, np.zeros(missing)),
        np.append(masses, np.zeros(missing)),
    )
    return mf.solve(
        mf.Flow(attention_on_circle(kind, beta), space=mf.Sphere()),
        cloud,
        depths[-1],
        save=depths,
        solver=mf.LongDepth(),
        merge=merge,
        rtol=rtol,
    )


def long_depths(last: float, first: float = 1e-2) -> np.ndarray:
    """Zero and logarithmically spaced depths."""
    return np.append(0.0, np.geomspace(first, last, SAVED - 1))


def depths_around(joins: np.ndarray, last: float) -> np.ndarray:
    """Zero, logarithmically spaced depths, and denser ones where tokens are joined."""
    shares = np.append(-np.geomspace(0.5, 1e-6, 8), 1e-6)
    near = (np.unique(joins)[:, None] * (1 + shares)).ravel()
    others = np.geomspace(1e-2, last, SAVED - 1 - len(near))
    return np.append(0.0, np.sort(np.append(near, others)))


def joins_of(path: mf.Trajectory) -> Merges:
    """The joins of a walk, which always has them."""
    return cast(Merges, path.merges)
