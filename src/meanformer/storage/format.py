"""The file format of a run: zarr arrays of which only finished rows are visible.

Every array that grows with depth has its full planned length on disk, one chunk for
each depth. What a reader sees is the shape in the consolidated metadata, one small
file that is replaced in a single step after all chunks of a depth are written. A crash
at any moment therefore leaves a shorter trajectory, never a broken one.
"""

import json
import os
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


class GrowingArrays:
    """Named arrays along depth in one zarr folder, grown one depth at a time."""

    def __init__(self, path: Path):
        import zarr

        self.path = path
        self._group = zarr.open_group(
            path, mode="a", zarr_format=2, use_consolidated=False
        )

    def create_fixed(self, name: str, array: np.ndarray, axes: tuple[str, ...]) -> None:
        """Write an array that does not grow."""
        self._create(name, array.shape, array.shape, array.dtype, axes)[...] = array

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
        """Write one depth; it is not visible before `commit`."""
        for name, row in rows.items():
            self._array(name)[index] = row

    def read(self, name: str) -> np.ndarray:
        """Return the visible rows of an array."""
        array = self._array(name)
        rows = array[: self.committed()] if self._grows(array) else array[...]
        return np.asarray(rows)

    def names(self) -> set[str]:
        """Return the names of all arrays."""
        return set(self._group.array_keys())

    def committed(self) -> int:
        """Return how many depths are visible."""
        metadata = json.loads((self.path / METADATA).read_text())["metadata"]
        return metadata["depth/.zarray"]["shape"][0]

    def commit(self, count: int) -> None:
        """Make the first `count` depths visible."""
        entries: dict[str, Any] = {".zgroup": {"zarr_format": 2}}
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

    def _array(self, name: str) -> Any:
        return self._group[name]

    def _growing(self):
        return [array for array in self._group.array_values() if self._grows(array)]

    @staticmethod
    def _grows(array) -> bool:
        return array.attrs["_ARRAY_DIMENSIONS"][0] == "depth"
