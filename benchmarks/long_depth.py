"""A metastable phase to its end, against explicit steps and a normalised gradient."""

import time
import warnings
from collections.abc import Iterator
from typing import cast

import jax
import numpy as np

import meanformer as mf
from benchmarks.result import Result
from meanformer.flows import Merges

BETAS = (10.0, 20.0, 40.0)
ANGLES = np.array([-0.05, 0.0, 0.05, 1.5, 1.6, 1.7])
DEPTHS = {10.0: 1e5, 20.0: 1e9, 40.0: 1e18}  # beyond the meeting of the two groups
# How far and with how many steps the explicit solver goes; extrapolated from there.
FARTHEST, BUDGET = 1e5, 20_000
EULER_STEPS, EULER_SAMPLE = 1_000_000, 2_000


def results() -> Iterator[Result]:
    with jax.enable_x64(True):
        for beta in BETAS:
            yield from of_temperature(beta)


def of_temperature(beta: float) -> Iterator[Result]:
    """Compare steps and seconds until the two groups have become one."""
    ours, path = timed(lambda: long_walk(beta))
    joins = cast(Merges, path.merges)
    meeting, steps = float(joins.depths[-1]), int(path.accepted_steps[-1])
    taken, explicit = timed(lambda: explicit_walk(beta, min(meeting, FARTHEST)))
    scale = max(1.0, meeting / float(explicit.depths[-1]))
    label = "explicit, no merging" + (", extrapolated" if scale > 1 else "")
    name = f"metastable phase, beta={beta:g}, depth {meeting:.2g}"
    theirs = int(explicit.accepted_steps[-1])
    # At high temperature the phase is short, and every solver gets through.
    target = 100.0 if beta >= 20 else None
    yield Result(f"{name}, steps", label, steps, theirs * scale, "steps", target)
    yield Result(name, label, ours, taken * scale, "s")
    label = f"normalised gradient in NumPy, {EULER_STEPS:.0e} steps, extrapolated"
    yield Result(name, label, ours, normalised_gradient(beta), "s", 100.0)


def timed(call) -> tuple[float, mf.Trajectory]:
    """Return the seconds of a second call, compiled already, and what it returns."""
    call()
    start = time.perf_counter()
    path = jax.block_until_ready(call())
    return time.perf_counter() - start, path


def problem(beta: float) -> tuple[mf.Flow, mf.TokenCloud]:
    """Return softmax attention and two groups of three tokens on the circle."""
    points = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)
    attention = mf.identity_attention("softmax", 2, beta)
    return mf.Flow(attention, space=mf.Sphere()), mf.TokenCloud(points)


def long_walk(beta: float) -> mf.Trajectory:
    """Walk to the end in the tokens' own clock."""
    return mf.solve(*problem(beta), DEPTHS[beta], save=2, solver=mf.LongDepth())


def explicit_walk(beta: float, depth: float) -> mf.Trajectory:
    """Go as far as the budget of the explicit solver allows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mf.errors.StoppedEarly)
        return mf.solve(*problem(beta), depth, save=2, stop=mf.flows.StepBudget(BUDGET))


def normalised_gradient(beta: float) -> float:
    """Seconds of Euler steps along the normalised velocity of the angles."""
    angles, step = ANGLES.copy(), 1.0 / EULER_STEPS
    start = time.perf_counter()
    for _ in range(EULER_SAMPLE):
        gaps = angles[None, :] - angles[:, None]
        masses = np.exp(beta * (np.cos(gaps) - 1))
        velocity = (masses * np.sin(gaps)).sum(1) / masses.sum(1)
        angles = angles + step * velocity / np.linalg.norm(velocity)
    return (time.perf_counter() - start) * EULER_STEPS / EULER_SAMPLE
