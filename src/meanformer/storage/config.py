"""A run of one's own, described in a file: tokens, attention, flow, solve."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import (
    AbstractInContextMap,
    Blocks,
    Causal,
    Masked,
    MultiHead,
    Perceptron,
    Prefix,
    StrictCausal,
    Sum,
    Window,
    in_order,
)
from meanformer.attention.zoo import KINDS
from meanformer.errors import InvalidInput, check
from meanformer.flows import (
    AbstractIntegrator,
    Adaptive,
    EscapeRadius,
    FixedStep,
    Flow,
    Splitting,
    SteadyState,
    StepBudget,
    Stiff,
)
from meanformer.geometry import Euclidean, Sphere
from meanformer.measures import Gaussian, TokenCloud, UniformBox, UniformSphere
from meanformer.storage.sections import Section

SPACES = {"euclidean": Euclidean, "sphere": Sphere}
LAWS = ("gaussian", "sphere", "box")
MASKS = ("causal", "strict", "window", "prefix", "blocks")
SOLVERS = ("adaptive", "stiff", "fixed", "lie", "strang")
ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A configuration made into objects: what `solve` is called with."""

    flow: Flow
    cloud: TokenCloud
    depths: Float[Array, " t"]
    options: dict[str, Any]


def read_config(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file, or raise with the line of the mistake."""
    import tomllib

    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise InvalidInput(f"{path} does not exist; give a TOML file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{path} is not a TOML file: {error}.") from error


def build(config: dict[str, Any], folder: Path) -> Run:
    """Build the objects that a configuration describes.

    Args:
        config: its tables `tokens`, `attention`, `perceptron`, `flow`, `solve`, `stop`.
        folder: where files named in it are looked for.
    """
    top = Section("config", config)
    tables = {
        name: Section(name, top.take(name, default={}))
        for name in ("tokens", "attention", "perceptron", "flow", "solve", "stop")
    }
    top.finish()
    cloud = _tokens(tables["tokens"], folder)
    velocity = _velocity(tables["attention"], tables["perceptron"], cloud.dimension)
    flow, key = _flow(tables["flow"], velocity)
    depths, options = _solve(tables["solve"], cloud.points.dtype)
    options |= {"stop": _stops(tables["stop"]), "key": key}
    for section in tables.values():
        section.finish()
    return Run(flow, cloud, depths, options)


def _tokens(section: Section, folder: Path) -> TokenCloud:
    points, file = section.take("points"), section.take("file", str)
    weights, ordered = section.take("weights"), section.take("in_order", bool, False)
    positions = section.take("positions")
    law = section.take("law", str)
    check(
        sum(source is not None for source in (points, file, law)) == 1,
        "tokens needs exactly one of points, file and law.",
    )
    if file is not None:
        points = _load(folder / file)
    elif law is not None:
        points = _sample(law, section)
    cloud = TokenCloud(points, weights, positions=positions)
    check(not (ordered and positions), "tokens has both in_order and positions.")
    return in_order(cloud) if ordered else cloud


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"tokens.file: {path} is not a .npy array: {error}"
        ) from error


def _sample(law: str, section: Section) -> Float[Array, "n d"]:
    check(law in LAWS, f"tokens.law is {law!r}; it must be one of {', '.join(LAWS)}.")
    count, seed = section.require("count", int), section.take("seed", int, 0)
    dimension = section.require("dimension", int)
    scale = section.take("scale", float, 1.0)
    check(count > 0, f"tokens.count is {count}; it must be positive.")
    check(dimension > 0, f"tokens.dimension is {dimension}; it must be positive.")
    zero, one = jnp.zeros(dimension), jnp.ones(dimension)
    measure = {
        "gaussian": lambda: Gaussian(zero, jnp.eye(dimension)),
        "sphere": lambda: UniformSphere(dimension),
        "box": lambda: UniformBox(-one, one),
    }[law]()
    return scale * measure.sample(count, key=jr.key(seed))


def _velocity(
    attention: Section, perceptron: Section, dimension: int
) -> AbstractInContextMap:
    mask = _mask(attention.take("mask"))
    heads = attention.take("heads")
    if heads is None:
        velocity = _head(attention, dimension)
    else:
        sections = [
            Section(f"attention.heads[{index}]", head)
            for index, head in enumerate(heads)
        ]
        velocity = MultiHead([_head(section, dimension) for section in sections])
        for section in sections:
            section.finish()
    if mask is not None:
        velocity = Masked(velocity, mask)
    extra = _perceptron(perceptron)
    return velocity if extra is None else Sum((velocity, extra))


def _head(section: Section, dimension: int) -> AbstractInContextMap:
    kind = KINDS[section.choose("kind", KINDS, "softmax")]
    matrices = [
        _matrix(section.name, name, section.take(name, default="identity"), dimension)
        for name in ("query", "key", "value")
    ]
    options = {"beta": section.take("beta", float, 1.0)}
    for field in dataclasses.fields(kind):
        if field.kw_only and field.name not in ("beta", "feature_map"):
            value = section.take(field.name)
            if value is not None:
                options[field.name] = value
    return kind(*matrices, **options)


def _matrix(section: str, name: str, value: Any, dimension: int) -> Float[Array, "k d"]:
    if value == "identity":
        return jnp.eye(dimension)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value * jnp.eye(dimension)
    if isinstance(value, dict):
        return _random_matrix(Section(f"{section}.{name}", value), dimension)
    if isinstance(value, list):
        return jnp.asarray(np.asarray(value, float))
    raise InvalidInput(
        f'{section}.{name} is {value!r}; it must be "identity", a number (a multiple '
        f"of "
        "the identity), the rows of a matrix, or { seed = …, rows = …, scale = … }."
    )


def _random_matrix(section: Section, dimension: int) -> Float[Array, "k d"]:
    rows = section.take("rows", int, dimension)
    scale = section.take("scale", float, dimension**-0.5)
    seed = section.require("seed", int)
    section.finish()
    return scale * jr.normal(jr.key(seed), (rows, dimension))


def _mask(value: Any):
    if value is None:
        return None
    section = Section(
        "attention.mask", {"kind": value} if isinstance(value, str) else value
    )
    kind = section.choose("kind", MASKS)
    if kind == "window":
        mask = Window(section.require("length", float))
    elif kind == "prefix":
        mask = Prefix(section.require("end", float))
    elif kind == "blocks":
        isolated = section.take("isolated", bool, False)
        mask = Blocks(section.require("boundaries"), isolated=isolated)
    else:
        mask = Causal() if kind == "causal" else StrictCausal()
    section.finish()
    return mask


def _perceptron(section: Section) -> Perceptron | None:
    names = ("weights_in", "bias_in", "weights_out", "bias_out")
    arrays = [section.take(name) for name in names]
    activation = section.choose("activation", ACTIVATIONS, "gelu")
    if all(array is None for array in arrays):
        return None
    for name, array in zip(names[:3], arrays, strict=False):
        check(array is not None, f"perceptron.{name} is missing; it must be given.")
    return Perceptron(*arrays, activation=ACTIVATIONS[activation])


def _flow(section: Section, velocity: AbstractInContextMap):
    space = SPACES[section.choose("space", SPACES, "euclidean")]()
    noise, seed = section.take("noise", float), section.take("seed", int, 0)
    key = None if noise is None else jr.key(seed)
    return Flow(velocity, space=space, noise=noise), key


def _solve(section: Section, dtype) -> tuple[Float[Array, " t"], dict[str, Any]]:
    depth = section.require("depth", float)
    every = section.take("save_every", float, depth / 10)
    options = {
        "rtol": section.take("rtol", float, 1e-6),
        "atol": section.take("atol", float, 1e-9),
        "solver": _solver(section),
    }
    return depth_grid(depth, every).astype(dtype), options


def depth_grid(depth: float, every: float) -> Float[Array, " t"]:
    """Return the depths 0, h, 2h, … up to the last one not beyond `depth`.

    A longer run has the same depths and more, which is what makes it an extension.
    """
    check(depth > 0, f"solve.depth is {depth}; it must be positive.")
    check(
        0 < every <= depth,
        f"solve.save_every is {every}; it must be positive and at most the depth, "
        f"{depth}.",
    )
    count = int(np.floor(depth / every * (1 + 1e-12))) + 1
    return every * jnp.arange(count, dtype=float)


def _solver(section: Section) -> AbstractIntegrator:
    name = section.choose("solver", SOLVERS, "adaptive")
    step = section.take("step", float)
    needs_step = name in ("fixed", "lie", "strang")
    check(
        needs_step == (step is not None),
        f"solve.solver is {name}; solve.step must "
        + ("be given with it." if needs_step else "not be given with it."),
    )
    if name == "fixed":
        return FixedStep(step)
    if needs_step:
        return Splitting(step, order=1 if name == "lie" else 2)
    return Adaptive() if name == "adaptive" else Stiff()


def _stops(section: Section) -> tuple:
    radius = section.take("escape_radius", float)
    speed = section.take("steady_speed", float)
    budget = section.take("step_budget", int)
    return tuple(
        kind(value)
        for kind, value in (
            (EscapeRadius, radius),
            (SteadyState, speed),
            (StepBudget, budget),
        )
        if value is not None
    )
