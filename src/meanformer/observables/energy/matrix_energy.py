"""Interaction energies with a matrix: flows, and optimal densities on a circle."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meanformer.attention import Unnormalised
from meanformer.errors import (
    Overflow,
    Unsupported,
    as_finite_array,
    as_integer,
    as_number,
    check,
    check_kind,
    check_shape,
    check_square,
    is_concrete,
)
from meanformer.flows import Flow
from meanformer.geometry import Sphere
from meanformer.geometry.circle import on_circle
from meanformer.measures import TokenCloud
from meanformer.numerics.arrays import matmul
from meanformer.typing import ArrayLike


def matrix_energy_flow(form: ArrayLike, *, ascending: bool = True) -> Flow:
    r"""Flow on the sphere that climbs or descends an energy with a symmetric matrix.

    $$\dot x_i = \pm P_{x_i}\sum_j w_j e^{\langle x_i, Dx_j\rangle} Dx_j, \qquad
      E_D(\mu) = \iint e^{\langle x, Dy\rangle}\,\mathrm{d}\mu(x)\,\mathrm{d}\mu(y):$$
    unnormalised attention with $Q = D$, $K = I$, $V = \pm D$ and $\beta = 1$, the
    Wasserstein gradient flow of $\pm\tfrac12E_D$, which is what `energy` returns. For
    positive definite $D$ the maximisers are single points at unit eigenvectors $\pm v$
    of the largest eigenvalue, with $E_D = e^{\lambda_1}$ [BKKRW25]; minimisers are
    spread out.

    A cluster at $v$ and an equal one at $-v$ are stationary too. They resist small
    perturbations if and only if $\lambda_1\tanh\lambda_1 > \lambda_2$, the next
    eigenvalue: this is why runs of the ascent end in two clusters. (Linear stability,
    derived here.)

    Args:
        form: the symmetric matrix $D$.
        ascending: climb the energy; descend it if `False`.
    """
    form = _checked_form(form)
    check_kind("ascending", ascending, bool, "True or False")
    value = form if ascending else -form
    identity = jnp.eye(len(form), dtype=form.dtype)
    return Flow(Unnormalised(form, identity, value), space=Sphere())


class CircleDensity(eqx.Module):
    r"""A measure on the nodes of a circle that nearly minimises an energy.

    Attributes:
        cloud: the nodes with their masses.
        angles: the angles of the nodes.
        density: the masses divided by the width of a cell, to compare with
            $1/2\pi$.
        energy: the energy $E_D$.
        gap: a bound on how far the energy is above its minimum over all masses on
            these nodes.
        steps: how many steps were taken.
    """

    cloud: TokenCloud
    angles: Float[Array, " n"]
    density: Float[Array, " n"]
    energy: Float[Array, ""]
    gap: Float[Array, ""]
    steps: Int[Array, ""]


def optimal_circle_density(
    form: ArrayLike,
    *,
    count: int = 1000,
    tolerance: float = 1e-9,
    most_steps: int = 20_000,
) -> CircleDensity:
    r"""Minimise an energy with a matrix over all measures on a circle.

    On equally spaced nodes, $E_D = w^\top K w$ with $K_{ij} = e^{\langle x_i,
    Dx_j\rangle}$ is convex in the masses for positive semi-definite $D$. Exponentiated
    gradients, $w_i \propto w_ie^{-g_i/L}$ with $g = 2Kw$ and $L = 2\max_{ij}K_{ij}$,
    never increase it, and
    $$E_D(w) - \min E_D \le \langle w, g\rangle - \min_i g_i$$
    is known at every step: it is the certificate returned as `gap`.

    For $D = I + \varepsilon\,\mathrm{diag}(0, 1)$ the density is
    $\frac1{2\pi}\bigl(1 + \varepsilon\frac{I_1(1)}{2I_2(1)}\cos 2\theta\bigr) +
    O(\varepsilon^2)$, with Bessel functions.

    Args:
        form: the symmetric positive semi-definite matrix $D$, of shape (2, 2).
        count: the number of nodes.
        tolerance: stop when the gap is below this share of the energy.
        most_steps: stop after so many steps in any case.

    Returns:
        The density with its certificate. Cost: $O(n^2)$ time for each step and memory.
    """
    form = _checked_form(form)
    check_shape("form", form, (2, 2))
    if is_concrete(form):
        smallest = float(jnp.linalg.eigvalsh(form)[0])
        if smallest < -1e-12 * float(jnp.abs(form).max()):
            raise Unsupported(
                f"form has the eigenvalue {smallest:.6g}; the energy is convex in the "
                "masses only for positive semi-definite matrices."
            )
    count = as_integer("count", count, least=2)
    most_steps = as_integer("most_steps", most_steps, least=1)
    tolerance = as_number("tolerance", tolerance, "a number from 0 on", least=0)
    angles = (2 * jnp.pi / count) * jnp.arange(count, dtype=form.dtype)
    points = on_circle(angles)
    scores = matmul(matmul(points, form), points.T)
    log_scale = scores.max()
    share = jnp.asarray(tolerance, form.dtype)
    found = _descended(jnp.exp(scores - log_scale), share, most_steps)
    masses = found.masses / found.masses.sum()
    return CircleDensity(
        TokenCloud(points, masses),
        angles,
        masses * (count / (2 * jnp.pi)),
        _unscaled("energy", found.energy, log_scale),
        _unscaled("gap", found.gap, log_scale),
        found.steps,
    )


class _Descent(NamedTuple):
    """A state of the descent; energy and gap in units of the largest kernel."""

    masses: Float[Array, " n"]
    slopes: Float[Array, " n"]
    energy: Float[Array, ""]
    gap: Float[Array, ""]
    steps: Int[Array, ""]


def _unscaled(
    name: str, share: Float[Array, ""], log_scale: Float[Array, ""]
) -> Float[Array, ""]:
    """Return a share of the largest kernel as a number, or raise if it is too large."""
    ceiling = float(np.log(jnp.finfo(share.dtype).max))
    is_zero = share == 0
    log_value = jnp.log(jnp.where(is_zero, 1, share)) + log_scale
    if is_concrete(log_value) and not is_zero and float(log_value) > ceiling:
        raise Overflow(
            f"the {name} overflows {share.dtype}: its logarithm is about "
            f"{float(log_value):.6g}; take a smaller form, or more steps."
        )
    return jnp.where(is_zero, 0, jnp.exp(jnp.minimum(log_value, ceiling)))


@jax.jit
def _descended(
    kernel: Float[Array, "n n"],
    tolerance: Float[Array, ""],
    most_steps: int | Int[Array, ""],
) -> _Descent:
    def looked_at(masses: Float[Array, " n"], steps: Int[Array, ""]) -> _Descent:
        slopes = 2 * matmul(kernel, masses)
        energy = jnp.dot(masses, slopes) / 2
        gap = jnp.maximum(2 * energy - slopes.min(), 0)
        return _Descent(masses, slopes, energy, gap, steps)

    def is_open(state: _Descent) -> Bool[Array, ""]:
        return (state.gap > tolerance * state.energy) & (state.steps < most_steps)

    def step(state: _Descent) -> _Descent:
        # The largest kernel is one, so the step is one half.
        masses = state.masses * jnp.exp(-(state.slopes - state.slopes.min()) / 2)
        return looked_at(masses / masses.sum(), state.steps + 1)

    start = jnp.full(len(kernel), 1 / len(kernel), kernel.dtype)
    return lax.while_loop(is_open, step, looked_at(start, jnp.zeros((), int)))


def _checked_form(form: ArrayLike) -> Float[Array, "d d"]:
    form = as_finite_array("form", form, (None, None))
    check_square("form", form)
    if is_concrete(form):
        apart = float(jnp.abs(form - form.T).max())
        allowed = 1000 * float(jnp.finfo(form.dtype).eps) * float(jnp.abs(form).max())
        check(
            apart <= allowed,
            f"form is not symmetric: entries differ by {apart:.3g}; give (D + D^T)/2.",
        )
    return form
