"""Peak memory, measured in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads /proc, which Linux has"
)
# What the first part takes is not counted; compiling the call of the second is.
SCRIPT = """
import sys

def peak():
    # Not ru_maxrss, which starts from the memory of the process that started this one.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith("VmHWM")) / 1024

{before}
start = peak()
{call}
sys.stdout.write(str(peak() - start))
"""


def peak_increase(before: str, call: str, *arguments: str) -> float:
    """Return by how many MiB a call raises the peak of a fresh process.

    Args:
        before: code that makes ready.
        call: code that is measured.
        *arguments: what both find in `sys.argv`.
    """
    script = SCRIPT.format(before=before, call=call)
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)
