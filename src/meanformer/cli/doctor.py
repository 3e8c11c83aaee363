"""`meanformer doctor`: what is installed, what is missing, and how to get it."""

import importlib.metadata
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from meanformer.cli.app import HELP, app
from meanformer.files import cache_directory

CORE = ("meanformer", "jax", "jaxlib", "equinox", "diffrax", "numpy", "scipy",
        "matplotlib", "xarray", "zarr")  # fmt: skip


@app.command(rich_help_panel=HELP)
def doctor() -> None:
    """Show versions, devices, precision, caches, and optional parts missing."""
    for name, value in _findings():
        typer.echo(f"{name:<14}{value}")


def _findings() -> Iterator[tuple[str, Any]]:
    from meanformer.experiments.framework import environment
    from meanformer.plotting.movies import has_ffmpeg

    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in CORE:
        yield name, environment.version_of(name) or "missing; pip install meanformer"
    yield from _arithmetic()
    folder = cache_directory()
    yield "cache", f"{folder} ({_size(folder)}); MEANFORMER_CACHE moves it"
    yield "sums", _choice_of_sums()
    yield "movies", ".gif and .mp4" if has_ffmpeg() else ".gif; install ffmpeg for .mp4"
    yield from _optional_parts()


def _arithmetic() -> Iterator[tuple[str, str]]:
    import jax

    devices = (f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices())
    yield "devices", ", ".join(devices)
    bits = 64 if jax.config.read("jax_enable_x64") else 32
    advice = "" if bits == 64 else "; JAX_ENABLE_X64=1 changes it"
    setting = f"JAX itself is set to {bits} bits{advice}"
    yield "precision", f"experiments run in float64; {setting}"


def _choice_of_sums() -> str:
    """From how many tokens on sums are fast."""
    from meanformer.numerics.fourier.sums import Auto, missing, smallest_fast_count

    reason = missing()
    if reason is not None:
        return f"exact, since {reason}"
    counts = [f"{smallest_fast_count(Auto(), k)} in {k}-d" for k in (1, 2, 3)]
    return f"fast from about {', '.join(counts)}"


def _size(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()]
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    return f"{len(files)} files, {megabytes:.1f} MB" if files else "empty"


def _optional_parts() -> Iterator[tuple[str, str]]:
    """Each extra of the package, and which of its packages are not there."""
    from meanformer.experiments.framework.environment import version_of

    for extra, packages in optional_packages().items():
        versions = {package: version_of(package) for package in packages}
        missing = [package for package, version in versions.items() if version is None]
        advice = f"missing {', '.join(missing)}; pip install 'meanformer[{extra}]'"
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield extra, advice if missing else found


def optional_packages() -> dict[str, list[str]]:
    """The packages that each extra of the installed distribution asks for."""
    extras: dict[str, list[str]] = {}
    pattern = re.compile(r"""^([\w.-]+).*extra\s*==\s*['"]([\w.-]+)['"]""")
    for requirement in importlib.metadata.requires("meanformer") or []:
        found = pattern.match(requirement)
        if found and found[1] != "meanformer":
            extras.setdefault(found[2], []).append(found[1])
    return extras
