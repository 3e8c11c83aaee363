"""Trajectories of training: heads along training time, and what was measured."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, UInt8

from meanformer.attention.averaged_heads import Heads
from meanformer.errors import InvalidInput, check
from meanformer.flows.trajectories.abstract import AbstractTrajectory
from meanformer.training.layer import Neurons, Parameters
from meanformer.training.transformer import MeanFieldTransformer

HEAD_AXES = ("depth", "layer", "head")
NEURON_AXES = ("depth", "layer", "neuron")
MEASURED = {
    "dissipated": ("depth",),
    "lengths": ("depth",),
    "risks": ("depth",),
    "squared_norms": ("depth",),
    "profiles": ("depth", "layer"),
    "accepted_steps": ("depth",),
    "rejected_steps": ("depth",),
    "notes": ("depth", "byte"),
}


class TrainingRun(AbstractTrajectory):
    r"""Heads along training time, with the status of the training that made them.

    Attributes:
        depths: the saved times.
        parameters: heads and neurons at each of them.
        dissipated: $\int|\nabla R|^2\,\mathrm dt$ up to there, what the risk should
            have lost.
        lengths: the length of the path of the particles up to there.
        risks: the risk.
        squared_norms: $|\nabla R|^2$, in mean-field units.
        profiles: the mean square of the gradient at each depth of heads.
        accepted_steps: steps taken up to each saved time.
        rejected_steps: steps tried and refused.
        notes: what descent goes on from beside the particles, as bytes; or `None`.
        status: how the training ended.
        start: the transformer at the start; `None` for a run read from a file.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "depth": ("depth",),
        "query": (*HEAD_AXES, "key_coordinate", "coordinate"),
        "key": (*HEAD_AXES, "key_coordinate", "coordinate"),
        "value": (*HEAD_AXES, "out_coordinate", "coordinate"),
        "value_bias": (*HEAD_AXES, "coordinate"),
        "weights_in": (*NEURON_AXES, "coordinate"),
        "bias_in": NEURON_AXES,
        "weights_out": (*NEURON_AXES, "coordinate"),
        **MEASURED,
    }
    UNMOVED: ClassVar[tuple[str, ...]] = ("start",)
    CLOCK: ClassVar[str] = "time"
    TOLD: ClassVar[Mapping[str, str]] = {
        "reached": "the time asked for was reached",
        "steady": "the heads came to rest before the time asked for",
        "step_budget": "the step budget between two saved times was used up; raise it, "
        "loosen rtol, save more often, or take GradientDescent(step)",
        "not_finite": "the risk or its gradient was not finite, so that the last "
        "finite heads were kept; look at the loss, or take smaller steps, or another "
        "engine than Reversible()",
        "diverging": "the risk rose from step to step, and the heads from before it "
        "did were kept; take a smaller step: close to a minimum of the squared error "
        "those below 2 N / spectrum(model, data).largest are stable",
    }

    depths: Float[Array, " t"]
    parameters: Parameters
    dissipated: Float[Array, " t"]
    lengths: Float[Array, " t"]
    risks: Float[Array, " t"]
    squared_norms: Float[Array, " t"]
    profiles: Float[Array, "t l"]
    accepted_steps: Int[Array, " t"]
    rejected_steps: Int[Array, " t"]
    notes: UInt8[Array, "t e"] | None
    status: PyTree
    start: MeanFieldTransformer | None = None

    def __str__(self) -> str:
        first, last = (f"{float(self.risks[index]):.4g}" for index in (0, -1))
        return f"{self.message} The risk was {first} at the start, {last} at the end."

    @property
    def times(self) -> Float[Array, " t"]:
        """The saved times."""
        return self.depths

    @property
    def caption(self) -> str:
        """The last risk."""
        return f"risk {float(self.risks[-1]):.4g}"

    @property
    def model(self) -> MeanFieldTransformer:
        """The transformer at the last saved time."""
        return self.at(-1)

    def at(self, index: int) -> MeanFieldTransformer:
        """Return the transformer at a saved time, by its index."""
        if self.start is None:
            raise InvalidInput(
                "a run from a file does not know its transformer; give its particles "
                "to one: model.with_parameters(run.particles(index))."
            )
        return self.start.with_parameters(self.particles(index))

    def particles(self, index: int) -> Parameters:
        """Return heads and neurons at a saved time, by its index."""
        check(
            -len(self) <= index < len(self),
            f"index is {index}; there are {len(self)} saved times.",
        )
        return jax.tree.map(lambda leaf: leaf[index], self.parameters)

    @property
    def energy_defects(self) -> Float[Array, " t"]:
        r"""What the risk lost beyond $\int|\nabla R|^2\,\mathrm dt$.

        Zero along the exact flow, and of first order in the step for gradient descent.
        It says nothing of batches and optimisers.
        """
        return self.risks[0] - self.risks - self.dissipated

    @property
    def gauge_drifts(self) -> Float[Array, " t"]:
        r"""The largest change of an entry of $QQ^\top - KK^\top$ since the start.

        Every head keeps this matrix along the exact flow without decay.
        """
        query, key = self.parameters.heads[:2]
        kept = query @ query.mT - key @ key.mT
        return jnp.abs(kept - kept[:1]).max(axis=(1, 2, 3, 4))

    def columns(self) -> dict[str, Any]:
        """Return the arrays by their names in files."""
        heads, neurons = self.parameters.heads, self.parameters.neurons
        return {
            "depth": self.depths,
            **heads._asdict(),
            **({} if neurons is None else vars(neurons)),
            **{name: getattr(self, name) for name in MEASURED},
        }

    @classmethod
    def from_columns(cls, columns: Mapping[str, Array], status: PyTree):
        """Return the run that arrays of a file stand for, without its transformer."""
        heads = Heads(*(columns.get(name) for name in Heads._fields))
        names = ("weights_in", "bias_in", "weights_out")
        has_neurons = names[0] in columns
        neurons = Neurons(*(columns[name] for name in names)) if has_neurons else None
        measured: dict[str, Any] = {name: columns.get(name) for name in MEASURED}
        particles = Parameters(heads, neurons)
        return cls(columns["depth"], particles, status=status, **measured)
