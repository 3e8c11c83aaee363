"""Draw the movies of a run, small enough to stand in the page about it."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meanformer.experiments.framework.experiment import Movie
from meanformer.experiments.framework.settings import Movies

LARGEST_GIF = 1_500_000  # bytes
DOTS_PER_INCH = 90


@dataclasses.dataclass(frozen=True)
class Reel:
    """A movie as files: an animated image, its last frame, and a video if asked for."""

    gif: bytes
    still: bytes
    mp4: bytes
    width: int
    caption: str
    alt: str


def gif_name(experiment: str, index: int) -> str:
    """Where the movie of this number stands, seen from the folder of the page."""
    return f"figures/{experiment}-movie-{index}.gif"


def check_possible(wanted: Movies) -> None:
    """Raise, before anything is computed, if movies of this kind cannot be made."""
    from meanformer.plotting.movies import check_path

    if wanted != "none":
        check_path(Path(f"movie.{wanted}"))


def film(movies: Sequence[Movie], wanted: Movies) -> tuple[Reel, ...]:
    """Draw the movies of a run; none, if none are wanted."""
    if wanted == "none":
        return ()
    return tuple(_filmed(movie, has_video=wanted == "mp4") for movie in movies)


def _filmed(movie: Movie, *, has_video: bool) -> Reel:
    from meanformer.plotting.movies import Film

    names = ("draw", "frames", "depths", "fps", "size")
    options = {name: getattr(movie, name) for name in names} | {"dpi": DOTS_PER_INCH}
    gif, still = Film(movie.trajectory, **options).small_gif(LARGEST_GIF)
    return Reel(
        gif=gif,
        still=still,
        mp4=_video(movie.trajectory, options) if has_video else b"",
        width=width_of(still),
        caption=movie.caption,
        alt=movie.alt or movie.caption,
    )


def _video(trajectory: Any, options: dict[str, Any]) -> bytes:
    from meanformer.plotting import movie

    with tempfile.TemporaryDirectory() as folder:
        return movie(trajectory, Path(folder) / "movie.mp4", **options).read_bytes()


def width_of(png: bytes) -> int:
    """The width of a PNG file in pixels, which its header tells."""
    return int.from_bytes(png[16:20], "big")
