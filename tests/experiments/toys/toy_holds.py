r"""A toy: the mean of $n$ equally spaced numbers in $[0, 1]$ is $\frac12$."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from meanformer.experiments import (
    Claim,
    Experiment,
    Outcome,
    Picture,
    Table,
    closed_form,
    setting,
    theory,
)
from meanformer.plotting import style


@dataclass(frozen=True)
class Parameters:
    count: int = setting(5, full=50, help="how many numbers, $n$", at_least=2)
    width: float = setting(1.0, help="length of the interval", above=0)
    shifts: tuple[float, ...] = setting((0.0, 1.0), help="left ends")
    rule: Literal["even", "odd"] = setting("even", help="which rule")
    is_loud: bool = setting(False, help="whether to print")


MEAN = Claim(
    id="mean",
    statement=r"The mean is $\frac{1}{n}\sum_{i=1}^n x_i = \frac12$.",
    status="theorem",
    reference="CACP25, Section 1; GLPR23",
)
SPREAD = Claim(
    id="spread",
    statement="No number is further than $1/2$ from the mean.",
    status="observation",
)


def run(parameters, *, progress):
    numbers = np.linspace(0, parameters.width, parameters.count) / parameters.width
    for _ in progress.over(parameters.shifts):
        if parameters.is_loud:
            print("a stray line")
    figure, axes = style.canvas()
    axes.plot(numbers)
    return Outcome(
        findings=[
            MEAN.close_to(
                numbers.mean(), 0.5, tolerance=1e-12, source=closed_form("$1/2$")
            ),
            SPREAD.at_most(
                abs(numbers - 0.5), 0.5, tolerance=1e-12, source=theory("convexity")
            ),
        ],
        pictures=[Picture(figure, "The numbers $x_i$, one after the other.")],
        tables=[Table(["$n$", "rule"], [[parameters.count, parameters.rule]])],
        notes=["A < B & C: text is escaped."],
    )


experiment = Experiment(
    name="toy-holds",
    title="The mean of equally spaced numbers",
    room="numerics",
    about=__doc__,
    claims=(MEAN, SPREAD),
    parameters=Parameters,
    run=run,
    seconds=1,
)
