"""Base classes of contexts, which attention sees, and of token measures."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meanformer.errors import Unsupported, check_range
from meanformer.numerics.arrays import matmul
from meanformer.typing import Key, MassAndMean

FeatureMap = Callable[[Float[Array, "n d"]], Float[Array, "n k"]]


class AbstractContext(eqx.Module):
    r"""What a query attends to: a measure, or one measure for each query.

    Softmax attention sees its context only through the log-Laplace transform
    $$\Lambda_\mu(u) = \log \int e^{\langle u, y\rangle}\,\mathrm{d}\mu(y),$$
    whose gradient is the tilted mean. The other attention variants ask one more
    question each (`linear_mean`, `quadratic_tilt`, …). A context that has no closed
    form for one refuses with the reason; `quadrature(mu, order)` turns a measure into
    a token cloud, which answers all of them.
    """

    @property
    @abc.abstractmethod
    def dimension(self) -> int:
        """Dimension $d$ of the space the tokens live in."""

    @abc.abstractmethod
    def tilted_mass_and_mean(self, u: Float[Array, "m d"]) -> MassAndMean:
        r"""Return $\Lambda_\mu(u)$ and its gradient for each row of `u`."""

    def tilted_through(
        self, queries: Float[Array, "m k"], key: Float[Array, "k d"]
    ) -> MassAndMean:
        r"""Return the same at the tilts $K^\top q$; a cloud is cheaper for few rows."""
        return self.tilted_mass_and_mean(matmul(queries, key))

    def log_laplace(self, u: Float[Array, "m d"]) -> Float[Array, " m"]:
        r"""Return $\Lambda_\mu(u)$ for each row of `u`."""
        log_mass = self.tilted_mass_and_mean(u)[0]
        check_range("log_laplace", log_mass, "lower u, rescale the measure")
        return log_mass

    def tilted_mean(self, u: Float[Array, "m d"]) -> Float[Array, "m d"]:
        r"""Return $\nabla\Lambda_\mu(u)$, the mean under $e^{\langle u,y\rangle}$."""
        mean = self.tilted_mass_and_mean(u)[1]
        check_range("tilted_mean", mean, "lower u, rescale the measure")
        return mean

    @abc.abstractmethod
    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> MassAndMean:
        r"""Return $\int \langle u,\varphi(y)\rangle\,\mathrm{d}\mu$, and with $y$."""

    def centred(self) -> tuple[Float[Array, " d"] | None, "AbstractContext"]:
        """Return an origin amid the context, and the context as seen from there.

        Distances between far points lose their digits in sums of large squares; from
        an origin nearby they keep them. A context whose answers are exact wherever it
        lies stays where it is, with origin `None`.
        """
        return None, self

    def seen_by(self, count: int) -> Bool[Array, " m"]:
        """Return whether each of so many queries sees anything; without a mask, all."""
        return jnp.ones((count,), bool)

    def quadratic_tilt(
        self, precision: Float[Array, "d d"], *, is_positive: bool = False
    ) -> tuple[Float[Array, ""], "AbstractContext"]:
        r"""Multiply by $e^{-y^\top P y/2}$; return the log-mass and the rest.

        Args:
            precision: the matrix $P$.
            is_positive: whether it is known that $P \ge 0$, so that there is nothing to
                be refused.
        """
        raise self._refusal("L2 attention")

    def kernel_mean(
        self, u: Float[Array, "m d"], profile: Callable[[Array], Array]
    ) -> MassAndMean:
        r"""Return $\int \varphi(\langle u,y\rangle)\,\mathrm{d}\mu$, and with $y$."""
        raise self._refusal("a function of the score, as in sigmoid attention")

    def maximal_mean(
        self, u: Float[Array, "m d"], tolerance: float
    ) -> Float[Array, "m d"]:
        r"""Return the mean over the support where $\langle u,y\rangle$ is largest."""
        raise self._refusal("hardmax attention")

    def entropic_tilt(
        self, form: Float[Array, "d d"], potential: Callable
    ) -> "AbstractContext":
        r"""Return $e^{g}\mu$, with $g$ a potential of the entropic self-transport.

        The plan is $e^{y^\top B x + f(x) + g(y)}\mu(\mathrm{d}x)\mu(\mathrm{d}y)$ with
        both marginals $\mu$, so that the mean of $y$ given $x$ is the tilted mean of
        $e^{g}\mu$ at $Bx$.

        Args:
            form: the matrix $B$.
            potential: computes $g$ on the tokens of a cloud; measures that know it in
                closed form do without.
        """
        raise self._refusal("Sinkhorn attention")

    def _refusal(self, what: str) -> Unsupported:
        return Unsupported(
            f"{type(self).__name__} has no closed form for {what}; use "
            "quadrature(measure, order) to turn it into a TokenCloud."
        )


class AbstractMeasure(AbstractContext):
    r"""A probability measure on $\mathbb{R}^d$: a context with moments and samples."""

    @abc.abstractmethod
    def mean(self) -> Float[Array, " d"]:
        """Return the mean."""

    @abc.abstractmethod
    def covariance(self) -> Float[Array, "d d"]:
        """Return the covariance matrix."""

    @abc.abstractmethod
    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw independent points."""

    def second_moment(self) -> Float[Array, "d d"]:
        r"""Return $\int y y^\top \mathrm{d}\mu$, not centred."""
        mean = self.mean()
        return self.covariance() + jnp.outer(mean, mean)

    def diameter(self) -> Float[Array, ""]:
        """Return the largest distance between two points of the support."""
        raise self._refusal("its diameter")

    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> MassAndMean:
        r"""Return $\langle u, m\rangle$ and $M_2 u$ from the first two moments."""
        if feature_map is not None:
            raise self._refusal("linear attention with a feature map")
        return matmul(u, self.mean()), matmul(u, self.second_moment())
