"""The files of a run: zarr arrays of which only finished rows are visible; a record.

There is one chunk for each depth, with a checksum of its own. What a reader sees is the
shape in the consolidated metadata, one small sealed file that is replaced in a single
step after all chunks of a depth have reached the disk. A crash at any moment, of the
program or of the machine, therefore leaves a shorter trajectory, never a broken one.
What is changed later, be it a single byte, is told. The record beside the arrays holds
configuration, versions, precision and history.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from meanformer.errors import InvalidInput, LostDepths, check, warn
from meanformer.files import checksum, read_sealed, sealed

RECORD = "run.json"
TOKENS = "tokens.npy"
CHECKSUM_OF_TOKENS = f"crc32 of {TOKENS}"
_KEPT = {"config": dict, "versions": dict, "double_precision": bool, "history": list}
METADATA = ".zmetadata"
_CHECKED = {"id": "crc32"}
_WHOLE_FOLDER = (".zgroup", ".zattrs")


def replace_file(path: Path, text: str) -> None:
    """Write a file so that it is either the old one or the new one, never a part."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush(path.parent)


def flush(*paths: Path) -> None:
    """Wait until these files, or the names in these folders, have reached the disk."""
    # Together, not one after the other: the disk then does it in one go.
    with ThreadPoolExecutor() as pool:
        list(pool.map(_flush, paths))


def _flush(path: Path) -> None:
    # Windows flushes files that may be written only, and keeps names by itself.
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class GrowingArrays:
    """Named arrays along depth in one zarr folder, grown one depth at a time."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path = path
        self._metadata = metadata

    @classmethod
    def create(cls, path: Path, attributes: Mapping[str, Any]) -> "GrowingArrays":
        """Return no arrays yet, in a new folder with these attributes."""
        whole = ({"zarr_format": 2}, dict(attributes))
        arrays = cls(path, dict(zip(_WHOLE_FOLDER, whole, strict=True)))
        path.mkdir()
        for name, entry in arrays._metadata.items():
            (path / name).write_text(json.dumps(entry, indent=1))
        return arrays

    def add(
        self,
        name: str,
        values: np.ndarray,
        axes: tuple[str, ...],
        attributes: Mapping[str, str],
        *,
        grows: bool,
    ) -> None:
        """Write an array; or make one that will have such a row for each depth."""
        shape = (0, *values.shape) if grows else values.shape
        chunks = (1, *values.shape) if grows else values.shape
        (self.path / name).mkdir()
        self._metadata[f"{name}/.zattrs"] = {
            "_ARRAY_DIMENSIONS": list(axes),
            **attributes,
        }
        self._metadata[f"{name}/.zarray"] = {
            "zarr_format": 2,
            "shape": list(shape),
            "chunks": [max(size, 1) for size in chunks],
            "dtype": values.dtype.str,
            "fill_value": "NaN" if np.issubdtype(values.dtype, np.floating) else None,
            "order": "C",
            "filters": None,
            "compressor": _CHECKED,
            "dimension_separator": ".",
        }
        if not grows:
            self._write(name, values, (0,) * values.ndim)

    def write_row(self, index: int, rows: dict[str, np.ndarray]) -> None:
        """Write one depth to the disk; it is not visible before `commit`."""
        places = {name: (index, *(0,) * row.ndim) for name, row in rows.items()}
        written = (self._write(name, row, places[name]) for name, row in rows.items())
        flush(*itertools.chain(*written))

    def commit(self, count: int) -> None:
        """Make the first `count` depths visible."""
        for name, entry in arrays_in(self._metadata):
            if grows(self._metadata, name):
                entry["shape"][0] = count
        document = {"zarr_consolidated_format": 1, "metadata": self._metadata}
        replace_file(self.path / METADATA, sealed(document))

    def flush_all(self) -> None:
        """Wait until everything in the folder has reached the disk."""
        flush(*self.path.rglob("*"), self.path, self.path.parent)

    def _write(
        self, name: str, values: np.ndarray, place: tuple[int, ...]
    ) -> list[Path]:
        """Write one chunk; return what must reach the disk."""
        from numcodecs import CRC32

        folder, content = self.path / name, values.tobytes()
        if not content:
            return [folder]
        if self._metadata[f"{name}/.zarray"]["compressor"] == _CHECKED:
            content = CRC32().encode(content)
        chunk = folder / _chunk_name(place)
        chunk.write_bytes(content)
        return [chunk, folder]


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the consolidated metadata of a folder, empty if nothing was written."""
    try:
        known = {"zarr_consolidated_format", "metadata"}
        document = read_sealed(folder / METADATA, known)
        metadata = dict(document["metadata"])
        for name, array in arrays_in(metadata):
            _check_described(array, metadata[f"{name}/.zattrs"])
    except FileNotFoundError:
        if _holds_rows(folder):
            raise damaged(folder / METADATA, "it is missing") from None
        return {}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise damaged(folder / METADATA, error) from error
    _check_copies(folder, metadata)
    return metadata


def _check_described(array: dict[str, Any], attributes: dict[str, Any]) -> None:
    """Raise unless the metadata of an array can be read as such."""
    np.dtype(array["dtype"])
    shape, chunks = array["shape"], array["chunks"]
    sizes = zip(shape, chunks, attributes["_ARRAY_DIMENSIONS"], strict=True)
    if "compressor" not in array or not all(
        isinstance(length, int) and isinstance(chunk, int) and length >= 0 < chunk
        for length, chunk, _ in sizes
    ):
        raise ValueError("an array in it has no shape")


def _holds_rows(folder: Path) -> bool:
    """Whether a folder holds more than a run killed before its first depth leaves."""
    files = (path for path in folder.rglob("*") if path.is_file())
    unmoved = ("weights", "position")
    return any(
        not path.name.startswith(".") and path.parent.name not in unmoved
        for path in files
    )


def _check_copies(folder: Path, metadata: dict[str, Any]) -> None:
    """Raise unless the small files beside the metadata say the same.

    In runs without checksums, those of single arrays say how long it is to be instead.
    """
    checked = any(_is_checked(array) for _, array in arrays_in(metadata))
    beside = [key for key in metadata if checked and (folder / key).exists()]
    for key in {*beside, *_WHOLE_FOLDER}:
        try:
            same = json.loads((folder / key).read_bytes().decode()) == metadata[key]
            check(same, "it does not agree with the metadata")
        except (LookupError, OSError, RecursionError, ValueError) as error:
            raise damaged(folder / key, error) from error


def damaged(path: Path, reason: object) -> InvalidInput:
    """Return what to raise for a file that is not as it was written."""
    return InvalidInput(
        f"{path} is damaged ({reason}); restore it from a copy, or compute the run "
        "anew in another folder."
    )


def whole_rows(folder: Path, metadata: dict[str, Any]) -> int:
    """Return how many depths are visible with every chunk in place and complete.

    A disk that lost what it had confirmed shortens the run, with a warning; it does not
    add a NaN.
    """
    announced = metadata["depth/.zarray"]["shape"][0] if metadata else 0
    rows = announced
    for name, array in arrays_in(metadata):
        size = math.prod(array["chunks"]) * np.dtype(array["dtype"]).itemsize
        size += 4 * _is_checked(array)
        is_growing = grows(metadata, name)
        present = itertools.takewhile(
            lambda path, size=size: path.is_file() and path.stat().st_size == size,
            _chunks(folder / name, array, rows if is_growing else None),
        )
        count = sum(1 for _ in present)
        if 0 not in array["shape"][is_growing:]:
            rows = min(rows, count) if is_growing else rows * count
    if rows < announced:
        warn(
            f"{folder} is damaged: files of its depths from number {rows} on, of "
            f"{announced}, are missing or cut; restore them from a copy, or resume the "
            "run, which computes these depths again.",
            LostDepths,
        )
    return rows


def check_chunks(folder: Path, metadata: dict[str, Any], rows: int | None) -> None:
    """Raise if a chunk, of so many depths, is missing or fails its checksum."""
    from numcodecs import CRC32

    for name, array in arrays_in(metadata):
        count = rows if grows(metadata, name) else None
        for path in _chunks(folder / name, array, count) if _is_checked(array) else ():
            try:
                CRC32().decode(path.read_bytes())
            except FileNotFoundError:
                raise damaged(path, "it is missing") from None
            except (RuntimeError, ValueError):
                raise damaged(path, "its checksum does not match") from None


def arrays_in(metadata: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the arrays of a folder by their names."""
    for key, entry in metadata.items():
        name, _, part = key.rpartition("/")
        if part == ".zarray":
            yield name, entry


def grows(metadata: dict[str, Any], name: str) -> bool:
    """Return whether an array has one row for each depth."""
    attributes = metadata.get(f"{name}/.zattrs", {})
    return attributes.get("_ARRAY_DIMENSIONS", [])[:1] == ["depth"]


def _is_checked(array: dict[str, Any]) -> bool:
    return array["compressor"] == _CHECKED


def _chunks(folder: Path, array: dict[str, Any], rows: int | None) -> Iterator[Path]:
    """Return the files of an array, or of its first rows."""
    shape = [*array["shape"]] if rows is None else [rows, *array["shape"][1:]]
    lengths = zip(shape, array["chunks"], strict=True)
    grid = (range(-(-length // chunk)) for length, chunk in lengths)
    return (folder / _chunk_name(place) for place in itertools.product(*grid))


def _chunk_name(place: tuple[int, ...]) -> str:
    return ".".join(map(str, place))


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the record, in one step, with the checksum of the copy of the tokens."""
    copy = folder / TOKENS
    checks = {CHECKSUM_OF_TOKENS: _checksum_of(copy)} if copy.exists() else {}
    replace_file(folder / RECORD, sealed(record | checks))


def read_record(folder: Path) -> dict[str, Any]:
    """Return what a run's folder says of itself, or raise if a byte of it changed."""
    path = folder / RECORD
    try:
        record = read_sealed(path, {*_KEPT, "machine"})
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidInput(
            f"{folder} holds no run that can be resumed (there is no {RECORD}); start "
            "one with simulate."
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{folder} holds no run that can be resumed: {damaged(path, error)}"
        ) from error
    for key, kind in _KEPT.items():
        check(
            isinstance(record.get(key), kind),
            f"{folder} holds no run that can be resumed ({RECORD} has no {key}).",
        )
    copy = folder / TOKENS
    if record.get(CHECKSUM_OF_TOKENS, _checksum_of(copy)) != _checksum_of(copy):
        raise damaged(
            copy, "its checksum does not match" if copy.exists() else "it is missing"
        )
    return record


def _checksum_of(path: Path) -> str | None:
    return checksum(path.read_bytes()) if path.is_file() else None
