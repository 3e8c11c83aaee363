"""Files: written whole, known to be unchanged when read; kept between runs."""

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

SEAL = "crc32"
_BLANK = "0" * 8


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


def sealed(document: dict[str, Any]) -> str:
    """Return a document as JSON that carries the checksum of its own text."""
    text = json.dumps({SEAL: _BLANK} | document, indent=1)
    return text.replace(_BLANK, checksum(text.encode()), 1)


def read_sealed(path: Path, unsealed_keys: Collection[str]) -> dict[str, Any]:
    """Return a sealed document, or raise `ValueError` if a byte of it has changed.

    Args:
        path: the file.
        unsealed_keys: what a document from before there were seals may hold.
    """
    try:
        text = path.read_bytes().decode()
        document = json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    seal = document.pop(SEAL, None)
    if seal is None and set(document) <= set(unsealed_keys):
        return document
    if seal != checksum(text.replace(str(seal), _BLANK, 1).encode()):
        raise ValueError("its checksum does not match")
    return document


def checksum(content: bytes) -> str:
    """Return the CRC-32 of some bytes as eight digits."""
    return f"{zlib.crc32(content):08x}"


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
