"""Runs from the command line, killed at any moment and taken up again."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import xarray

CONFIG = """
[tokens]
law = "sphere"
count = 24
dimension = 3
seed = 1
[attention]
beta = 4.0
[flow]
space = "sphere"
[solve]
depth = 4.0
save_every = 0.05
"""

KILLS = 10


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
    return len(list((folder / "trajectory.zarr" / "depth").glob("[0-9]*")))


def kill_after(folder, rows, delay, words, cache):
    """Start a command and kill it soon after so many depths are on disk."""
    process = subprocess.Popen(
        command(*words),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"MEANFORMER_CACHE": str(cache)},
    )
    while process.poll() is None and rows_written(folder) < rows:
        time.sleep(0.0005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """The folder of an uninterrupted run, and the file that describes it."""
    folder = tmp_path_factory.mktemp("whole")
    config = folder / "run.toml"
    config.write_text(CONFIG)
    result = run("simulate", config, "--out", folder / "out", cache=cache)
    assert result.returncode == 0, result.stderr
    return config, folder / "out"


def test_killed_at_ten_moments_and_resumed_a_run_ends_as_if_never_killed(
    whole, cache, tmp_path
):
    config, uninterrupted = whole
    folder, total = tmp_path / "out", rows_written(uninterrupted)
    words, kills = ("simulate", config, "--out", folder), 0
    for moment in range(KILLS):
        rows = 1 + moment * (total - 10) // KILLS
        # Some milliseconds more, so that the kills hit different parts of a depth.
        kills += kill_after(folder, rows, 0.002 * moment, words, cache)
        if rows_written(folder) > 0:
            dataset = xarray.open_zarr(folder / "trajectory.zarr")
            assert np.isfinite(dataset["points"].values).all()
        words = ("resume", folder)
    assert kills == KILLS
    assert run("resume", folder, cache=cache).returncode == 0
    expected = xarray.open_zarr(uninterrupted / "trajectory.zarr")
    resumed = xarray.open_zarr(folder / "trajectory.zarr")
    for name in expected.variables:
        np.testing.assert_array_equal(resumed[name].values, expected[name].values)


def test_an_extended_run_goes_on(whole, cache, tmp_path):
    config, _ = whole
    folder = tmp_path / "out"
    assert run("simulate", config, "--out", folder, cache=cache).returncode == 0
    result = run("extend", folder, "--depth", 4.5, cache=cache)
    assert result.returncode == 0
    assert "91 depths" in result.stdout


def test_mistakes_end_with_code_two_and_one_sentence(whole, cache, tmp_path):
    config, folder = whole
    bad = tmp_path / "bad.toml"
    bad.write_text(CONFIG.replace("beta", "bata"))
    for words, message in (
        (("simulate", bad, "--out", tmp_path / "a"), "did you mean beta"),
        (("simulate", tmp_path / "no.toml", "--out", tmp_path / "b"), "does not exist"),
        (("simulate", config, "--out", folder), "not empty"),
        (("resume", tmp_path), "no run that can be resumed"),
        (("extend", folder, "--depth", 1.0), "already goes to"),
    ):
        result = run(*words, cache=cache)
        assert result.returncode == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
