r"""The gradient of the risk in mean-field units, by the engine of one's choice.

All engines but `Continuous` and a `Reversible` with too few corrections return the
gradient of the network that is run, to rounding; they differ in memory.
"""

import abc
import math
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import (
    InvalidInput,
    Overflow,
    Unsupported,
    as_integer,
    as_number,
    check,
    is_concrete,
)
from meanformer.flows import Adaptive
from meanformer.measures import TokenCloud
from meanformer.training.data import Dataset, Loss, squared_error
from meanformer.training.heads import Heads
from meanformer.training.layer import Parameters
from meanformer.training.sweeps import Sweep, gathered, steps_of, tableau_of
from meanformer.training.transformer import MeanFieldTransformer


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
    ) -> tuple[Float[Array, ""], Any, Fields | None]:
        """Return the risk, what each step leaves to particles, and the fields.

        Args:
            sweep: the steps through depth.
            points: the points before them.
            terminal: takes the points after them, returns risk and adjoint there.
        """


class Stored(AbstractEngine):
    """The explicit adjoint, points of all layers stored; the default."""

    def pull(self, sweep, points, terminal):
        """Go forward, store, go back."""
        states = sweep.forward(points)
        risk, adjoint = terminal(states[-1])
        adjoints, found = sweep.back_all(states, adjoint)
        return risk, found, fields_of(sweep, states, adjoints)


class Checkpointed(AbstractEngine):
    r"""The explicit adjoint with points of about $\sqrt L$ layers in memory at a time.

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
        segments = self.segments or math.isqrt(count)
        length = -(-count // segments)

        def cut(leaf):
            # Steps of length zero fill up: they move nothing.
            missing = [(0, segments * length - count)] + [(0, 0)] * (leaf.ndim - 1)
            return jnp.pad(leaf, missing).reshape(segments, length, *leaf.shape[1:])

        steps = jax.tree.map(cut, sweep.steps)

        def ahead(points, steps):
            part = eqx.tree_at(lambda s: s.steps, sweep, steps)
            return part.end(points), points

        end, starts = jax.lax.scan(ahead, points, steps)
        risk, adjoint = terminal(end)

        def behind(adjoint, given):
            steps, start = given
            part = eqx.tree_at(lambda s: s.steps, sweep, steps)
            adjoints, found = part.back_all(part.forward(start), adjoint)
            return adjoints[0], found

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
    """

    corrections: int = eqx.field(static=True, default=50)
    tolerance: float = eqx.field(static=True, default=1e-15)

    def pull(self, sweep, points, terminal):
        """Keep the end alone; find the points before each layer on the way back."""
        end = sweep.end(points)
        risk, adjoint = terminal(end)

        def one(carry, step):
            points, adjoint = carry
            before = self.before(sweep, step, points)
            adjoint, found = sweep.back(step, before, adjoint)
            return (before, adjoint), found

        _, found = jax.lax.scan(one, (end, adjoint), sweep.steps, reverse=True)
        return risk, found, None

    def before(self, sweep: Sweep, step, points: Float[Array, "N r d"]):
        """Return the points before a step from those after it."""
        backward = step._replace(size=-step.size, first=step.last or step.first)
        if step.last is not None:
            backward = backward._replace(last=step.first)
        start = sweep.moved(backward, points)
        size = jnp.abs(points).max()

        def is_far(carry):
            _, move, count = carry
            return (move > self.tolerance * size) & (count < self.corrections)

        def correct(carry):
            x, last, count = carry
            move = sweep.moved(step, x) - points
            largest = jnp.abs(move).max()
            # Where rounding is reached, moves no longer shrink.
            count = jnp.where(largest < last, count + 1, self.corrections)
            return x - move, largest, count

        first = (start, jnp.full_like(size, jnp.inf), 0)
        found, move, _ = jax.lax.while_loop(is_far, correct, first)
        if self.corrections == 0:
            return found
        is_lost = ~(move <= LOST * jnp.finfo(size.dtype).eps * size)
        return eqx.error_if(
            found,
            is_lost,
            "Reversible() does not find the points before a layer that moves them too "
            "far; take Stored() or Checkpointed(), or more layers.",
        )


class Continuous(AbstractEngine):
    r"""The adjoint equation, discretised by Euler steps at the right end point.

    It optimises first and discretises then, so that its error is of first order in the
    length of layers. It is there to be compared with.
    """

    def pull(self, sweep, points, terminal):
        """Go back with the points after each layer in place of those before it."""
        if len(sweep.tableau.shares) > 1:
            raise Unsupported("Continuous() is for Euler steps; use another engine.")
        states = sweep.forward(points)
        risk, adjoint = terminal(states[-1])
        shifted = jnp.concatenate([states[1:], states[-1:]])
        adjoints, found = sweep.back_all(shifted, adjoint)
        return risk, found, fields_of(sweep, states, adjoints)


class Automatic(AbstractEngine):
    """Automatic differentiation of the forward pass, that everything is compared with.

    Args:
        is_rematerialised: compute each layer again on the way back.
    """

    is_rematerialised: bool = eqx.field(static=True, default=False)

    def pull(self, sweep, points, terminal):
        """Differentiate the loop over layers."""

        def end(steps):
            def one(points, step):
                return sweep.moved(step, points), None

            body = jax.checkpoint(one) if self.is_rematerialised else one
            return jax.lax.scan(body, points, steps)[0]

        def risk(first, last):
            steps = sweep.steps._replace(first=first, last=last)
            return terminal(end(steps))[0]

        steps = sweep.steps
        value, found = jax.value_and_grad(risk, argnums=(0, 1))(steps.first, steps.last)
        return value, tuple(_per_particle(one) for one in found), None


def _per_particle(changes: Parameters | None) -> Parameters | None:
    """Multiply by the number of heads or neurons, which share each layer."""
    return jax.tree.map(lambda leaf: leaf.shape[1] * leaf, changes)


def fields_of(sweep: Sweep, states, adjoints) -> Fields:
    """Return points and adjoints along depth."""
    count = sweep.weights.shape[1]
    return Fields(states, adjoints[:, :, :count], adjoints[:, :, count:])


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
    check_fits(model, data)
    found = _risk(model, data, checked_loss(loss), checked_decay(decay, data))
    _check_known("risk", found)
    return found


@eqx.filter_jit
def _risk(model, data: Dataset, loss: Loss, decay) -> Float[Array, ""]:
    return mean_loss(data, loss, ends_of(model, data)) + penalty(model, decay)


def outputs(model: MeanFieldTransformer, data: Dataset) -> Float[Array, "N m d"]:
    """Return where a transformer carries the queries of all contexts, at once."""
    check_fits(model, data)
    found = _outputs(model, data)
    _check_known("output", found)
    return found


@eqx.filter_jit
def _outputs(model, data: Dataset) -> Float[Array, "N m d"]:
    return ends_of(model, data)[:, data.tokens.shape[1] :]


def ends_of(model: MeanFieldTransformer, data: Dataset) -> Float[Array, "N r d"]:
    """Return where tokens and queries end."""
    if isinstance(model.method, Adaptive):
        return _solved(model, data)
    return sweep_of(model, data).end(data.points)


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
        engine: `Stored()` by default, `Checkpointed()`, `Reversible()`,
            `Automatic()` or `Continuous()`. With the method `Adaptive()` it is
            automatic through the steps that were taken.

    Returns:
        The gradient. Cost: about four times that of the risk; for N contexts of n
        tokens, L layers of M heads, $O(NLMn^2d)$ time and $O(NLnd + NMn^2)$ memory.
    """
    check_fits(model, data)
    check(
        engine is None or isinstance(engine, AbstractEngine),
        f"engine is {engine!r}; it must be Stored(), Checkpointed(), Reversible(), "
        "Automatic() or Continuous().",
    )
    check(
        engine is None or not isinstance(model.method, Adaptive),
        "the method Adaptive() chooses its steps, which engines do not know; leave "
        "engine out.",
    )
    strength = checked_decay(decay, data)
    found = gradient_of(model, data, checked_loss(loss), strength, engine or Stored())
    _check_known("gradient", found.squared_norm)
    return found


def _check_known(what: str, values: Array) -> None:
    """Raise if values are known not to be finite."""
    if is_concrete(values) and not np.isfinite(values).all():
        raise Overflow(
            f"the {what} is not finite: tokens have blown up on their way; lower beta, "
            "rescale the tokens, or take smaller values."
        )


def checked_loss(loss: Loss) -> Loss:
    """Return the loss, or raise if it cannot be one."""
    check(
        callable(loss),
        f"loss is {loss!r}; it must be a function of the End of a context and its "
        "target, such as squared_error.",
    )
    return loss


def checked_decay(decay: Any, data: Dataset) -> Float[Array, ""]:
    """Return the factor of the penalty as an array, or raise if it is none."""
    if not is_concrete(decay):
        return decay
    number = as_number("decay", decay, "a number >= 0", least=0, below=math.inf)
    return jnp.asarray(number, data.tokens.dtype)


@eqx.filter_jit
def gradient_of(model, data: Dataset, loss: Loss, decay, engine) -> Gradient:
    """Return the gradient; everything is checked."""
    if isinstance(model.method, Adaptive):

        def of(parameters: Parameters):
            points = ends_of(model.with_parameters(parameters), data)
            return mean_loss(data, loss, points)

        value, found = jax.value_and_grad(of)(model.parameters)
        found, fields = _per_particle(found), None
    else:
        sweep = sweep_of(model, data)
        value, found, fields = engine.pull(
            sweep, data.points, lambda points: terminal(data, loss, points)
        )
        found = gathered(found)

    def in_units(change, particle):
        share = model.shares.reshape(-1, *[1] * (change.ndim - 1))
        return change / share + decay * particle

    changes = jax.tree.map(in_units, found, model.parameters)
    profile = profile_of(changes)
    squared = profile @ model.shares
    total = value + penalty(model, decay)
    return Gradient(total, changes, squared, profile, fields)


def profile_of(changes: Parameters) -> Float[Array, " l"]:
    """Return the mean square of changes over heads, and over neurons, at each depth."""
    squares = [
        jnp.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) / leaf.shape[1]
        for leaf in jax.tree.leaves(changes)
    ]
    return jnp.sum(jnp.stack(squares), axis=0)


def penalty(model: MeanFieldTransformer, decay) -> Float[Array, ""]:
    """Return half the mean square of all particles, times the decay."""
    return decay * (profile_of(model.parameters) @ model.shares) / 2


def sweep_of(model: MeanFieldTransformer, data: Dataset) -> Sweep:
    """Return the steps of a transformer through depth."""
    sizes = jnp.diff(model.depths)
    steps = steps_of(model.parameters, sizes, model.interpolate)
    return Sweep(model.layer, steps, data.weights, tableau_of(model.method))


def mean_loss(data: Dataset, loss: Loss, points: Float[Array, "N r d"]):
    """Return the mean loss where all contexts have ended."""

    def of_one(points, weights, target):
        found = loss(data.end(points, weights), target)
        shape = jnp.shape(found)
        check(shape == (), f"loss returns an array of shape {shape}, not one number.")
        return found

    return jax.vmap(of_one)(points, data.weights, data.targets).mean()


def terminal(data: Dataset, loss: Loss, points: Float[Array, "N r d"]):
    """Return the mean loss, and the adjoint of each point with which it begins."""
    value, change = jax.value_and_grad(mean_loss, argnums=2)(data, loss, points)
    count, queries = len(points), data.queries.shape[1]
    ones = jnp.ones((count, queries), points.dtype)
    masses = jnp.concatenate([data.weights, ones], axis=1)[:, :, None]
    adjoint = jnp.where(masses > 0, change / jnp.where(masses > 0, masses, 1), 0)
    return value, count * adjoint


def _solved(model: MeanFieldTransformer, data: Dataset) -> Float[Array, "N r d"]:
    """Return where adaptive steps carry tokens and queries."""

    def end(tokens, weights, queries):
        path = model.run(TokenCloud(tokens, weights), queries)
        if model.layer.is_frozen:
            return jnp.concatenate([tokens, path.points[-1]])
        return jnp.concatenate([path.points[-1], cast(Array, path.probes)[-1]])

    return jax.vmap(end)(data.tokens, data.weights, data.queries)


def check_fits(model: MeanFieldTransformer, data: Dataset) -> None:
    """Raise unless this is a transformer and a data set of one dimension."""
    if not isinstance(model, MeanFieldTransformer):
        raise InvalidInput(
            f"model is a {type(model).__name__}; it must be a MeanFieldTransformer."
        )
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
        data.tokens.dtype == model.parameters.heads.query.dtype,
        f"data is {data.tokens.dtype}, the heads are "
        f"{model.parameters.heads.query.dtype}; give both in one precision.",
    )


class FirstVariation(eqx.Module):
    r"""The first variation of the risk: what a new head at some depth would change.

    $$\frac{\delta R}{\delta\nu_s}(\theta) = \frac1N\sum_k\Bigl(
      \langle p^k, \Gamma_\theta[\mu^k](z^k)\rangle
      + \int\langle q^k, \Gamma_\theta[\mu^k]\rangle\,\mathrm d\mu^k\Bigr).$$

    A little mass of $\nu_s$ moved from its heads to $\theta$ lowers the risk if the
    value at $\theta$ is below the mean over the heads (`excess` is negative).

    Args:
        model: the transformer; its method is Euler.
        data: contexts, queries and targets.
        loss: as for `risk`.
    """

    model: MeanFieldTransformer
    weights: Float[Array, "N n"]
    points: Float[Array, "l N r d"]
    adjoint: Float[Array, "l N r d"]

    def __init__(self, model, data, *, loss: Loss = squared_error):
        found = gradient(model, data, loss=loss).fields
        if found is None or len(found.points) != model.layers + 1:
            raise Unsupported(
                "the first variation is that of the network: give the method Euler()."
            )
        self.model, self.weights = model, data.weights
        self.points = found.points[:-1]
        adjoints = jnp.concatenate([found.tokens, found.queries], axis=2)
        self.adjoint = adjoints[1:]

    def __call__(self, layer: int, heads: Heads) -> Float[Array, " h"]:
        """Return its values at heads, side by side along a leading axis."""
        last = self.model.layers - 1
        check(
            isinstance(layer, int) and 0 <= layer <= last,
            f"layer is {layer}; it must be an integer from 0 to {last}.",
        )

        def of_head(head: Heads):
            alone = Parameters(jax.tree.map(lambda leaf: leaf[None], head))
            moved = jax.vmap(self.model.layer.velocity, in_axes=(None, 0, 0))(
                alone, self.points[layer], self.weights
            )
            queries = moved.shape[1] - self.weights.shape[1]
            ones = jnp.ones((len(moved), queries), moved.dtype)
            masses = jnp.concatenate([self.weights, ones], axis=1)
            return jnp.sum(masses * jnp.sum(self.adjoint[layer] * moved, 2)) / len(
                moved
            )

        return jax.lax.map(of_head, heads)

    def excess(self, layer: int, heads: Heads) -> Float[Array, " h"]:
        """Return its values less the mean over the heads that are there."""
        own = jax.tree.map(lambda leaf: leaf[layer], self.model.parameters.heads)
        return self(layer, heads) - self(layer, own).mean()
