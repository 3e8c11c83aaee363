"""Find experiments by name, pattern or file; nothing is registered by hand.

Every file in the folder of a chapter is an experiment. More can be kept elsewhere: the
folders named in `MEANFORMER_EXPERIMENTS` are searched too, and a single file can be
given by its path. Names are those of the files, and only what is asked for is imported.
"""

import dataclasses
import fnmatch
import functools
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from meanformer.errors import InvalidInput, check
from meanformer.experiments.framework.claims import Claim, InvalidExperiment
from meanformer.experiments.framework.experiment import Experiment, Outcome
from meanformer.experiments.framework.names import listed, nearest, unknown

CHAPTERS = ("foundations", "large_scale", "gaussians", "limits", "sphere")
CHAPTERS += ("metastability", "landscape", "mean_field", "modes", "training")
CHAPTERS += ("expressivity",)
PACKAGE = "meanformer.experiments"
FOLDER = Path(__file__).parents[1]


def all_experiments() -> tuple[Experiment, ...]:
    """Every experiment, by name.

    A file that cannot be imported is listed too; running it tells what is wrong, and
    does not keep the others from running.
    """
    return tuple(map(_from_file, _files()))


def find(name: str) -> Experiment:
    """The experiment of this name, or in the Python file of this path."""
    if name.endswith(".py"):
        check(Path(name).is_file(), f"There is no file {name!r}.")
        return _from_file(Path(name))
    known = {_name_of(file): file for file in _files()}
    if name not in known:
        raise InvalidInput(unknown("experiment", name, known))
    return _from_file(known[name])


def path_of(name: str) -> str:
    """The whole path, if an experiment is given by the path of its file."""
    return str(Path(name).resolve()) if name.endswith(".py") else ""


def select(pattern: str | None) -> tuple[Experiment, ...]:
    """The experiments whose name matches one of the patterns, separated by `|`."""
    if pattern is None:
        return all_experiments()
    patterns = [piece.strip() for piece in pattern.split("|")]
    chosen = tuple(
        _from_file(file)
        for file in _files()
        if any(fnmatch.fnmatchcase(_name_of(file), piece) for piece in patterns)
    )
    if not chosen:
        raise InvalidInput(_no_match(pattern, patterns))
    return chosen


def _no_match(pattern: str, patterns: list[str]) -> str:
    names = list(map(_name_of, _files()))
    close = [name for piece in patterns for name in nearest(piece.strip("*?"), names)]
    known = f"the known ones are {listed(names)}"
    advice = f"the nearest are {', '.join(dict.fromkeys(close))}" if close else known
    return f"No experiment matches {pattern!r}; {advice}."


def _files() -> list[Path]:
    own = os.environ.get("MEANFORMER_EXPERIMENTS", "").split(os.pathsep)
    folders = [FOLDER / chapter for chapter in CHAPTERS]
    folders += [Path(folder) for folder in own if folder]
    files = [file for folder in folders for file in folder.glob("[!._]*.py")]
    return sorted(files, key=_name_of)


def _name_of(file: Path) -> str:
    return file.stem.replace("_", "-").lower()


@functools.cache
def _from_file(path: Path) -> Experiment:
    name = _name_of(path)
    try:
        known = vars(_imported(path)).values()
        found = [one for one in known if isinstance(one, Experiment)]
        if [one.name for one in found] != [name]:
            raise InvalidExperiment(
                f"{path.name} must define one experiment, named {name!r}."
            )
        return found[0]
    except Exception as error:
        return _unreadable(name, error)


def _imported(path: Path) -> ModuleType:
    if path.parent.parent == FOLDER:
        return importlib.import_module(f"{PACKAGE}.{path.parent.name}.{path.stem}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InvalidExperiment(f"{path.name} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_unreadable(experiment: Experiment) -> bool:
    """Whether an experiment only stands for a file that fails to import."""
    return experiment.parameters is _NoParameters


def _unreadable(name: str, error: Exception) -> Experiment:
    """Stands for a file that fails to import: its only claim is that it can be read."""

    def run(parameters, *, progress) -> Outcome:
        raise error

    return Experiment(
        name=name,
        title=f"The file of {name} cannot be read",
        room="experiments",
        claims=(Claim("file-is-readable", "The file can be imported.", "observation"),),
        parameters=_NoParameters,
        run=run,
    )


@dataclasses.dataclass(frozen=True)
class _NoParameters:
    """Nothing to choose."""
