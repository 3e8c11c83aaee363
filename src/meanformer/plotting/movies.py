"""Movies of tokens along depth, as GIF or MP4 files."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meanformer.errors import InvalidInput, as_integer, as_number, check
from meanformer.files import write_atomically
from meanformer.flows import AbstractProgress, Trajectory
from meanformer.flows.dynamics.recorder import NoProgress, ProgressBar
from meanformer.plotting import gifs, style
from meanformer.plotting.frames import Frame, usual_frames
from meanformer.plotting.token_paths import check_trajectory, paths_of, resample

SIZE = (4.8, 4.8)  # inches
SUFFIXES = (".gif", ".mp4")
LONGEST_SIDE = 2**16  # pixels; drawings and GIF files go no further
LARGEST_AREA = 2**26  # pixels, of four bytes
# No date, no version, no encoder: the same movie is the same file.
PLAIN_FILE = ("-fflags", "+bitexact", "-flags:v", "+bitexact", "-map_metadata", "-1")


Draw = Callable[[Any, Frame], Any]


def movie(
    trajectory: Trajectory,
    path: str | Path,
    *,
    draw: Draw | None = None,
    frames: int = 100,
    depths: Any = None,
    fps: float = 25,
    size: tuple[float, float] = SIZE,
    dpi: float = 100,
    progress: bool | AbstractProgress = False,
) -> Path:
    """Make a movie of tokens along depth.

    The file appears when it is complete, and the same arguments give the same bytes.

    Args:
        trajectory: tokens along depth, drawn between saved depths by `at`.
        path: the file to write; its suffix says which kind, `.gif` or `.mp4`, of which
            the second needs the program ffmpeg.
        draw: `draw(figure, frame)` draws a `Frame` on an empty figure. By default what
            suits the tokens: `CircleFrames`, `PlaneFrames`, `SphereFrames` or
            `SpaceFrames`.
        frames: how many, at equally spaced depths.
        depths: the depths of the frames instead; the saved ones, `trajectory.depths`,
            where these are far apart, as with `LongDepth`.
        fps: frames per second.
        size: width and height in inches.
        dpi: pixels per inch.
        progress: show a bar on standard error, or report to this object.

    Returns:
        The path.
    """
    path = Path(path)
    check_path(path)
    film = Film(trajectory, draw, frames, depths, fps, size, dpi)
    path.parent.mkdir(parents=True, exist_ok=True)  # fails now rather than at the end
    bar = _bar(progress)
    if path.suffix.lower() == ".gif":
        write_atomically(path, film.to_gif(bar))
    else:
        _write_mp4(film, path, bar)
    return path


def check_path(path: Path) -> None:
    """Raise unless a movie can be written to a file of this name."""
    check(
        path.suffix.lower() in SUFFIXES,
        f"{str(path)!r} ends in {path.suffix!r}; a movie is a .gif or a .mp4 file.",
    )
    check(
        path.suffix.lower() == ".gif" or has_ffmpeg(),
        "an .mp4 movie needs the program ffmpeg, which is not installed; install it, "
        "or choose a name that ends in .gif.",
    )


def has_ffmpeg() -> bool:
    """Whether MP4 files can be written here."""
    from matplotlib.animation import FFMpegWriter

    return FFMpegWriter.isAvailable()


class Film:
    """The frames of a movie, drawn one after the other on one figure."""

    def __init__(
        self,
        trajectory: Trajectory,
        draw: Draw | None,
        frames: int,
        depths: Any,
        fps: float,
        size: tuple[float, float],
        dpi: float,
    ):
        check_trajectory(trajectory)
        for name, value in (("fps", fps), ("dpi", dpi)):
            is_possible = 0 < as_number(name, value) < float("inf")
            check(is_possible, f"{name} is {value}; it must be positive and finite.")
        _check_size(size, dpi)
        self.paths = resample(trajectory, _frame_depths(trajectory, frames, depths))
        # Frames are few and between: the saved tokens tell whether they are round.
        self.draw = usual_frames(paths_of(trajectory)) if draw is None else draw
        self.fps, self.size, self.dpi = fps, size, dpi

    def __len__(self) -> int:
        return len(self.paths.depths)

    @contextmanager
    def figure(self) -> Iterator[Any]:
        """A figure without a window, in our style; empty again at the end."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        # A layout that follows the labels would let the picture tremble.
        with style.applied(), rc_context({"figure.constrained_layout.use": False}):
            figure = Figure(figsize=self.size, dpi=self.dpi)
            try:
                yield figure
            finally:
                figure.clear()

    def expose(self, figure: Any, index: int) -> None:
        """Draw one frame."""
        figure.clear()
        self.draw(figure, Frame(self.paths, index))

    def pictures(self, indices: Iterable[int], progress: AbstractProgress) -> Iterator:
        """Frames one after the other, as arrays of bytes, (height, width, 3)."""
        with self.figure() as figure, progress:
            for index in indices:
                self.expose(figure, index)
                yield _photograph(figure)
                progress.update(index + 1, len(self))

    def to_gif(self, progress: AbstractProgress) -> bytes:
        """The movie as a GIF file that repeats itself.

        Its colours are those of some frames: what stays still is then stored once.
        """
        gifs.check_rate(self.fps)
        some = gifs.spread(len(self))
        palette = gifs.choose_palette([*self.pictures(some, NoProgress())])
        images = [
            gifs.index_picture(picture, palette)
            for picture in self.pictures(range(len(self)), progress)
        ]
        return gifs.encode_gif(images, self.fps)

    def small_gif(self, largest: int) -> tuple[bytes, bytes]:
        """The movie as a GIF file of at most so many bytes, and its last frame as PNG.

        Drawn once, then made smaller; it holds all pictures in memory.
        """
        gifs.check_rate(self.fps)
        pictures = [*self.pictures(range(len(self)), NoProgress())]
        return gifs.small_gif(pictures, self.fps, largest)


def _check_size(size: Any, dpi: float) -> None:
    """Raise unless frames of this size have pixels, and not too many."""
    is_pair = np.shape(size) == (2,)
    sides = [as_number("a side of size", side) for side in size] if is_pair else []
    check(
        is_pair and min(sides) > 0 and max(sides) < np.inf,
        f"size is {size!r}; it must be a width and a height in inches, and both sides "
        "must be positive and finite.",
    )
    width, height = (int(side * dpi) for side in size)
    check(
        min(width, height) >= 1
        and max(width, height) <= LONGEST_SIDE
        and width * height <= LARGEST_AREA,
        f"size is {size} and dpi is {dpi}, which makes {width} x {height} pixels; each "
        f"side must have from 1 to {LONGEST_SIDE}, and all of it at most "
        f"{LARGEST_AREA}.",
    )


def _frame_depths(trajectory: Trajectory, frames: int, depths: Any) -> np.ndarray:
    if depths is None:
        count = as_integer("frames", frames, least=1)
        ends = np.asarray(trajectory.depths)[[0, -1]]
        return np.linspace(*ends, count, dtype=ends.dtype)
    depths = np.asarray(depths, float)
    check(
        depths.ndim == 1 and depths.size > 0,
        f"depths has shape {depths.shape}; it must be a list of at least one depth.",
    )
    return depths


def _photograph(figure: Any) -> np.ndarray:
    """The figure on white, as an array of bytes, (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_facecolor("white")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _write_mp4(film: Film, path: Path, progress: AbstractProgress) -> None:
    from subprocess import CalledProcessError

    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "movie.mp4"
        try:
            _encode(film, whole, progress)
        except (CalledProcessError, BrokenPipeError) as error:
            raise InvalidInput(
                f"ffmpeg could not write {path}: {_last_words(error)}; a .gif needs no "
                "ffmpeg."
            ) from error
        write_atomically(path, whole.read_bytes())


def _encode(film: Film, path: Path, progress: AbstractProgress) -> None:
    from matplotlib.animation import FFMpegWriter

    writer = FFMpegWriter(fps=film.fps, extra_args=list(PLAIN_FILE))
    with film.figure() as figure, progress, writer.saving(figure, path, film.dpi):
        for index in range(len(film)):
            film.expose(figure, index)
            writer.grab_frame(facecolor="white")
            progress.update(index + 1, len(film))


def _last_words(error: Any) -> str:
    lines = str(vars(error).get("stderr") or error).strip().splitlines()
    return lines[-1].rstrip(".") if lines else "it said nothing"


def _bar(progress: bool | AbstractProgress) -> AbstractProgress:
    if isinstance(progress, AbstractProgress):
        return progress
    return ProgressBar("drawing") if progress else NoProgress()
