"""A toy that breaks off: by an exception, or by killing its own process."""

import os
import signal
from dataclasses import dataclass

from meanformer.experiments import Claim, Experiment, setting


@dataclass(frozen=True)
class Parameters:
    is_violent: bool = setting(False, full=True, help="whether the process dies")


def run(parameters, *, progress):
    if parameters.is_violent:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("The solver ran out of steps; allow more.\nSecond line.")


experiment = Experiment(
    name="toy-crashes",
    title="An accident",
    room="numerics",
    claims=(
        Claim("first", "Nothing is measured.", "observation"),
        Claim("second", "Nothing at all.", "observation"),
    ),
    parameters=Parameters,
    run=run,
)
