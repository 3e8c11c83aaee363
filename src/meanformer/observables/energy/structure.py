"""Which attention layers are gradients, of what, and in which metric."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import (
    AbstractAttention,
    AbstractInContextMap,
    GradientForm,
    Perceptron,
    Sum,
)
from meanformer.attention.composition import terms_of as terms_of
from meanformer.errors import InvalidInput
from meanformer.numerics.multiples import agree, definite_quotient, multiple_of
from meanformer.observables.energy.potentials import why_no_gradient


class GradientStructure(eqx.Module):
    r"""Whether the flow of a layer is a gradient flow; true in a condition if it is.

    If so, $\Gamma[\mu](x) = M(x)\,\nabla\frac{\delta (cE)}{\delta\mu}(x)$ with the
    `energy` $E$ of the layer.

    Attributes:
        holds: the answer.
        failure: the condition that fails, in words; empty if none does.
        factor: the constant $c$; the flow climbs $E$ if it is positive and descends
            it if negative.
        mobility: a positive definite $P$ with $M = P$ (or $P/Z$); `None` for $I$.
        divides_by_mass: whether $M$ has the factor $1/Z(x)$ of softmax.
    """

    holds: bool = eqx.field(static=True)
    failure: str = eqx.field(static=True, default="")
    factor: Float[Array, ""] = eqx.field(converter=jnp.asarray, default=0.0)
    mobility: Float[Array, "d d"] | None = None
    divides_by_mass: bool = eqx.field(static=True, default=False)

    def __bool__(self) -> bool:
        return self.holds

    @property
    def direction(self) -> str:
        """`"ascent"` or `"descent"` of the energy; `"none"` if nothing moves."""
        if not self.holds or float(self.factor) == 0:
            return "none"
        return "ascent" if float(self.factor) > 0 else "descent"

    @property
    def metric(self) -> str:
        """The metric of the gradient, in words."""
        if not self.holds:
            return "none"
        name = "Wasserstein" if self.mobility is None else "Wasserstein twisted by P"
        return name + " with mobility 1/Z(x)" if self.divides_by_mass else name

    @property
    def is_wasserstein(self) -> bool:
        """Whether it is a gradient flow in the plain Wasserstein metric."""
        return self.metric == "Wasserstein"

    def covector(self, velocity: Float[Array, "n d"]) -> Float[Array, "n d"]:
        r"""Return $P^{-1}v$ for each velocity."""
        if self.mobility is None:
            return velocity
        return jnp.linalg.solve(self.mobility, velocity.T).T


def is_gradient_flow(
    layer: AbstractInContextMap, *, tolerance: float | None = None
) -> GradientStructure:
    r"""Tell whether the flow of a layer is a gradient flow, and of what.

    With the `energy` $E$ of the layer, its flow is the gradient flow of

    - $\tfrac c2 E_B$ for Sinkhorn, if $B = B^\top$ and $V = cB$;
    - $cE$ for unnormalised and sigmoid attention, if $A = A^\top$ and $V = cA$;
    - $cE$ for linear attention, if $A = \pm A^\top$ and $V = cA^\top$;
    - $cE$ for softmax, if $A = A^\top$ and $V = cA$, but with the mobility $1/Z(x)$: in
      plain Wasserstein space softmax is never one;
    - $\int\Phi\,\mathrm{d}\mu$ for a perceptron, if the output weights of each unit are
      a multiple $c_ja_j$ of its input weights, with $\Phi(x) = \sum_jc_jS(\langle a_j,
      x\rangle + b_j)$ and $S' = \sigma$;
    - the sum of $c_kE_k$ for a `Sum` of such maps, if the metric of each is that of
      Wasserstein. So unnormalised attention with such a perceptron is one, softmax with
      a perceptron has no known energy;
    - $E$ for a map of one's own with a method `energy`, on its word.

    With $V = cPA$ for a symmetric positive definite $P$ (or $cPB$, $cPA^\top$) the same
    holds in the metric $\langle v, P^{-1}v\rangle$.

    Args:
        layer: the map.
        tolerance: relative error allowed in the equations; by default that of rounding.

    Returns:
        The structure; it is true in a condition if the layer is a gradient, and says
        which condition fails if it is not.
    """
    # Known parameters stay known, also where a function that holds them is compiled.
    with jax.ensure_compile_time_eval():
        return _structure(layer, tolerance)


def checked_structure(layer: AbstractInContextMap) -> GradientStructure:
    """Return the structure of a gradient flow, or raise with what fails."""
    structure = is_gradient_flow(layer)
    if not structure:
        raise InvalidInput(f"this is not a gradient flow: {structure.failure}.")
    return structure


def _structure(layer: AbstractInContextMap, tolerance) -> GradientStructure:
    if isinstance(layer, Sum):
        return _of_sum(layer, tolerance)
    if isinstance(layer, Perceptron):
        failure = why_no_gradient(layer, tolerance)
        if failure:
            return _failed(f"the perceptron is no known gradient: {failure}")
        return GradientStructure(True, factor=jnp.ones((), layer.weights_in.dtype))
    form = layer.gradient_form()
    if isinstance(form, str):
        return _failed(form)
    if form is None or not isinstance(layer, AbstractAttention):
        return GradientStructure(True, factor=jnp.ones((), dtype_of(layer)))
    return _of_form(layer, form, tolerance)


def _of_sum(layer: Sum, tolerance: float | None) -> GradientStructure:
    terms = terms_of(layer)
    found = [_structure(term, tolerance) for term in terms]
    if len(found) == 1:
        return found[0]
    for term, one in zip(terms, found, strict=True):
        name = type(term).__name__
        if not one:
            return _failed(f"the term {name} is none: {one.failure}")
        if not one.is_wasserstein:
            return _failed(
                f"the term {name} is a gradient in another metric ({one.metric}), and "
                "a sum has a known energy only if each term is one in that of "
                "Wasserstein"
            )
    return GradientStructure(True, factor=jnp.ones((), found[0].factor.dtype))


def dtype_of(layer: AbstractInContextMap) -> np.dtype:
    """Return the widest type of the numbers of a map."""
    arrays = jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array))
    types = [array.dtype for array in arrays] or [jnp.zeros(()).dtype]
    return max(types, key=lambda dtype: dtype.itemsize)


def unwrapped(layer: AbstractInContextMap) -> AbstractInContextMap:
    """Return the only term of a sum of one; any other map as it is."""
    terms = terms_of(layer)
    return terms[0] if len(terms) == 1 else layer


def factor_in_sum(term: AbstractInContextMap) -> Float[Array, ""]:
    """Return the factor of a term's energy in that of a sum; also under `jit`."""
    form = term.gradient_form()
    if not (isinstance(form, GradientForm) and isinstance(term, AbstractAttention)):
        return jnp.ones(())
    square = jnp.sum(form.matrix * form.matrix)
    factor = jnp.sum(form.matrix * term.value) / jnp.where(square == 0, 1, square)
    return form.share * factor


def _of_form(layer: AbstractAttention, form: GradientForm, tolerance):
    """Compare the value matrix with the form that the energy's gradient has."""
    if layer.query_bias is not None and form.sees_query_bias:
        return _failed("query_bias is set")
    if layer.value_bias is not None:
        return _failed("value_bias is set")
    dtype = form.matrix.dtype
    if tolerance is None:
        tolerance = 1000 * float(jnp.finfo(dtype).eps)
    base, value = (np.asarray(x, np.float64) for x in (form.matrix, layer.value))
    is_odd = form.may_be_odd and agree(base, -base.T, tolerance)
    if not (is_odd or agree(base, base.T, tolerance)):
        apart = np.abs(base - base.T).max()
        rest = " nor antisymmetric" if form.may_be_odd else ""
        return _failed(
            f"{form.name} is not symmetric{rest}: entries differ by {apart:.3g}"
        )
    if base.shape != value.shape:
        return _failed(f"V has shape {value.shape}, which is not square")
    factor, mobility = multiple_of(base, value, tolerance), None
    if factor is None:
        mobility = definite_quotient(base, value, tolerance)
        if mobility is None:
            return _failed(
                f"V is not c {form.name}, and no symmetric positive definite P was "
                f"found with V = c P {form.name}"
            )
        factor = np.sign(np.trace(mobility))
        mobility = jnp.asarray(factor * mobility, dtype)
    return GradientStructure(
        True,
        factor=jnp.asarray(form.share * factor, dtype),
        mobility=mobility,
        divides_by_mass=form.divides_by_mass,
    )


def _failed(failure: str) -> GradientStructure:
    return GradientStructure(False, failure)
