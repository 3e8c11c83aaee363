"""Movies of experiments: made when asked for, small, and part of the page."""

import base64
import dataclasses
import io
import pickle
import re

import numpy as np
import pytest
from PIL import Image

from meanformer.errors import InvalidInput
from meanformer.experiments import find, run
from meanformer.experiments.framework import atlas as atlases
from meanformer.experiments.framework import filming
from meanformer.experiments.framework.records import attempt, perform
from meanformer.experiments.framework.report import render
from meanformer.experiments.framework.settings import movies_of
from meanformer.experiments.framework.workers import Finished, run_in_parallel


@pytest.fixture
def record():
    """A run that was asked for its movie."""
    return run("toy-moves", movie="gif")


def page(record):
    toy = find(record.experiment)
    atlas = atlases.blank([toy], "meanformer run toy-moves")
    return render(dataclasses.replace(atlas, records={toy.name: record}))


def frames_of(gif):
    return Image.open(io.BytesIO(gif)).n_frames


@pytest.mark.slow
def test_a_quick_run_makes_no_movie_and_a_full_one_does():
    assert run("toy-moves").reels == ()
    (reel,) = run("toy-moves", "full").reels
    assert frames_of(reel.gif) == 4
    assert reel.mp4 == b""


def test_an_experiment_without_the_setting_follows_its_profile():
    settings = find("toy-holds").settings()
    assert movies_of(settings, "quick") == "none"
    assert movies_of(settings, "full") == "gif"
    assert movies_of(find("toy-moves").settings("full", movie="none"), "full") == "none"


def test_a_movie_has_its_last_frame_as_a_still(record):
    (reel,) = record.reels
    moving = Image.open(io.BytesIO(reel.gif))
    moving.seek(3)
    still = Image.open(io.BytesIO(reel.still))
    assert still.size == moving.size == (90, 90)
    assert reel.width == 90
    difference = np.asarray(still.convert("RGB"), int) - moving.convert("RGB")
    assert np.abs(difference).mean() < 2
    assert reel.alt == reel.caption == "Two tokens $x_i$ < each other."


def test_a_record_with_a_movie_can_travel_between_processes(record):
    assert pickle.loads(pickle.dumps(record)).reels == record.reels


@pytest.mark.slow
def test_a_worker_sends_its_movies():
    events = list(run_in_parallel([find("toy-moves")], "full", jobs=1))
    (record,) = [e.record for e in events if isinstance(e, Finished)]
    assert [frames_of(reel.gif) for reel in record.reels] == [4]


def test_movies_stand_next_to_the_figures(record, tmp_path):
    video = dataclasses.replace(record.reels[0], mp4=b"video")
    atlases.write_figures(
        dataclasses.replace(record, reels=(record.reels[0], video)), tmp_path
    )
    found = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert found == {
        "toy-moves-movie-1.gif": record.reels[0].gif,
        "toy-moves-movie-2.gif": record.reels[0].gif,
        "toy-moves-movie-2.mp4": b"video",
    }


def test_the_page_holds_the_movie_itself(record):
    text, (reel,) = page(record), record.reels
    (source,) = re.findall(r'<img src="data:image/gif;base64,([^"]+)"', text)
    assert base64.b64decode(source) == reel.gif
    assert 'alt="Two tokens xᵢ &lt; each other."' in text
    assert "<figcaption>Two tokens <math" in text
    assert "&lt; each other." in text


def test_readers_who_object_to_motion_see_a_still_and_a_link(record):
    text, (reel,) = page(record), record.reels
    pattern = (
        r'<picture><source srcset="data:image/png;base64,([^"]+)" media="([^"]+)">'
    )
    ((still, media),) = re.findall(pattern, text)
    assert base64.b64decode(still) == reel.still
    assert "(prefers-reduced-motion: reduce)" in media
    assert "print" in media
    assert 'href="figures/toy-moves-movie-1.gif" class="play"' in text
    sheet = text[: text.index("</style>")]
    assert ".play { display: none; }" in sheet
    assert re.search(r"reduced-motion: reduce\) {[^}]+}\s*.play { display: inl", sheet)


def test_numbers_for_scripts_have_no_movie(record):
    assert set(record.to_json()) == {
        "experiment",
        "parameters",
        "holds",
        "claims",
        "seconds",
    }
    assert record.parameters["movie"] == "gif"


def test_a_large_movie_is_made_small(monkeypatch, record):
    limit = len(record.reels[0].gif) - 1
    monkeypatch.setattr(filming, "LARGEST_GIF", limit)
    (reel,) = run("toy-moves", movie="gif").reels
    assert len(reel.gif) <= limit
    assert reel.width < 90


def test_a_video_that_cannot_be_made_is_refused_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    def measure(parameters, *, progress):
        raise AssertionError("it should not start")

    toy = dataclasses.replace(find("toy-moves"), run=measure)
    settings = toy.settings(movie="mp4")
    with pytest.raises(InvalidInput, match="needs the program ffmpeg"):
        perform(toy, settings)
    with pytest.raises(InvalidInput, match="needs the program ffmpeg"):
        attempt(toy, settings, is_users_choice=True)


def test_a_video_is_made_besides_the_picture(monkeypatch):
    monkeypatch.setattr("meanformer.plotting.movies.has_ffmpeg", lambda: True)
    seen = {}

    def write(film, path, progress):
        seen.update(frames=len(film), dpi=film.dpi)
        path.write_bytes(b"video")

    monkeypatch.setattr("meanformer.plotting.movies._write_mp4", write)
    (reel,) = run("toy-moves", movie="mp4").reels
    assert reel.mp4 == b"video"
    assert frames_of(reel.gif) == seen["frames"] == 4


def test_another_kind_of_movie_is_refused():
    with pytest.raises(InvalidInput, match="it must be 'none' or 'gif' or 'mp4'"):
        find("toy-moves").settings(movie="avi")
