"""Runs from the command line, killed at any moment and taken up again."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import xarray
from typer.testing import CliRunner

from meanformer.cli import app, signals
from meanformer.flows import Status
from meanformer.flows.status import STATUS_FLAGS

STATUS_NAMES = STATUS_FLAGS["flag_meanings"].split()

CONFIG = """
[tokens]
file = "points.npy"
[attention]
beta = 4.0
[flow]
space = "sphere"
[solve]
depth = 4.0
save_every = 0.05
"""

STOPS_EARLY = """
[tokens]
points = [[1.0]]
[attention]
kind = "linear"
[solve]
depth = 0.2
solver = "fixed"
step = 1e-3
save_every = 0.02
[stop]
step_budget = 10
"""


def points():
    """Twenty-four tokens on the sphere."""
    normal = np.random.default_rng(1).normal(size=(24, 3))
    return normal / np.linalg.norm(normal, axis=1, keepdims=True)


def command(*words):
    return [sys.executable, "-m", "meanformer", *map(str, words)]


def run(*words, cache):
    return subprocess.run(
        command(*words),
        capture_output=True,
        text=True,
        env=os.environ | {"MEANFORMER_CACHE": str(cache)},
        check=False,
    )


def rows_written(folder):
    """Count the saved depths on disk; a folder that is being made has none."""
    try:
        names = os.listdir(folder / "trajectory.zarr" / "depth")
    except FileNotFoundError:
        return 0
    return sum(name[0].isdigit() for name in names)


def kill_after(folder, rows, delay, words, cache):
    """Start a command and kill it soon after so many depths are on disk."""
    return kill_when(lambda: rows_written(folder) >= rows, delay, words, cache)


def kill_when(condition, delay, words, cache):
    """Start a command and kill it soon after a condition is met."""
    process = subprocess.Popen(
        command(*words),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"MEANFORMER_CACHE": str(cache)},
    )
    try:
        while process.poll() is None and not condition():
            time.sleep(0.0005)
        time.sleep(delay)
    finally:
        process.kill()
        code = process.wait()
    return code == -signal.SIGKILL


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """The folder of an uninterrupted run, and the file that describes it."""
    folder = tmp_path_factory.mktemp("whole")
    config = folder / "run.toml"
    config.write_text(CONFIG)
    np.save(folder / "points.npy", points())
    result = run("simulate", config, "--out", folder / "out", cache=cache)
    assert result.returncode == 0, result.stderr
    return config, folder / "out"


@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_several_moments_and_resumed_a_run_ends_as_if_never_killed(
    times, whole, cache, tmp_path
):
    config, uninterrupted = whole
    folder, total = tmp_path / "out", rows_written(uninterrupted)
    words, kills = ("simulate", config, "--out", folder), 0
    for moment in range(times):
        rows = 1 + moment * (total - 10) // times
        # Some milliseconds more, so that the kills hit different parts of a depth.
        kills += kill_after(folder, rows, 0.002 * moment, words, cache)
        if rows_written(folder) > 0:
            dataset = xarray.open_zarr(folder / "trajectory.zarr")
            assert np.isfinite(dataset["points"].values).all()
        words = ("resume", folder)
    assert kills == times
    assert run("resume", folder, cache=cache).returncode == 0
    expected = xarray.open_zarr(uninterrupted / "trajectory.zarr")
    resumed = xarray.open_zarr(folder / "trajectory.zarr")
    for name in expected.variables:
        np.testing.assert_array_equal(resumed[name].values, expected[name].values)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.002, 0.005, 0.01, 0.02])
def test_killed_before_its_first_depth_a_run_can_always_be_taken_up(
    delay, whole, cache, tmp_path
):
    _, uninterrupted = whole
    folder, config = tmp_path / "out", tmp_path / "run.toml"
    config.write_text(CONFIG.replace("depth = 4.0", "depth = 0.1"))
    np.save(tmp_path / "points.npy", points())
    words = ("simulate", config, "--out", folder)
    assert kill_when(folder.exists, delay, words, cache)
    has_record = (folder / "run.json").exists()
    result = run(*(("resume", folder) if has_record else words), cache=cache)
    assert result.returncode == 0, result.stderr
    expected = xarray.open_zarr(uninterrupted / "trajectory.zarr")["points"][:3]
    resumed = xarray.open_zarr(folder / "trajectory.zarr")["points"]
    np.testing.assert_array_equal(resumed.values, expected.values)


@pytest.mark.slow
def test_an_extended_run_goes_on(whole, cache, tmp_path):
    config, _ = whole
    folder = tmp_path / "out"
    assert run("simulate", config, "--out", folder, cache=cache).returncode == 0
    result = run("extend", folder, "--depth", 4.5, cache=cache)
    assert result.returncode == 0
    assert "91 depths" in result.stdout


@pytest.fixture
def described(tmp_path):
    """The file of a short run."""
    config = tmp_path / "run.toml"
    config.write_text(STOPS_EARLY.replace("10", "10000"))
    return config


def call(*words):
    """Run a command line in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def test_mistakes_end_with_code_two_and_one_sentence(described, tmp_path):
    folder, bad = tmp_path / "out", tmp_path / "bad.toml"
    assert call("simulate", described, "--out", folder).exit_code == 0
    bad.write_text(STOPS_EARLY.replace("kind", "kimd"))
    for words, message in (
        (("simulate", bad, "--out", tmp_path / "a"), "did you mean kind"),
        (("simulate", tmp_path / "no.toml", "--out", tmp_path / "b"), "does not exist"),
        (("simulate", described, "--out", folder), "not empty"),
        (("resume", tmp_path), "no run that can be resumed"),
        (("extend", folder, "--depth", 0.1), "already goes to"),
        (("extend", folder, "--depth", "inf"), "depth is inf"),
        (("extend", folder, "--depth", 0.43), "the nearest are 0.42 and 0.44"),
        (("simulate", described, "--out", described), "choose another"),
        (("simulate", described, "--out", described / "below"), "choose another"),
        (("simulate", described, "--out", "/proc/x"), "choose another"),
    ):
        result = call(*words)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "a").exists()


def test_a_run_that_stops_early_says_so_and_what_to_do(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(STOPS_EARLY)
    result = call("simulate", config, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "raise the step budget" in result.stdout
    assert "StepBudget" not in result.stdout
    assert "Stiff()" not in result.stdout


def test_the_way_on_is_told_only_if_there_is_one(tmp_path, monkeypatch):
    def fails(*words, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr("meanformer.storage.simulate", fails)
    arguments = [str(tmp_path / "run.toml"), "--out", str(tmp_path)]
    first = CliRunner().invoke(app, ["simulate", *arguments])
    assert first.exit_code == 1
    assert "resume" not in first.stderr
    (tmp_path / "run.json").touch()
    second = CliRunner().invoke(app, ["simulate", *arguments])
    assert f"what was written is kept: meanformer resume {tmp_path}" in second.stderr


def test_the_advice_of_a_status_has_no_words_of_python():
    texts = " ".join(Status[getattr(Status, name)] for name in STATUS_NAMES)
    assert not re.search(r"\w\(|\w=|[a-z][A-Z]", texts)


STOPS = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", 143)}


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_inside_of_a_callback_ends_the_run_with_its_sentence(
    number, tmp_path, monkeypatch
):
    import jax
    import jax.numpy as jnp

    stopped = threading.Event()

    def stopping(value):
        os.kill(os.getpid(), number)
        stopped.wait(30.0)
        return value

    def compute(*words, **options):
        (tmp_path / "run.json").touch()
        double = jax.ShapeDtypeStruct((), jnp.float64)
        jax.pure_callback(stopping, double, jnp.zeros(())).block_until_ready()

    monkeypatch.setattr("meanformer.storage.simulate", compute)
    before = signal.signal(signal.SIGTERM, signals.leave)
    try:
        result = call("simulate", tmp_path / "run.toml", "--out", tmp_path)
    finally:
        stopped.set()
        signal.signal(signal.SIGTERM, before)
    word, code = STOPS[number]
    assert result.exit_code == code
    assert (
        result.stderr
        == f"meanformer: {word}; go on with: meanformer resume {tmp_path}\n"
    )
