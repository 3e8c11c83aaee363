"""A token cloud transported onto itself: the steps behind Sinkhorn attention."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from meanformer.numerics.arrays import matmul
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import AbstractPairSums


class SelfTransport(eqx.Module):
    r"""The entropic transport of a token cloud onto itself for a bilinear score.

    $$s_{ij} = \langle B x_i, x_j\rangle, \qquad
      k_{ij} = e^{s_{ij} + f_i + g_j}, \qquad
      \sum_j w_j k_{ij} = 1, \quad \sum_i w_i k_{ij} = 1.$$

    Rows are queries, columns are tokens. A step or an average is one pair sum: time
    $O(n^2 d)$, memory $O(n d)$ plus one block.

    Args:
        points: the tokens $x_i$.
        weights: their masses $w_i \ge 0$; zero means absent.
        form: the matrix $B$.
        sums: how sums over tokens are computed.
    """

    points: Float[Array, "n d"]
    weights: Float[Array, " n"]
    form: Float[Array, "d d"]
    sums: AbstractPairSums

    def row_step(self, g: Float[Array, " n"]) -> Float[Array, " n"]:
        r"""Return $f_i = -\log\sum_j w_j e^{s_{ij} + g_j}$: rows then sum to one."""
        return -self.sums.softmax(self._rows(g), self.points[:, :0])[0]

    def column_step(self, f: Float[Array, " n"]) -> Float[Array, " n"]:
        r"""Return $g_j = -\log\sum_i w_i e^{s_{ij} + f_i}$: columns then sum to one.

        Absent tokens get the extension of $g$ to their place.
        """
        return -self.sums.softmax(self._columns(f), self.points[:, :0])[0]

    def both_steps(self, g: Float[Array, " n"]) -> Float[Array, " n"]:
        """Return the token potential after one row step and one column step."""
        return self.column_step(self.row_step(g))

    def row_average(
        self, g: Float[Array, " n"], values: Float[Array, "n v"]
    ) -> Float[Array, "n v"]:
        """Average values over the tokens that each query sees."""
        return self.sums.softmax(self._rows(g), values)[1]

    def column_average(
        self, f: Float[Array, " n"], values: Float[Array, "n v"]
    ) -> Float[Array, "n v"]:
        """Average values over the queries that see each token."""
        return self.sums.softmax(self._columns(f), values)[1]

    def density(
        self, f: Float[Array, " n"], g: Float[Array, " n"]
    ) -> Float[Array, "n n"]:
        """Return the plan's density $k$ as a dense array; for small clouds only."""
        return jnp.exp(self._rows(g).scores() + f[:, None])

    def resting_potential(self) -> Float[Array, " n"]:
        r"""Return $g_j = -\tfrac12 x_j^\top B x_j$, the natural start.

        With it in both arguments the score is
        $-\tfrac12 (x_i - x_j)^\top B (x_i - x_j)$ for symmetric $B$, and the iterates
        do not depend on where the cloud sits.
        """
        return -jnp.sum(self.points * self._tilts(self.form), axis=1) / 2

    def _rows(self, g):
        return Pairs(self._tilts(self.form.T), self.points, self.weights, g)

    def _columns(self, f):
        return Pairs(self._tilts(self.form), self.points, self.weights, f)

    def _tilts(self, matrix):
        return matmul(self.points, matrix)


def marginal_error(
    weights: Float[Array, " n"],
    potential: Float[Array, " n"],
    balanced: Float[Array, " n"],
) -> Float[Array, ""]:
    r"""Largest distance from one of the plan's marginal densities.

    $$\max_{w_j > 0} |e^{g_j - g_j'} - 1|,$$

    where the step that would balance this marginal turns $g$ into $g'$.
    """
    return jnp.max(
        jnp.abs(jnp.expm1(potential - balanced)), where=weights > 0, initial=0
    )


def rounding_level(
    weights: Float[Array, " n"], f: Float[Array, " n"], g: Float[Array, " n"]
) -> Float[Array, ""]:
    """Estimate the rounding in sums of the plan, from the size of its exponents."""
    sizes = jnp.where(weights > 0, jnp.maximum(jnp.abs(f), jnp.abs(g)), 0)
    return 8 * jnp.finfo(weights.dtype).eps * jnp.max(sizes)


def is_positive_form(form: Float[Array, "d d"]) -> Bool[Array, ""]:
    """Whether a matrix is symmetric positive semi-definite, up to rounding."""
    rounding = 8 * len(form) * jnp.finfo(form.dtype).eps
    asymmetry = jnp.max(jnp.abs(form - form.T), initial=0)
    eigenvalues = jnp.linalg.eigvalsh((form + form.T) / 2)
    largest = jnp.max(jnp.abs(eigenvalues))
    return (asymmetry <= rounding * largest) & (eigenvalues[0] >= -rounding * largest)


@eqx.filter_jit
def oscillation(problem: SelfTransport) -> Float[Array, ""]:
    r"""Largest oscillation of the score, which sets the speed of Sinkhorn's algorithm.

    $$\eta = \max_{x, x', y, y'} \langle B(x - x'), y - y'\rangle.$$

    Each half-step contracts Hilbert's distance at least by $\tanh(\eta/4)$
    (Birkhoff's theorem). Absent tokens do not count.

    Returns:
        $\eta$, exactly. Cost: $O(n^3)$ time, $O(n d)$ memory plus $64 n$ numbers; see
        `oscillation_bound` for large clouds.
    """
    points = _only_present(problem)
    tilts = matmul(points, problem.form.T)

    def width(direction):
        heights = matmul(points, direction)
        return heights.max() - heights.min()

    def widest_from(tilt):
        return lax.map(width, tilt[None, :] - tilts, batch_size=64).max()

    return lax.map(widest_from, tilts).max()


@eqx.filter_jit
def oscillation_bound(problem: SelfTransport) -> Float[Array, ""]:
    r"""Bound the oscillation of the score from above, in time linear in the tokens.

    $$\eta \le \sum_k \sigma_k \operatorname{width}(u_k) \operatorname{width}(v_k),
      \qquad B = \sum_k \sigma_k u_k v_k^\top,$$

    where the width of a direction is that of the cloud seen along it. The bound is an
    equality in dimension one. Cost: $O(n d^2 + d^3)$.
    """
    left, scales, right = jnp.linalg.svd(problem.form)
    points = _only_present(problem)

    def widths(directions):
        heights = matmul(points, directions)
        return heights.max(axis=0) - heights.min(axis=0)

    return jnp.sum(scales * widths(left) * widths(right.T))


def _only_present(problem):
    """Return the points with every absent token moved onto a present one."""
    anchor = problem.points[jnp.argmax(problem.weights)]
    return jnp.where((problem.weights > 0)[:, None], problem.points, anchor[None, :])
