"""Precision, caches and threads of a run, and facts about the machine."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from typing import Any

from meanformer.files import cache_directory, keep_numbers, kept_numbers

TIMINGS = "timings"
SHOWN_VERSIONS = ("meanformer", "jax", "equinox", "diffrax", "numpy")


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Run with 64 bits, compiled programs kept on disk, and figures without a screen.

    The previous settings of JAX come back afterwards.
    """
    import jax
    import matplotlib

    wanted = {"jax_enable_x64": True} | _compilation_cache()
    before = {name: getattr(jax.config, name) for name in wanted}
    matplotlib.use("Agg")
    _configure(wanted)
    try:
        yield
    finally:
        _configure(before)


def limit_threads(jobs: int) -> None:
    """Share the cores among so many processes; call before they are started."""
    cores = os.cpu_count() or 1
    # XLA needs a second thread, or a program that calls back into Python never ends.
    os.environ.setdefault("PJRT_NPROC", str(max(2, cores // jobs)))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(max(1, cores // jobs)))


def default_jobs() -> int:
    """One worker per core, at most eight."""
    return min(8, os.cpu_count() or 1)


def version_of(distribution: str) -> str | None:
    """Version of an installed package, or nothing if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_facts() -> dict[str, str]:
    """Date, machine and versions, for the foot of a report."""
    now = datetime.datetime.now().astimezone()
    versions = [f"{name} {version_of(name)}" for name in SHOWN_VERSIONS]
    return {
        "date": now.strftime("%d %B %Y, %H:%M %Z").lstrip("0"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "precision": "float64",
    }


def remembered_seconds(name: str, profile: str) -> float | None:
    """How long an experiment took when it last ran on this machine."""
    return kept_numbers(TIMINGS).get(f"{name}/{profile}")


def remember_seconds(name: str, profile: str, seconds: float) -> None:
    """Keep how long an experiment took."""
    timings = kept_numbers(TIMINGS) | {f"{name}/{profile}": round(seconds, 2)}
    keep_numbers(TIMINGS, timings)


def _compilation_cache() -> dict[str, Any]:
    folder = cache_directory() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    return {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }


def _configure(values: dict[str, Any]) -> None:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in values.items():
        jax.config.update(name, value)
    # JAX opens its cache once; without this a new directory would go unnoticed.
    compilation_cache.reset_cache()
