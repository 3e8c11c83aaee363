"""The measure that flows, as a file describes it: tokens, a Gaussian, a density."""

from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import in_order
from meanformer.errors import InvalidInput, check
from meanformer.measures import (
    FourierDensity,
    Gaussian,
    TokenCloud,
    UniformBox,
    UniformSphere,
)
from meanformer.storage.config.sections import MUST, Section

Flowing = TokenCloud | Gaussian | FourierDensity

MOST_NUMBERS = 10**9  # of the tokens of a sample
MEASURES = ("tokens", "gaussian", "density")
LAWS = {
    "gaussian": lambda d: Gaussian(jnp.zeros(d), jnp.eye(d)),
    "sphere": UniformSphere,
    "box": lambda d: UniformBox(-jnp.ones(d), jnp.ones(d)),
}


def measure_of(tables: dict[str, Section], given: list[str], folder: Path) -> Flowing:
    """Return the measure of a file, which must have one of the three tables."""
    listed = " and ".join(f"[{name}]" for name in given)
    check(
        len(given) == 1,
        f"the file has {listed or 'no measure'}; one of [tokens], [gaussian] and "
        "[density] must be there, the measure that flows.",
    )
    section = tables[given[0]]
    if given == ["gaussian"]:
        mean = section.take("mean", Array, MUST)
        return Gaussian(mean, section.take("covariance", Array, MUST))
    if given == ["density"]:
        return _density(section)
    return _tokens(section, folder)


def _density(section: Section) -> FourierDensity:
    """Return a density on the circle: by its moments, or the von Mises law."""
    moments = section.take("moments", Array)
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
    points, weights, positions = (
        section.take(key, Array) for key in ("points", "weights", "positions")
    )
    file, law = section.take("file", str), section.choose("law", LAWS, None)
    is_ordered = section.take("in_order", bool, False)
    total = 1.0 if weights is None else np.asarray(weights, float).sum()
    check(
        abs(total - 1) <= 1e-6,
        f"tokens.weights sum to {total:.6g}; they must sum to 1.",
    )
    check(
        sum(source is not None for source in (points, file, law)) == 1,
        "tokens needs exactly one of points, file and law.",
    )
    check(
        not is_ordered or positions is None, "tokens has both in_order and positions."
    )
    if file is not None:
        points = _load(folder / file)
    elif law is not None:
        points = _sample(law, section)
    cloud = TokenCloud(points, weights, positions=positions)
    return in_order(cloud) if is_ordered else cloud


def _load(path: Path) -> np.ndarray:
    given = f"tokens.file is {str(path)!r}"
    check(
        path.is_file(),
        f"{given}, where there is no file; it must name a .npy file, which numpy.save "
        "writes, by its path from the folder of the configuration.",
    )
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy reads the head of the file as Python
        raise InvalidInput(f"{given}, which is no .npy file: {error}.") from error
    is_right = isinstance(array, np.ndarray) and array.dtype.kind in "iuf"
    check(is_right, f"{given}, which holds no array of numbers.")
    return array


def _sample(law: str, section: Section) -> Float[Array, "n d"]:
    count, dimension = (
        section.take(key, int, MUST, positive=True) for key in ("count", "dimension")
    )
    check(
        count * dimension <= MOST_NUMBERS,
        f"tokens.count is {count}, tokens.dimension is {dimension}; their product must "
        f"be at most {MOST_NUMBERS:.0e}.",
    )
    seed, scale = section.take("seed", int, 0), section.take("scale", float, 1.0)
    return scale * LAWS[law](dimension).sample(count, key=jr.key(seed))
