"""Toy experiments and a cache of their own for the tests of the framework."""

from pathlib import Path

import pytest

TOYS = Path(__file__).parent / "toys"


@pytest.fixture(autouse=True)
def toys(monkeypatch, tmp_path_factory):
    """Make the toy experiments known, and keep caches out of the home directory."""
    monkeypatch.setenv("MEANFORMER_EXPERIMENTS", str(TOYS))
    monkeypatch.setenv("MEANFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))
    return TOYS
