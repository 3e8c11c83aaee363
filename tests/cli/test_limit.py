"""`meanformer limit`: a file with tokens and matrices, and what becomes of them."""

import json

import pytest
from typer.testing import CliRunner

from meanformer.cli import app

TOKENS = """
[tokens]
points = [[1, 0.2], [-0.6, 0.8], [0.3, -1.1], [0.1, 0.15], [-0.4, -0.3], [0.7, 0.6]]
"""


def call(*words):
    """Run a command line in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def written(tmp_path):
    """Write a file from tokens and a value matrix."""

    def write(value, more=""):
        path = tmp_path / "config.toml"
        path.write_text(f"{TOKENS}\n[attention]\nvalue = {value}\n{more}")
        return path

    return write


@pytest.mark.slow
def test_matrices_and_tokens_agree(written):
    result = call("limit", written("[[0.647, 0.819], [0.612, 0.633]]"), "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["predicted"] == told["found"]["geometry"] == "hyperplanes"
    assert told["agrees"] is True
    assert told["found"]["leaders"] == [2, 5]
    assert len(told["found"]["offsets"]) == 2


def test_the_prediction_needs_no_flow(written):
    path = written("[[0.0, 1.0], [-1.0, 0.0]]", "[solve]\ndepth = 3.0")
    result = call("limit", path, "--predict")
    assert result.exit_code == 0
    assert "tokens rotate" in result.stdout


@pytest.mark.slow
def test_what_is_open_is_no_disagreement(written):
    path = written("[[0.647, 0.819], [0.612, 0.633]]")
    result = call("limit", path, "--depth", 1.0, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["found"]["verdict"] == "not reached"
    assert told["agrees"] is None


def test_a_mistake_is_one_sentence(tmp_path, written):
    result = call("limit", tmp_path / "nothing.toml")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
    path = written('"identity"', 'kind = "linear"')
    result = call("limit", path, "--predict")
    assert result.exit_code == 0
    assert "Linear" in result.stdout
    for table in ('space = "sphere"', 'normalisation = "pre"'):
        result = call("limit", written('"identity"', f"[flow]\n{table}"), "--predict")
        assert result.exit_code == 2
        assert "limits are" in result.stderr
    heads = tmp_path / "heads.toml"
    heads.write_text(f"{TOKENS}\n[[attention.heads]]\n[[attention.heads]]\nvalue = 2.0")
    result = call("limit", heads)
    assert result.exit_code == 2
    assert "of several heads give one" in result.stderr


def test_the_limit_of_a_gaussian_is_refused_for_want_of_tokens(tmp_path):
    path = tmp_path / "gaussian.toml"
    path.write_text("[gaussian]\nmean = [0.0]\ncovariance = [[1.0]]\n[attention]\n")
    result = call("limit", path)
    assert result.exit_code == 2
    assert "limit follows tokens; the file must have [tokens]" in result.stderr
