"""The file format of a run: zarr arrays of which only finished rows are visible.

Every array that grows with depth has its full planned length on disk, one chunk for
each depth. What a reader sees is the shape in the consolidated metadata, one small
file that is replaced in a single step after all chunks of a depth have reached the
disk. A crash at any moment, of the program or of the machine, therefore leaves a
shorter trajectory, never a broken one.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

METADATA = ".zmetadata"


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
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class GrowingArrays:
    """Named arrays along depth in one zarr folder, grown one depth at a time."""

    def __init__(self, path: Path):
        import zarr

        self.path = path
        self._group = zarr.open_group(
            path, mode="a", zarr_format=2, use_consolidated=False
        )

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Attach attributes to the whole, before the first `commit`."""
        self._group.attrs.update(attributes)

    def create_fixed(self, name: str, array: np.ndarray, axes: tuple[str, ...]) -> None:
        """Write an array that does not grow."""
        self._create(name, array.shape, array.shape, array.dtype, axes)
        self._write(name, ..., array)

    def create_growing(
        self,
        name: str,
        planned: int,
        row: np.ndarray,
        axes: tuple[str, ...],
        attributes: dict[str, str],
    ) -> None:
        """Plan an array with one row like this for each depth."""
        shape, chunk = (planned, *row.shape), (1, *row.shape)
        array = self._create(name, shape, chunk, row.dtype, ("depth", *axes))
        array.attrs.update(attributes)

    def plan(self, planned: int) -> None:
        """Change the planned number of depths of every growing array."""
        for array in self._growing():
            array.resize((planned, *array.shape[1:]))

    def write_row(self, index: int, rows: dict[str, np.ndarray]) -> None:
        """Write one depth to the disk; it is not visible before `commit`."""
        written = []
        for name, row in rows.items():
            self._write(name, index, row)
            folder = self.path / name
            chunks = [folder / _chunk_name(index, row.ndim)] if row.size > 0 else []
            written += [*chunks, folder]
        flush(*written)

    def read(self, name: str, rows: int) -> np.ndarray:
        """Return the first rows of a growing array, or all of a fixed one."""
        array = self._array(name)
        return np.asarray(array[:rows] if self._grows(array) else array[...])

    def names(self) -> set[str]:
        """Return the names of all arrays."""
        return set(self._group.array_keys())

    def commit(self, count: int) -> None:
        """Make the first `count` depths visible."""
        entries: dict[str, Any] = {".zgroup": {"zarr_format": 2}}
        entries[".zattrs"] = dict(self._group.attrs)
        for array in self._group.array_values():
            folder = self.path / array.basename
            for part in (".zarray", ".zattrs"):
                entries[f"{array.basename}/{part}"] = json.loads(
                    (folder / part).read_text()
                )
            if self._grows(array):
                entries[f"{array.basename}/.zarray"]["shape"][0] = count
        document = {"zarr_consolidated_format": 1, "metadata": entries}
        replace_file(self.path / METADATA, json.dumps(document, indent=1))

    def flush_all(self) -> None:
        """Wait until everything in the folder has reached the disk."""
        flush(*self.path.rglob("*"), self.path, self.path.parent)

    def _create(self, name, shape, chunks, dtype, axes) -> Any:
        return self._group.create_array(
            name,
            shape=shape,
            chunks=tuple(max(size, 1) for size in chunks),
            dtype=dtype,
            compressors=None,
            fill_value=np.nan if np.issubdtype(dtype, np.floating) else None,
            attributes={"_ARRAY_DIMENSIONS": list(axes)},
        )

    def _write(self, name: str, where: Any, values: np.ndarray) -> None:
        import zarr

        # Also chunks of zeros are written: one that is missing was lost.
        with zarr.config.set({"array.write_empty_chunks": True}):
            self._array(name)[where] = values

    def _array(self, name: str) -> Any:
        return self._group[name]

    def _growing(self):
        return [array for array in self._group.array_values() if self._grows(array)]

    @staticmethod
    def _grows(array) -> bool:
        return array.attrs["_ARRAY_DIMENSIONS"][0] == "depth"


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the consolidated metadata of a folder, empty if there are none."""
    try:
        return json.loads((folder / METADATA).read_text())["metadata"]
    except FileNotFoundError:
        return {}


def whole_rows(folder: Path) -> int:
    """Return how many depths are visible with every chunk in place and complete.

    A disk that lost what it had confirmed shortens the run; it does not add a NaN.
    """
    metadata = read_metadata(folder)
    rows = metadata["depth/.zarray"]["shape"][0] if metadata else 0
    for name, array in _arrays(metadata):
        size = math.prod(array["chunks"]) * np.dtype(array["dtype"]).itemsize
        grows = metadata[f"{name}/.zattrs"]["_ARRAY_DIMENSIONS"][0] == "depth"
        inner = array["shape"][1:] if grows else array["shape"]
        if 0 in inner:
            continue
        wanted = range(rows) if grows else range(1)
        chunks = (folder / name / _chunk_name(i, len(inner), grows) for i in wanted)
        present = _leading(_has_size(chunk, size) for chunk in chunks)
        rows = min(rows, present) if grows else rows * present
    return rows


def _arrays(metadata: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    for key, entry in metadata.items():
        name, _, part = key.rpartition("/")
        if part == ".zarray":
            yield name, entry


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _leading(conditions: Iterable[bool]) -> int:
    """Return how many conditions hold before the first that does not."""
    count = 0
    for holds in conditions:
        if not holds:
            break
        count += 1
    return count


def _chunk_name(index: int, inner: int, grows: bool = True) -> str:
    places = [index] * grows + [0] * inner
    return ".".join(map(str, places))
