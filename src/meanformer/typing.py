"""Shapes and scalars shared by every room, as jaxtyping aliases.

The axis letters mean the same everywhere: `n` tokens, `m` queries, `d` dimension,
`k` key dimension, `h` heads, `t` saved depths, `b` batch.
"""

from jaxtyping import Array, Float, Int, PRNGKeyArray

Scalar = Float[Array, ""]
Point = Float[Array, " d"]
Tokens = Float[Array, "n d"]
Queries = Float[Array, "m d"]
Weights = Float[Array, " n"]
Positions = Float[Array, " n"]
Matrix = Float[Array, "d d"]
Depths = Float[Array, " t"]
Ranges = Int[Array, " m"]
Key = PRNGKeyArray
