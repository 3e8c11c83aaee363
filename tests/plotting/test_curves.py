"""Curves have the names, colours and heights they are given."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from meanformer.plotting import canvas, draw_curves, mark_values, style


@pytest.fixture
def axes():
    return canvas()[1]


def test_curves_have_their_heights_names_and_labels(axes):
    curves = {"first": [1.0, 2.0], "second": [3.0, 4.0]}
    draw_curves([0, 1], curves, axes, marks=("o-", "--"), xlabel="depth", yscale="log")
    for line, (name, heights) in zip(axes.lines, curves.items(), strict=True):
        np.testing.assert_allclose(line.get_xydata().T, ([0, 1], heights))
        assert line.get_label() == name
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--"]
    assert [to_hex(line.get_color()) for line in axes.lines] == [*style.PALETTE[:2]]
    assert (axes.get_xlabel(), axes.get_yscale()) == ("depth", "log")
    assert [text.get_text() for text in axes.get_legend().texts] == [*curves]


@pytest.mark.parametrize(
    ("colours", "found"),
    [
        (style.INK, [style.INK] * 3),
        ([style.ROSE, style.TEAL, style.GOLD], [style.ROSE, style.TEAL, style.GOLD]),
        ("depth", [to_hex(style.depth_colours()(share)) for share in (0, 0.5, 1.0)]),
    ],
)
def test_curves_have_one_colour_their_own_or_those_of_depth(axes, colours, found):
    curves = {name: [0, 1] for name in "abc"}
    draw_curves([0, 1], curves, axes, colours=colours, legend=None)
    assert [to_hex(line.get_color()) for line in axes.lines] == found
    assert axes.get_legend() is None


def test_values_are_marked_across_with_one_name(axes):
    mark_values([1.0, 2.0], axes, label="joins")
    mark_values(3.0, axes, axis="y")
    assert [line.get_xdata()[0] for line in axes.lines[:2]] == [1.0, 2.0]
    assert list(axes.lines[2].get_ydata()) == [3.0, 3.0]
    assert axes.get_legend_handles_labels()[1] == ["joins"]
