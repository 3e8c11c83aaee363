"""Movies on the page: they play by themselves, except where less motion is asked."""

import base64

from meanformer.experiments.framework import text
from meanformer.experiments.framework.filming import Reel, gif_name
from meanformer.experiments.framework.records import Record
from meanformer.experiments.framework.report.html import Markup, prose, tag

STILL = "(prefers-reduced-motion: reduce), print"


def movie_figures(record: Record) -> list[Markup]:
    """The movies of a run, each with its caption.

    On paper, and for readers who ask for less motion, the last frame stands in its
    place, beside a link to the file.
    """
    return [
        _figure(reel, gif_name(record.experiment, index))
        for index, reel in enumerate(record.reels, start=1)
    ]


def _figure(reel: Reel, address: str) -> Markup:
    image = tag(
        "img",
        src=_inline("gif", reel.gif),
        alt=text.to_plain(reel.alt),
        width=reel.width,
        class_="bitmap",
    )
    still = tag("source", srcset=_inline("png", reel.still), media=STILL)
    play = tag("a", "Play the movie.", href=address, class_="play")
    caption = tag("figcaption", prose(reel.caption), " ", play)
    width = f"width: {reel.width}px"
    return tag("figure", tag("picture", still, image), caption, style=width)


def _inline(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
