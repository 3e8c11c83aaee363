"""GIF files: few colours, chosen once for all frames, and each pixel the nearest."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from meanformer.errors import check
from meanformer.plotting import style

COLOURS = 256
EXACT = 16  # the most common colours, which are kept as they are
SAMPLES = 7  # frames that a palette is taken from
SMALLEST = 0.5  # of the size drawn
FASTEST = 50  # frames a second; viewers slow down what is faster


def check_rate(fps: float) -> None:
    """Raise unless so many frames a second can be shown."""
    check(fps <= FASTEST, f"fps is {fps}; a .gif shows at most {FASTEST}.")


def choose_palette(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Choose 256 colours: the most common, those of our figures, and a cover of all.

    Args:
        pictures: arrays of bytes, (height, width, 3).

    Returns:
        The colours, one in each row.
    """
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
