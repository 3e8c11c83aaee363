"""The published staircase, against Euler steps along the normalised gradient."""

import time
from collections.abc import Iterator
from typing import cast

import jax
import numpy as np

import meanformer as mf
from benchmarks.result import Result
from meanformer.experiments.helpers.circle_walks import attention_on_circle
from meanformer.experiments.metastability.staircase import (
    BETAS,
    SPACED,
    STEP,
    published_step,
)
from meanformer.flows import Merges

PUBLISHED_STEPS = 1_000_000
# Its seconds are measured on so many steps, and extrapolated by their number.
SAMPLE = 4_000
STAGES = 14  # velocities for a step of Dopri8, none reused


def results() -> Iterator[Result]:
    with jax.enable_x64(True):
        for beta in BETAS:
            yield from of_temperature(beta)


def of_temperature(beta: float) -> Iterator[Result]:
    """Compare velocities, seconds and errors of the jumps."""
    walk(beta, 1e-8)
    start = time.perf_counter()
    path = jax.block_until_ready(walk(beta, 1e-8))
    seconds = time.perf_counter() - start
    ours = STAGES * int(path.accepted_steps[-1] + path.rejected_steps[-1])
    name = f"staircase, beta={beta:g}"
    label = f"normalised gradient, {PUBLISHED_STEPS:.0e} Euler steps"
    yield Result(f"{name}, velocities", label, ours, PUBLISHED_STEPS, "calls", 100.0)
    yield Result(name, f"{label}, extrapolated", seconds, euler_seconds(beta), "s", 100)
    exact, found = lengths(walk(beta, 1e-12)), lengths(path)
    end, needed = euler_end(beta)
    label = "the same, up to its last jump"
    yield Result(f"{name}, velocities to the last jump", label, ours, needed, "calls")
    yield Result(
        f"{name}, error of the last jump",
        label,
        max(float(abs(found[-1] / exact[-1] - 1)), 1e-16),
        float(abs(end / exact[-1] - 1)),
        "relative",
        10.0,
    )


def walk(beta: float, rtol: float) -> mf.Trajectory:
    """Walk until one cluster is left."""
    flow = mf.Flow(attention_on_circle("unnormalised", beta), space=mf.Sphere())
    cloud = mf.TokenCloud.from_angles(SPACED)
    return mf.solve(flow, cloud, 1e300, save=2, solver=mf.LongDepth(), rtol=rtol)


def lengths(path: mf.Trajectory) -> np.ndarray:
    """Return the arc lengths of the joins."""
    return np.asarray(cast(Merges, path.merges).arc_lengths)


def euler_step(angles: np.ndarray, beta: float) -> np.ndarray:
    """One step of the published scheme; none where its velocity is zero."""
    following = published_step(angles, beta)[1]
    return angles if following is None else following


def euler_seconds(beta: float) -> float:
    """Seconds of all published steps, from a part of them."""
    angles, start = SPACED.copy(), time.perf_counter()
    for _ in range(SAMPLE):
        angles = euler_step(angles, beta)
    return (time.perf_counter() - start) * PUBLISHED_STEPS / SAMPLE


def euler_end(beta: float) -> tuple[float, int]:
    """Return arc length and steps at which the scheme has put all tokens together."""
    angles = SPACED.copy()
    for count in range(1, PUBLISHED_STEPS):
        angles = euler_step(angles, beta)
        if np.ptp(angles) < STEP * np.log(beta):
            return float(STEP * np.log(beta) * count), count
    return float(STEP * np.log(beta) * PUBLISHED_STEPS), PUBLISHED_STEPS
