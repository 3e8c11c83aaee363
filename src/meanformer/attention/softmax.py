"""Row-normalised attention: softmax and L2, tilted means of the context."""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractAttention, checked_queries
from meanformer.errors import InvalidInput, is_concrete
from meanformer.measures import AbstractContext
from meanformer.numerics.dense import softmax_shares


class AbstractTilting(AbstractAttention):
    r"""An attention that averages the values over a tilt of the context.

    $$\Gamma[\mu](x) = V\,\nabla\Lambda_{\nu}(u(x)) + b_V,$$
    where $\nu$ is the context, perhaps reweighted (`seen`), and $u(x)$ the gradient of
    the score in the token.
    """

    @abc.abstractmethod
    def seen(self, mu: AbstractContext) -> AbstractContext:
        """Return the context as the queries see it."""

    @abc.abstractmethod
    def slopes(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """Return the tilt of each query."""

    @abc.abstractmethod
    def read(self, mean: Float[Array, "m d"]) -> Float[Array, "m e"]:
        """Return the value of the tilted mean."""

    def __call__(
        self,
        mu: AbstractContext,
        x: Float[Array, "m d"],
        *,
        positions: Float[Array, " m"] | None = None,
    ) -> Float[Array, "m e"]:
        """Return the averaged values as seen from each query."""
        x = checked_queries(self, mu, x)
        return self.read(self.seen(mu).tilted_mean(self.slopes(x)))

    def matrix(
        self, mu: AbstractContext, x: Float[Array, "m d"]
    ) -> Float[Array, "m n"]:
        """Return the probabilities of the tokens as seen from each query."""
        return softmax_shares(self.seen(mu).pairs(self.slopes(x)))


class Softmax(AbstractTilting):
    r"""Softmax attention, the usual one.

    $$\Gamma[\mu](x) = V \int y\, p_x(\mathrm{d}y), \qquad
      p_x(\mathrm{d}y) \propto e^{\beta\langle Qx, Ky\rangle}\mu(\mathrm{d}y).$$

    In terms of the log-Laplace transform of the context it is
    $V\nabla\Lambda_\mu(\beta A x)$, $A = K^\top Q$. Its derivative in the query is
    $\beta V \mathrm{Cov}_{p_x} A$. Cost on a cloud: $O(mnd)$ time.
    """

    def seen(self, mu: AbstractContext) -> AbstractContext:
        """Return the context itself."""
        return mu

    def slopes(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        r"""Return $\beta K^\top(Qx+b_Q)$."""
        return self.tilts(x)

    def read(self, mean: Float[Array, "m d"]) -> Float[Array, "m e"]:
        r"""Return $Vy + b_V$."""
        return self.values(None, mean)


class L2(AbstractTilting):
    r"""Attention by distance instead of inner product.

    $$p_x(\mathrm{d}y) \propto e^{-\beta|Qx - Ky|^2}\mu(\mathrm{d}y).$$

    It is softmax attention at $2\beta$ on the context reweighted by
    $e^{-\beta|Ky|^2}$, equal to softmax where all $|Ky|$ agree. With $Q = K = V = I$,
    $\Gamma - x$ is the Gaussian mean shift.

    Args:
        query: as for every attention; likewise `key`, `value`, `beta` and the biases.
        half: use $e^{-\beta|Qx-Ky|^2/2}$ instead, as some papers do.
        value_map: `"kim"` multiplies the mean by $A/\sqrt{k}$ before $V$, the layer of
            Kim, Papamakarios and Mnih [KPM21], which needs $Q = K$.
    """

    half: bool = eqx.field(default=False, kw_only=True, static=True)
    value_map: str | None = eqx.field(default=None, kw_only=True, static=True)

    def __check_init__(self):
        if self.value_map not in (None, "kim"):
            raise InvalidInput(
                f'value_map is {self.value_map!r}; it must be None or "kim".'
            )
        if self.value_map == "kim" and not _agree(self.query, self.key):
            raise InvalidInput('value_map="kim" needs query equal to key; they differ.')

    @property
    def sharpness(self) -> Float[Array, ""]:
        r"""Twice the factor of $|Qx-Ky|^2$: $2\beta$, or $\beta$ with `half`."""
        return self.temperature if self.half else 2 * self.temperature

    def seen(self, mu: AbstractContext) -> AbstractContext:
        r"""Return the context times $e^{-\beta|Ky|^2}$."""
        return mu.quadratic_tilt(self.sharpness * self.key.T @ self.key)[1]

    def slopes(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        r"""Return $2\beta K^\top(Qx+b_Q)$."""
        return self.sharpness * self.queries(x) @ self.key

    def read(self, mean: Float[Array, "m d"]) -> Float[Array, "m e"]:
        r"""Return $Vy + b_V$, or $V(A/\sqrt{k})y + b_V$."""
        if self.value_map == "kim":
            mean = mean @ self.score.T / jnp.sqrt(self.key.shape[0]).astype(mean.dtype)
        return self.values(None, mean)


def _agree(first: Array, second: Array) -> bool:
    known = is_concrete(first) and is_concrete(second)
    return not known or bool(jnp.array_equal(first, second))
