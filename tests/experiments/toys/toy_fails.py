"""A toy whose claim is false, and which warns."""

import warnings
from dataclasses import dataclass

from meanformer.errors import check
from meanformer.experiments import Claim, Experiment, Outcome, other_method, setting


@dataclass(frozen=True)
class Parameters:
    depth: float = setting(1.0, help="must be positive, which only the run notices")


GUESS = Claim("guess", r"$\pi = 22/7$ to $10^{-6}$.", "conjecture")


def run(parameters, *, progress):
    check(parameters.depth > 0, f"depth is {parameters.depth}; it must be positive.")
    warnings.warn("fractions are not reals", UserWarning, stacklevel=1)
    finding = GUESS.close_to(
        3.141592653589793, 22 / 7, tolerance=1e-6, source=other_method("a fraction")
    )
    return Outcome([finding])


experiment = Experiment("toy-fails", "A wrong guess", "numerics", Parameters, run)
