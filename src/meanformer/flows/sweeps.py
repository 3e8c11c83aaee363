"""Forward through depth and back again, by explicit Runge-Kutta steps.

Steps go back by the transpose of their derivative, stage by stage, so that the gradient
is that of the network that is run, not of an equation close to it.
"""

import abc
from typing import Any, NamedTuple, cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

Method = diffrax.Euler | diffrax.AbstractERK
Numbers = tuple[float, ...]


def tableau_of(method: Method) -> tuple[tuple[Numbers, ...], Numbers, Numbers]:
    """Return the coefficients of stages, those of the step, and the places of stages.

    Each stage has a coefficient for all before it; places are from 0 to 1.
    """
    if isinstance(method, diffrax.Euler):
        return ((),), (1.0,), (0.0,)
    known = cast(diffrax.ButcherTableau, method.tableau)
    rows = ((), *(tuple(map(float, row)) for row in known.a_lower))
    return rows, tuple(map(float, known.b_sol)), (0.0, *map(float, known.c))


class Step(NamedTuple):
    """A step: its length, the parameters at its start, those at its end or `None`."""

    size: Float[Array, ""]
    first: PyTree
    last: PyTree | None

    def at(self, place: float) -> PyTree:
        """Return the parameters at a place in the step, from 0 to 1."""
        if self.last is None:
            return self.first

        def blend(first, last):
            return (1 - place) * first + place * last

        return jax.tree.map(blend, self.first, self.last)


class AbstractLayer(eqx.Module):
    """Base class of what moves tokens and queries at every depth."""

    @abc.abstractmethod
    def velocity(
        self,
        parameters: PyTree,
        points: Float[Array, "r d"],
        weights: Float[Array, " n"],
        *,
        is_explicit: bool = False,
    ) -> Float[Array, "r d"]:
        """Return the velocity of tokens, which come first, and queries.

        Args:
            parameters: those of one depth.
            points: tokens and queries.
            weights: the masses of the tokens.
            is_explicit: use a derivative that is written out, where there is one.
        """


class Sweep(eqx.Module):
    """Steps through depth for a batch of contexts.

    Attributes:
        layer: what does not change with depth.
        steps: the steps, with an axis of depth in front.
        weights: the masses of the tokens of each context.
        method: the method.
    """

    layer: AbstractLayer
    steps: Step
    weights: Float[Array, "N n"]
    method: Method

    def forward(self, points: Float[Array, "N r d"]) -> Float[Array, "s N r d"]:
        """Return the points before all steps and after each one."""

        def one(points, step: Step):
            moved = self.moved(step, points)
            return moved, moved

        _, later = jax.lax.scan(one, points, self.steps)
        return jnp.concatenate([points[None], later])

    def end(
        self, points: Float[Array, "N r d"], *, again: bool = False
    ) -> Float[Array, "N r d"]:
        """Return the points after the last step.

        Args:
            points: the points before all steps.
            again: compute each step again where derivatives are taken backward.
        """

        def one(points, step: Step):
            return self.moved(step, points), None

        return jax.lax.scan(jax.checkpoint(one) if again else one, points, self.steps)[
            0
        ]

    def moved(
        self, step: Step, points: Float[Array, "N r d"], *, is_explicit: bool = False
    ) -> Float[Array, "N r d"]:
        """Return the points after a step."""

        def slope(place, points):
            def of_one(points, weights):
                return self.layer.velocity(
                    step.at(place), points, weights, is_explicit=is_explicit
                )

            return jax.vmap(of_one)(points, self.weights)

        def ahead(shares):
            terms = [a * k for a, k in zip(shares, slopes, strict=True) if a != 0]
            return points + step.size * sum(terms) if terms else points

        slopes: list[Array] = []
        stages, shares, places = tableau_of(self.method)
        for row, place in zip(stages, places, strict=True):
            slopes.append(slope(place, ahead(row)))
        return ahead(shares)

    def back(
        self, step: Step, points: Float[Array, "N r d"], adjoint: Float[Array, "N r d"]
    ) -> tuple[Float[Array, "N r d"], tuple[PyTree, PyTree | None]]:
        """Return the adjoint before a step, and what both ends' parameters have of it.

        Args:
            step: the step.
            points: the points before it.
            adjoint: the adjoint after it.
        """

        def moved(parameters, points):
            return self.moved(Step(step.size, *parameters), points, is_explicit=True)

        _, pull = jax.vjp(moved, (step.first, step.last), points)
        found, before = pull(adjoint)
        return before, found

    def back_all(
        self, states: Float[Array, "s N r d"], adjoint: Float[Array, "N r d"]
    ) -> tuple[Float[Array, "s N r d"], Any]:
        """Return the adjoint at all depths, and what each step leaves to parameters."""

        def one(adjoint, given):
            before, found = self.back(*given, adjoint)
            return before, (before, found)

        _, (earlier, found) = jax.lax.scan(
            one, adjoint, (self.steps, states[:-1]), reverse=True
        )
        return jnp.concatenate([earlier, adjoint[None]]), found
