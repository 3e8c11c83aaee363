"""From a configuration file to the objects that a solve is called with."""

import dataclasses
import gc
import tomllib
from pathlib import Path
from typing import Any

import jax.random as jr
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput, check
from meanformer.flows import FixedStep, Flow, Rescaled, normalised_flow
from meanformer.measures import AbstractMeasure, TokenCloud
from meanformer.storage.config.maps import SCHEMES, SPACES, velocity_of
from meanformer.storage.config.measures import MEASURES, Flowing, measure_of
from meanformer.storage.config.sections import Section
from meanformer.storage.config.solving import options_of, saved_depths, stops_of


@dataclasses.dataclass(frozen=True)
class Run:
    """A configuration made into objects: what `solve` is called with."""

    flow: Flow
    measure: Flowing
    depths: Float[Array, " t"]
    options: dict[str, Any]


def read_config(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file, or raise with the line of the mistake."""
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
    measure = measure_of(tables, [name for name in MEASURES if name in config], folder)
    flow, key = _flow(tables, measure)
    depths = saved_depths(tables["solve"]).astype(measure.mean().dtype)
    options = options_of(tables["solve"], measure)
    if isinstance(measure, TokenCloud):
        check(
            key is None or isinstance(options["solver"], FixedStep),
            'flow.noise needs equal steps; give solve.solver = "fixed" and solve.step.',
        )
        options["key"] = key
    options["stop"] = stops_of(tables["stop"])
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


def _flow(tables: dict[str, Section], measure: AbstractMeasure):
    """Return the flow, and the key of its noise if there is any."""
    velocity = velocity_of(tables["attention"], tables["perceptron"], measure)
    section = tables["flow"]
    scheme = section.choose("normalisation", SCHEMES, None)
    options = section.take_fields(SCHEMES[scheme]) if scheme else {}
    is_rescaled = section.take("rescaled", bool, False)
    space = section.choose("space", SPACES, None)
    noise, seed = section.take("noise", float), section.take("seed", int, 0)
    key = None if noise is None else jr.key(seed)
    if scheme is not None:
        check(
            not (is_rescaled or space is not None or noise is not None),
            "flow.normalisation decides the space and the speed; leave flow.space, "
            "flow.rescaled and flow.noise out.",
        )
        return normalised_flow(velocity, SCHEMES[scheme](**options)), key
    moved = Rescaled(velocity) if is_rescaled else velocity
    return Flow(moved, space=SPACES[space or "euclidean"](), noise=noise), key
