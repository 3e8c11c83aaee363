"""Movies have the frames asked for, and are whole files or none."""

import io
import os
import sys

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import meanformer as mf
from meanformer.flows import AbstractProgress
from meanformer.flows.status import Status
from meanformer.plotting import (
    CircleFrames,
    Frame,
    PlaneFrames,
    SpaceFrames,
    SphereFrames,
    movie,
    style,
)
from meanformer.plotting.frames import usual_frames
from meanformer.plotting.movies import Film, small_gif
from meanformer.plotting.token_paths import TokenPaths, paths_of

FAKE_FFMPEG = """#!{python}
import sys
pixels = sys.stdin.buffer.read()
open(sys.argv[-1], "wb").write(" ".join(sys.argv[1:]).encode() + b"|%d" % len(pixels))
sys.exit({code})
"""


def walk(dimension, *, is_round=False, layers=4):
    points = np.random.default_rng(7).normal(size=(5, dimension))
    if is_round:
        points /= np.linalg.norm(points, axis=1, keepdims=True)
    flow = mf.Flow(
        mf.identity_attention("softmax", dimension, 2.0),
        space=mf.Sphere() if is_round else mf.Euclidean(),
    )
    return mf.run_layers(flow, mf.TokenCloud(jnp.asarray(points)), layers)


@pytest.fixture(scope="module")
def flat():
    return walk(2)


def small(**options):
    return {"frames": 4, "dpi": 30} | options


def opened(path):
    """An image that keeps no file open."""
    return Image.open(io.BytesIO(path.read_bytes()))


def mark_depth(figure, frame):
    """A bar as long as the movie has come, so that no two frames are alike."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.barh(0, frame.share + 0.05, color=style.BLUE)
    axes.set(xlim=(0, 1.1))


def test_a_gif_has_the_frames_asked_for_and_repeats(flat, tmp_path):
    path = movie(flat, tmp_path / "a.gif", draw=mark_depth, frames=7, dpi=30, fps=20)
    assert path.read_bytes()[:6] == b"GIF89a"
    image = opened(path)
    assert (image.n_frames, image.size, image.info["loop"]) == (7, (144, 144), 0)
    for index in range(7):
        image.seek(index)
        assert image.info["duration"] == 50
    assert [p.name for p in tmp_path.iterdir()] == ["a.gif"]


@pytest.mark.slow
def test_pauses_of_whole_hundredths_add_up(flat, tmp_path):
    options = small(draw=mark_depth, frames=30, fps=30, dpi=15)
    image = opened(movie(flat, tmp_path / "a.gif", **options))
    pauses = []
    for index in range(image.n_frames):
        image.seek(index)
        pauses.append(image.info["duration"])
    assert sum(pauses) == 1000
    assert set(pauses) == {30, 40}


def test_frames_are_equally_spaced_and_interpolated(flat, tmp_path):
    seen = []

    def draw(figure, frame):
        seen.append((frame.index, frame.depth, np.asarray(frame.cloud.points)))

    movie(flat, tmp_path / "a.gif", draw=draw, frames=5, dpi=20)
    (indices, depths, points) = zip(*seen[-5:], strict=True)
    assert indices == (0, 1, 2, 3, 4)
    np.testing.assert_allclose(depths, np.linspace(0, 1, 5))
    for depth, shown in zip(depths, points, strict=True):
        np.testing.assert_allclose(shown, flat.at(depth).points)


def test_depths_can_be_chosen(flat, tmp_path):
    seen = []
    draw = lambda figure, frame: seen.append(frame.depth)  # noqa: E731
    movie(flat, tmp_path / "a.gif", draw=draw, depths=flat.depths[1:], dpi=20)
    np.testing.assert_allclose(seen[-4:], flat.depths[1:])


@pytest.mark.slow
def test_the_same_movie_is_the_same_file(flat, tmp_path):
    first = movie(flat, tmp_path / "a.gif", **small()).read_bytes()
    assert movie(flat, tmp_path / "b.gif", **small()).read_bytes() == first


@pytest.mark.parametrize(
    ("dimension", "is_round", "kind"),
    [
        (2, False, PlaneFrames),
        (2, True, CircleFrames),
        (3, False, SpaceFrames),
        (3, True, SphereFrames),
    ],
)
def test_frames_suit_the_tokens(dimension, is_round, kind):
    paths = paths_of(walk(dimension, is_round=is_round))
    assert type(usual_frames(paths)) is kind
    figure = Figure()
    usual_frames(paths)(figure, Frame(paths, 2))
    (axes,) = figure.axes
    discs = axes.collections[-1]
    if dimension == 2:
        np.testing.assert_allclose(discs.get_offsets(), paths.points[2])
    else:
        assert axes.name == "3d"
    assert figure.texts[0].get_text() == "depth $t = 0.5$"


def test_the_plane_shows_tails_hull_lines_and_what_is_added():
    paths = paths_of(walk(2))
    seen = []
    frames = PlaneFrames(
        tail=2,
        hull=True,
        hyperplanes=([1.0, 0.0], [float(paths.points[..., 0].mean())]),
        decorate=lambda axes, frame: seen.append(frame.index),
    )
    figure = Figure()
    frames(figure, Frame(paths, 3))
    (axes,) = figure.axes
    tails, discs, hull = axes.collections
    assert len(tails.get_segments()) == 2 * 5
    np.testing.assert_allclose(discs.get_offsets(), paths.points[3])
    corners = hull.get_paths()[0].vertices
    assert np.isin(corners.round(9), paths.points[3].round(9)).all()
    assert len(axes.lines) == 1
    assert seen == [3]


@pytest.mark.parametrize("kind", [PlaneFrames, SpaceFrames])
def test_axes_stand_still_or_follow_the_tokens(kind):
    paths = paths_of(walk(2 if kind is PlaneFrames else 3))

    def limits(frames, index):
        figure = Figure()
        frames(figure, Frame(paths, index))
        return figure.axes[0].get_xlim()

    assert limits(kind(), 0) == limits(kind(), 4)
    assert limits(kind(follows=True), 0) != limits(kind(follows=True), 4)
    low, high = limits(kind(), 0)
    assert low < paths.points[..., 0].min() < paths.points[..., 0].max() < high


@pytest.mark.parametrize("kind", [SpaceFrames, SphereFrames])
def test_the_eye_turns_slowly(kind):
    paths = paths_of(walk(3, is_round=kind is SphereFrames))
    turns = []
    for index in range(5):
        figure = Figure()
        kind(view=(10.0, 20.0), turn=40.0)(figure, Frame(paths, index))
        turns.append((figure.axes[0].elev, figure.axes[0].azim))
    np.testing.assert_allclose(turns, [(10, 20 + 10 * index) for index in range(5)])


def test_space_has_planes_and_a_hull():
    paths = paths_of(walk(3))
    figure = Figure()
    SpaceFrames(hull=True, hyperplanes=([0.0, 0, 1], [0.0]), tail=1)(
        figure, Frame(paths, 1)
    )
    names = [type(one).__name__ for one in figure.axes[0].collections]
    assert sorted(names) == [
        "Line3DCollection",
        "Path3DCollection",
        "Poly3DCollection",
        "Poly3DCollection",
    ]


def test_white_and_our_colours_come_through_exactly(flat, tmp_path):
    def draw(figure, frame):
        figure.add_artist(_square(frame))

    def _square(frame):
        from matplotlib.patches import Rectangle

        colour = style.PALETTE[frame.index % len(style.PALETTE)]
        return Rectangle((0.25, 0.25), 0.5, 0.5, facecolor=colour)

    options = {"frames": len(style.PALETTE), "dpi": 20}
    image = opened(movie(flat, tmp_path / "a.gif", draw=draw, **options))
    for index, colour in enumerate(style.PALETTE):
        image.seek(index)
        pixels = np.asarray(image.convert("RGB"))
        assert tuple(pixels[0, 0]) == (255, 255, 255)
        assert "#%02x%02x%02x" % tuple(pixels[48, 48]) == colour  # noqa: UP031


@pytest.mark.slow
def test_a_gif_is_made_as_small_as_asked_for():
    noise = np.random.default_rng(0).integers(0, 256, (12, 64, 64, 3), np.uint8)
    noise = list(noise)
    free, _ = small_gif(noise, 20, 10**9)
    assert Image.open(io.BytesIO(free)).size == (64, 64)
    small, still = small_gif(noise, 20, len(free) // 2)
    assert len(small) <= len(free) // 2
    image = Image.open(io.BytesIO(small))
    assert image.n_frames == 12
    assert image.size == Image.open(io.BytesIO(still)).size < (64, 64)
    fewer, _ = small_gif(noise, 20, len(free) // 5)
    image = Image.open(io.BytesIO(fewer))
    assert (image.n_frames, image.size) == (6, (32, 32))
    assert image.info["duration"] == 100


class Listener(AbstractProgress):
    def __init__(self):
        self.heard = []

    def update(self, done, total):
        self.heard.append((done, total))


@pytest.mark.slow
def test_progress_is_told(flat, tmp_path, capsys):
    listener = Listener()
    movie(flat, tmp_path / "a.gif", progress=listener, **small())
    assert listener.heard == [(1, 4), (2, 4), (3, 4), (4, 4)]
    movie(flat, tmp_path / "a.gif", progress=True, **small())
    assert capsys.readouterr().err.strip() == "", "no bar where there is no terminal"


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("a.avi", {}, "ends in '.avi'; a movie is a .gif or a .mp4 file"),
        ("a", {}, "ends in ''"),
        ("a.gif", {"frames": 0}, "frames is 0; it must be 1 or more"),
        ("a.gif", {"fps": 0}, "fps is 0; it must be positive"),
        ("a.gif", {"fps": 60}, "fps is 60; a .gif shows at most 50"),
        ("a.gif", {"dpi": -1}, "dpi is -1; it must be positive"),
        ("a.gif", {"size": (0, 1)}, "both sides must be positive"),
        ("a.gif", {"size": (3, np.inf)}, "both sides must be positive and finite"),
        ("a.gif", {"dpi": 0.1}, "which makes 0 x 0 pixels; each side must have from 1"),
        ("a.gif", {"dpi": 20000}, "96000 x 96000 pixels; .* at most 67108864"),
        ("a.gif", {"dpi": 3000}, "14400 x 14400 pixels; .* at most 67108864"),
        ("a.gif", {"depths": [0.0, 7.0]}, r"depth is 7.0; the trajectory covers \[0"),
        ("a.gif", {"depths": []}, "at least one depth"),
        ("a.gif", {"draw": PlaneFrames(tail=-1)}, "tail is -1; it must be 0 or more"),
        ("a.gif", {"draw": PlaneFrames(labels=[0])}, "1 labels for 5 tokens"),
        ("a.gif", {"draw": SpaceFrames()}, "dimension 2; this figure is of dimension"),
    ],
)
def test_mistakes_are_told_and_leave_no_file(flat, tmp_path, name, options, sentence):
    with pytest.raises(mf.InvalidInput, match=sentence):
        movie(flat, tmp_path / name, **small(**options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": "a"}, "size is 'a'; it must be a width and a height"),
        ({"size": (3,)}, r"size is \(3,\); it must be a width and a height"),
        ({"size": (3, "b")}, "a side of size is 'b'; it must be a number"),
        ({"fps": "a"}, "fps is 'a'; it must be a number"),
        ({"dpi": None}, "dpi is None; it must be a number"),
    ],
)
def test_what_is_no_number_is_told(flat, tmp_path, options, sentence):
    with pytest.raises(mf.InvalidInput, match=sentence):
        movie(flat, tmp_path / "a.gif", **options)


@pytest.mark.usefixtures("untyped")
def test_a_cloud_is_no_movie(flat, tmp_path):
    with pytest.raises(mf.InvalidInput, match="TokenCloud has no tokens along depth"):
        movie(flat.cloud(0), tmp_path / "a.gif")


def test_tokens_between_few_saved_depths_stay_on_the_sphere():
    depths = jnp.array([0.0, 1.5, 3.0])
    zero, cosine, sine = 0 * depths, jnp.cos(depths), jnp.sin(depths)
    path = mf.Trajectory(
        depths,
        jnp.stack([cosine, sine, zero], axis=1)[:, None],
        jnp.stack([-sine, cosine, zero], axis=1)[:, None],
        jnp.ones(1),
        None,
        None,
        Status.reached,
        jnp.arange(3),
        jnp.zeros(3, int),
    )
    assert np.linalg.norm(path.at(0.75).points) < 0.99, "it leaves the sphere"
    film = Film(path, None, 21, None, 25, (4, 4), 50)
    assert isinstance(film.draw, SphereFrames)
    np.testing.assert_allclose(np.linalg.norm(film.paths.points, axis=2), 1.0)


@pytest.mark.slow
def test_movies_of_default_solves_are_round():
    cloud = mf.TokenCloud(mf.UniformSphere(3).sample(8, key=jr.key(0)))
    flow = mf.Flow(mf.identity_attention("softmax", 3), space=mf.Sphere())
    path = mf.solve(flow, cloud, 10.0)
    between = np.linalg.norm(path.at(0.5).points, axis=1)
    assert between.min() < 0.999, "the interpolation leaves the sphere"
    film = Film(path, None, 21, None, 25, (4, 4), 50)
    assert isinstance(film.draw, SphereFrames)
    np.testing.assert_allclose(np.linalg.norm(film.paths.points, axis=2), 1.0)


def test_tokens_that_leave_the_sphere_are_drawn_in_space():
    points = np.random.default_rng(7).normal(size=(5, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    path = mf.run_layers(
        mf.Flow(mf.identity_attention("softmax", 3)), mf.TokenCloud(points), 3
    )
    film = Film(path, None, 1, None, 25, (4, 4), 50)  # the first depth only
    assert isinstance(film.draw, SpaceFrames)


@pytest.mark.parametrize(
    ("depths", "texts"),
    [
        ([0.0, 0.5, 1.0], ["0.0", "0.5", "1.0"]),
        ([0.0, 5e-5, 1e-4], ["0.00000", "0.00005", "0.00010"]),
        ([0.0, 1e-9], ["0.000000", r"1.00 \cdot 10^{-9}"]),
        ([2e-4, 3.0, 1e6], [r"2.00 \cdot 10^{-4}", "3", "1000000"]),
        ([1e-4, 1e-3, 1.0], [r"1.00 \cdot 10^{-4}", "0.001", "1.000"]),
        ([0.0], ["0"]),
    ],
)
def test_small_depths_keep_their_digits(depths, texts):
    paths = TokenPaths(np.array(depths), np.ones((len(depths), 1, 2)), np.ones(1))
    for index, text in enumerate(texts):
        figure = Figure()
        PlaneFrames()(figure, Frame(paths, index))
        assert figure.texts[0].get_text() == f"depth $t = {text}$"


def test_the_old_name_of_the_paths_of_a_frame_warns():
    frame = Frame(paths_of(walk(2)), 0)
    with pytest.warns(DeprecationWarning, match="Frame.paths"):
        assert frame.strip is frame.paths


@pytest.mark.slow
def test_more_dimensions_than_three_need_a_function(tmp_path):
    path = walk(4)
    with pytest.raises(mf.InvalidInput, match="dimension 4; .*pass a function draw"):
        movie(path, tmp_path / "a.gif", **small())
    assert movie(path, tmp_path / "a.gif", **small(draw=mark_depth)).exists()


def test_an_interrupted_movie_leaves_the_old_one(flat, tmp_path):
    path = movie(flat, tmp_path / "a.gif", **small())
    before = path.read_bytes()

    def draw(figure, frame):
        if frame.index == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        movie(flat, path, draw=draw, frames=4, dpi=20)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.gif"]


@pytest.fixture
def ffmpeg(tmp_path, monkeypatch):
    """A program of that name that writes what it was given."""

    def install(code=0):
        folder = tmp_path / "programs"
        folder.mkdir()
        program = folder / "ffmpeg"
        program.write_text(FAKE_FFMPEG.format(python=sys.executable, code=code))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return install


def test_without_ffmpeg_an_mp4_is_refused_with_advice(flat, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(mf.InvalidInput, match="install it, or .* ends in .gif"):
        movie(flat, tmp_path / "a.mp4", **small())
    assert list(tmp_path.iterdir()) == []


def test_ffmpeg_gets_every_frame(flat, tmp_path, ffmpeg):
    ffmpeg()
    listener = Listener()
    path = movie(flat, tmp_path / "new" / "a.mp4", progress=listener, **small(fps=60))
    words, _, count = path.read_bytes().decode().rpartition("|")
    assert int(count) == 4 * 144 * 144 * 4
    assert "-framerate 60" in words
    assert "144x144" in words
    assert "+bitexact" in words
    assert listener.heard[-1] == (4, 4)
    assert [p.name for p in path.parent.iterdir()] == ["a.mp4"]


def test_a_failing_ffmpeg_leaves_no_file(flat, tmp_path, ffmpeg, caplog):
    ffmpeg(code=3)
    with pytest.raises(mf.InvalidInput, match="ffmpeg could not write .*a.mp4"):
        movie(flat, tmp_path / "a.mp4", **small())
    assert not (tmp_path / "a.mp4").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["programs"]


@pytest.mark.slow
def test_drawing_changes_no_setting_and_keeps_no_figure(flat, tmp_path):
    import matplotlib
    from matplotlib import pyplot

    assert pyplot.get_backend()  # chosen on first use
    before = matplotlib.rcParams.copy()
    film = Film(flat, None, 3, None, 25, (2, 2), 30)
    with film.figure() as figure:
        film.expose(figure, 0)
        assert len(figure.axes) == 1
    assert figure.axes == []
    movie(flat, tmp_path / "a.gif", **small())
    assert matplotlib.rcParams == before
    assert pyplot.get_fignums() == []
