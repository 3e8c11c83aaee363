"""A small run of one's own, described in a file."""

import textwrap

import pytest

CONFIG = """
[tokens]
law = "sphere"
count = 12
dimension = 3
seed = 1

[attention]
kind = "softmax"
beta = 4.0

[flow]
space = "sphere"

[solve]
depth = 3.0
save_every = 0.1
"""


@pytest.fixture
def config(tmp_path):
    """The file of a run: 31 saved depths on the sphere."""
    path = tmp_path / "run.toml"
    path.write_text(textwrap.dedent(CONFIG))
    return path
