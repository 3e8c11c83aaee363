"""A run of one's own, described in a file: tokens, attention, flow, solve."""

import dataclasses
import gc
import typing
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
    NGPT,
    AbstractIntegrator,
    AbstractScheme,
    EscapeRadius,
    FixedStep,
    Flow,
    LongDepth,
    Merge,
    MixNorm,
    PeriNorm,
    PostNorm,
    PreNorm,
    Rescaled,
    Spectral,
    Splitting,
    SqrtScaling,
    SteadyState,
    StepBudget,
    Stiff,
    Switching,
    normalised_flow,
)
from meanformer.geometry import Euclidean, Sphere
from meanformer.measures import (
    AbstractMeasure,
    FourierDensity,
    Gaussian,
    TokenCloud,
    UniformBox,
    UniformSphere,
)
from meanformer.storage.sections import Section, is_number, numbers, shown

MOST_NUMBERS = 10**9  # of the tokens of a sample
MOST_DEPTHS = 10**6
MEASURES = ("tokens", "gaussian", "density")
SPACES = {"euclidean": Euclidean, "sphere": Sphere}
LAWS = ("gaussian", "sphere", "box")
MASKS = ("causal", "strict", "window", "prefix", "blocks")
SOLVERS = ("adaptive", "stiff", "switching", "fixed", "lie", "strang", "long-depth")
SCHEMES: dict[str, type[AbstractScheme]] = {
    "post": PostNorm,
    "pre": PreNorm,
    "peri": PeriNorm,
    "ngpt": NGPT,
    "mix": MixNorm,
    "sqrt": SqrtScaling,
}
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
    measure: TokenCloud | Gaussian | FourierDensity
    depths: Float[Array, " t"]
    options: dict[str, Any]


def read_config(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file, or raise with the line of the mistake."""
    import tomllib

    # What is collected where the stack is nearly full complains on standard error.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise InvalidInput(f"{path} does not exist; give a TOML file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.") from error
    except ValueError as error:
        raise InvalidInput(f"{path} is not a TOML file: {error}.") from error
    except RecursionError:
        raise InvalidInput(
            f"{path} has lists or tables nested too deeply to be read; tokens are a "
            "list of lists."
        ) from None
    finally:
        if is_collecting:
            gc.enable()


def build(config: dict[str, Any], folder: Path) -> Run:
    """Build the objects that a configuration describes.

    Args:
        config: its tables `attention`, `perceptron`, `flow`, `solve`, `stop`, and one
            of `tokens`, `gaussian` and `density`.
        folder: where files named in it are looked for.
    """
    tables = _tables(config)
    measure = _measure(config, tables, folder)
    flow, key = _flow(tables, measure)
    depths, options = _solve(tables["solve"], measure)
    if isinstance(measure, TokenCloud):
        check(
            key is None or isinstance(options["solver"], FixedStep),
            'flow.noise needs equal steps; give solve.solver = "fixed" and solve.step.',
        )
        options["key"] = key
    options["stop"] = _stops(tables["stop"])
    for section in tables.values():
        section.finish()
    return Run(flow, measure, depths, options)


def build_flow(config: dict[str, Any], measure: AbstractMeasure) -> Flow:
    """Build the flow alone, for tokens that are known already."""
    return _flow(_tables(config), measure)[0]


def _tables(config: dict[str, Any]) -> dict[str, Section]:
    top = Section("config", config)
    names = (*MEASURES, "attention", "perceptron", "flow", "solve", "stop")
    tables = {name: Section(name, top.take(name, default={})) for name in names}
    top.finish()
    return tables


def _measure(
    config: dict[str, Any], tables: dict[str, Section], folder: Path
) -> TokenCloud | Gaussian | FourierDensity:
    given = [name for name in MEASURES if name in config]
    check(
        len(given) <= 1,
        f"the file has {' and '.join(f'[{name}]' for name in given)}; one of them is "
        "the measure that flows.",
    )
    if given == ["gaussian"]:
        section = tables["gaussian"]
        mean = section.require_numbers("mean")
        return Gaussian(mean, section.require_numbers("covariance"))
    if given == ["density"]:
        return _density(tables["density"])
    return _tokens(tables["tokens"], folder)


def _density(section: Section) -> FourierDensity:
    """Return a density on the circle: by its moments, or the von Mises law."""
    moments = section.take_numbers("moments")
    sharpness = section.take("concentration", float)
    has_angle, angle = section.has("angle"), section.take("angle", float, 0.0)
    check(
        (moments is None) != (sharpness is None),
        "density needs exactly one of moments and concentration.",
    )
    if moments is not None:
        check(not has_angle, "density.angle goes with concentration only.")
        return FourierDensity(moments)

    def von_mises(angles):
        return jnp.exp(sharpness * (jnp.cos(angles - angle) - 1))

    return FourierDensity.from_function(von_mises, normalize=True)


def _tokens(section: Section, folder: Path) -> TokenCloud:
    points, file = section.take_numbers("points"), section.take("file", str)
    weights, positions = (section.take_numbers(k) for k in ("weights", "positions"))
    ordered = section.take("in_order", bool, False)
    law = section.choose("law", LAWS) if section.has("law") else None
    if weights is not None:
        _check_weights(np.asarray(weights, float))
    check(
        sum(source is not None for source in (points, file, law)) == 1,
        "tokens needs exactly one of points, file and law.",
    )
    check(not ordered or positions is None, "tokens has both in_order and positions.")
    if file is not None:
        points = _load(folder / file)
    elif law is not None:
        points = _sample(law, section)
    cloud = TokenCloud(points, weights, positions=positions)
    return in_order(cloud) if ordered else cloud


def _check_weights(weights: np.ndarray) -> None:
    total = weights.sum()
    check(
        abs(total - 1) <= 1e-6,
        f"tokens.weights sum to {total:.6g}; they must sum to 1.",
    )


def _load(path: Path) -> np.ndarray:
    check(
        path.is_file(),
        f"tokens.file is {str(path)!r}, where there is no file; it must name a .npy "
        "file, which numpy.save writes, by its path from the folder of the "
        "configuration.",
    )
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy reads the head of the file as Python
        raise InvalidInput(
            f"tokens.file is {str(path)!r}, which is no .npy file: {error}."
        ) from error
    check(
        isinstance(array, np.ndarray) and array.dtype.kind in "iuf",
        f"tokens.file is {str(path)!r}, which holds no array of numbers.",
    )
    return array


def _sample(law: str, section: Section) -> Float[Array, "n d"]:
    count, dimension = (section.require_positive(k) for k in ("count", "dimension"))
    check(
        count * dimension <= MOST_NUMBERS,
        f"tokens.count is {count}, tokens.dimension is {dimension}; their product must "
        f"be at most {MOST_NUMBERS:.0e}.",
    )
    seed, scale = section.take_seed("seed", 0), section.take("scale", float, 1.0)
    zero, one = jnp.zeros(dimension), jnp.ones(dimension)
    measure = {
        "gaussian": lambda: Gaussian(zero, jnp.eye(dimension)),
        "sphere": lambda: UniformSphere(dimension),
        "box": lambda: UniformBox(-one, one),
    }[law]()
    return scale * measure.sample(count, key=jr.key(seed))


def _velocity(
    attention: Section, perceptron: Section, measure: AbstractMeasure
) -> AbstractInContextMap:
    mask, dimension = _mask(attention.take("mask")), measure.dimension
    check(
        mask is None or getattr(measure, "positions", None) is not None,
        "attention.mask needs the places of the tokens; give tokens.in_order = true, "
        "or tokens.positions.",
    )
    heads = attention.take("heads")
    if heads is None:
        velocity = _head(attention, dimension)
    else:
        check(
            isinstance(heads, list) and heads != [],
            f"attention.heads is {shown(heads)}; it must be a list of tables, one "
            "for each head.",
        )
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
            value = _option(section, field)
            if value is not None:
                options[field.name] = value
    return kind(*matrices, **options)


def _option(section: Section, field: dataclasses.Field) -> Any:
    """Return the value of an attention's option, read by the type of its field."""
    allowed = typing.get_args(field.type) or (field.type,)
    plain = [kind for kind in allowed if kind in (bool, int, float, str)]
    if plain:
        return section.take(field.name, plain[0])
    return section.take_numbers(field.name)


def _matrix(section: str, name: str, value: Any, dimension: int) -> Float[Array, "k d"]:
    if value == "identity":
        return jnp.eye(dimension)
    if is_number(value):
        return float(value) * jnp.eye(dimension)
    if isinstance(value, dict):
        return _random_matrix(Section(f"{section}.{name}", value), dimension)
    if isinstance(value, list):
        return numbers(f"{section}.{name}", value)
    raise InvalidInput(
        f'{section}.{name} is {shown(value)}; it must be "identity", a number (a '
        "multiple of the identity), the rows of a matrix, or { seed = …, rows = …, "
        "scale = … }."
    )


def _random_matrix(section: Section, dimension: int) -> Float[Array, "k d"]:
    rows = section.take_positive("rows", int, dimension)
    scale = section.take("scale", float, dimension**-0.5)
    seed = section.take_seed("seed")
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
        mask = Blocks(section.require_numbers("boundaries"), isolated=isolated)
    else:
        mask = Causal() if kind == "causal" else StrictCausal()
    section.finish()
    return mask


def _perceptron(section: Section) -> Perceptron | None:
    names = ("weights_in", "bias_in", "weights_out", "bias_out")
    arrays = [section.take_numbers(name) for name in names]
    activation = section.choose("activation", ACTIVATIONS, "gelu")
    section.finish()
    if all(array is None for array in arrays):
        return None
    for name, array in zip(names[:3], arrays, strict=False):
        check(array is not None, f"perceptron.{name} is missing; it must be given.")
    return Perceptron(*arrays, activation=ACTIVATIONS[activation])


def _flow(tables: dict[str, Section], measure: AbstractMeasure):
    velocity = _velocity(tables["attention"], tables["perceptron"], measure)
    section = tables["flow"]
    scheme, is_rescaled = _scheme(section), section.take("rescaled", bool, False)
    has_space = section.has("space")
    space = SPACES[section.choose("space", SPACES, "euclidean")]()
    noise, seed = section.take("noise", float), section.take_seed("seed", 0)
    key = None if noise is None else jr.key(seed)
    if scheme is not None:
        check(
            not (is_rescaled or has_space or noise is not None),
            "flow.normalisation decides the space and the speed; leave flow.space, "
            "flow.rescaled and flow.noise out.",
        )
        return normalised_flow(velocity, scheme), key
    moved = Rescaled(velocity) if is_rescaled else velocity
    return Flow(moved, space=space, noise=noise), key


def _scheme(section: Section) -> AbstractScheme | None:
    """Return the normalisation scheme of a flow, if there is one."""
    if not section.has("normalisation"):
        return None
    name = section.choose("normalisation", SCHEMES)
    if name == "mix":
        return MixNorm(section.require("switch", float))
    if name == "ngpt":
        return NGPT(section.take_positive("alpha", float, 1.0))
    return SCHEMES[name]()


def _solve(
    section: Section, measure: AbstractMeasure
) -> tuple[Float[Array, " t"], dict[str, Any]]:
    depths = _depths(section)
    options = {
        "rtol": section.take_positive("rtol", float, 1e-6),
        "atol": section.take_positive("atol", float, 1e-9),
        "solver": _solver(section),
        "merge": _merge(section),
    }
    if isinstance(measure, FourierDensity):
        most_modes = section.take_positive("most_modes", int, Spectral.most_modes)
        options["solver"] = Spectral(most_modes, integrator=options["solver"])
    return depths.astype(measure.mean().dtype), options


def _depths(section: Section) -> Float[Array, " t"]:
    """Return the saved depths, equally or logarithmically spaced."""
    depth, every = section.require("depth", float), section.take("save_every", float)
    per_decade = section.take_positive("saves_per_decade", int)
    first = section.take_positive("first_depth", float)
    if per_decade is None:
        check(first is None, "solve.first_depth needs solve.saves_per_decade.")
        return depth_grid(depth, depth / 10 if every is None else every)
    check(every is None, "solve has both save_every and saves_per_decade.")
    return decade_grid(depth, 1.0 if first is None else first, per_decade)


def depth_grid(depth: float, every: float) -> Float[Array, " t"]:
    """Return the depths 0, h, 2h, … up to `depth`, which must be one of them.

    A longer run has the same depths and more, which is what makes it an extension.
    """
    check(
        0 < depth < np.inf, f"solve.depth is {depth}; it must be positive and finite."
    )
    check(
        0 < every <= depth,
        f"solve.save_every is {every}; it must be positive and at most the depth, "
        f"{depth}.",
    )
    check(
        depth / every <= MOST_DEPTHS,
        f"solve.save_every is {every}; it must be at least the depth, {depth}, divided "
        f"by {MOST_DEPTHS}.",
    )
    count = round(depth / every)
    below = int(np.floor(depth / every))
    check(
        abs(depth / every - count) <= 1e-9 * count,
        f"solve.depth is {depth:.12g}; it must be a multiple of solve.save_every, "
        f"{every:.12g}: the nearest are {below * every:.12g} and "
        f"{(below + 1) * every:.12g}.",
    )
    return every * jnp.arange(count + 1, dtype=float)


def decade_grid(depth: float, first: float, per_decade: int) -> Float[Array, " t"]:
    """Return 0 and `first` times powers of ten, `depth` the last of them."""
    check(
        first < depth < np.inf,
        f"solve.depth is {depth}; it must be finite and larger than solve.first_depth, "
        f"{first}.",
    )
    steps = per_decade * float(np.log10(depth / first))
    count = round(steps)
    check(count < MOST_DEPTHS, f"solve.saves_per_decade is {per_decade}; too many.")
    below, above = (
        first * 10 ** (end / per_decade) for end in (np.floor(steps), np.ceil(steps))
    )
    check(
        abs(steps - count) <= 1e-9 * max(count, 1),
        f"solve.depth is {depth:.12g}; with {per_decade} saves per decade from "
        f"{first:.12g} the nearest are {below:.12g} and {above:.12g}.",
    )
    return jnp.asarray(
        np.append(0.0, first * 10.0 ** (np.arange(count + 1) / per_decade))
    )


def _solver(section: Section) -> AbstractIntegrator | None:
    """Return how steps are taken; `None` for those that the measure has by default."""
    name = section.choose("solver", SOLVERS) if section.has("solver") else "adaptive"
    step = section.take_positive("step", float)
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
    kinds = {"stiff": Stiff, "switching": Switching, "long-depth": LongDepth}
    return kinds[name]() if name in kinds else None


def _merge(section: Section) -> Merge | None:
    """Return how tokens are joined: not, at the usual distance, or at a given one."""
    value = section.take("merge")
    if value is None or isinstance(value, bool):
        return Merge() if value else None
    check(
        is_number(value) and value > 0,
        f"solve.merge is {shown(value)}; it must be true, false, or a positive "
        "distance.",
    )
    return Merge(float(value))


def _stops(section: Section) -> tuple:
    radius = section.take_positive("escape_radius", float)
    speed = section.take_positive("steady_speed", float)
    budget = section.take_positive("step_budget", int)
    return tuple(
        kind(value)
        for kind, value in (
            (EscapeRadius, radius),
            (SteadyState, speed),
            (StepBudget, budget),
        )
        if value is not None
    )
