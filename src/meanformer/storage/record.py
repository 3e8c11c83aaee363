"""What a run's folder says of itself: configuration, versions, precision, history."""

from pathlib import Path
from typing import Any

from meanformer.errors import InvalidInput, check
from meanformer.files import checksum, read_sealed, sealed
from meanformer.storage.format import damaged, replace_file

RECORD = "run.json"
TOKENS = "tokens.npy"
CHECKSUM_OF_TOKENS = f"crc32 of {TOKENS}"
_KEYS = {"config": dict, "versions": dict, "double_precision": bool, "history": list}


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the record, in one step, with the checksum of the copy of the tokens."""
    copy = folder / TOKENS
    checks = {CHECKSUM_OF_TOKENS: _checksum_of(copy)} if copy.exists() else {}
    replace_file(folder / RECORD, sealed(record | checks))


def read_record(folder: Path) -> dict[str, Any]:
    """Return what a run's folder says of itself, or raise if a byte of it changed."""
    path = folder / RECORD
    try:
        record = read_sealed(path, {*_KEYS, "machine"})
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidInput(
            f"{folder} holds no run that can be resumed (there is no {RECORD}); start "
            "one with simulate."
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{folder} holds no run that can be resumed: {damaged(path, error)}"
        ) from error
    for key, kind in _KEYS.items():
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
