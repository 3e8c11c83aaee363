"""Import time against that of jax, equinox and diffrax; start of the command line."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import alternate, python, run
from benchmarks.result import Result

ROUNDS = 7
# The front door loads its rooms on first use: ask for what every script needs.
USED = "from meanformer import Softmax, TokenCloud, solve"
ALLOWED = 1.0


def results() -> Iterator[Result]:
    seconds = alternate(
        {
            "ours": lambda: python(USED),
            "theirs": lambda: python("import jax, equinox, diffrax"),
            "help": lambda: run([command(), "--help"]),
        },
        ROUNDS,
    )
    yield Result(
        "import Softmax, TokenCloud, solve",
        "jax, equinox, diffrax",
        seconds["ours"],
        seconds["theirs"],
        "s",
        target=1.2,
        at_least=False,
    )
    yield Result("meanformer --help", "1 s allowed", seconds["help"], ALLOWED, "s", 1.0)


def command() -> str:
    """Return the installed command line, from the environment that runs this."""
    beside = Path(sys.executable).with_name("meanformer")
    return (
        str(beside) if beside.exists() else shutil.which("meanformer") or "meanformer"
    )
