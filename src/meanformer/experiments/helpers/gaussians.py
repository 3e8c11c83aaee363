"""What experiments on Gaussians share: a covariance, kinds of attention, a layer."""

import numpy as np

import meanformer as mf
from meanformer.attention import AbstractAttention
from meanformer.gaussian import centred

COVARIANCE = np.array([[1.0, 0.3], [0.3, 0.6]])
# The kinds under which a Gaussian stays Gaussian.
KINDS = {
    "softmax": mf.Softmax,
    "L2": mf.L2,
    "Sinkhorn": mf.Sinkhorn,
    "linear": mf.Linear,
}


def softmax_of(score: np.ndarray, value: np.ndarray | None = None) -> mf.Softmax:
    """Softmax attention with this score; its values are the identity by default."""
    identity = np.eye(len(score))
    return mf.Softmax(score, identity, identity if value is None else value)


def change_of(layer: AbstractAttention, covariance: np.ndarray) -> np.ndarray:
    r"""The rate $LS + SL^\top$ at which the covariance of a centred Gaussian moves."""
    slope, _ = mf.gaussian.affine_velocity(layer, centred(covariance))
    half = np.asarray(slope) @ covariance
    return half + half.T
