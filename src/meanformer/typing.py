"""Types shared by every room.

The axis letters of shapes mean the same everywhere: `n` tokens, `m` queries, `d`
dimension, `e` dimension of the output, `k` key dimension, `h` heads, `t` saved depths.
"""

from typing import Any

import numpy.typing as npt
from jaxtyping import Array, Float, PRNGKeyArray

Key = PRNGKeyArray

# NumPy's protocol of nested sequences leaves tuples out when it is checked at run time.
ArrayLike = npt.ArrayLike | tuple[Any, ...]

# The logarithm of a mass and a mean, for each query.
MassAndMean = tuple[Float[Array, " m"], Float[Array, "m d"]]

# Places of queries in the sequence, for masked maps.
Places = Float[Array, " m"] | None
