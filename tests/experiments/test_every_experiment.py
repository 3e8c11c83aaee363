"""Every experiment that we ship is declared with care."""

import ast
import dataclasses
import inspect
import re

import pytest

from meanformer.experiments import Progress
from meanformer.experiments.framework import citations, registry
from meanformer.experiments.framework.text import to_html, to_plain

SHIPPED = sorted(
    path.stem.replace("_", "-")
    for chapter in registry.CHAPTERS
    for path in (registry.FOLDER / chapter).glob("*.py")
    if not path.stem.startswith("_")
)


SOLVERS = {
    "solve",
    "run_layers",
    "run_hardmax",
    "evolve",
    "find_limit",
    "limit_of",
    "count_modes",
    "solve_ivp",
    "by_scipy",
    "find_critical_points",
    "low_temperature_comparison",
    "walk_on_circle",
}


@pytest.fixture(params=SHIPPED)
def experiment(request):
    return registry.find(request.param)


def texts(experiment):
    yield experiment.title
    yield experiment.about
    for claim in experiment.claims:
        yield claim.statement
    for field in dataclasses.fields(experiment.parameters):
        yield field.metadata["help"]


def test_its_file_can_be_read(experiment):
    assert "file-is-readable" not in [claim.id for claim in experiment.claims]


def test_what_it_cites_is_in_the_bibliography(experiment):
    known = citations.bibliography(citations.bibliography_file())
    keys = [ref.key for claim in experiment.claims for ref in claim.references]
    assert set(keys) <= set(known)


def test_its_formulas_are_understood(experiment):
    for text in texts(experiment):
        assert text.count("$") % 2 == 0
        formulas = re.findall(r"<math.*?</math>", to_html(text))
        assert not any("\\" in formula for formula in formulas)
        assert "$" not in to_plain(text)


def test_it_tells_what_it_is_about(experiment):
    assert len(experiment.about) > 80


def test_it_belongs_to_a_room(experiment):
    assert (registry.FOLDER.parent / experiment.room / "__init__.py").is_file()


def test_its_profiles_are_valid(experiment):
    for profile in ("quick", "full"):
        settings = experiment.settings(profile)
        assert experiment.settings(profile, **dataclasses.asdict(settings)) == settings


def calls_of(function):
    """Names of all that a function calls, as they are written."""
    found = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {ast.unparse(call).rpartition(".")[2] for call in found}


def test_its_figures_draw_what_the_run_computed(experiment):
    file = ast.parse(inspect.getsource(inspect.getmodule(experiment.run)))
    functions = {node.name: node for node in file.body if hasattr(node, "returns")}
    drawing = {
        name
        for name, function in functions.items()
        if function.returns and "Picture" in ast.unparse(function.returns)
    }
    called = set(drawing)
    while (
        new := {c for n in called & {*functions} for c in calls_of(functions[n])}
        - called
    ):
        called |= new
    assert drawing
    assert called & SOLVERS == set()


@pytest.mark.slow
def test_it_holds_with_something_to_look_at(experiment):
    outcome = experiment.run(experiment.settings("quick"), progress=Progress())
    experiment.check_complete(outcome)
    assert [f.claim.id for f in outcome.findings if not f.holds] == []
    assert outcome.pictures
