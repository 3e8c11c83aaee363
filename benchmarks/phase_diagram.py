"""The published phase diagram, against Euler steps with renormalisation in PyTorch."""

import os
import time
from collections.abc import Iterator

import jax
import jax.random as jr
import numpy as np

import meanformer as mf
from benchmarks.result import Result

TOKENS, STARTS, LEVEL = 32, 2048, 0.999
BETAS, DEPTHS = np.linspace(0.1, 9, 90), np.linspace(0, 30, 200)
STEP = 0.1
# Every temperature is the same work for Euler; the time of all is scaled from these.
SHARE = np.linspace(0, 89, int(os.environ.get("MEANFORMER_BENCH_BETAS", 2))).astype(int)
# Best of so many; ours is timed on every temperature, where it needs different steps.
ROUNDS = int(os.environ.get("MEANFORMER_BENCH_ROUNDS", 2))
DIMENSIONS = (8, 128)
# Many starts are computed otherwise than few: errors are measured on as many as take
# the way that is timed, against few at a time.
CHECKED_BETAS, CHECKED_STARTS, AT_A_TIME = np.array([1.0, 4.0, 6.0]), 512, 64


def results() -> Iterator[Result]:
    for dimension in DIMENSIONS:
        yield of_speed(dimension)
        yield from of_accuracy(dimension)


def of_speed(dimension: int) -> Result:
    """Compare the shortest times of the whole diagram; ours is compiled by then."""
    ours = shortest(lambda: diagram(dimension, BETAS, STARTS))
    theirs = shortest(lambda: euler(dimension, BETAS[SHARE], STARTS))
    name = f"phase diagram, n={TOKENS}, d={dimension}, 90 x 200, {STARTS} starts"
    label = f"torch, Euler {STEP:g}, {len(SHARE)} of {len(BETAS)} betas, scaled"
    return Result(name, label, ours, theirs * len(BETAS) / len(SHARE), "s", target=5.0)


def shortest(call) -> float:
    """Return the shortest of several times, in seconds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def diagram(dimension: int, betas, starts, **options):
    """Return our diagram, in single precision unless told otherwise."""
    return mf.observables.phase_diagram(
        dimension=dimension,
        count=TOKENS,
        betas=betas,
        depths=DEPTHS,
        starts=starts,
        level=LEVEL,
        key=jr.key(0),
        **({"dtype": "float32"} | options),
    )


def euler(dimension: int, betas, starts) -> np.ndarray:
    """Return the fractions by the published scheme, on all cores.

    A step along the attention, then division by the norm; pairs are counted whenever
    a depth of the grid is passed.
    """
    import torch

    torch.manual_seed(0)
    rows = []
    for beta in betas:
        if np.ndim(starts) == 3:
            tokens = torch.tensor(starts, dtype=torch.float32)
        else:
            tokens = torch.randn(starts, TOKENS, dimension)
        tokens = torch.nn.functional.normalize(tokens, dim=2)
        with torch.no_grad():
            rows.append(euler_row(torch, tokens, float(beta)))
    return np.array(rows)


def euler_row(torch, tokens, beta: float) -> list[float]:
    """Return the fractions at one temperature."""
    row: list[float] = []
    for index in range(1 + round(DEPTHS[-1] / STEP)):
        # The published script reads the state after the step that passes a depth.
        if index * STEP >= DEPTHS[len(row)] - 1e-9:
            gram = torch.matmul(tokens, tokens.transpose(1, 2))
            close = float((gram > LEVEL).sum()) / len(tokens) - TOKENS
            while len(row) < len(DEPTHS) and index * STEP >= DEPTHS[len(row)] - 1e-9:
                row.append(close / (TOKENS * (TOKENS - 1)))
        scores = torch.matmul(tokens, tokens.transpose(1, 2)).mul_(beta)
        attention = torch.matmul(torch.softmax(scores, dim=2), tokens)
        moved = tokens + STEP * attention
        tokens = torch.nn.functional.normalize(moved, dim=2)
    return row


def accurate(dimension: int, starts: np.ndarray) -> np.ndarray:
    """Return the fractions in double precision, at a small tolerance."""
    options = {"dtype": "float64", "tolerance": 1e-7, "workers": 1}
    return diagram(dimension, CHECKED_BETAS, starts, **options).mean


def of_accuracy(dimension: int) -> Iterator[Result]:
    """Compare the errors of both fractions, on the same starts."""
    drawn = np.random.default_rng(0).standard_normal(
        (CHECKED_STARTS, TOKENS, dimension)
    )
    starts = drawn / np.linalg.norm(drawn, axis=2, keepdims=True)
    with jax.enable_x64(True):
        parts = np.split(starts, CHECKED_STARTS // AT_A_TIME)
        exact = np.mean([accurate(dimension, part) for part in parts], axis=0)
    ours = diagram(dimension, CHECKED_BETAS, starts.astype(np.float32)).mean
    theirs = euler(dimension, CHECKED_BETAS, starts)
    for word, measure in (("largest", np.max), ("mean", np.mean)):
        errors = [float(measure(np.abs(found - exact))) for found in (ours, theirs)]
        name = f"phase diagram, d={dimension}, {word} error of the fraction"
        yield Result(name, "torch, Euler 0.1", *errors, "", target=10.0)
