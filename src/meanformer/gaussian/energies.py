"""Which flows of centred Gaussians are gradient flows, of what, in which metric."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import (
    AbstractAttention,
    AbstractExponential,
    AbstractInContextMap,
    GradientForm,
)
from meanformer.attention.affine import slope_and_drift
from meanformer.errors import check, is_concrete
from meanformer.flows import GaussianTrajectory
from meanformer.gaussian.velocity import check_gaussian
from meanformer.measures import Gaussian
from meanformer.numerics import multiples
from meanformer.numerics.arrays import matmul

# Relative errors of matrices that were multiplied a few times.
ROUNDINGS = 1000
BURES, FISHER_RAO = "Bures-Wasserstein", "Fisher-Rao"


class GaussianStructure(eqx.Module):
    r"""Whether the covariance follows a gradient; true in a condition if it does.

    It is that of $F = cE$ with the `energy` $E$ of the layer. In the Bures-Wasserstein
    metric $\dot S = 2(\nabla F\,S + S\,\nabla F)$, that is $L = 2\nabla F$; with a
    mobility $P$ it is $L = 2P\,\nabla F$; in the Fisher-Rao metric
    $\operatorname{tr}(S^{-1}\dot S S^{-1}\dot S)/2$ it is $\dot S = 2S\,\nabla F\,S$.

    Attributes:
        holds: the answer.
        failure: the condition that fails, in words; empty if none does.
        metric: `"Bures-Wasserstein"` or `"Fisher-Rao"`; empty if it does not hold.
        factor: the constant $c$; the flow climbs $E$ if it is positive and descends
            it if negative.
        mobility: a positive definite $P$ that twists the metric; `None` for $I$.
    """

    holds: bool = eqx.field(static=True)
    failure: str = eqx.field(static=True, default="")
    metric: str = eqx.field(static=True, default="")
    factor: float = eqx.field(static=True, default=0.0)
    mobility: Float[Array, "d d"] | None = None

    def __bool__(self) -> bool:
        return self.holds


def gradient_structure(
    gamma: AbstractInContextMap, *, tolerance: float | None = None
) -> GaussianStructure:
    r"""Tell whether centred Gaussians follow a gradient flow, and of what.

    With the `energy` $E$ of the layer it is that of

    - $cE$ for softmax and linear attention, if $A = \pm A^\top$ and $V = cA^\top$;
    - $cE$ for L2, if $Q = qK$ and $V = cK^\top K$;
    - $\tfrac c2E_B$ for Sinkhorn, if $B = B^\top$ and $V = cB$;
    - $vE$ for softmax with $V = vI$ and any $A$, in the Fisher-Rao metric.

    With $V$ multiplied from the left by a symmetric positive definite $P$ the first
    three hold in the metric twisted by $P^{-1}$.

    Args:
        gamma: one attention layer.
        tolerance: relative error allowed in the equations; by default that of rounding.
    """
    # Also inside of a traced function: the layer itself must be known.
    with jax.ensure_compile_time_eval():
        unknown = f"no energy is known for {type(gamma).__name__}"
        if not isinstance(gamma, AbstractAttention):
            return GaussianStructure(False, unknown)
        if tolerance is None:
            tolerance = ROUNDINGS * float(jnp.finfo(gamma.value.dtype).eps)
        if gamma.peculiarity:
            return GaussianStructure(False, gamma.peculiarity)
        form = gamma.gaussian_form(tolerance)
        if not isinstance(form, GradientForm):
            return GaussianStructure(False, form or unknown)
        return _structure(gamma, form, tolerance)


def _structure(gamma, form, tolerance: float) -> GaussianStructure:
    base = np.asarray(form.matrix, np.float64)
    is_odd = form.may_be_odd and multiples.agree(base, -base.T, tolerance)
    if is_odd or multiples.agree(base, base.T, tolerance):
        found = _of_value(gamma, base, form.name, tolerance)
    elif form.may_be_odd:
        found = GaussianStructure(False, "A is neither symmetric nor antisymmetric")
    else:
        found = GaussianStructure(False, f"{form.name} is not symmetric")
    multiple = multiples.multiple_of_identity(gamma.value)
    if not found and multiple is not None and isinstance(gamma, AbstractExponential):
        return GaussianStructure(True, metric=FISHER_RAO, factor=multiple)
    return dataclasses.replace(found, factor=form.share * found.factor)


def _of_value(gamma, base: np.ndarray, name: str, tolerance) -> GaussianStructure:
    """Compare the value matrix with what the gradient has."""
    value = np.asarray(gamma.value, np.float64)
    multiple = multiples.multiple_of(base, value, tolerance)
    if multiple is not None:
        return GaussianStructure(True, metric=BURES, factor=multiple)
    twist = multiples.definite_quotient(base, value, tolerance)
    if twist is not None:
        sign = float(np.sign(np.trace(twist)))
        mobility = jnp.asarray(sign * twist, gamma.value.dtype)
        return GaussianStructure(True, "", BURES, sign, mobility)
    return GaussianStructure(
        False,
        f"V is not c {name}, and no positive definite P was found with V = c P {name}",
    )


def energy(gamma: AbstractInContextMap, mu: Gaussian) -> Float[Array, ""]:
    r"""Energy that belongs to a kind of attention, at a centred Gaussian.

    - softmax and linear attention: $\frac\beta4\operatorname{tr}(SA^\top SA)$;
    - L2, $Q = qK$ and $G = K^\top K$: $\frac q2\bigl(\operatorname{tr}(GS)
      - \frac{1}{2\beta}\log\det(I + 2\beta SG)\bigr)$;
    - Sinkhorn: the entropic transport reward
      $E_B = \sum_i \frac{s_i - 1}{2} + \frac12\log\frac{2}{1+s_i}$,
      $s_i = \sqrt{1 + 4h_i}$ for the eigenvalues $h_i$ of $S^{1/2}BSB^\top S^{1/2}$;
    - softmax with $V = vI$: $\beta\operatorname{tr}(AS)$, in the Fisher-Rao metric.

    As in `observables.energy` the values do not enter: the flow climbs the energy times
    the `factor` of `gradient_structure`. Linear and Sinkhorn attention have the same
    energy there, for any measure. Softmax has another one: it moves a centred Gaussian
    as linear attention does, so that here it has that energy, in a plainer metric.

    Args:
        gamma: a layer for which `gradient_structure` holds.
        mu: a Gaussian, of mean zero except for Sinkhorn attention, whose energy has
            $m^\top Bm$ in addition.
    """
    return _energy(gamma, mu, _checked(gamma, mu))


def _energy(gamma, mu: Gaussian, structure: GaussianStructure) -> Float[Array, ""]:
    if structure.metric == FISHER_RAO:
        return gamma.temperature * jnp.trace(matmul(gamma.score, mu.covariance()))
    return gamma.gaussian_energy(mu)


def dissipation(gamma: AbstractInContextMap, mu: Gaussian) -> Float[Array, ""]:
    r"""Rate at which the energy changes along the flow, by the dissipation identity.

    $\frac1c\operatorname{tr}(LSL^\top)$ in the Bures-Wasserstein metric, with the
    `factor` $c$ of `gradient_structure`, $\frac1c\operatorname{tr}(P^{-1}LSL^\top)$
    with a mobility, and $\frac1{2c}\operatorname{tr}\bigl((S^{-1}\dot S)^2\bigr)$ in
    that of Fisher and Rao.

    A mean adds $\frac1c|\dot m|^2$, or $\frac1c\dot m^\top P^{-1}\dot m$.

    Args:
        gamma: a layer for which `gradient_structure` holds.
        mu: a Gaussian, of mean zero except for Sinkhorn attention.
    """
    structure = _checked(gamma, mu)
    (slope, drift), root = slope_and_drift(gamma, mu), mu.root()
    if structure.metric == FISHER_RAO and isinstance(gamma, AbstractExponential):
        # S^-1 dS = 2 v beta A_s S, also where S is singular.
        symmetric = (gamma.score + gamma.score.T) / 2
        inner = matmul(root.T, matmul(symmetric, root))
        return 2 * structure.factor * gamma.temperature**2 * jnp.sum(inner**2)
    moved = jnp.concatenate([matmul(slope, root), drift[:, None]], axis=1)
    covectors = moved
    if structure.mobility is not None:
        covectors = jnp.linalg.solve(structure.mobility, moved)
    return jnp.sum(moved * covectors) / (structure.factor or 1.0)


class GaussianEnergyProfile(eqx.Module):
    r"""The energy along a path of Gaussians, with its rate by the identity.

    Attributes:
        depths: the saved depths.
        energies: the energy at each of them.
        rates: $\mathrm{d}E/\mathrm{d}t$ there, from the dissipation identity.
        worst_violation: largest step of the energy against the sign of its rate; zero
            if it is monotone.
    """

    depths: Float[Array, " t"]
    energies: Float[Array, " t"]
    rates: Float[Array, " t"]
    worst_violation: Float[Array, ""]


def energy_profile(
    gamma: AbstractInContextMap, trajectory: GaussianTrajectory
) -> GaussianEnergyProfile:
    """Watch the energy along a solved gradient flow of Gaussians.

    Args:
        gamma: the velocity of the flow.
        trajectory: its solution, from a Gaussian as for `energy`.
    """
    structure = _checked(gamma, trajectory.gaussian(0))

    def at(moments: tuple[Array, Array]) -> tuple[Array, Array]:
        mu = Gaussian(moments[0], factor=moments[1])
        return _energy(gamma, mu, structure), dissipation(gamma, mu)

    energies, rates = jax.lax.map(at, (trajectory.means, trajectory.factors))
    forward = jnp.sign(trajectory.depths[-1] - trajectory.depths[0])
    steps = jnp.diff(energies) * forward * np.sign(structure.factor)
    return GaussianEnergyProfile(
        trajectory.depths, energies, rates, jnp.max(-steps, initial=0)
    )


def _checked(gamma, mu: Gaussian) -> GaussianStructure:
    check_gaussian(mu)
    structure = gradient_structure(gamma)
    check(
        structure.holds,
        f"this is not a gradient flow as far as is known: {structure.failure}.",
    )
    if is_concrete(mu.mean()) and not gamma.energy_sees_mean:
        check(
            not bool(jnp.any(mu.mean() != 0)),
            "the energies are those of Gaussians of mean zero; this one has mean "
            f"{np.asarray(mu.mean())}.",
        )
    return structure
