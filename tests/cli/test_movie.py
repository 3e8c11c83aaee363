"""`meanformer movie`: stored runs become files, mistakes become sentences."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import meanformer as mf
from meanformer.cli import app


def call(*words):
    """Run a command line in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def solved(dimension, folder):
    """A run of three tokens, stored."""
    points = jnp.asarray(np.random.default_rng(0).normal(size=(3, dimension)))
    flow = mf.Flow(mf.identity_attention("softmax", dimension))
    mf.solve(
        flow, mf.TokenCloud(points), 0.5, save=3, store=mf.storage.RunStore(folder)
    )
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return solved(2, tmp_path_factory.mktemp("flat") / "run")


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return solved(5, tmp_path_factory.mktemp("deep") / "run")


def frames_of(path):
    return Image.open(io.BytesIO(path.read_bytes())).n_frames


@pytest.mark.slow
def test_a_stored_run_becomes_a_movie(stored, tmp_path):
    out = tmp_path / "new" / "a.gif"
    result = call("movie", stored, "--out", out, "--frames", 4, "--fps", 8, "--dpi", 30)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"4 frames, 0.5 s: {out}\n"
    assert result.stderr == ""
    assert frames_of(out) == 4


def test_saved_depths_can_be_the_frames(stored, tmp_path):
    out = tmp_path / "a.gif"
    assert call("movie", stored, "--out", out, "--saved", "--dpi", 30).exit_code == 0
    assert frames_of(out) == len(mf.open_run(stored))


def test_coordinates_of_many_dimensions_are_chosen(deep, tmp_path):
    out = tmp_path / "a.gif"
    options = ("--out", out, "--frames", 2, "--dpi", 30)
    assert call("movie", deep, *options, "--coordinates", "5,1,2").exit_code == 0
    assert frames_of(out) == 2


def test_mistakes_end_with_code_two_and_one_sentence(stored, deep, tmp_path):
    gif = tmp_path / "a.gif"
    for words, sentence in (
        ((tmp_path / "no", "--out", gif), "does not exist"),
        ((stored, "--out", tmp_path / "a.avi"), "a movie is a .gif or a .mp4 file"),
        ((stored, "--out", gif, "--frames", 0), "frames"),
        ((stored, "--out", gif, "--fps", -1), "fps is -1.0"),
        ((stored, "--out", gif, "--fps", 99), "a .gif shows at most 50"),
        ((stored, "--out", gif, "--dpi", 0), "dpi is 0.0"),
        ((stored, "--out", gif, "--dpi", 0.1), "0 x 0 pixels"),
        ((stored, "--out", gif, "--dpi", 20000), "96000 x 96000 pixels"),
        ((deep, "--out", gif, "--coordinates", "1,1"), "each can be shown once"),
        ((deep, "--out", gif), "the tokens have dimension 5"),
        ((deep, "--out", gif, "--coordinates", "1,9"), "from 1 to 5"),
        ((deep, "--out", gif, "--coordinates", "1"), "dimension 1"),
        ((deep, "--out", gif, "--coordinates", "x,y"), "such as 1,2 or 1,2,3"),
        ((stored,), "--out"),
    ):
        result = call("movie", *words)
        assert result.exit_code == 2, words
        assert sentence in result.stderr
        assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_ffmpeg_the_sentence_says_what_to_do(stored, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = call("movie", stored, "--out", tmp_path / "a.mp4")
    assert result.exit_code == 2
    assert "install it, or choose a name that ends in .gif" in result.stderr


def test_gaussians_are_refused(tmp_path):
    mu = mf.Gaussian(jnp.zeros(2), jnp.eye(2))
    flow = mf.Flow(mf.identity_attention("softmax", 2))
    mf.run_layers(flow, mu, 2).save(tmp_path / "gaussian")
    result = call("movie", tmp_path / "gaussian", "--out", tmp_path / "a.gif")
    assert result.exit_code == 2
    assert "holds Gaussians along depth; a movie shows tokens" in result.stderr


def test_a_place_that_cannot_be_written_ends_with_code_one(stored, tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "a.gif"
    result = call("movie", stored, "--out", out, "--frames", 2, "--dpi", 30)
    assert result.exit_code == 1
    assert f"{out} could not be written" in result.stderr
    assert result.stderr.count("\n") == 1


def test_help_tells_the_options():
    result = call("movie", "--help")
    assert result.exit_code == 0
    for word in ("--out", "--frames", "--fps", "--coordinates", "--saved"):
        assert word in result.stdout
