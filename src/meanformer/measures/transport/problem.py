"""The entropic transport problem between two clouds, and its semi-dual."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.measures.transport.atoms import Atoms
from meanformer.numerics.arrays import matmul
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import Blocked

DENSE_LIMIT = 4_000_000


class Problem(NamedTuple):
    """What is asked: two clouds, a temperature, and how far marginals may be off."""

    source: Atoms
    target: Atoms
    epsilon: Float[Array, ""]
    tolerance: Float[Array, ""]

    @property
    def is_dense(self) -> bool:
        """Whether all pairs fit comfortably in memory."""
        return len(self.source.masses) * len(self.target.masses) <= DENSE_LIMIT

    def reversed(self) -> "Problem":
        """Return the problem seen from the target."""
        return self._replace(source=self.target, target=self.source)

    def pairs(self, potential: Float[Array, " m"]) -> Pairs:
        r"""Return $(g_j - |x_i - y_j|^2)/\varepsilon$ as scores, less $|x_i|^2$."""
        offsets = (potential - jnp.sum(self.target.points**2, axis=1)) / self.epsilon
        tilts = 2 * self.source.points / self.epsilon
        return Pairs(tilts, self.target.points, self.target.masses, offsets)


def softmin(problem: Problem, potential: Float[Array, " m"]) -> Float[Array, " n"]:
    r"""Best partner of a potential, on the source atoms.

    $$f(x) = -\varepsilon \log \sum_j b_j\, e^{(g_j - |x - y_j|^2)/\varepsilon}:$$
    the log-Laplace transform of the target at $2x/\varepsilon$. Absent atoms of the
    target count for nothing, in value and gradient.
    """
    nothing = problem.target.points[:, :0]
    log_mass, _ = Blocked().softmax(problem.pairs(potential), nothing)
    squares = jnp.sum(problem.source.points**2, axis=1)
    return squares - problem.epsilon * log_mass


@eqx.filter_jit
def semi_dual(problem: Problem, potential: Float[Array, " m"]) -> Float[Array, ""]:
    r"""Lower bound $\int f\,\mathrm{d}\mu + \int g\,\mathrm{d}\nu$ of the cost.

    Its error is quadratic in that of $g$, and with $g$ frozen the derivative is that
    of the optimal value.
    """
    source, target = problem.source, problem.target
    partner = softmin(problem, potential)
    return matmul(source.masses, partner) + matmul(target.masses, potential)
