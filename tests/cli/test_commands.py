"""The commands: what they print, and the codes with which they leave."""

import html
import json
import random
import re
import shlex
import sys
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from meanformer.cli import app
from meanformer.cli.atlas import summary
from meanformer.experiments import run

TOYS = Path(__file__).parents[1] / "experiments" / "toys"
KEYS = {"id", "statement", "measured", "expected", "tolerance", "holds", "status"}


@pytest.fixture
def meanformer():
    """Run a command line in this process."""

    def call(*words):
        return CliRunner().invoke(app, [str(word) for word in words])

    return call


def test_a_claim_that_holds_leaves_with_0(meanformer):
    result = meanformer("run", "toy-holds")
    assert result.exit_code == 0
    assert "✓ holds" in result.stdout
    assert "toy-holds/mean" in result.stdout
    assert "measured 0.5, expected ≈ 0.5 ± 10⁻¹²" in result.stdout
    assert "measured 0.5, expected ≤ 0.5 + 10⁻¹²" in result.stdout


def test_a_claim_that_fails_leaves_with_1(meanformer):
    result = meanformer("run", "toy-fails")
    assert result.exit_code == 1
    assert "✗ fails" in result.stdout


def test_a_crash_leaves_with_1_and_tells_the_sentence(meanformer):
    result = meanformer("run", "toy-crashes")
    assert result.exit_code == 1
    assert "RuntimeError: The solver ran out of steps; allow more." in result.stdout
    assert "Traceback" not in result.output


def test_json_is_one_object_and_nothing_else(meanformer):
    result = meanformer("run", "toy-holds", "--set", "is_loud=yes", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert set(found) == {"experiment", "parameters", "holds", "claims", "seconds"}
    assert found["experiment"] == "toy-holds"
    assert found["holds"] is True
    assert [set(claim) >= KEYS for claim in found["claims"]] == [True, True]
    assert found["claims"][0]["expected"] == 0.5
    assert "a stray line" in result.stderr


def test_json_of_a_crash_is_an_object_too(meanformer):
    result = meanformer("run", "toy-crashes", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["holds"] is False
    assert "ran out of steps" in found["error"]


def test_parameters_are_changed_by_name(meanformer):
    words = ("--set", "count=7", "--set", "shifts=1,2,3", "--set", "rule=odd")
    result = meanformer("run", "toy-holds", *words, "--json")
    parameters = json.loads(result.stdout)["parameters"]
    assert parameters["count"] == 7
    assert parameters["shifts"] == [1.0, 2.0, 3.0]
    assert parameters["rule"] == "odd"


def test_the_full_profile_starts_from_full_values(meanformer):
    result = meanformer("run", "toy-holds", "--full", "--json")
    assert json.loads(result.stdout)["parameters"]["count"] == 50


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["run", "toy-hold"],
            "There is no experiment 'toy-hold'; did you mean toy-holds",
        ),
        (["run", "toy-holds", "--set", "cuont=3"], "did you mean count?"),
        (["run", "toy-holds", "--set", "count=x"], "count is 'x'; it must be a whole"),
        (["run", "toy-holds", "--set", "count=1"], "count is 1; it must be at least 2"),
        (["run", "toy-holds", "--set", "count"], "not of the form key=value"),
        (
            ["run", "toy-fails", "--set", "depth=-1"],
            "depth is -1.0; it must be positive",
        ),
        (
            ["run", "wasserstein-stability", "--set", "depth=12"],
            "smaller",
        ),
        (["run", "radius-bound", "--set", "seed=1e20"], "must be smaller than 2^63"),
        (["run", "nowhere.py"], "There is no file 'nowhere.py'"),
        (["run"], "Missing argument"),
        (["cite", "toy-hold"], "did you mean toy-holds"),
        (["atlas", "--only", "toy-hold"], "the nearest are toy-holds"),
        (["atlas", "--jobs", "0"], "--jobs"),
        (["atlas", "--jbos", "2"], "--jobs"),
        (["atlass"], "atlas"),
    ],
)
def test_a_mistake_is_told_in_one_sentence_and_leaves_with_2(
    meanformer, words, sentence
):
    result = meanformer(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_report_that_cannot_be_written_leaves_with_2(meanformer, tmp_path):
    (tmp_path / "file").write_text("")
    result = meanformer("run", "toy-holds", "--out", tmp_path / "file")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_run_writes_a_report_on_request(meanformer, tmp_path):
    result = meanformer("run", "toy-holds", "--set", "count=9", "--out", tmp_path)
    assert result.exit_code == 0
    assert "--set count=9" in (tmp_path / "index.html").read_text()
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert numbers["holds"] is True
    assert (tmp_path / "figures" / "toy-holds-1.svg").is_file()


def test_the_command_on_the_card_of_a_file_runs_that_file(
    meanformer, tmp_path, monkeypatch
):
    monkeypatch.delenv("MEANFORMER_EXPERIMENTS")
    source = (TOYS / "toy_holds.py").read_text()
    (tmp_path / "toy_holds.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    meanformer("run", "toy_holds.py", "--set", "count=9", "--out", "report")
    page = (tmp_path / "report" / "index.html").read_text()
    command = re.search(r"Run it again: <code>meanformer (.*?)</code>", page)
    monkeypatch.chdir("/")
    again = meanformer(*shlex.split(html.unescape(command[1])), "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["parameters"]["count"] == 9


@pytest.mark.parametrize(
    ("experiments", "line"),
    [
        (["toy-fails"], "0 of 1 claim holds, 1 experiment, 3 s. Report: p"),
        (["toy-holds"], "2 of 2 claims hold, 1 experiment, 3 s. Report: p"),
        (
            ["toy-fails", "toy-holds"],
            "2 of 3 claims hold, 2 experiments, 3 s. Report: p",
        ),
    ],
)
def test_the_last_line_of_the_atlas_counts(experiments, line):
    records = [run(name) for name in experiments]
    assert summary(records, 3.2, Path("p")) == line


def test_the_list_names_claims_papers_and_rooms(meanformer):
    result = meanformer("experiments")
    assert result.exit_code == 0
    for piece in (
        "toy-holds",
        "Castin et al. (2025)",
        "numerics",
        "(theorem)",
        "about",
    ):
        assert piece in result.stdout


def test_the_list_can_be_of_some(meanformer):
    result = meanformer("experiments", "--only", "toy-h*")
    assert result.exit_code == 0
    assert result.stdout.strip().endswith(
        "1 experiment; run one with: meanformer run NAME"
    )
    assert meanformer("experiments", "--only", "nothing*").exit_code == 2


def test_the_list_as_json(meanformer):
    listed = json.loads(meanformer("experiments", "--json").stdout)["experiments"]
    toy = next(one for one in listed if one["name"] == "toy-holds")
    assert [claim["id"] for claim in toy["claims"]] == ["mean", "spread"]
    assert toy["parameters"]["count"] == 5


def test_cite_prints_bibtex_of_every_work_once(meanformer):
    result = meanformer("cite", "toy-holds")
    assert result.exit_code == 0
    assert result.stdout.count("@misc{CACP25,") == 1
    assert result.stdout.count("@article{GLPR23,") == 1
    assert "% mean (theorem): CACP25, Section 1" in result.stdout


def test_cite_says_when_there_is_nothing_to_cite(meanformer):
    assert meanformer("cite", "toy-fails").stdout == (
        "% toy-fails cites no publication.\n"
    )


def test_doctor_tells_versions_devices_and_caches(meanformer):
    result = meanformer("doctor")
    assert result.exit_code == 0
    for piece in ("python", "jax", "devices", "float64", "cache", "transport"):
        assert piece in result.stdout
    assert all(f"{d.platform}:{d.id} " in result.stdout for d in jax.devices())


def test_doctor_tells_that_there_is_no_fast_transform(meanformer, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_finufft", None)
    (line,) = [
        line
        for line in meanformer("doctor").stdout.splitlines()
        if line.startswith("sums ")
    ]
    assert "exact, since jax-finufft is not installed" in line


def test_help_and_version_leave_with_0(meanformer):
    assert "atlas" in meanformer().stdout
    assert meanformer("--help").exit_code == 0
    assert meanformer("--version").stdout.startswith("meanformer ")
    for command in ("atlas", "run", "experiments", "doctor", "cite"):
        assert meanformer(command, "--help").exit_code == 0


def test_a_file_that_cannot_be_read_is_told_before_its_parameters(meanformer, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("experiment = 3\n")
    result = meanformer("run", file, "--set", "count=3")
    assert result.exit_code == 1
    assert "must define one experiment, named" in result.stdout


COMMANDS = ("simulate", "resume", "extend", "limit", "movie", "run", "cite", "none", "")
FILES = ("deep.toml", "bytes.toml", "empty.toml", ".", "none", "/dev/null", "", "\x00")
OPTIONS = ("--out", "--depth", "--set", "--json", "--frames", "--coordinates", "-x")
VALUES = ("1e400", "nan", "-1", "0", "out.gif", "1,,2", "=", "[[[[", 300 * "a", "é")


def test_any_command_line_ends_with_a_sentence_and_code_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.toml").write_text(f"a = {600 * '['}{600 * ']'}")
    (tmp_path / "bytes.toml").write_bytes(bytes(range(256)))
    (tmp_path / "empty.toml").touch()
    rng = random.Random(0)
    for name in FILES:
        for words in (
            ["simulate", name, "--out", "new"],
            ["limit", name],
            [rng.choice(COMMANDS), *rng.choices(FILES + OPTIONS + VALUES, k=3)],
            [rng.choice(COMMANDS), name, rng.choice(OPTIONS), rng.choice(VALUES)],
        ):
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 2, words
            assert result.stderr.startswith("meanformer: "), words
            assert result.stderr.count("\n") == 1, words
    assert not (tmp_path / "new").exists()
