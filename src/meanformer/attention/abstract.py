"""In-context maps: what a layer is, and what all attention variants share."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from meanformer.attention.constants import Constants
from meanformer.errors import (
    InvalidInput,
    Unsupported,
    as_float_array,
    as_number,
    check,
    check_finite,
    check_kind,
    check_range,
    check_shape,
    is_concrete,
)
from meanformer.measures import AbstractContext, AbstractMeasure, Gaussian, TokenCloud
from meanformer.measures.cloud import AbstractCloud
from meanformer.numerics.arrays import matmul, widened
from meanformer.typing import Places

NEGATIVE_BETA = (
    "must not be negative; for the repulsive case change the sign of query, or set "
    "allow_negative_beta to true."
)


class GradientForm(NamedTuple):
    r"""The matrix $F$ that values are a multiple of, where a flow climbs an energy.

    Attributes:
        matrix: the form $F$; the flow of $V = cF$ is the gradient flow of $cE$.
        name: how it is called in messages.
        may_be_odd: whether $F^\top = -F$ does as well as $F^\top = F$.
        share: a factor of the energy besides $c$.
        divides_by_mass: whether velocities are divided by the mass that is seen.
        sees_query_bias: whether a bias of the queries spoils it.
    """

    matrix: Float[Array, "d d"]
    name: str
    may_be_odd: bool = False
    share: float = 1.0
    divides_by_mass: bool = False
    sees_query_bias: bool = True


# How maps compose and add, filled in by `composition`, which is built on them.
OPERATORS: dict[str, Callable] = {}


class AbstractHolder(eqx.Module):
    """Something made of several maps, of which those that are alike become one."""

    @abc.abstractmethod
    def stacked(self) -> "AbstractHolder":
        """Return the same with maps that are alike kept as one."""


def stack_maps(tree: PyTree) -> PyTree:
    """Return a tree whose sums, heads, networks and schedules keep alike maps as one.

    Done once before a loop over depth, so that it is not done at every step.
    """

    def is_holder(node) -> bool:
        return isinstance(node, AbstractHolder)

    def keep(node):
        if not is_holder(node):
            return node
        inside = jax.tree.map(
            keep, node, is_leaf=lambda inner: inner is not node and is_holder(inner)
        )
        return inside.stacked()

    return jax.tree.map(keep, tree, is_leaf=is_holder)


class AbstractInContextMap(eqx.Module):
    r"""A map $\Gamma[\mu](x)$ that sees a point and a whole measure.

    Call it as `gamma(mu, x)` with any context and any query points, on the support or
    off it; `positions` are the queries' places in the sequence, for masked maps. Maps
    add (`a + b`) and compose (`last @ first`).

    Attributes:
        bends_gaussians: why a Gaussian does not stay one under the map, where that is
            known of its kind; `None` otherwise.
        refuses_masks: why the map cannot stand behind a mask; `None` if it can.
        is_continuous: whether a small change of tokens changes its values little.
    """

    bends_gaussians: ClassVar[str | None] = None
    refuses_masks: ClassVar[str | None] = None
    is_continuous: ClassVar[bool] = True

    @property
    def input_dimension(self) -> int | None:
        """Dimension of the points it takes; `None`, as by default, if any."""
        return None

    @property
    def output_dimension(self) -> int | None:
        """Dimension of the points it returns; that of the input by default."""
        return self.input_dimension

    @abc.abstractmethod
    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m e"]:
        """Return the image of each query point in the context."""

    def matrix(self, mu: AbstractCloud, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        r"""Return the weight of each token as seen from each query, $w_j$ included.

        Maps that weigh tokens say it, for `attention_matrix`; others have none.
        """
        raise Unsupported(f"{type(self).__name__} has no attention matrix.")

    def energy(self, mu: AbstractMeasure) -> Float[Array, ""]:
        r"""Return the energy that the flow of the map climbs, for fitting values."""
        raise Unsupported(
            f"{type(self).__name__} has no known energy; Sinkhorn, Unnormalised, "
            "Softmax, Sigmoid, Linear, Perceptron and their sums may have one, and a "
            "map of one's own with a method `energy`."
        )

    def gradient_form(self) -> GradientForm | str | None:
        """Return what values must be a multiple of, or why no energy is known.

        `None` if the map is the Wasserstein gradient of its `energy` as it stands, as
        one of one's own is.
        """
        if type(self).energy is not AbstractInContextMap.energy:
            return None
        return f"no energy is known for {type(self).__name__}"

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        r"""Return what is known for queries and tokens in a ball: `lipschitz_bounds`.

        Args:
            radius: the radius of the ball.
            order: the order $p$ of the distance $d_p$, for masked maps.
        """
        raise Unsupported(f"no a priori bound is known for {type(self).__name__}.")

    def followed_by(self, output: Float[Array, "f e"]) -> "AbstractInContextMap | None":
        """Return the map with a matrix multiplied into its values, if it has values."""
        return None

    def __matmul__(self, first: "AbstractInContextMap") -> "AbstractInContextMap":
        return OPERATORS["@"](self, first)

    def __add__(self, other: "AbstractInContextMap") -> "AbstractInContextMap":
        return OPERATORS["+"](self, other)


def maps_in(tree: PyTree) -> list[AbstractInContextMap]:
    """Return all maps in a tree, itself if it is one, and those they are made of."""

    def is_inner(node) -> bool:
        return node is not tree and isinstance(node, AbstractInContextMap)

    inner = filter(is_inner, jax.tree.leaves(tree, is_leaf=is_inner))
    own = [tree] if isinstance(tree, AbstractInContextMap) else []
    return own + [part for one in inner for part in maps_in(one)]


def parameter(name: str, *, is_scalar: bool = False, **options):
    """Return a module field holding a finite array, converted from input and checked.

    Args:
        name: what the user calls it.
        is_scalar: whether it must be one number.
        options: those of `eqx.field`; with the default `None` it may be left out.
    """
    is_optional = options.get("default", name) is None

    def convert(value):
        if is_optional and value is None:
            return None
        array = as_float_array(name, value)
        if is_scalar:
            check_shape(name, array, ())
        check_finite(name, array)
        return array

    return eqx.field(converter=convert, **options)


def number(name: str, *, least: float = -math.inf, **options):
    """Return a static module field holding one finite number, converted from input.

    Args:
        name: what the user calls it.
        least: the smallest number allowed: zero, or none.
        options: those of `eqx.field`.
    """

    def convert(value):
        converted = as_number(name, value)
        check(math.isfinite(converted), f"{name} is {value}; it must be finite.")
        check(converted >= least, f"{name} is {converted}; it must not be negative.")
        return converted

    return eqx.field(converter=convert, static=True, **options)


class AbstractAttention(AbstractInContextMap):
    r"""An attention variant: four parameters and the context's answer to one question.

    The score of the pair of a query $x$ and a token $y$ is
    $\beta\langle Qx + b_Q, Ky\rangle = \beta\, y^\top (Ax + K^\top b_Q)$ with
    $A = K^\top Q$; the values are $Vy + b_V$. Nothing is rescaled silently; for the
    usual scaling pass `beta=standard_beta(query)`.

    Args:
        query: the matrix $Q$, of shape (k, d).
        key: the matrix $K$, of shape (k, d).
        value: the matrix $V$, of shape (e, d).
        beta: inverse temperature $\beta \ge 0$, multiplying the score.
        query_bias: a vector $b_Q$ added to the queries; none by default.
        value_bias: a vector $b_V$ added to the values; none by default.
        allow_negative_beta: accept $\beta < 0$, the repulsive case.

    Attributes:
        is_normalised: whether a query pays each token a share of what it pays to all.
        obeys_riccati: whether its slope on a Gaussian is $\beta VSA$, so that for
            $V = vI$ the covariance $S$ has a closed form.
        sees_second_moment: whether the second moment stands there in place of $S$.
        grows_linearly: whether it is at most $|V|$ on every Gaussian.
        energy_sees_mean: whether `gaussian_energy` is that of any mean, not just zero.
        tends_to_hardmax: whether it is hardmax at infinite $\beta$.
        has_known_limits: whether theorems tell where its tokens go.
    """

    is_normalised: ClassVar[bool] = False
    obeys_riccati: ClassVar[bool] = False
    sees_second_moment: ClassVar[bool] = False
    grows_linearly: ClassVar[bool] = False
    energy_sees_mean: ClassVar[bool] = False
    tends_to_hardmax: ClassVar[bool] = False
    has_known_limits: ClassVar[bool] = False

    query: Float[Array, "_k _d"] = parameter("query")
    key: Float[Array, "_k _d"] = parameter("key")
    value: Float[Array, "_e _d"] = parameter("value")
    beta: Float[Array, ""] = parameter("beta", default=1.0, kw_only=True)
    query_bias: Float[Array, " _k"] | None = parameter(
        "query_bias", default=None, kw_only=True
    )
    value_bias: Float[Array, " _e"] | None = parameter(
        "value_bias", default=None, kw_only=True
    )
    allow_negative_beta: bool = eqx.field(default=False, kw_only=True, static=True)

    def __post_init__(self):
        # A traced value is known when it is used: only then can it be refused.
        if not self.allow_negative_beta and not is_concrete(self.beta):
            wrong = self.beta < 0
            self.beta = eqx.error_if(self.beta, wrong, f"beta {NEGATIVE_BETA}")

    def __check_init__(self):
        _check_projections(self)
        _check_bias("query_bias", self.query_bias, self.query)
        _check_bias("value_bias", self.value_bias, self.value)
        _check_beta(self.beta, self.allow_negative_beta)

    @property
    def input_dimension(self) -> int:
        """Dimension of the tokens."""
        return self.query.shape[1]

    @property
    def output_dimension(self) -> int:
        """Dimension of the values."""
        return self.value.shape[0]

    @property
    def score(self) -> Float[Array, "d d"]:
        r"""The matrix $A = K^\top Q$ of the score $y^\top A x$."""
        return matmul(self.key.T, self.query)

    @property
    def exact_score(self) -> Float[np.ndarray, "d d"]:
        r"""The matrix $A$ in double precision, whatever that of $K$ and $Q$ is."""
        query, key = (np.asarray(x, np.float64) for x in (self.query, self.key))
        return key.T @ query

    @property
    def mean_value(self) -> Float[Array, "e d"]:
        """The matrix that is applied to the mean of the tokens."""
        return self.value

    @property
    def temperature(self) -> Float[Array, ""]:
        r"""The inverse temperature $\beta$ in the type of the matrices."""
        return self.beta.astype(self.query.dtype)

    @property
    def sharpness(self) -> Float[Array, ""]:
        r"""The factor of $\langle Qx, Ky\rangle$ in the exponent of the weights."""
        return self.temperature

    @property
    def peculiarity(self) -> str | None:
        """What it has beside matrices and beta, in words; `None` if nothing."""
        for bias in ("query_bias", "value_bias"):
            if getattr(self, bias) is not None:
                return f"{bias} is set"
        return self.unusual_option

    @property
    def unusual_option(self) -> str | None:
        """The option of its kind that is not as usual, in words; `None` if none is."""
        return None

    def gaussian_form(self, tolerance: float) -> GradientForm | str | None:
        """Return the form of `gradient_form` for a flow of Gaussians of mean zero.

        Args:
            tolerance: relative error allowed in equations of matrices.
        """
        if self.bends_gaussians:
            return f"no energy is known for {type(self).__name__}"
        return self.gradient_form()

    def gaussian_energy(self, mu: Gaussian) -> Float[Array, ""]:
        """Return the energy of `gaussian_form` at a Gaussian."""
        return self.energy(mu)

    def why_global(self, tolerance: float) -> str | None:
        """Return why flows of Gaussians exist for all depths, if that is known.

        Args:
            tolerance: relative error allowed in equations of matrices.
        """
        return None

    def settled(self, mu: TokenCloud) -> "AbstractAttention":
        """Return the attention with what it looks for at a cloud already found."""
        return self

    def queries(self, x: Float[Array, "m d"]) -> Float[Array, "m k"]:
        r"""Return $Qx + b_Q$."""
        projected = matmul(x, self.query.T)
        return (
            projected if self.query_bias is None else projected + self.query_bias[None]
        )

    def tilts(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        r"""Return $\beta K^\top(Qx + b_Q)$: the gradient of the score in the token."""
        return self.tilts_of(self.temperature * self.queries(x))

    def tilts_of(self, queries: Float[Array, "m k"]) -> Float[Array, "m d"]:
        r"""Return $K^\top q$ for each query."""
        return checked_range(self, matmul(queries, self.key))

    def values(
        self, mass: Float[Array, " m"] | None, moment: Float[Array, "m d"]
    ) -> Float[Array, "m e"]:
        r"""Return $V\!\int y + b_V\!\int 1$ from mass (`None`: one) and moment."""
        projected = matmul(moment, self.mean_value.T)
        if self.value_bias is None:
            return projected
        share = self.value_bias[None]
        return projected + (share if mass is None else mass[:, None] * share)

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m e"]:
        """Return what each query makes of the context; half precision in single.

        A result too large for the floating-point type raises `Overflow`; under `jit`
        it is not finite, and a flow stops with the status of a failed solve.
        """
        x = checked_queries(self, mu, x)
        if len(x) == 0:
            return jnp.zeros((0, self.output_dimension), x.dtype)
        wide, context, queries = widened((self, mu, x))
        output = wide.attend(context, queries).astype(x.dtype)
        return checked_range(self, output)

    def followed_by(self, output: Float[Array, "f e"]) -> "AbstractAttention":
        """Return the attention with a matrix multiplied into its values."""
        bias = None if self.value_bias is None else matmul(output, self.value_bias)
        value = matmul(output, self.value)
        return dataclasses.replace(self, value=value, value_bias=bias)

    @abc.abstractmethod
    def attend(
        self, mu: AbstractContext, x: Float[Array, "m d"]
    ) -> Float[Array, "m e"]:
        """Return what each query makes of the context; both are checked."""

    @abc.abstractmethod
    def matrix(self, mu: AbstractCloud, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        r"""Return the weight of each token as seen from each query, $w_j$ included."""


def standard_beta(query: Float[Array, "k d"]) -> float:
    r"""Return $1/\sqrt{k}$, the inverse temperature of ordinary transformers."""
    return 1 / math.sqrt(query.shape[0])


def checked_queries(
    gamma: AbstractInContextMap, mu: AbstractContext, x: Float[Array, "m d"]
) -> Float[Array, "m d"]:
    """Return the queries as an array, or raise if they do not fit map and context."""
    allowed = "a measure, for instance TokenCloud(points)"
    check_kind("the context", mu, AbstractContext, allowed)
    dimension, name = gamma.input_dimension, type(gamma).__name__
    check(
        dimension in (None, mu.dimension),
        f"the context has dimension {mu.dimension}; {name} takes {dimension}.",
    )
    return checked_points(gamma, x)


def checked_points(
    gamma: AbstractInContextMap, x: Float[Array, "m d"]
) -> Float[Array, "m d"]:
    """Return the points as an array, or raise if they do not fit the map."""
    x = as_float_array("x", x)
    dimension, name = gamma.input_dimension, type(gamma).__name__
    check(
        x.ndim == 2 and dimension in (None, x.shape[1]),
        f"x has shape {x.shape}; {name} takes points of shape (m, {dimension or 'd'}).",
    )
    check_finite("x", x)
    return x


def checked_range(
    gamma: AbstractInContextMap, rows: Float[Array, "m c"]
) -> Float[Array, "m c"]:
    """Return what was computed for each query, or raise if it is known to overflow."""
    check_range(type(gamma).__name__, rows, "lower beta, rescale the tokens")
    return rows


def check_function(name: str, value: object) -> None:
    """Raise unless the value can be called."""
    check(callable(value), f"{name} is {value!r}; it must be a function of an array.")


def check_map(name: str, value: object) -> None:
    """Raise unless the value is an in-context map."""
    allowed = "an in-context map, for instance Softmax(query, key, value)"
    check_kind(name, value, AbstractInContextMap, allowed)


def _check_projections(attention: AbstractAttention) -> None:
    shapes = {
        name: getattr(attention, name).shape for name in ("query", "key", "value")
    }
    fits = (
        all(len(shape) == 2 for shape in shapes.values())
        and shapes["query"] == shapes["key"]
        and shapes["query"][1] == shapes["value"][1]
    )
    check(
        fits,
        f"query is {shapes['query']}, key is {shapes['key']}, value is "
        f"{shapes['value']}; they must be (k, d), (k, d) and (e, d).",
    )


def _check_bias(name: str, bias: Array | None, matrix: Array) -> None:
    if bias is None:
        return
    check(
        bias.shape == matrix.shape[:1],
        f"{name} has shape {bias.shape}; it must be {matrix.shape[:1]}.",
    )


def _check_beta(beta: Array, allow_negative: bool) -> None:
    check(beta.shape == (), f"beta has shape {beta.shape}; it must be one number.")
    if is_concrete(beta) and float(beta) < 0 and not allow_negative:
        raise InvalidInput(f"beta is {float(beta)}; it {NEGATIVE_BETA}")


def parameter_dtype(gamma: AbstractInContextMap) -> jnp.dtype:
    """Return the floating-point type of a map's parameters."""
    leaves = jax.tree.leaves(eqx.filter(gamma, eqx.is_inexact_array))
    matrices = [leaf for leaf in leaves if leaf.ndim == 2]
    return jnp.result_type(*(matrices or [float]))
