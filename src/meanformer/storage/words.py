"""Advice meant for Python, turned into advice for the file that describes a run."""

import contextlib
from collections.abc import Iterator

from meanformer.errors import InvalidInput

WORDS = {
    "use Stiff(), loosen rtol": 'set solve.solver = "stiff", loosen solve.rtol',
    "save more often": "lower solve.save_every",
    "pass stop=StepBudget(more)": "raise stop.step_budget",
    "raise the radius": "raise stop.escape_radius",
    "use PostNorm()": 'set flow.normalisation = "post"',
    "use the explicit solver": 'set solve.solver = "adaptive"',
    "on Sphere() every": 'with flow.space = "sphere" every',
    "use Adaptive() or Stiff()": 'set solve.solver = "adaptive" or "stiff"',
    "use Adaptive() for a schedule": 'set solve.solver = "adaptive"',
    "LongDepth() ": 'solve.solver = "long-depth" ',
    "is for Sphere()": 'is for flow.space = "sphere"',
    "merge joins tokens": "solve.merge joins tokens",
    "or merge.": "or solve.merge.",
    "leave merge out": "leave solve.merge out",
    "pass allow_negative_beta=True": "give allow_negative_beta = true",
}


def in_words_of_a_file(message: str) -> str:
    """Return a message with the names that a configuration file uses."""
    for python, file in WORDS.items():
        message = message.replace(python, file)
    return message


@contextlib.contextmanager
def mistakes_of_a_file() -> Iterator[None]:
    """Tell the mistakes found inside in the words of a configuration file."""
    try:
        yield
    except InvalidInput as error:
        raise type(error)(in_words_of_a_file(str(error))) from error
