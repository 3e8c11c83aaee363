"""The command lines that README and documentation show can be typed as they stand."""

import dataclasses
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer

from meanformer.cli import app
from meanformer.experiments import find
from meanformer.experiments.framework.registry import CHAPTERS, FOLDER
from meanformer.experiments.framework.settings import split_assignments

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
SHIPPED = [
    path.stem.replace("_", "-")
    for chapter in CHAPTERS
    for path in (FOLDER / chapter).glob("[a-z]*.py")
]


def lines_shown():
    """Every `meanformer …` of a console block or between backquotes, once."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
            for line in block.splitlines():
                shown = re.search(r"\bmeanformer\s.*", line.partition(" #")[0])
                if line.startswith("$ ") and shown:
                    found[shown[0].strip()] = page.name
        for code in re.findall(r"`(meanformer [a-z][^`\n]*)`", text):
            found[code] = page.name
    return sorted(found)


def commands():
    return typer.main.get_command(app).commands


def typed(line):
    """The words of a line, optional parts and ellipses taken as they are shown."""
    return shlex.split(line.replace("[", "").replace("]", "").replace("…", ""))[1:]


def test_there_are_lines_to_check():
    assert len(lines_shown()) > 12


@pytest.mark.parametrize("line", lines_shown())
def test_a_command_line_that_is_shown_exists(line):
    name, *words = typed(line)
    command = commands()[name]
    context = command.make_context(name, list(words), resilient_parsing=True)
    options = {flag for option in command.params for flag in option.opts}
    assert {word for word in words if word.startswith("--")} <= options
    if name == "run" and "NAME" not in words:
        check_run(**context.params)
    if name == "cite" and "NAME" not in words:
        assert find(context.params["name"]).claims[0].id != "file-is-readable"
    if name == "atlas" and context.params["only"] not in (None, "PATTERN"):
        patterns = context.params["only"].split("|")
        assert any(fnmatch(one, pattern) for one in SHIPPED for pattern in patterns)


def check_run(name, changes, **others):
    path = ROOT / "docs" / "examples" / name
    experiment = find(str(path) if name.endswith(".py") else name)
    names = {field.name for field in dataclasses.fields(experiment.parameters)}
    assert set(split_assignments(changes or [])) <= names
    experiment.settings(**split_assignments(changes or []))
