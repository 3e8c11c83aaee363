"""The page stands alone, says what was found, and grows."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meanformer.errors import InvalidInput
from meanformer.experiments import find
from meanformer.experiments.framework import atlas as atlases
from meanformer.experiments.framework.records import attempt
from meanformer.experiments.framework.report import render
from meanformer.experiments.framework.report.card import LARGEST_DRAWING, rerun_command
from meanformer.experiments.framework.report.overview import STATUSES
from meanformer.plotting import style

VOID = {"meta", "link", "br", "hr", "img", "source"}


class Page(HTMLParser):
    """Collects elements, ids and loads of a page, and checks that tags balance."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.elements = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def loads(self):
        """Addresses that a browser would fetch by itself."""
        for tag, attributes in self.elements:
            for name in ("src", "srcset", "poster", "data", "xlink:href"):
                if name in attributes:
                    yield attributes[name]
            if tag not in ("a", "math") and "href" in attributes:
                yield attributes["href"]


def page_about(*names, records=None, **fields):
    toys = [find(name) for name in names]
    done = records or {toy.name: attempt(toy, toy.settings()) for toy in toys}
    atlas = dataclasses.replace(atlases.blank(toys, "meanformer atlas"), records=done)
    return dataclasses.replace(atlas, **fields)


def test_the_page_needs_no_network():
    text = render(page_about("toy-holds", "toy-fails", "toy-crashes"))
    loads = list(Page(text).loads())
    assert loads, "figures refer to their own glyphs"
    assert all(address.startswith(("data:", "#")) for address in loads)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "<script" not in text


def test_ids_are_unique_and_links_within_the_page_lead_somewhere():
    page = Page(render(page_about("toy-holds", "toy-fails", "toy-crashes")))
    assert len(page.ids) == len(set(page.ids))
    inner = [
        a["href"][1:] for t, a in page.elements if t == "a" and a["href"][0] == "#"
    ]
    assert inner
    assert set(inner) <= set(page.ids)


def test_a_card_shows_what_a_reader_wants():
    text = render(page_about("toy-holds"))
    for piece in (
        "The mean of equally spaced numbers",
        "<math",
        'role="img" aria-label="The numbers xᵢ, one after the other."',
        "Castin et al. (2025)",
        "arxiv.org/abs/2501.18322",
        "@misc{CACP25,",
        "meanformer run toy-holds",
        "A &lt; B &amp; C: text is escaped.",
        "how many numbers",
        "Expected value in closed form",
        "Least favourable of 5 comparisons.",
    ):
        assert piece in text


def test_verdicts_are_words_not_only_colours():
    text = render(page_about("toy-holds", "toy-fails", "toy-crashes"))
    for state in ("holds", "fails", "broken"):
        assert re.search(rf'class="badge {state}">.*?</span>{state}</span>', text)


def test_a_crash_shows_its_sentence_and_place():
    text = render(page_about("toy-crashes"))
    assert "The solver ran out of steps; allow more." in text
    assert "toy_crashes.py" in text


def test_a_growing_page_reloads_and_shows_who_is_at_work():
    toys = ("toy-holds", "toy-fails", "toy-crashes")
    toy = find("toy-fails")
    records = {"toy-fails": attempt(toy, toy.settings())}
    growing = page_about(*toys, records=records, running=frozenset({"toy-holds"}))
    text = render(growing)
    assert 'http-equiv="refresh"' in text
    assert "Running now" in text
    assert "Waiting for a free worker" in text
    stopped = render(dataclasses.replace(growing, is_stopped=True))
    assert 'http-equiv="refresh"' not in stopped
    assert "stopped before its turn" in stopped
    assert 'http-equiv="refresh"' not in render(page_about("toy-holds"))


def test_the_command_repeats_the_run():
    toy = find("toy-holds")
    settings = toy.settings("full", count=9, shifts=(2.0, 3.0), is_loud=True)
    record = attempt(toy, settings, profile="full")
    assert rerun_command(toy, record) == (
        "meanformer run toy-holds --set count=9 --set shifts=2.0,3.0 "
        "--set is_loud=true --full"
    )


def test_a_heavy_drawing_is_shown_as_a_bitmap():
    toy = find("toy-holds")
    record = attempt(toy, toy.settings())
    heavy = dataclasses.replace(record.prints[0], svg="<svg>" + " " * LARGEST_DRAWING)
    records = {toy.name: dataclasses.replace(record, prints=(heavy,))}
    page = Page(render(page_about("toy-holds", records=records)))
    (image,) = [attributes for tag, attributes in page.elements if tag == "img"]
    assert image["src"].startswith("data:image/png;base64,")
    assert image["alt"] == "The numbers xᵢ, one after the other."


@pytest.mark.slow
def test_the_files_grow_with_the_run(tmp_path):
    toys = [find("toy-holds"), find("toy-fails")]
    states = []
    for _ in atlases.explore(
        toys, "quick", tmp_path, jobs=1, command="meanformer atlas"
    ):
        numbers = json.loads((tmp_path / "results.json").read_text())
        reloads = "refresh" in (tmp_path / "index.html").read_text()
        states.append((len(numbers["experiments"]), numbers["complete"], reloads))
    assert states[0] == (0, False, True)
    assert (1, False, True) in states
    assert states[-1] == (2, True, False)
    figures = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert figures == ["toy-holds-1.png", "toy-holds-1.svg"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_leaving_early_says_what_was_not_run(tmp_path):
    toys = [find("toy-slow"), find("toy-holds")]
    for _ in atlases.explore(
        toys, "quick", tmp_path, jobs=1, command="meanformer atlas"
    ):
        break
    assert "stopped before its turn" in (tmp_path / "index.html").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["holds"] is False


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be written"):
        atlases.publish(page_about("toy-fails"), tmp_path / "file" / "atlas")


def contrast(first, second):
    """Contrast ratio of two colours, after the WCAG definition."""

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def schemes():
    """The colours of the style sheet: the light scheme, and what dark changes."""
    sheet = render(page_about("toy-fails", records={}))
    pattern = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")
    light, dark = (dict(pattern.findall(part)) for part in sheet.split("@media")[:2])
    return light, light | dark


def test_data_colours_read_on_white_and_on_dark():
    for scheme in schemes():
        for colour in style.PALETTE:
            assert contrast(colour, scheme["card"]) >= 3


def test_text_colours_read_in_both_schemes():
    for scheme in schemes():
        for ground in ("paper", "card", "wash"):
            for ink in ("ink", "soft", "accent"):
                assert contrast(scheme[ink], scheme[ground]) >= 4.5
        for kind in ("good", "bad", "wait"):
            assert contrast(scheme[kind], scheme[f"{kind}-wash"]) >= 4.5
            assert contrast(scheme[kind], scheme["card"]) >= 4.5


def test_drawings_take_their_ink_from_the_page():
    figure, axes = style.canvas()
    axes.plot([0, 1])
    drawing = style.to_svg(figure)
    assert style.INK not in drawing
    assert "currentColor" in drawing
    assert style.PALETTE[0] in drawing


def test_two_drawings_share_no_identifier():
    drawings = []
    for height in (1, 2):
        figure, axes = style.canvas()
        axes.plot([0, height])
        drawings.append(set(re.findall(r'id="([^"]+)"', style.to_svg(figure))))
    assert drawings[0].isdisjoint(drawings[1])


def test_the_page_and_the_documentation_say_alike_what_a_theorem_is():
    page = Path(__file__).parents[3] / "docs" / "atlas.md"
    words = "proved in the work cited, or derived on the"
    assert words in STATUSES
    assert words in page.read_text()
