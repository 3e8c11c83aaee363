"""Movies of tokens along depth, as GIF or MP4 files."""

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import numpy as np

from meanformer.errors import InvalidInput, as_integer, as_number, check
from meanformer.files import write_atomically
from meanformer.flows import AbstractProgress, Trajectory
from meanformer.flows.dynamics.recorder import NoProgress, ProgressBar, bar_for
from meanformer.plotting import style
from meanformer.plotting.frames import Frame, usual_frames
from meanformer.plotting.token_paths import check_trajectory, paths_of, resample

SIZE = (4.8, 4.8)  # inches
SUFFIXES = (".gif", ".mp4")
POSITIVE = "positive and finite"
BOTH_SIDES = "a number; both sides must be positive and finite"
LONGEST_SIDE = 2**16  # pixels; drawings and GIF files go no further
LARGEST_AREA = 2**26  # pixels, of four bytes
# No date, no version, no encoder: the same movie is the same file.
PLAIN_FILE = ("-fflags", "+bitexact", "-flags:v", "+bitexact", "-map_metadata", "-1")
# A GIF file has few colours, chosen once for all frames; each pixel has the nearest.
COLOURS = 256
EXACT = 16  # the most common colours, which are kept as they are
SAMPLES = 7  # frames that a palette is taken from
SMALLEST = 0.5  # of the size drawn
FASTEST = 50  # frames a second; viewers slow down what is faster

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
    bar = bar_for(ProgressBar("drawing") if progress is True else progress)
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
            as_number(name, value)
            as_number(name, value, POSITIVE, above=0, below=np.inf)
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
        _check_rate(self.fps)
        some = spread(len(self))
        palette = choose_palette([*self.pictures(some, NoProgress())])
        images = [
            index_picture(picture, palette)
            for picture in self.pictures(range(len(self)), progress)
        ]
        return encode_gif(images, self.fps)

    def small_gif(self, largest: int) -> tuple[bytes, bytes]:
        """The movie as a GIF file of at most so many bytes, and its last frame as PNG.

        Drawn once, then made smaller; it holds all pictures in memory.
        """
        _check_rate(self.fps)
        pictures = [*self.pictures(range(len(self)), NoProgress())]
        return small_gif(pictures, self.fps, largest)


def _check_size(size: Any, dpi: float) -> None:
    """Raise unless frames of this size have pixels, and not too many."""
    check(
        np.shape(size) == (2,),
        f"size is {size!r}; it must be a width and a height in inches.",
    )
    for side in size:
        as_number("a side of size", side, BOTH_SIDES, above=0, below=np.inf)
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
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "movie.mp4"
        try:
            _encode(film, whole, progress)
        except (CalledProcessError, BrokenPipeError) as error:
            said = str(vars(error).get("stderr") or error).strip() or "it said nothing"
            last = said.splitlines()[-1].rstrip(".")
            raise InvalidInput(
                f"ffmpeg could not write {path}: {last}; a .gif needs no ffmpeg."
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


def _check_rate(fps: float) -> None:
    """Raise unless so many frames a second can be shown."""
    check(fps <= FASTEST, f"fps is {fps}; a .gif shows at most {FASTEST}.")


def choose_palette(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Choose 256 colours: the most common, those of our figures, and a cover of all."""
    from matplotlib.colors import to_rgb
    from PIL import Image

    mosaic = Image.fromarray(np.concatenate(pictures))
    counted = sorted(mosaic.getcolors(mosaic.width * mosaic.height), reverse=True)
    common = [colour for _, colour in counted[:EXACT]]
    own = 255 * np.array([to_rgb(colour) for colour in (style.INK, *style.PALETTE)])
    kept = np.concatenate([common, np.round(own)]).astype(np.uint8)
    rest = mosaic.quantize(COLOURS - len(kept), method=Image.Quantize.MAXCOVERAGE)
    others = np.array(rest.getpalette(), np.uint8).reshape(-1, 3)
    return np.concatenate([kept, others])[:COLOURS]


def index_picture(picture: np.ndarray, palette: np.ndarray) -> Any:
    """A picture in the colours of a palette, the nearest for each pixel."""
    from PIL import Image
    from scipy.spatial import KDTree

    # Four bytes are one whole number, which sorts fast.
    pixels = np.asarray(Image.fromarray(picture).convert("RGBA")).view(np.uint32)
    found, places = np.unique(pixels[..., 0], return_inverse=True)
    colours = found.view(np.uint8).reshape(-1, 4)[:, :3]
    nearest = np.asarray(KDTree(palette).query(colours)[1], np.uint8)
    image = Image.fromarray(nearest[places].reshape(picture.shape[:2]))
    image.putpalette(palette.tobytes())
    return image


def encode_gif(images: Sequence[Any], fps: float) -> bytes:
    """A GIF file that repeats itself; it holds no date, and pauses of whole 10 ms."""
    ends = np.round(100 * np.arange(len(images) + 1) / fps)
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        format="gif",
        save_all=True,
        append_images=images[1:],
        duration=[int(10 * pause) for pause in np.diff(ends)],
        loop=0,
        optimize=False,
    )
    return buffer.getvalue()


def small_gif(
    pictures: Sequence[np.ndarray], fps: float, largest: int
) -> tuple[bytes, bytes]:
    """A GIF file of at most so many bytes, and its last frame as a PNG file.

    Pictures are made smaller until it fits; below half of their size every second one
    is left out instead. The size of a file grows with the area, which gives the next
    guess.
    """
    from PIL import Image

    scale, stride = 1.0, 1
    while True:
        shown = [_shrunk(one, scale) for one in pictures[::-stride]][::-1]
        palette = choose_palette([shown[index] for index in spread(len(shown))])
        images = [index_picture(one, palette) for one in shown]
        gif = encode_gif(images, fps / stride)
        if len(gif) <= largest or len(shown) == 1:
            still = io.BytesIO()
            Image.fromarray(shown[-1]).save(still, format="png", optimize=True)
            return gif, still.getvalue()
        scale *= min(0.95 * np.sqrt(largest / len(gif)), 0.9)
        if scale < SMALLEST:
            scale, stride = SMALLEST, 2 * stride


def spread(count: int) -> list[int]:
    """Some of so many frames, the first and the last included, to take colours from."""
    return sorted({int(place) for place in np.linspace(0, count - 1, SAMPLES)})


def _shrunk(picture: np.ndarray, scale: float) -> np.ndarray:
    from PIL import Image

    height, width = (max(round(scale * side), 1) for side in picture.shape[:2])
    return np.asarray(Image.fromarray(picture).resize((width, height)))
