"""Tabulated values of attention on the circle with identity matrices at beta 5."""

import numpy as np

BETA = 5.0
# Growth rates of waves of 1 to 5 periods on the uniform density, softmax and
# unnormalised.
RATES = np.array(
    [
        [0.1786766274, 0.5141173961, 0.6826783336, 0.6000891395, 0.3961058557],
        [4.8671284285, 14.0044919733, 18.5960703045, 16.3463512437, 10.7898727366],
    ]
)
# Cosine moments of degrees 3 and 6 at depth 3 under softmax attention, from the density
# 1 + 0.1 cos(3 theta), by a spectral solver.
THIRD, SIXTH = 0.3660580605, 0.0978164714
