"""Tokens and a value matrix whose limits are tabulated; layers of known limit."""

import numpy as np

from meanformer.experiments import plain_attention
from meanformer.experiments.helpers import reference
from meanformer.experiments.limits.clusters_predicted import KINDS as KINDS
from meanformer.experiments.limits.clusters_predicted import random_case as random_case

TOKENS = np.array(reference.SIX)
THIRD = np.array(reference.THIRD)
VALUE = np.array([[0.64709742, 0.81911926], [0.61210449, 0.63263484]])


def plain(value, **options):
    """Softmax attention with identity query and key."""
    return plain_attention(np.atleast_2d(value), **options)
