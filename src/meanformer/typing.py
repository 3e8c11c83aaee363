"""Types shared by every room.

The axis letters of shapes mean the same everywhere: `n` tokens, `m` queries, `d`
dimension, `e` dimension of the output, `k` key dimension, `h` heads, `t` saved depths.
"""

from jaxtyping import PRNGKeyArray

Key = PRNGKeyArray
