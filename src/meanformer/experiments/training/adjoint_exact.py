r"""The gradient of a transformer by its adjoint, tokens included.

The derivative of the risk in a head at depth $s$ is read off from two fields that go
backward through depth: $p_s$ at the query, and $q_s$ on the support of the context,
which carries what the context does to others. Discretised as the layers are, it is the
gradient of the network to rounding; methods that reconstruct points, or discretise the
equation of the adjoint, have an error of the order of a layer.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer import training
from meanformer.experiments.helpers.engines import Continuous
from meanformer.plotting import draw_rate, mark_sizes, style


class Parameters(lab.Parameters):
    """How many random networks, and how deep the others are."""

    networks: int = lab.setting(2, full=20, help="random networks", at_least=1)
    doublings: int = lab.setting(3, full=6, help="depths 16, 32, …", at_least=3)


RISK = lab.observation(
    "reference-risk",
    "The reference network of two layers has the tabulated risk and squared norm of "
    "the gradient.",
    source=lab.tabulated("explicit adjoint and reverse mode, two programs"),
)
ADJOINT = lab.theorem(
    "adjoint",
    "The explicit adjoint is the derivative of ordinary layers, relatively, over "
    "random networks with absent tokens, a value bias and neurons.",
    "BHFP26, adjoint equations",
    source=lab.other_method("jax.grad through run_layers on maps of the library"),
)
ENGINES = lab.observation(
    "engines",
    "Checkpoints, and layers run backward with corrections, give the same gradient.",
    source=lab.other_method("automatic differentiation of the forward pass"),
)
REVERSED = lab.theorem(
    "reversed",
    "Layers run backward without corrections have an error of first order in $1/L$.",
    "SAP22, memory-free backward passes",
    source=lab.theory("fitted to all depths"),
)
CONTINUOUS = lab.observation(
    "continuous",
    "So has the adjoint equation discretised at the right end points.",
    source=lab.theory("fitted to all depths"),
)
MEMORY = lab.observation(
    "memory",
    "Beyond the heads and their gradient, memory does not grow with depth where layers "
    "are run backward: bytes for each layer more, relative to those of storing points.",
    source=lab.theory("zero; the compiler's own count of temporary memory"),
)


@lab.experiment(
    "The adjoint is the gradient, tokens included", room="training", seconds=10
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compare gradients, engines, orders and memory."""
    reference = training.gradient(*reference_problem())
    seeds = range(parameters.networks)
    differences = [from_autodiff(*random_problem(s)) for s in progress.over(seeds, 0.4)]
    depths = [16 * 2**k for k in range(parameters.doublings)]
    errors = {"layers run backward": [], "adjoint equation": []}
    for layers in progress.over(depths, 0.3):
        model, data = same_heads(layers)
        exact = training.gradient(model, data).parameters
        for name, engine in zip(errors, INEXACT, strict=True):
            found = training.gradient(model, data, engine=engine).parameters
            errors[name].append(difference(found, exact))
    model, data = same_heads(depths[0])
    exact = training.gradient(model, data, engine=training.Automatic()).parameters
    others = [training.gradient(model, data, engine=one).parameters for one in EXACT]
    growth = memory_growth()
    fields = training.gradient(model, data)
    return lab.Outcome(
        findings=[
            RISK.close_to(
                [reference.risk, reference.squared_norm], TABULATED, tolerance=1e-12
            ),
            ADJOINT.at_most(differences, 1e-12),
            ENGINES.at_most([difference(one, exact) for one in others], 1e-12),
            REVERSED.close_to(order(depths, errors[REVERSE]), 1, tolerance=0.15),
            CONTINUOUS.close_to(order(depths, errors[EQUATION]), 1, tolerance=0.15),
            MEMORY.at_most(growth["reversible"] / growth["stored"], 0.05),
        ],
        pictures=[draw_fields(fields), draw_errors(depths, errors)],
        tables=[
            lab.Table(("engine", "bytes for each layer more"), list(growth.items())),
        ],
    )


INEXACT = (training.Reversible(corrections=0), Continuous())
EXACT = (training.Stored(), training.Checkpointed(), training.Reversible())
TABULATED = (1.6808851103560536, 3.245003493284794)
REVERSE, EQUATION = "layers run backward", "adjoint equation"


def reference_problem():
    """Two layers of two heads in the plane, without randomness."""
    eye = np.eye(2)
    query = [[[[1, 0.5], [0, 1]], eye], [eye, [[1, 1], [0, 1]]]]
    key = [[[[0.5, -1], [1, 0]], eye], [[[0, 1], [-1, 0]], [[1, 0], [1, 1]]]]
    value = [
        [[[1, -0.5], [0.25, 1]], -eye / 2],
        [[[0, 1], [1, 0]], [[0.5, 0], [0, -1]]],
    ]
    heads = [np.array(each, float) for each in (query, key, value)]
    model = training.MeanFieldTransformer(*heads, beta=1.5)
    cloud = mf.TokenCloud([[1.0, 0], [0, 1.0], [-1.0, 0.5]], [0.5, 0.25, 0.25])
    return model, training.Dataset([cloud], [[0.5, -1.0]], [[0.0, 1.0]])


def random_problem(seed: int):
    """A random network, and contexts of different sizes with random weights."""
    keys = jr.split(jr.key(seed), 5)
    clouds = [
        mf.TokenCloud(
            jr.normal(keys[0], (size, 3)),
            jr.uniform(keys[1], (size,), minval=0.2),
            normalize=True,
        )
        for size in (4, 7)
    ]
    model = training.MeanFieldTransformer.draw(
        4, 3, 3, key=keys[2], key_dimension=2, beta=1.3, value_bias=True, neurons=5
    )
    queries, targets = jr.normal(keys[3], (2, 3)), jr.normal(keys[4], (2, 3))
    return model, training.Dataset(clouds, queries, targets)


@jax.jit
def autodiff(model, data):
    """The derivative of the risk through ordinary layers, in single particles."""

    def risk(model):
        def loss(tokens, weights, query, target):
            cloud = mf.TokenCloud(tokens, weights)
            path = mf.run_layers(model.flow(), cloud, model.layers, probes=query)
            ended = cast(jax.Array, path.probes)[-1]
            return jnp.sum((ended - target) ** 2) / 2

        given = (data.tokens, data.weights, data.queries, data.targets)
        return jax.vmap(loss)(*given).mean()

    return jax.grad(risk)(model).parameters


def from_autodiff(model, data) -> float:
    """The relative difference from derivatives of ordinary layers."""
    expected = jax.tree.map(
        lambda leaf: model.layers * leaf.shape[1] * leaf, autodiff(model, data)
    )
    return difference(training.gradient(model, data).parameters, expected)


def difference(one, other) -> float:
    """The largest relative difference of two gradients."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def same_heads(layers: int):
    """The same heads at every layer, and three contexts."""
    model = training.MeanFieldTransformer.draw(
        layers, 4, 2, key=jr.key(5), style="every layer", scale=0.7
    )
    contexts = jr.normal(jr.key(6), (3, 4, 2))
    queries, targets = jr.normal(jr.key(7), (2, 3, 2))
    return model, training.Dataset(contexts, queries, targets)


def order(depths, errors) -> float:
    """The fitted exponent of the error in the length of a layer."""
    return -float(np.polyfit(np.log(depths), np.log(errors), 1)[0])


def memory_growth() -> dict[str, float]:
    """Bytes of temporary memory for each layer more, beyond heads and gradient."""
    engines = {"stored": training.Stored(), "reversible": training.Reversible()}
    growth = {}
    for name, engine in engines.items():
        sizes = []
        for layers in (16, 64):
            model, data = same_heads(layers)

            def of(parameters, model=model, data=data, engine=engine):
                moved = model.with_parameters(parameters)
                return training.gradient(moved, data, engine=engine).squared_norm

            compiled = jax.jit(of).lower(model.parameters).compile()
            used = cast(Any, compiled.memory_analysis()).temp_size_in_bytes
            own = sum(leaf.nbytes for leaf in jax.tree.leaves(model.parameters))
            sizes.append(used - own)
        growth[name] = (sizes[1] - sizes[0]) / 48
    return growth


def draw_fields(found) -> lab.Picture:
    """Sizes of the adjoints along depth, and of the gradient."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.2))
    fields = found.fields
    depths = np.linspace(0, 1, len(fields.queries))
    sizes = {"query, $|p_s|$": fields.queries, "context, mean $|q_s|$": fields.tokens}
    for name, field in sizes.items():
        left.plot(depths, np.linalg.norm(field, axis=-1).mean(axis=(1, 2)), label=name)
    left.set(xlabel="depth $s$", ylabel="mean norm of the adjoint")
    left.legend()
    right.plot((depths[1:] + depths[:-1]) / 2, found.profile, "o-")
    right.set(xlabel="depth $s$", ylabel=r"$\int|G_s|^2\,\mathrm{d}\nu_s$")
    return lab.Picture(
        figure,
        "Left: the adjoint of the query, and that of the context, which vanishes at "
        "the end. Right: how much the heads at each depth contribute to the gradient.",
    )


def draw_errors(depths, errors) -> lab.Picture:
    """Errors of the engines that are not exact."""
    figure, axes = style.canvas(panel=(4.8, 3.4))
    for name, values in errors.items():
        draw_rate(depths, values, axes, label=name, slope=-1)
    mark_sizes(depths, axes)
    axes.set(xlabel="layers $L$", ylabel="relative error of the gradient")
    axes.legend()
    return lab.Picture(
        figure,
        "Two ways to save memory or a derivation cost accuracy of the order of a "
        "layer. Dashed: slope $-1$. The exact engines agree to rounding.",
    )
