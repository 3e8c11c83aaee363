r"""Forward through depth and back again, by explicit Runge-Kutta steps.

A step is $k_i = F(x + h\sum_j a_{ij}k_j)$, $x \leftarrow x + h\sum_i b_i k_i$. Its
transpose goes through the stages backward,
$$\xi_i = h\,F'(x_i)^\top\bigl(b_i p + \textstyle\sum_{j>i}a_{ji}\xi_j\bigr), \qquad
  p \leftarrow p + \textstyle\sum_i \xi_i,$$
which is the gradient of the network that is run, not of an equation close to it.
"""

from typing import Any, NamedTuple, cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.training.layer import Layer, Parameters


class Tableau(NamedTuple):
    """The coefficients of an explicit Runge-Kutta method.

    Attributes:
        stages: for each stage the coefficients of those before it.
        shares: the coefficient of each stage in the step.
        places: where in the step each stage lies, from 0 to 1.
    """

    stages: tuple[tuple[float, ...], ...]
    shares: tuple[float, ...]
    places: tuple[float, ...]


def tableau_of(method: diffrax.Euler | diffrax.AbstractERK) -> Tableau:
    """Return the coefficients of a method of diffrax."""
    if isinstance(method, diffrax.Euler):
        return Tableau(((),), (1.0,), (0.0,))
    known = cast(diffrax.ButcherTableau, method.tableau)
    rows = [(), *(tuple(map(float, row)) for row in known.a_lower)]
    places = (0.0, *map(float, known.c))
    return Tableau(tuple(rows), tuple(map(float, known.b_sol)), places)


class Step(NamedTuple):
    """A step: its length, the particles at its start, those at its end or `None`."""

    size: Float[Array, ""]
    first: Parameters
    last: Parameters | None

    def at(self, place: float) -> Parameters:
        """Return the particles at a place in the step, from 0 to 1."""
        if self.last is None:
            return self.first

        def blend(first, last):
            return (1 - place) * first + place * last

        return jax.tree.map(blend, self.first, self.last)

    def spread(self, changes: Parameters, place: float) -> tuple:
        """Return how changes of the particles at a place belong to start and end."""
        if self.last is None:
            return changes, None
        return tuple(
            jax.tree.map(lambda leaf, share=share: share * leaf, changes)
            for share in (1 - place, place)
        )


class Sweep(eqx.Module):
    """Steps through depth for a batch of contexts.

    Attributes:
        layer: what does not change with depth.
        steps: the steps, with an axis of depth in front.
        weights: the masses of the tokens of each context.
        tableau: the method.
    """

    layer: Layer
    steps: Step
    weights: Float[Array, "N n"]
    tableau: Tableau = eqx.field(static=True)

    def forward(self, points: Float[Array, "N r d"]) -> Float[Array, "s N r d"]:
        """Return the points before all steps and after each one."""

        def one(points, step: Step):
            moved = self.moved(step, points)
            return moved, moved

        _, later = jax.lax.scan(one, points, self.steps)
        return jnp.concatenate([points[None], later])

    def end(self, points: Float[Array, "N r d"]) -> Float[Array, "N r d"]:
        """Return the points after the last step."""

        def one(points, step: Step):
            return self.moved(step, points), None

        return jax.lax.scan(one, points, self.steps)[0]

    def moved(self, step: Step, points: Float[Array, "N r d"]) -> Float[Array, "N r d"]:
        """Return the points after a step."""
        slopes = self._stages(step, points)[1]
        return points + step.size * _combined(self.tableau.shares, slopes)

    def back(
        self, step: Step, points: Float[Array, "N r d"], adjoint: Float[Array, "N r d"]
    ) -> tuple[Float[Array, "N r d"], tuple[Parameters, Parameters | None]]:
        """Return the adjoint before a step, and what particles at both ends have of it.

        Args:
            step: the step.
            points: the points before it.
            adjoint: the adjoint after it, of tokens divided by their masses.
        """
        coefficients, shares, places = self.tableau
        stages, _ = self._stages(step, points)
        pulled: dict[int, Array] = {}
        found: Any = None
        for index in reversed(range(len(stages))):
            later = [row[index] if index < len(row) else 0.0 for row in coefficients]
            given = shares[index] * adjoint
            for after, change in pulled.items():
                given = given + later[after] * change
            particles = step.at(places[index])
            pulled[index], derivative = jax.vmap(
                self.layer.transposed, in_axes=(None, 0, 0, 0)
            )(particles, stages[index], self.weights, step.size * given)
            mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), derivative)
            both = step.spread(mean, places[index])
            found = both if found is None else jax.tree.map(jnp.add, found, both)
        return adjoint + sum(pulled.values()), found

    def back_all(
        self, states: Float[Array, "s N r d"], adjoint: Float[Array, "N r d"]
    ) -> tuple[Float[Array, "s N r d"], Any]:
        """Return the adjoint at all depths, and what each step leaves to particles."""

        def one(adjoint, given):
            before, found = self.back(*given, adjoint)
            return before, (before, found)

        _, (earlier, found) = jax.lax.scan(
            one, adjoint, (self.steps, states[:-1]), reverse=True
        )
        return jnp.concatenate([earlier, adjoint[None]]), found

    def _stages(self, step: Step, points) -> tuple[list[Array], list[Array]]:
        """Return the points of all stages, and the velocities there."""
        stages, slopes = [], []
        for row, place in zip(self.tableau.stages, self.tableau.places, strict=True):
            moved = points
            if row:
                moved = points + step.size * _combined(row, slopes)
            stages.append(moved)
            slopes.append(
                jax.vmap(self.layer.velocity, in_axes=(None, 0, 0))(
                    step.at(place), moved, self.weights
                )
            )
        return stages, slopes


def _combined(shares: tuple[float, ...], slopes: list[Array]) -> Array:
    terms = [a * k for a, k in zip(shares, slopes, strict=True) if a != 0]
    return sum(terms[1:], start=terms[0]) if terms else 0 * slopes[0]


def steps_of(parameters: Parameters, sizes, interpolate: bool) -> Step:
    """Return the steps of particles that are held, or interpolated, between depths."""
    if not interpolate:
        return Step(sizes, parameters, None)
    first, last = (
        jax.tree.map(lambda leaf, part=part: leaf[part], parameters)
        for part in (slice(None, -1), slice(1, None))
    )
    return Step(sizes, first, last)


def gathered(found: tuple[Parameters, Parameters | None]) -> Parameters:
    """Return what steps leave to particles at both ends, by depth of the particles."""
    first, last = found
    if last is None:
        return first

    def join(first, last):
        edge = [(0, 0)] * (first.ndim - 1)
        return jnp.pad(first, [(0, 1), *edge]) + jnp.pad(last, [(1, 0), *edge])

    return jax.tree.map(join, first, last)
