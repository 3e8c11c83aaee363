"""GIF files: few colours, chosen once for all frames, and each pixel the nearest."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from meanformer.errors import check
from meanformer.plotting import style

COLOURS = 256
DEPTH_COLOURS = 32
SAMPLES = 7  # frames that a palette is taken from
SMALLEST = 0.5  # of the size drawn
FASTEST = 50  # frames a second; viewers slow down what is faster


def check_rate(fps: float) -> None:
    """Raise unless so many frames a second can be shown."""
    check(fps <= FASTEST, f"fps is {fps}; a .gif shows at most {FASTEST}.")


def choose_palette(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """At most 256 colours for pictures, pure white the first of them.

    Our own colours are among them, whatever few pixels they have; the others suit the
    pictures, where rare colours count almost as much as common ones.

    Args:
        pictures: arrays of bytes, (height, width, 3).

    Returns:
        The colours, one in each row.
    """
    from PIL import Image

    packed = np.concatenate([_packed(picture).ravel() for picture in pictures])
    found, counts = np.unique(packed, return_counts=True)
    repeated = np.repeat(found, 1 + np.log2(counts).astype(int))
    own, mixed = _own_colours(), Image.fromarray(_unpacked(repeated)[None])
    few = mixed.quantize(COLOURS - len(own), dither=0)
    chosen = np.array(few.getpalette(), np.uint8).reshape(-1, 3)
    return np.concatenate([own, chosen])[:COLOURS]


def _own_colours() -> np.ndarray:
    """White, ink, the palette of our figures and the colours of depths."""
    from matplotlib.colors import to_rgb

    along = style.depth_colours()(np.linspace(0, 1, DEPTH_COLOURS))[:, :3]
    plain = [to_rgb(colour) for colour in ("white", style.INK, *style.PALETTE)]
    return np.round(255 * np.concatenate([plain, along])).astype(np.uint8)


def index_picture(picture: np.ndarray, palette: np.ndarray) -> Any:
    """A picture in the colours of a palette, the nearest for each pixel."""
    from PIL import Image
    from scipy.spatial import KDTree

    found, places = np.unique(_packed(picture), return_inverse=True)
    nearest = np.asarray(KDTree(palette).query(_unpacked(found))[1], np.uint8)
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
    scale, stride = 1.0, 1
    while True:
        shown = [_shrunk(one, scale) for one in pictures[::-stride]][::-1]
        palette = choose_palette([shown[index] for index in spread(len(shown))])
        images = [index_picture(one, palette) for one in shown]
        gif = encode_gif(images, fps / stride)
        if len(gif) <= largest or len(shown) == 1:
            return gif, _png(shown[-1])
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


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def _packed(picture: np.ndarray) -> np.ndarray:
    """Each colour as one whole number."""
    red, green, blue = np.moveaxis(picture.astype(np.uint32), -1, 0)
    return red << 16 | green << 8 | blue


def _unpacked(colours: np.ndarray) -> np.ndarray:
    channels = [colours >> 16, colours >> 8 & 255, colours & 255]
    return np.stack(channels, axis=-1).astype(np.uint8)
