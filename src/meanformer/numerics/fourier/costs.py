"""How long a fast sum takes: a model of few numbers, those of two recent cores."""

import math

from meanformer.numerics.fourier.levels import (
    GAUSSIAN,
    SAMPLE,
    Level,
    kernel_width,
)
from meanformer.numerics.pair_sums.sums import Sizes

# Seconds to spread one point to one node of the grid, by dimension.
POINT = {1: 4e-9, 2: 1.2e-9, 3: 8e-10}
# Seconds of the fast Fourier transform, by mode and binary digit of their number.
MODE = 1e-9


def fast_seconds(level: Level, sizes: Sizes) -> float:
    """Predict the time of a sum at a level, its sample included."""
    axes = sizes.dimension if level.kind == GAUSSIAN else 1
    point = POINT[axes] * kernel_width(level.accuracy) ** axes
    fine = (2 * level.modes) ** axes
    transform = MODE * fine * math.log2(fine)
    complex_columns = -(-sizes.columns // 2)
    sampled = sizes._replace(queries=min(SAMPLE, sizes.queries)).exact_seconds()
    points = sizes.queries + sizes.tokens
    return sampled + complex_columns * (points * point + 2 * transform)
