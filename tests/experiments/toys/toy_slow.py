"""A toy that takes its time, for tests that interrupt it."""

import time
from dataclasses import dataclass

from meanformer.experiments import Claim, Experiment, Outcome, setting, theory


@dataclass(frozen=True)
class Parameters:
    seconds: float = setting(60.0, help="how long it sleeps")


SLEEP = Claim("sleep", "Sleeping takes time.", "observation")


def run(parameters, *, progress):
    for _ in progress.over(range(100)):
        time.sleep(parameters.seconds / 100)
    return Outcome([SLEEP.above(parameters.seconds, 0, source=theory())])


experiment = Experiment("toy-slow", "A nap", "numerics", Parameters, run)
