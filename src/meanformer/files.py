"""Files: written so that a reader never sees half of one; kept between runs."""

import contextlib
import json
import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a whole file at once, creating its folder if needed."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def cache_directory() -> Path:
    """Where compiled programs and timings are kept between runs.

    `MEANFORMER_CACHE` if set, else `meanformer` inside the user's cache directory.
    """
    chosen = os.environ.get("MEANFORMER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).expanduser() / "meanformer"


def kept_numbers(name: str) -> dict[str, float]:
    """Read numbers kept in the cache under a name; none if there are none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((cache_directory() / f"{name}.json").read_text())
    return {}


def keep_numbers(name: str, numbers: dict[str, float]) -> None:
    """Keep numbers in the cache; one that cannot be written is no error."""
    with contextlib.suppress(OSError):
        text = json.dumps(numbers, indent=1, sort_keys=True)
        write_atomically(cache_directory() / f"{name}.json", text)
