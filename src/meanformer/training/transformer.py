"""The mean-field transformer: heads averaged at every depth, in a depth of one."""

import math
from collections.abc import Callable

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap, MultiHead, Sum
from meanformer.attention.abstract import (
    AbstractAttention,
    check_function,
    checked_queries,
)
from meanformer.attention.averaged_heads import Heads
from meanformer.attention.softmax import Softmax
from meanformer.attention.stacking import Stacked
from meanformer.errors import (
    InvalidInput,
    as_finite_array,
    as_integer,
    as_key,
    check,
    check_choice,
    is_concrete,
)
from meanformer.flows import Adaptive, FixedStep, Flow, Schedule, Trajectory, solve
from meanformer.measures import AbstractContext, TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.training.layer import Layer, Neurons, Parameters
from meanformer.typing import ArrayLike, Key

Method = diffrax.Euler | diffrax.AbstractERK | Adaptive


class MeanFieldTransformer(AbstractInContextMap):
    r"""A transformer of infinite depth and width, by finitely many heads of it.

    At depth $s\in[0,1]$ a measure $\nu_s$ over heads $\theta = (Q, K, V)$ moves tokens
    and queries,
    $$\dot x = \int \Gamma_\theta[\mu_s](x)\,\mathrm d\nu_s(\theta), \qquad
      \partial_s\mu_s + \nabla\!\cdot(\mu_s\dot x) = 0,$$
    and $T_\nu[\mu_0](x)$ is where a query $x$ ends: tokens move each other, queries
    read them and are read by nobody. Between two depths $s_l$ and $s_{l+1}$ it has
    $\nu_s = \tfrac1M\sum_m\delta_{\theta_{l,m}}$,
    so that with explicit Euler steps it is the residual network
    $x \leftarrow x + \tfrac{1}{LM}\sum_m\Gamma_{\theta_{l,m}}[\mu](x)$: heads are
    averaged, never summed.

    Called as `model(mu, x)` it returns $T_\nu[\mu](x)$, like any in-context map.

    Args:
        query: the matrices $Q$, of shape (L, M, k, d).
        key: the matrices $K$, of shape (L, M, k, d).
        value: the matrices $V$, of shape (L, M, d, d).
        beta: the inverse temperature, the same for all heads.
        value_bias: vectors added to the values, of shape (L, M, d); none by default.
        neurons: `Neurons` with arrays of shape (L, p, …), averaged as well.
        depths: the increasing depths $s_0 < \dots < s_L$ that layers lie between; with
            `interpolate` the depths of the L layers. Equally spaced by default.
        interpolate: interpolate heads linearly between the depths of the layers.
        context: `"moving"`, or `"frozen"` for tokens that stay (cross-attention).
        method: an explicit Runge-Kutta method of diffrax that makes one step for each
            layer: `Euler()`, the network itself, by default, `Heun()`, `flows.RK4()`;
            or `Adaptive()`, the differential equation at the tolerances given.
        rtol: relative tolerance of `Adaptive()`.
        atol: absolute tolerance of `Adaptive()`.
        kind: the attention of a head; anything that takes query, key, value, `beta` and
            `value_bias` and returns an attention. Training knows no masks: contexts
            have no order, and every token is read by all.
        activation: that of the neurons.
    """

    parameters: Parameters
    layer: Layer
    depths: Float[Array, " s"]
    interpolate: bool = eqx.field(static=True)
    method: Method
    tolerances: tuple[float, float] = eqx.field(static=True)

    def __init__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        *,
        beta: float | Float[Array, ""] = 1.0,
        value_bias: ArrayLike | None = None,
        neurons: Neurons | None = None,
        depths: ArrayLike | None = None,
        interpolate: bool = False,
        context: str = "moving",
        method: Method | None = None,
        rtol: float = 1e-8,
        atol: float = 1e-10,
        kind: Callable[..., AbstractAttention] = Softmax,
        activation: Callable[[Array], Array] = jnp.tanh,
    ):
        query = as_finite_array("query", query, (None, None, None, None))
        check(
            query.size > 0,
            f"query has shape {query.shape}; layers, heads and dimensions are at least "
            "1.",
        )
        layers, heads, _, size = query.shape
        key = as_finite_array("key", key, query.shape)
        value = as_finite_array("value", value, (layers, heads, size, size))
        if value_bias is not None:
            shape = layers, heads, size
            value_bias = as_finite_array("value_bias", value_bias, shape)
        if neurons is not None:
            neurons = _checked_neurons(neurons, layers, size)
        check_choice("context", context, ("moving", "frozen"))
        beta = as_finite_array("beta", beta, (), query.dtype)
        if is_concrete(beta):
            check(bool(beta >= 0), f"beta is {float(beta)}; it must not be negative.")
        told = f"kind is {kind!r}; it must be a class of attention, such as Softmax."
        check(callable(kind) and not isinstance(kind, AbstractInContextMap), told)
        check_function("activation", activation)
        heads = Heads(query, key, value, value_bias)
        self.parameters = Parameters(heads, neurons)
        self.layer = Layer(beta, kind, activation, context == "frozen")
        one = self.layer.attention(jax.tree.map(lambda leaf: leaf[0, 0], heads))
        check(
            isinstance(one, AbstractInContextMap),
            f"kind returns a {type(one).__name__}; it must return an attention, such "
            "as Softmax and Linear do.",
        )
        self.depths = _depths(depths, layers, interpolate).astype(query.dtype)
        self.interpolate = interpolate
        self.method = _checked_method(method)
        self.tolerances = (rtol, atol)

    @classmethod
    def draw(
        cls,
        layers: int,
        heads: int,
        dimension: int,
        *,
        key: Key,
        key_dimension: int | None = None,
        style: str = "independent",
        scale: float = 1.0,
        neurons: int = 0,
        value_bias: bool = False,
        **options,
    ) -> "MeanFieldTransformer":
        r"""Draw heads with normal entries.

        Args:
            layers: how many layers, L.
            heads: how many heads in each, M.
            dimension: the dimension $d$ of tokens.
            key: a random key.
            key_dimension: the number $k$ of rows of $Q$ and $K$; $d$ by default.
            style: `"independent"` heads; the same at `"every layer"`; `"antithetic"`,
                pairs with values $V$ and $-V$, so that the network is the identity and
                its tangent kernel that of one layer of them; `"zero values"`.
            scale: multiplies values, biases and output weights of neurons. Large scales
                train lazily, close to their linearisation.
            neurons: how many neurons in each layer.
            value_bias: whether heads have value biases, which begin at zero.
            options: those of the class.
        """
        counts = {"layers": layers, "heads": heads, "dimension": dimension}
        if key_dimension is not None:
            counts["key_dimension"] = key_dimension
        for name, given in counts.items():
            as_integer(name, given, least=1)
        as_integer("neurons", neurons, least=0)
        check_choice(
            "style", style, ("independent", "every layer", "antithetic", "zero values")
        )
        check(
            style != "antithetic" or heads % 2 == 0,
            f"heads is {heads}; antithetic heads come in pairs.",
        )
        rank = dimension if key_dimension is None else key_dimension
        depth = 1 if style == "every layer" else layers
        drawn = heads // 2 if style == "antithetic" else heads
        keys = jr.split(as_key(key), 6)
        query, key_matrix, value = (
            jr.normal(one, (depth, drawn, rows, dimension))
            for one, rows in zip(keys[:3], (rank, rank, dimension), strict=True)
        )
        value = (0.0 if style == "zero values" else scale) * value
        if style == "antithetic":
            query, key_matrix = (jnp.tile(a, (1, 2, 1, 1)) for a in (query, key_matrix))
            value = jnp.concatenate([value, -value], axis=1)
        query, key_matrix, value = (
            jnp.repeat(a, layers // depth, axis=0) for a in (query, key_matrix, value)
        )
        if neurons:
            options["neurons"] = Neurons(
                jr.normal(keys[3], (layers, neurons, dimension)),
                jr.normal(keys[4], (layers, neurons)),
                scale * jr.normal(keys[5], (layers, neurons, dimension)),
            )
        if value_bias:
            options["value_bias"] = jnp.zeros((layers, heads, dimension))
        return cls(query, key_matrix, value, **options)

    @property
    def input_dimension(self) -> int:
        """Dimension of the tokens."""
        return self.parameters.heads.query.shape[-1]

    @property
    def layers(self) -> int:
        """How many layers have heads of their own."""
        return self.parameters.heads.query.shape[0]

    @property
    def heads(self) -> int:
        """How many heads each layer has."""
        return self.parameters.heads.query.shape[1]

    @property
    def shares(self) -> Float[Array, " l"]:
        r"""The share of depth of each layer, $s_{l+1} - s_l$, or that of its hat."""
        gaps = jnp.diff(self.depths)
        if not self.interpolate:
            return gaps
        return (jnp.append(gaps, 0) + jnp.append(jnp.zeros(1, gaps.dtype), gaps)) / 2

    def with_parameters(self, parameters: Parameters) -> "MeanFieldTransformer":
        """Return the same transformer with other heads and neurons."""
        return eqx.tree_at(lambda model: model.parameters, self, parameters)

    def particles_of_steps(
        self, parameters: Parameters
    ) -> tuple[Parameters, Parameters | None]:
        """Return the particles at the start and, if they change, the end of steps."""
        if not self.interpolate:
            return parameters, None
        first = jax.tree.map(lambda leaf: leaf[:-1], parameters)
        return first, jax.tree.map(lambda leaf: leaf[1:], parameters)

    def in_units(self, derivatives: Parameters, power: float = 1.0) -> Parameters:
        r"""Return derivatives in single particles in mean-field units.

        Args:
            derivatives: the derivatives.
            power: that of the factors $M/\Delta_l$ to multiply with.
        """

        def of_leaf(leaf):
            shares = self.shares.reshape(-1, *[1] * (leaf.ndim - 1))
            return leaf * (leaf.shape[1] / shares) ** power

        return jax.tree.map(of_leaf, derivatives)

    def profile(self, first: Parameters, second: Parameters) -> Float[Array, " l"]:
        """Return the mean over particles of the products of changes, at each depth."""

        def of_leaf(a, b):
            return jnp.sum(a * b, axis=tuple(range(1, a.ndim))) / a.shape[1]

        leaves = jax.tree.leaves(jax.tree.map(of_leaf, first, second))
        return jnp.sum(jnp.stack(leaves), axis=0)

    def product(self, first: Parameters, second: Parameters) -> Float[Array, ""]:
        """Return the inner product of changes: its profile, integrated over depth."""
        return self.profile(first, second) @ self.shares

    def flow(self, context: TokenCloud | None = None) -> Flow:
        """Return the flow of tokens and queries, made of ordinary maps.

        Args:
            context: the tokens that are read where they are frozen; then it is a flow
                of the queries.
        """
        layers = jax.vmap(self._map)(self.parameters)
        if self.layer.is_frozen:
            check_cloud("context", context)
            layers = jax.vmap(lambda gamma: _InContext(gamma, context))(layers)
        maps = Stacked((layers,), tuple((0, row) for row in range(self.layers)))
        depths = self.depths[: self.layers]
        return Flow(Schedule(maps, depths, interpolate=self.interpolate))

    def run(self, mu: TokenCloud, x: ArrayLike) -> Trajectory:
        """Return the run through depth: tokens, and queries as probes.

        A frozen context does not move; then the tokens of the trajectory are queries.
        """
        rtol, atol = self.tolerances
        is_adaptive = isinstance(self.method, Adaptive)
        # One step for each layer, however long it is.
        steps = self.method if is_adaptive else FixedStep(math.inf, self.method)
        ends = self.depths[0], self.depths[-1]
        given = dict(depth=ends, save=self.depths, solver=steps, rtol=rtol, atol=atol)
        x = checked_queries(self, mu, x)
        if self.layer.is_frozen:
            return solve(self.flow(mu), TokenCloud(x), **given)
        return solve(self.flow(), mu, probes=x, **given)

    def __call__(
        self,
        mu: AbstractContext,
        x: Float[Array, "m d"],
        *,
        positions: Float[Array, " m"] | None = None,
    ) -> Float[Array, "m d"]:
        """Return where the queries end."""
        check_cloud("mu", mu)
        path = self.run(mu, x)
        return path.points[-1] if path.probes is None else path.probes[-1]

    @eqx.filter_jit
    def measure(self, *, neurons: bool = False) -> TokenCloud:
        r"""Return the heads as a measure: a place for each, its depth as position.

        Positions are shares of the whole depth, from 0 to 1.

        Args:
            neurons: the neurons in place of the heads.
        """
        particles = self.parameters.neurons if neurons else self.parameters.heads
        check(particles is not None, "neurons is True; this transformer has none.")
        leaves = jax.tree.leaves(particles)
        rows = [leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves]
        points = jnp.concatenate(rows, axis=2)
        count, size = points.shape[1:]
        places, length = self.depths - self.depths[0], self.depths[-1] - self.depths[0]
        return TokenCloud(
            points.reshape(-1, size),
            jnp.repeat(self.shares / (count * length), count),
            positions=jnp.repeat(places[: self.layers] / length, count),
            normalize=True,
        )

    def _map(self, parameters: Parameters) -> AbstractInContextMap:
        """Return the particles of one layer as an ordinary map."""
        query, key, value, bias = parameters.heads
        count = len(query)
        over = Heads(query, key, value / count, None if bias is None else bias / count)
        heads = jax.vmap(self.layer.attention)(over)
        one = MultiHead((jax.tree.map(lambda leaf: leaf[0], heads),))
        kept = Stacked((heads,), tuple((0, row) for row in range(count)))
        attention = eqx.tree_at(lambda gamma: gamma.heads, one, kept)
        if parameters.neurons is None:
            return attention
        return Sum((attention, self.layer.perceptron(parameters.neurons)))


def check_transformer(name: str, value: object) -> None:
    """Raise unless the value is a mean-field transformer."""
    what = type(value).__name__
    is_one = isinstance(value, MeanFieldTransformer)
    check(is_one, f"{name} is a {what}; it must be a MeanFieldTransformer.")


class _InContext(AbstractInContextMap):
    """A map whose context is always the same."""

    gamma: AbstractInContextMap
    context: TokenCloud

    def __call__(self, mu, x, *, positions=None):
        """Return the image in the context that is held."""
        return self.gamma(self.context, x)


def _checked_neurons(neurons: Neurons, layers: int, size: int) -> Neurons:
    if not isinstance(neurons, Neurons):
        raise InvalidInput(f"neurons is {neurons!r}; it must be Neurons(…).")
    weights = as_finite_array("weights_in", neurons.weights_in, (layers, None, size))
    check(weights.size > 0, "weights_in has no rows; leave neurons out.")
    bias = as_finite_array("bias_in", neurons.bias_in, weights.shape[:2])
    outer = as_finite_array("weights_out", neurons.weights_out, weights.shape)
    return Neurons(weights, bias, outer)


def _checked_method(method) -> Method:
    if method is None:
        return diffrax.Euler()
    if isinstance(method, Method):
        return method
    raise InvalidInput(
        f"method is {method!r}; it must be an explicit Runge-Kutta method, such as "
        "diffrax.Euler() or flows.RK4(), or flows.Adaptive()."
    )


def _depths(depths: ArrayLike | None, layers: int, interpolate: bool) -> Array:
    count = layers if interpolate else layers + 1
    check(count > 1, "layers is 1; at least two can be interpolated.")
    if depths is None:
        return jnp.linspace(0, 1, count)
    array = as_finite_array("depths", depths, (count,))
    if is_concrete(array):
        is_right = bool((np.diff(array) > 0).all())
        check(is_right, f"depths is {np.asarray(array)}; it must increase strictly.")
    return array
