"""Fast sums in double precision against exact ones, their gradient, PyTorch, KeOps."""

import subprocess
from collections.abc import Iterator

from benchmarks import fourier_times
from benchmarks.fourier_times import measured
from benchmarks.result import Result

SPHERE, CIRCLE = 3, 2
MANY, MOST = 100_000, 1_000_000
EXACT = "exact sums, from {} queries"
BETAS = (1, 10, 100)


def results() -> Iterator[Result]:
    yield from small_beta()
    yield from large_beta()
    yield from circle()
    yield from gradient()
    yield from torch()
    yield from keops()


def small_beta() -> Iterator[Result]:
    found = measured(fourier_times.against_exact, MANY, SPHERE, 1e-7, 4096, 4)
    name = f"sphere, n={MANY}, beta=4"
    yield ratio(name, found, 4, 4096, 150.0)
    yield accuracy(name, found, 1e-7)


def large_beta() -> Iterator[Result]:
    found = measured(fourier_times.against_exact, MOST, SPHERE, 1e-5, 2048, 25)
    name = f"sphere, n={MOST}, beta=25"
    yield ratio(name, found, 25, 2048, 2500.0)
    yield accuracy(name, found, 1e-5)
    exponent = measured(fourier_times.exponent, MANY, MOST, SPHERE, 25, 1e-5)
    yield Result(
        f"exponent of the time from n={MANY} to {MOST}, beta=25",
        "linear",
        exponent["exponent"],
        1.0,
        "",
        target=1.1,
        at_least=False,
    )


def circle() -> Iterator[Result]:
    found = measured(fourier_times.against_exact, MOST, CIRCLE, 1e-10, 2048, *BETAS)
    for beta in BETAS:
        yield ratio(f"circle, n={MOST}, beta={beta}", found, beta, 2048, 5000.0)
    yield accuracy(f"circle, n={MOST}, all beta", found, 1e-10)


def gradient() -> Iterator[Result]:
    problem = MANY, SPHERE, 4, 1e-7
    seconds = measured(fourier_times.gradient, *problem)
    name = f"gradient through fast sums, sphere, n={MANY}, beta=4"
    ours, value = seconds["gradient"], seconds["value"]
    yield Result(name, "its value", ours, value, "s", 6.0, at_least=False)
    extra = measured(fourier_times.gradient_memory, *problem)["extra"]
    pairs = 8 * MANY**2 / 2**20
    yield Result(f"memory, {name}", "one n by n array", extra, pairs, "MiB", 1.0)


def torch() -> Iterator[Result]:
    for count in (8192, 32_768):
        seconds = measured(fourier_times.against_torch, count, SPHERE, 4, 1e-7)
        name = f"sphere, n={count}, beta=4"
        ours, theirs = seconds["fast"], seconds["torch"]
        yield Result(name, "torch SDPA, float32", ours, theirs, "s")


def keops() -> Iterator[Result]:
    """Compare with KeOps, which compiles C++ on first use, where that is possible."""
    for count in (10_000, MANY):
        try:
            seconds = measured(
                fourier_times.against_keops, count, SPHERE, 4, 1e-7, 2048
            )
        except subprocess.CalledProcessError as failure:
            reason = failure.stderr.strip().splitlines()[-1:]
            print("  KeOps: not available:", *reason)
            return
        opponent = "KeOps, float64, from 2048 queries"
        for ours, way in (("fast", "Fourier"), ("exact", "exact")):
            name = f"sphere, n={count}, beta=4, {way}"
            yield Result(name, opponent, seconds[ours], seconds["keops"], "s")


def ratio(
    name: str, found: dict[str, float], beta: float, queries: int, target: float
) -> Result:
    """Return the time of fast sums next to that of exact ones."""
    opponent = EXACT.format(queries)
    return Result(name, opponent, found[f"{beta:g}"], found["exact"], "s", target)


def accuracy(name: str, found: dict[str, float], tolerance: float) -> Result:
    """Return the error on some queries, computed with NumPy, next to the tolerance."""
    work = f"error on {fourier_times.CHECKED} queries, {name}"
    return Result(work, "tolerance", found["error"], tolerance, "", 1.0)
