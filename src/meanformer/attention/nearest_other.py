"""Zero temperature without oneself: each token looks at its nearest neighbour."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractInContextMap, checked_queries, number
from meanformer.errors import Unsupported
from meanformer.measures import AbstractContext
from meanformer.measures.cloud import TokenCloud
from meanformer.numerics.arrays import held, matmul, safe_norm
from meanformer.numerics.nearest import PAIRS_AT_ONCE, squared_distances
from meanformer.numerics.pair_sums.kernel import ROUNDINGS
from meanformer.numerics.pair_sums.tiles import map_rows
from meanformer.typing import Places


class NearestOther(AbstractInContextMap):
    r"""The token nearest to a point, those at the point itself left out.

    $$\Gamma[\mu](x) = x_{j^*}, \qquad
      j^* = \arg\min_{j:\, |x - x_j| > \tau}\,|x - x_j| .$$

    On the sphere the nearest token has the largest inner product, so the flow
    $\dot x_i = P_{x_i}x_{j^*}$ is self-attention at zero temperature without the token
    itself, which would win and make the velocity zero. Two tokens at the angle
    $\varphi$ that are nearest to each other follow $\dot\varphi = -2\sin\varphi$, hence
    $\tan\tfrac{\varphi(t)}2 = e^{-2t}\tan\tfrac{\varphi(0)}2$. They never meet, and
    look at each other for ever: to let a pair go on as one, join its tokens, with
    `solve(..., merge=...)` or with a positive tolerance.

    Tokens equally near are averaged with their weights. The map is discontinuous in the
    query; derivatives hold the chosen tokens fixed. Where there is no other token, it
    returns the point itself, whose velocity on the sphere is zero. Cost: $O(mnd)$ time,
    two million pairs of memory.

    Args:
        tolerance: the distance $\tau$ up to which a token is at the point itself;
            distances within rounding are so in any case.
    """

    tolerance: float = number("tolerance", least=0, default=0.0, kw_only=True)

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m d"]:
        """Return the nearest other token of each query point."""
        x = checked_queries(self, mu, x)
        if not isinstance(mu, TokenCloud):
            raise Unsupported(
                f"the context is a {type(mu).__name__}; only among tokens is one the "
                "nearest: use quadrature(measure, order) to turn a measure into some."
            )
        if len(x) == 0:
            return x
        rows = max(1, PAIRS_AT_ONCE // mu.count)
        return map_rows(lambda block: self._nearest(mu, block), x, rows)

    def _nearest(self, mu: TokenCloud, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        present = (mu.weights > 0)[:, None]
        held_points = held(mu.points, present)
        points, queries = lax.stop_gradient((held_points, x))
        sizes = safe_norm(queries)[:, None] + safe_norm(points)[None, :]
        rounding = ROUNDINGS * jnp.finfo(x.dtype).eps * sizes
        # In units of the largest coordinate, whose square may be no number.
        largest = jnp.maximum(jnp.abs(points).max(), jnp.abs(queries).max())
        unit = jnp.where(largest > 0, largest, 1)
        distances = unit * jnp.sqrt(squared_distances(queries / unit, points / unit))
        is_other = distances > jnp.maximum(self.tolerance, rounding)
        candidates = is_other & (mu.weights > 0)[None, :]
        nearest = jnp.where(candidates, distances, jnp.inf).min(axis=1, keepdims=True)
        is_nearest = candidates & (distances <= nearest + rounding)
        shares = jnp.where(is_nearest, mu.weights[None, :], 0)
        total = lax.stop_gradient(shares.sum(axis=1, keepdims=True))
        # Divided twice: the square of a tiny mass is no number.
        shares /= jnp.where(total > 0, total, 1)
        whole = shares.sum(axis=1, keepdims=True)
        mean = matmul(shares / jnp.where(whole > 0, whole, 1), held_points)
        return jnp.where(whole > 0, mean, x)
