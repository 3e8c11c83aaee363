r"""The gradient of the risk in mean-field units, by the engine of one's choice.

All engines but a `Reversible` with too few corrections return the gradient of the
network that is run, to rounding; they differ in memory.
"""

import abc
import math
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from diffrax import Euler
from jax.scipy.optimize import minimize
from jaxtyping import Array, Float, Int

from meanformer.attention.averaged_heads import Heads
from meanformer.errors import (
    InvalidInput,
    Overflow,
    Unsupported,
    as_integer,
    as_key,
    as_number,
    check,
    is_concrete,
)
from meanformer.flows import Adaptive
from meanformer.flows.sweeps import Step, Sweep
from meanformer.measures import TokenCloud
from meanformer.numerics.arrays import padded, safe_root
from meanformer.training.data import Dataset, Loss, squared_error
from meanformer.training.layer import Parameters
from meanformer.training.transformer import MeanFieldTransformer, check_transformer
from meanformer.typing import Key


class Fields(eqx.Module):
    r"""Points and adjoints at all depths.

    Attributes:
        points: tokens, then queries.
        tokens: the adjoint $q$ of tokens, divided by their masses.
        queries: the adjoint $p$ of queries.
    """

    points: Float[Array, "s N r d"]
    tokens: Float[Array, "s N n d"]
    queries: Float[Array, "s N m d"]


class Gradient(eqx.Module):
    r"""The gradient of a risk, in mean-field units.

    Attributes:
        risk: the risk.
        parameters: $G_s(\theta)$ for every head and neuron. The derivative of the risk
            in a head is $\Delta_l/M$ times it.
        squared_norm: $\int\!\int|G_s(\theta)|^2\,\mathrm d\nu_s\,\mathrm ds$.
        profile: $\int|G_s|^2\,\mathrm d\nu_s$ at each depth of heads.
        fields: points and adjoints along depth, where the engine keeps them.
    """

    risk: Float[Array, ""]
    parameters: Parameters
    squared_norm: Float[Array, ""]
    profile: Float[Array, " l"]
    fields: Fields | None = None


# Roundings by which points that are found again may differ.
LOST = 1e4


class AbstractEngine(eqx.Module):
    """Base class of the ways to the gradient."""

    @abc.abstractmethod
    def pull(
        self, sweep: Sweep, points: Float[Array, "N r d"], terminal
    ) -> tuple[Float[Array, ""], Any, Any]:
        """Return the risk, what each step leaves to particles; points and adjoints.

        Args:
            sweep: the steps through depth.
            points: the points before them.
            terminal: takes the points after them, returns the risk.

        Returns:
            The risk; its derivatives in the particles at both ends of steps; points and
            adjoints at all depths, or `None` if they are not kept.
        """


class Stored(AbstractEngine):
    """The explicit adjoint, points of all layers stored; the default."""

    def pull(self, sweep, points, terminal):
        """Go forward, store, go back."""
        states = sweep.forward(points)
        risk, adjoint = jax.value_and_grad(terminal)(states[-1])
        adjoints, found = sweep.back_all(states, adjoint)
        return risk, found, (states, adjoints)


class Checkpointed(AbstractEngine):
    r"""The explicit adjoint with points of about $2\sqrt L$ layers in memory at a time.

    Args:
        segments: how many stretches of layers are computed again; $\sqrt L$ by default.
    """

    segments: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.segments is not None:
            as_integer("segments", self.segments, least=1)

    def pull(self, sweep, points, terminal):
        """Store where stretches begin; go through each again before going back."""
        count = len(sweep.steps.size)
        length = -(-count // (self.segments or math.isqrt(count)))
        # Steps of length zero fill up: they move nothing.
        steps = jax.tree.map(
            lambda leaf: leaf.reshape(-1, length, *leaf.shape[1:]),
            padded(sweep.steps, length),
        )

        def part(steps):
            return eqx.tree_at(lambda s: s.steps, sweep, steps)

        def ahead(points, steps):
            return part(steps).end(points), points

        def behind(adjoint, given):
            steps, start = given
            here = part(steps)
            adjoints, found = here.back_all(here.forward(start), adjoint)
            return adjoints[0], found

        end, starts = jax.lax.scan(ahead, points, steps)
        risk, adjoint = jax.value_and_grad(terminal)(end)
        _, found = jax.lax.scan(behind, adjoint, (steps, starts), reverse=True)
        found = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], found)
        return risk, found, None


class Reversible(AbstractEngine):
    r"""The explicit adjoint with the points of one layer: the layers run backward.

    The points before a layer are those at which it ends where it did. A step back, and
    corrections $x \leftarrow x - (\Phi(x) - x_{l+1})$, find them where the layer moves
    points by a contraction; without corrections the gradient has an error of the order
    of the method in the length of steps.

    Args:
        corrections: the most corrections of each layer.
        tolerance: the relative distance below which they end.

    Where the points are not found, or not those that the network began with, there is
    no gradient: `gradient` says so.
    """

    corrections: int = eqx.field(static=True, default=50)
    tolerance: float = eqx.field(static=True, default=1e-15)

    def __check_init__(self):
        as_integer("corrections", self.corrections, least=0)
        as_number("tolerance", self.tolerance, "a number >= 0", least=0)

    def pull(self, sweep, points, terminal):
        """Keep the end alone; find the points before each layer on the way back."""
        end = sweep.end(points)
        risk, adjoint = jax.value_and_grad(terminal)(end)

        def one(carry, step):
            points, adjoint = carry
            before = self.before(sweep, step, points)
            adjoint, found = sweep.back(step, before, adjoint)
            return (before, adjoint), found

        (start, _), found = jax.lax.scan(one, (end, adjoint), sweep.steps, reverse=True)
        if self.corrections:
            # A layer may send other points to the same place.
            is_there = _is_close(start - points, jnp.abs(points).max())
            found = jax.tree.map(lambda a: jnp.where(is_there, a, jnp.nan), found)
        return risk, found, None

    def before(self, sweep: Sweep, step: Step, points: Float[Array, "N r d"]):
        """Return the points before a step from those after it."""
        ends = (step.first, None) if step.last is None else (step.last, step.first)
        start = sweep.moved(Step(-step.size, *ends), points)
        if self.corrections == 0:
            return start
        size = jnp.abs(points).max()

        def is_far(carry):
            _, error, count = carry
            return (error > self.tolerance * size) & (count < self.corrections)

        def correct(carry):
            x, last, count = carry
            change = sweep.moved(step, x) - points
            error = jnp.abs(change).max()
            # Where rounding is reached, errors no longer shrink.
            count = jnp.where(error < last, count + 1, self.corrections)
            return x - change, error, count

        first = (start, jnp.full_like(size, jnp.inf), 0)
        found, error, _ = jax.lax.while_loop(is_far, correct, first)
        return jnp.where(_is_close(error, size), found, jnp.nan)


def _is_close(gaps: Array, size: Float[Array, ""]) -> Array:
    """Return whether points are found again up to rounding."""
    return jnp.abs(gaps).max() <= LOST * jnp.finfo(size.dtype).eps * size


class Automatic(AbstractEngine):
    """Automatic differentiation of the forward pass, that everything is compared with.

    Args:
        is_rematerialised: compute each layer again on the way back.
    """

    is_rematerialised: bool = eqx.field(static=True, default=False)

    def pull(self, sweep, points, terminal):
        """Differentiate the loop over layers."""

        def risk(particles):
            steps = Step(sweep.steps.size, *particles)
            moved = eqx.tree_at(lambda one: one.steps, sweep, steps)
            return terminal(moved.end(points, again=self.is_rematerialised))

        value, found = jax.value_and_grad(risk)((sweep.steps.first, sweep.steps.last))
        return value, found, None


def risk(
    model: MeanFieldTransformer,
    data: Dataset,
    *,
    loss: Loss = squared_error,
    decay: float = 0.0,
) -> Float[Array, ""]:
    r"""Return the mean loss of a transformer on a data set.

    $$R(\nu) = \frac1N\sum_k\ell\bigl(T_\nu[\mu^k](x^k), y^k\bigr)
      + \frac\lambda2\int\!\!\int|\theta|^2\,\mathrm d\nu_s\,\mathrm ds.$$

    Args:
        model: the transformer.
        data: contexts, queries and targets.
        loss: takes the `End` of one context and its target; half the squared error.
        decay: the factor $\lambda$ of the penalty.
    """
    found = Problem(model, data, loss, decay).risk()
    check_finite("risk", found)
    return found


def outputs(model: MeanFieldTransformer, data: Dataset) -> Float[Array, "N m d"]:
    """Return where a transformer carries the queries of all contexts, at once."""
    check_fits(model, data)
    found = ends_of(model, data)[:, data.tokens.shape[1] :]
    check_finite("output", found)
    return found


def gradient(
    model: MeanFieldTransformer,
    data: Dataset,
    *,
    loss: Loss = squared_error,
    decay: float = 0.0,
    engine: AbstractEngine | None = None,
) -> Gradient:
    r"""Return the gradient of the risk in the conditional Wasserstein metric.

    $$G_s(\theta) = \nabla_\theta\frac1N\sum_k\Bigl(
      \langle p^k_s, \Gamma_\theta[\mu^k_s](z^k_s)\rangle
      + \int\langle q^k_s, \Gamma_\theta[\mu^k_s]\rangle\,\mathrm d\mu^k_s\Bigr)
      + \lambda\theta,$$
    with the adjoint $p$ of the query and the adjoint $q$ of the context, a vector field
    on the support of $\mu_s$. Heads that follow $\dot\theta = -G$ move at a speed that
    depends neither on the number of layers nor of heads.

    Args:
        model: the transformer.
        data: contexts, queries and targets.
        loss: as for `risk`.
        decay: as for `risk`.
        engine: `Stored()` by default, `Checkpointed()`, `Reversible()` or
            `Automatic()`. With the method `Adaptive()` it is automatic through the
            steps that were taken.

    Returns:
        The gradient. Cost: about four times that of the risk; for N contexts of n
        tokens, L layers of M heads, $O(NLMn^2d)$ time and $O(NLnd + NMn^2)$ memory.
    """
    found = Problem(model, data, loss, decay, engine).gradient()
    told = "gradient"
    if isinstance(engine, Reversible):
        told += " by Reversible(), which fails for layers that move points too far,"
    check_finite(told, found.squared_norm)
    return found


def check_finite(what: str, values: Array) -> None:
    """Raise if values are known not to be finite."""
    if is_concrete(values) and not np.isfinite(values).all():
        raise Overflow(
            f"the {what} is not finite: the loss is not, or tokens have blown up on "
            "their way; look at the loss, lower beta, or rescale the tokens or values."
        )


class Problem(eqx.Module):
    """A transformer and what it is to learn, checked.

    Attributes:
        model: the transformer.
        data: contexts, queries and targets.
        loss: the loss.
        decay: the factor of the penalty.
        engine: the way to the gradient.
    """

    model: MeanFieldTransformer
    data: Dataset
    loss: Loss
    decay: Float[Array, ""]
    engine: AbstractEngine

    def __init__(self, model, data, loss: Loss, decay: Any, engine: Any = None):
        check_fits(model, data)
        check(
            callable(loss),
            f"loss is {loss!r}; it must be a function of the End of a context and its "
            "target, such as squared_error.",
        )
        if is_concrete(decay):
            decay = as_number("decay", decay, "a number >= 0", least=0, below=math.inf)
        check(
            engine is None or isinstance(engine, AbstractEngine),
            f"engine is {engine!r}; it must be Stored(), Checkpointed(), Reversible(), "
            "or Automatic().",
        )
        check(
            engine is None or not isinstance(model.method, Adaptive),
            "the method Adaptive() chooses its steps, which engines do not know; leave "
            "engine out.",
        )
        self.model, self.data, self.loss = model, data, loss
        self.decay = jnp.asarray(decay, data.tokens.dtype)
        self.engine = Stored() if engine is None else engine

    @eqx.filter_jit
    def risk(self) -> Float[Array, ""]:
        """Return the risk."""
        return self._mean_loss(ends_of(self.model, self.data)) + self._penalty

    @eqx.filter_jit
    def gradient(self) -> Gradient:
        """Return the gradient of the risk."""
        model, data, fields = self.model, self.data, None

        def by_steps_taken(parameters: Parameters):
            return self._mean_loss(ends_of(model.with_parameters(parameters), data))

        if isinstance(model.method, Adaptive):
            value, found = jax.value_and_grad(by_steps_taken)(model.parameters)
        else:
            sweep = sweep_of(model, data)
            value, found, kept = self.engine.pull(sweep, data.points, self._mean_loss)
            _, gathered = jax.vjp(model.particles_of_steps, model.parameters)
            (found,) = gathered(found)
            fields = None if kept is None else _fields(data, *kept)
        changes = jax.tree.map(
            lambda change, particle: change + self.decay * particle,
            model.in_units(found),
            model.parameters,
        )
        profile = model.profile(changes, changes)
        value, squared = value + self._penalty, profile @ model.shares
        return Gradient(value, changes, squared, profile, fields)

    @property
    def _penalty(self) -> Float[Array, ""]:
        particles = self.model.parameters
        return self.decay * self.model.product(particles, particles) / 2

    def _mean_loss(self, points: Float[Array, "N r d"]) -> Float[Array, ""]:
        """Return the mean loss where all contexts have ended."""

        def of_one(points, weights, target):
            found = self.loss(self.data.end(points, weights), target)
            shape = jnp.shape(found)
            told = f"loss returns an array of shape {shape}, not one number."
            check(shape == (), told)
            return found

        return jax.vmap(of_one)(points, self.data.weights, self.data.targets).mean()


@eqx.filter_jit
def ends_of(model: MeanFieldTransformer, data: Dataset) -> Float[Array, "N r d"]:
    """Return where tokens and queries end."""
    if not isinstance(model.method, Adaptive):
        return sweep_of(model, data).end(data.points)

    def end(tokens, weights, queries):
        path = model.run(TokenCloud(tokens, weights), queries)
        if model.layer.is_frozen:
            return jnp.concatenate([tokens, path.points[-1]])
        return jnp.concatenate([path.points[-1], cast(Array, path.probes)[-1]])

    return jax.vmap(end)(data.tokens, data.weights, data.queries)


def sweep_of(model: MeanFieldTransformer, data: Dataset) -> Sweep:
    """Return the steps of a transformer through depth."""
    steps = Step(jnp.diff(model.depths), *model.particles_of_steps(model.parameters))
    return Sweep(model.layer, steps, data.weights, cast(Any, model.method))


def _fields(data: Dataset, points, adjoint: Float[Array, "s N r d"]) -> Fields:
    """Return the fields of adjoints, which masses and the mean over contexts divide."""
    count = data.tokens.shape[1]
    # Absent tokens have no adjoint.
    masses = jnp.where(data.weights > 0, data.weights, 1)[None, :, :, None]
    adjoint = len(data) * adjoint
    return Fields(points, adjoint[:, :, :count] / masses, adjoint[:, :, count:])


def check_fits(model: MeanFieldTransformer, data: Dataset) -> None:
    """Raise unless this is a transformer and a data set of one dimension."""
    check_transformer("model", model)
    if not isinstance(data, Dataset):
        raise InvalidInput(
            f"data is a {type(data).__name__}; it must be "
            "Dataset(contexts, queries, targets)."
        )
    check(
        data.dimension == model.input_dimension,
        f"data has dimension {data.dimension}; the heads take {model.input_dimension}.",
    )
    check(
        data.queries.shape[1] > 0 or not model.layer.is_frozen,
        "data has no queries; in a frozen context nothing else moves.",
    )
    given, wanted = data.tokens.dtype, model.parameters.heads.query.dtype
    told = f"data is {given}, the heads are {wanted}; give contexts of {wanted}."
    check(given == wanted, told)


def check_heads(heads: Heads, dimension: int) -> None:
    """Raise unless these are heads side by side."""
    is_right = isinstance(heads, Heads) and all(
        jnp.ndim(leaf) == 3 and leaf.shape[2] == dimension for leaf in heads[:3]
    )
    check(
        is_right,
        f"heads must be Heads with matrices of shape (h, k, {dimension}); those of "
        "layer 0 are jax.tree.map(lambda leaf: leaf[0], model.parameters.heads).",
    )


class FirstVariation(eqx.Module):
    r"""The first variation of the risk: what a new head at some depth would change.

    $$\frac{\delta R}{\delta\nu_s}(\theta) = \frac1N\sum_k\Bigl(
      \langle p^k, \Gamma_\theta[\mu^k](z^k)\rangle
      + \int\langle q^k, \Gamma_\theta[\mu^k]\rangle\,\mathrm d\mu^k\Bigr).$$

    A little mass of $\nu_s$ moved from its heads to $\theta$ lowers the risk if the
    value at $\theta$ is below the mean over the heads: a share $\varepsilon$ in layer
    $l$ changes it by $\varepsilon\Delta_l$ times `excess`, to first order. The value is
    linear in $V$, so that a search for the best head needs a bound on $V$.

    Args:
        model: the transformer; its method is Euler.
        data: contexts, queries and targets.
        loss: as for `risk`.
        decay: as for `risk`; the first variation of the penalty is
            $\tfrac\lambda2|\theta|^2$.
    """

    model: MeanFieldTransformer
    decay: float
    weights: Float[Array, "N n"]
    points: Float[Array, "l N r d"]
    adjoint: Float[Array, "l N r d"]

    def __init__(self, model, data, *, loss: Loss = squared_error, decay: float = 0.0):
        fields = gradient(model, data, loss=loss).fields
        if fields is None or not isinstance(model.method, Euler) or model.interpolate:
            raise Unsupported(
                "the first variation is that of the network: give the method Euler() "
                "and interpolate=False."
            )
        masses = data.weights[None, :, :, None]
        both = jnp.concatenate([masses * fields.tokens, fields.queries], axis=2)
        self.model, self.decay, self.weights = model, decay, data.weights
        self.points, self.adjoint = fields.points[:-1], both[1:] / len(data)

    def __call__(self, layer: int, heads: Heads) -> Float[Array, " h"]:
        """Return its values at heads, side by side along a leading axis."""
        check_heads(heads, self.model.input_dimension)
        return self._values(self._checked(layer), heads)

    def _checked(self, layer: int) -> Int[Array, ""]:
        """Return the layer as an array, so that one program serves all of them."""
        layer, last = as_integer("layer", layer, least=0), self.model.layers - 1
        check(layer <= last, f"layer is {layer}; the last one is {last}.")
        return jnp.asarray(layer)

    @eqx.filter_jit
    def _values(self, layer: Int[Array, ""], heads: Heads) -> Float[Array, " h"]:
        """Return the values at heads of right shapes."""

        def of_head(head: Heads):
            alone = Parameters(jax.tree.map(lambda leaf: leaf[None], head))
            moved = jax.vmap(self.model.layer.velocity, in_axes=(None, 0, 0))(
                alone, self.points[layer], self.weights
            )
            size = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(head))
            return jnp.sum(self.adjoint[layer] * moved) + self.decay * size / 2

        return jax.lax.map(of_head, heads)

    def excess(self, layer: int, heads: Heads) -> Float[Array, " h"]:
        """Return its values less the mean over the heads that are there."""
        own = jax.tree.map(lambda leaf: leaf[layer], self.model.parameters.heads)
        return self(layer, heads) - self(layer, own).mean()

    def best_head(
        self, layer: int, *, value_norm: float, key: Key, starts: int = 8
    ) -> Heads:
        r"""Search for the head that lowers the risk the most, of some size of values.

        For given $Q$ and $K$ the best $V$ is opposite to the gradient in it. Queries
        and keys are found by BFGS from several starts. If no head has a negative
        `excess` in any layer, the network satisfies the condition of first order for a
        minimum over measures, among heads of this size.

        Args:
            layer: the layer.
            value_norm: the largest Frobenius norm of $V$.
            key: a random key for the starts.
            starts: how many.

        Returns:
            One head, with an axis in front.
        """
        check(value_norm > 0, f"value_norm is {value_norm}; it must be positive.")
        size, starts = jnp.asarray(value_norm), as_integer("starts", starts, least=1)
        return self._search(self._checked(layer), size, as_key(key), starts)

    @eqx.filter_jit
    def _search(self, layer: Int[Array, ""], value_norm, key: Key, starts: int):
        """Return the best head that is found."""
        own = jax.tree.map(lambda leaf: leaf[layer, :1], self.model.parameters.heads)
        draws = starts, 2, *own.query.shape

        def with_values(flat):
            query, key = flat.reshape(draws[1:])
            alone = own._replace(query=query, key=key)

            def value(matrix):
                return self._values(layer, alone._replace(value=matrix))[0]

            slope = jax.grad(value)(jnp.zeros_like(own.value))
            size = safe_root(jnp.sum(slope**2), 2)
            limit = value_norm if self.decay == 0 else size / self.decay
            norm = jnp.minimum(limit, value_norm)
            matrix = -norm * slope / jnp.where(size > 0, size, 1)
            return alone._replace(value=matrix), value(matrix)

        def descend(start):
            found = minimize(lambda flat: with_values(flat)[1], start, method="BFGS")
            return with_values(found.x)

        places = jr.normal(key, draws, own.query.dtype)
        heads, values = jax.lax.map(descend, places.reshape(starts, -1))
        return jax.tree.map(lambda leaf: leaf[jnp.nanargmin(values)], heads)
