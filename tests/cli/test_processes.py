"""The commands as a user starts them: processes, signals, pipes."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

STARTS_LIGHT = """
import sys
sys.argv = ["meanformer", "--help"]
from meanformer.cli import main
try:
    main()
except SystemExit as leaving:
    assert leaving.code == 0
heavy = {"jax", "matplotlib", "scipy", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def meanformer(*words, **options):
    command = [sys.executable, "-m", "meanformer", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_help_loads_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", STARTS_LIGHT], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "atlas" in done.stdout


@pytest.mark.slow
def test_json_in_a_pipe_is_pure():
    done = meanformer("run", "toy-holds", "--set", "is_loud=1", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["holds"] is True


@pytest.mark.slow
def test_an_old_terminal_does_not_break_the_output():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = meanformer("run", "toy-holds", env=environment)
    assert done.returncode == 0
    assert "holds" in done.stdout


@pytest.mark.slow
def test_the_atlas_runs_in_parallel_and_survives_accidents(tmp_path):
    done = meanformer(
        "atlas", "--only", "toy-cr*|toy-[hfu]*", "--out", tmp_path, "--jobs", 2
    )
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert sum("toy-" in line for line in lines) == 6
    assert sum(line.startswith("✓ holds") for line in lines) == 2
    assert lines[-1].startswith("2 of 6 claims hold, 4 experiments")
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert numbers["complete"] is True
    assert numbers["holds"] is False


@pytest.mark.slow
def test_an_atlas_whose_claims_hold_leaves_with_0(tmp_path):
    done = meanformer("atlas", "--only", "toy-holds", "--out", tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "index.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_stopping_the_atlas_keeps_the_page_and_ends_the_workers(tmp_path, number, code):
    words = ["atlas", "--only", "toy-slow|toy-holds", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "meanformer", *words, "--jobs", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    page = tmp_path / "index.html"
    deadline = time.monotonic() + 60
    while "Running now" not in (page.read_text() if page.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == code
    assert not psutil.wait_procs(workers, timeout=10)[1]
    assert "Traceback" not in complaints
    assert "stopped before its turn" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_computation_can_be_stopped(number, code):
    command = [sys.executable, "-m", "meanformer", "run", "toy-computes"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watched = psutil.Process(process.pid)
    deadline = time.monotonic() + 120
    while sum(watched.cpu_times()[:2]) < 12:  # well into the computation
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(number)
    output, complaints = process.communicate(timeout=30)
    assert process.returncode == code
    assert (output, complaints) == ("", "")


@pytest.mark.slow
def test_only_the_transform_itself_needs_finufft_and_nothing_needs_fcntl():
    script = """
import pkgutil, sys
for name in ("fcntl", "resource", "jax_finufft"):
    sys.modules[name] = None
import meanformer as mf
for module in pkgutil.walk_packages(mf.__path__, "meanformer."):
    if not module.name.endswith(("__main__", "fourier.nufft")):
        __import__(module.name)
cloud = mf.TokenCloud([[0.0, 1.0], [1.0, 0.0]])
flow = mf.Flow(mf.identity_attention("softmax", 2, 1.0))
print(mf.solve(flow, cloud, 1.0).points.shape)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("2, 2)\n")
