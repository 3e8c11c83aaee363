"""Running an experiment: what is declared is measured, what breaks is told."""

import dataclasses
import json
import os
import warnings

import jax
import jax.numpy as jnp
import pytest

from meanformer import files
from meanformer.errors import InvalidInput, Overflow
from meanformer.experiments import (
    Claim,
    Experiment,
    InvalidExperiment,
    Outcome,
    Progress,
    Table,
    find,
    run,
    theory,
)
from meanformer.experiments.framework import environment, registry
from meanformer.experiments.framework.records import attempt, perform
from meanformer.experiments.framework.workers import (
    Advanced,
    Finished,
    Started,
    run_in_parallel,
)

ONE = Claim("one", "First.", "observation")
TWO = Claim("two", "Second.", "observation")


@dataclasses.dataclass(frozen=True)
class NoParameters:
    """Nothing to choose."""


def experiment_measuring(*claims, declared=(ONE, TWO)):
    def measure(parameters, *, progress):
        return Outcome([claim.above(1.0, 0.0, source=theory()) for claim in claims])

    return Experiment("toy", "Toy", "numerics", NoParameters, measure, claims=declared)


def test_all_claims_measured_once_is_a_complete_run():
    assert perform(experiment_measuring(ONE, TWO), NoParameters()).holds


@pytest.mark.parametrize(
    ("measured", "declared", "complaint"),
    [
        ((ONE,), (ONE, TWO), "declares but did not measure two"),
        ((ONE, TWO), (ONE,), "measured but does not declare two"),
        ((ONE, ONE), (ONE,), "measured twice one"),
    ],
)
def test_findings_must_match_the_declared_claims(measured, declared, complaint):
    toy = experiment_measuring(*measured, declared=declared)
    with pytest.raises(InvalidExperiment, match=complaint):
        perform(toy, NoParameters())
    record = attempt(toy, NoParameters())
    assert not record.holds
    assert complaint in record.error


def test_two_claims_cannot_share_a_name():
    with pytest.raises(InvalidExperiment, match="its own id"):
        experiment_measuring(ONE, declared=(ONE, ONE))


def test_a_name_is_kebab_case():
    with pytest.raises(InvalidExperiment, match="kebab-case"):
        dataclasses.replace(experiment_measuring(ONE, TWO), name="Toy_One")


def test_a_table_has_rows_of_equal_length():
    with pytest.raises(InvalidExperiment, match="2 cells"):
        Table(["a", "b"], [[1, 2], [1]])


def test_array_scalars_in_tables_become_numbers():
    table = Table(["a", "b"], [[jnp.float64(2.5), "word"]])
    assert table.rows == ((2.5, "word"),)
    assert type(table.rows[0][0]) is float


def test_a_run_from_python_takes_changes():
    record = run("toy-holds", count=7, width=2.0)
    assert record.holds
    assert record.parameters["count"] == 7
    assert [print_.svg.startswith("<svg") for print_ in record.prints] == [True]
    assert record.prints[0].png.startswith(b"\x89PNG")


def test_a_false_claim_is_reported_as_false_with_its_warnings():
    record = run("toy-fails")
    assert not record.holds
    assert record.warnings == ("UserWarning: fractions are not reals",)


def test_a_crash_is_recorded_in_one_sentence():
    toy = find("toy-crashes")
    record = attempt(toy, toy.settings())
    sentence = "RuntimeError: The solver ran out of steps; allow more."
    assert record.error == sentence
    assert "toy_crashes.py" in record.trace
    assert not record.holds
    claims = record.to_json()["claims"]
    assert [claim["holds"] for claim in claims] == [False, False]
    assert [claim["measured"] for claim in claims] == [None, None]


def test_a_wrong_parameter_is_the_users_mistake_only_if_the_user_chose_it():
    toy = find("toy-fails")
    settings = toy.settings(depth=-1.0)
    assert "depth is -1.0" in attempt(toy, settings).error
    with pytest.raises(InvalidInput, match="depth is -1.0"):
        attempt(toy, settings, is_users_choice=True)


def test_an_overflow_is_the_users_mistake_only_if_the_user_chose_the_parameters():
    def measure(parameters, *, progress):
        raise Overflow("the bound is e^800; choose a smaller depth.")

    toy = Experiment("toy", "Toy", "numerics", NoParameters, measure, claims=(ONE,))
    assert attempt(toy, NoParameters()).error.startswith("Overflow: the bound")
    with pytest.raises(Overflow, match="smaller depth"):
        attempt(toy, NoParameters(), is_users_choice=True)


def test_a_run_by_path_remembers_the_path(toys):
    path = toys / "toy_holds.py"
    assert run(str(path)).path == str(path)
    assert run("toy-holds").path == ""


def test_json_is_strict_even_without_numbers():
    def measure(parameters, *, progress):
        return Outcome([ONE.above(float("nan"), 0.0, source=theory())])

    toy = Experiment("toy", "Toy", "numerics", NoParameters, measure, claims=(ONE,))
    text = json.dumps(perform(toy, NoParameters()).to_json(), allow_nan=False)
    claim = json.loads(text)["claims"][0]
    assert claim["measured"] is None
    assert claim["holds"] is False


def test_experiments_compute_in_64_bits_and_leave_jax_as_it_was():
    seen = {}

    def measure(parameters, *, progress):
        seen["dtype"] = jnp.ones(()).dtype
        seen["cache"] = jax.config.jax_compilation_cache_dir
        return Outcome([ONE.above(1.0, 0.0, source=theory())])

    toy = Experiment("toy", "Toy", "numerics", NoParameters, measure, claims=(ONE,))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_enable_x64", False)
    try:
        perform(toy, NoParameters())
        assert not jax.config.read("jax_enable_x64")
    finally:
        jax.config.update("jax_enable_x64", True)
    assert seen["dtype"] == jnp.float64
    assert seen["cache"] == os.path.join(os.environ["MEANFORMER_CACHE"], "compiled")
    assert jax.config.jax_compilation_cache_dir == before


def test_progress_adds_up_over_nested_and_consecutive_loops():
    heard = []
    progress = Progress(heard.append)
    for _ in progress.over("ab", share=0.5):
        for _ in progress.over(range(2)):
            pass
    for _ in progress.over("cde", share=0.5):
        pass
    assert heard == sorted(heard)
    assert heard[1] == pytest.approx(0.25)
    assert progress.fraction == pytest.approx(1.0)


def test_a_file_that_cannot_be_imported_is_listed_and_tells_why():
    toy = find("toy-unreadable")
    record = attempt(toy, toy.settings())
    assert "a_module_that_does_not_exist" in record.error
    assert not record.holds


def test_an_experiment_is_found_by_the_path_of_its_file(toys):
    assert find(str(toys / "toy_holds.py")).name == "toy-holds"
    with pytest.raises(InvalidInput, match="There is no file"):
        find("nowhere.py")


def test_a_file_without_an_experiment_of_its_name_is_broken(tmp_path):
    path = tmp_path / "empty_file.py"
    path.write_text('"""Nothing."""\n')
    assert "cannot be read" in find(str(path)).title


def test_only_the_experiment_that_is_asked_for_is_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("MEANFORMER_EXPERIMENTS", str(tmp_path))
    for name in ("first", "second", "third"):
        mark = f"import pathlib; pathlib.Path({str(tmp_path / name)!r}).touch()"
        (tmp_path / f"counted_{name}.py").write_text(mark)

    def imported():
        return [
            name for name in ("first", "second", "third") if (tmp_path / name).exists()
        ]

    find("counted-second")
    assert imported() == ["second"]
    with pytest.raises(InvalidInput, match="counted-third"):
        find("counted-thirt")
    assert imported() == ["second"]
    registry.select("counted-th*")
    assert imported() == ["second", "third"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("toy-h*", ["toy-holds"]),
        ("toy-fails|toy-hol*", ["toy-fails", "toy-holds"]),
        ("toy-?ails", ["toy-fails"]),
    ],
)
def test_patterns_select_by_name(pattern, names):
    assert [toy.name for toy in registry.select(pattern)] == names


def test_a_pattern_without_match_names_the_nearest():
    with pytest.raises(InvalidInput, match="the nearest are toy-holds"):
        registry.select("toy-hold")


def test_the_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    assert str(files.cache_directory()) == os.environ["MEANFORMER_CACHE"]
    monkeypatch.delenv("MEANFORMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_directory() == tmp_path / "meanformer"


def test_run_times_are_remembered():
    assert environment.remembered_seconds("toy-holds", "quick") is None
    environment.remember_seconds("toy-holds", "quick", 1.234)
    assert environment.remembered_seconds("toy-holds", "quick") == 1.23


@pytest.mark.slow
def test_a_dying_process_does_not_take_the_others_along():
    toys = [find("toy-crashes"), find("toy-holds"), find("toy-fails")]
    events = list(run_in_parallel(toys, "full", jobs=1))
    finished = {e.name: e.record for e in events if isinstance(e, Finished)}
    assert "ended with signal 9" in finished["toy-crashes"].error
    assert finished["toy-holds"].holds
    assert finished["toy-holds"].parameters["count"] == 50
    assert not finished["toy-fails"].holds
    assert sum(isinstance(event, Started) for event in events) == 3
    assert any(isinstance(event, Advanced) for event in events)


def test_warnings_do_not_leak_from_an_experiment():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run("toy-fails")
