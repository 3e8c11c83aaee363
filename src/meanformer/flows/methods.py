"""Single steps that diffrax lacks: Runge-Kutta, splitting, decay."""

from collections.abc import Callable
from typing import Any, ClassVar, cast

import diffrax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Share of the exponents of the type that the growth within a step may use.
MOST_GROWTH = 0.8
TOO_LONG = 1e10


class RK4(diffrax.AbstractERK):
    """The classical Runge-Kutta method of order four, for fixed steps."""

    tableau: ClassVar[diffrax.ButcherTableau] = diffrax.ButcherTableau(
        a_lower=(
            np.array([0.5]),
            np.array([0.0, 0.5]),
            np.array([0.0, 0.0, 1.0]),
        ),
        b_sol=np.array([1 / 6, 1 / 3, 1 / 3, 1 / 6]),
        b_error=np.zeros(4),
        c=np.array([0.5, 0.5, 1.0]),
    )
    interpolation_cls: ClassVar[Callable] = (
        diffrax.ThirdOrderHermitePolynomialInterpolation.from_k
    )

    def order(self, terms) -> int:
        """Return four."""
        return 4


class SplitStep(diffrax.AbstractSolver):
    r"""One step of Lie or Strang splitting: the summands of the velocity in turn.

    Order one applies the partial flows one after another; order two applies half of
    each, the last one in full, and the halves back again. Each partial flow is advanced
    by one classical Runge-Kutta step, whose error is of higher order.
    """

    split_order: int
    term_structure: ClassVar = diffrax.MultiTerm
    interpolation_cls: ClassVar[Callable] = diffrax.LocalLinearInterpolation

    def order(self, terms) -> int:
        """Return one for Lie, two for Strang."""
        return self.split_order

    def init(self, terms, t0, t1, y0, args) -> None:
        """Return no state."""
        return

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        """Advance by one step of the splitting."""
        y1 = y0
        for term, start, end in self._stages(terms.terms, t0, t1):
            y1 = _runge_kutta_step(term, start, end, y1, args)
        return y1, None, {"y0": y0, "y1": y1}, None, diffrax.RESULTS.successful

    def func(self, terms, t0, y0, args):
        """Return the whole velocity."""
        return terms.vf(t0, y0, args)

    def _stages(self, terms, t0, t1) -> list[tuple[Any, Any, Any]]:
        if self.split_order == 1:
            return [(term, t0, t1) for term in terms]
        *halved, last = terms
        middle = t0 + (t1 - t0) / 2
        before = [(term, t0, middle) for term in halved]
        after = [(term, middle, t1) for term in reversed(halved)]
        return [*before, (last, t0, t1), *after]


class Lawson(diffrax.AbstractSolver):
    r"""An explicit solver for unknowns with known decay rates, integrated exactly.

    For $\dot y = N(t, y) - \lambda y$ with $\lambda \ge 0$ each step solves for
    $z = e^{\lambda(t - t_0)}y$, $\dot z = e^{\lambda(t-t_0)}N$: what decays fast limits
    no step, unless factors overflow: such a step is told to have a very large error.
    The term is $N$ alone. The order is that of the solver; steps must be adaptive.

    Args:
        solver: an explicit one.
        decay: the rates $\lambda$, of the shape of the unknown.
    """

    solver: diffrax.AbstractERK
    decay: Float[Array, "..."]
    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar[Callable] = diffrax.LocalLinearInterpolation

    def order(self, terms) -> int:
        """Return the order of the solver."""
        return cast(int, self.solver.order(terms))

    def error_order(self, terms):
        """Return the order of the solver's error estimate."""
        return self.solver.error_order(terms)

    def init(self, terms, t0, t1, y0, args) -> None:
        """Return no state: every step has its own unknown."""
        return

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        """Make a step of the solver in the unknown of this step."""
        most = MOST_GROWTH * np.log(float(jnp.finfo(self.decay.dtype).max))
        is_too_long = jnp.max(self.decay) * (t1 - t0) > most

        def grown(t):
            return jnp.exp(jnp.minimum(self.decay * (t - t0), most))

        def field(t, z, args):
            return grown(t) * terms.vf(t, z / grown(t), args)

        term = diffrax.ODETerm(field)
        state = self.solver.init(term, t0, t1, y0, args)
        z1, error, _, _, result = self.solver.step(
            term, t0, t1, y0, args, state, made_jump=True
        )
        y1, error = z1 / grown(t1), cast(Any, error) / grown(t1)
        error = jnp.where(is_too_long, TOO_LONG, error)
        return y1, error, {"y0": y0, "y1": y1}, None, result

    def func(self, terms, t0, y0, args):
        """Return the whole velocity, decay included."""
        return terms.vf(t0, y0, args) - self.decay * y0


def _runge_kutta_step(term, t0, t1, y0, args):
    """Make one classical step on one term; the terms are plain velocities."""
    method = RK4(scan_kind="bounded")
    y1, *_ = method.step(
        term, t0, t1, y0, args, method.init(term, t0, t1, y0, args), False
    )
    return y1
