"""Timing calls that alternate, and processes of their own."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Threads of the previous contestant spin for a while before they let go of the cores.
PAUSE = 0.02


def alternate(
    contestants: dict[str, Callable[[], object]], rounds: int = 15, calls: int = 1
) -> dict[str, float]:
    """Return the shortest time of each contestant over rounds in which all run.

    Args:
        contestants: what is called.
        rounds: how many rounds.
        calls: how many calls in a row in each round, as steps of training are made.
    """
    for call in contestants.values():
        call()
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, call in contestants.items():
            time.sleep(PAUSE)
            for _ in range(calls):
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def python(code: str, *arguments: str) -> str:
    """Run Python code in a process of its own and return what it prints."""
    return run([sys.executable, "-c", code, *arguments])


def run(command: list[str]) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def peak() -> float:
    """Return the largest memory this process has had, in MiB (Linux)."""
    # Not ru_maxrss, which starts from the memory of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith("VmHWM"))
    return int(found.split()[1]) / 1024
