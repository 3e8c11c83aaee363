"""Figures of cells and leaders show the numbers they are given."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

import meanformer as mf
from meanformer.plotting import (
    canvas,
    cell_colours,
    draw_cells,
    draw_form,
    draw_leaders,
    draw_polytope,
    style,
)

SQUARE = [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)]
SHRINKING = [(2, 0.9), (-2, 0.9), (0, -3), (0.2, 0.95)]


@pytest.fixture
def axes():
    return canvas()[1]


def tied_run():
    points = [*SQUARE, (0.2, 0.1), (0.5, 0.0), (9.0, 9.0)]
    weights = np.append(np.full(6, 1 / 6), 0)
    return mf.flows.run_hardmax(mf.TokenCloud(points, weights), 4, alpha=0.5)


def test_cells_are_their_polygons(axes):
    cells = mf.geometry.Cells(SQUARE)
    draw_cells(cells, axes)
    for index, patch in enumerate(axes.patches):
        np.testing.assert_allclose(patch.get_xy()[:-1], cells.cell(index).corners)
        assert to_hex(patch.get_facecolor()) == cell_colours(cells)[index]
    assert [text.get_text() for text in axes.texts] == [
        f"$v_{{{k}}}$" for k in range(1, 5)
    ]


def test_a_vertex_that_moves_is_crossed_and_a_point_inside_is_a_dot(axes):
    draw_cells(mf.geometry.Cells([*SHRINKING, (0.1, 0.1)]), axes, is_labelled=False)
    rings, crosses, dots = axes.collections
    np.testing.assert_allclose(rings.get_offsets(), SHRINKING)
    np.testing.assert_allclose(crosses.get_offsets(), [(0.2, 0.95)])
    np.testing.assert_allclose(dots.get_offsets(), [(0.1, 0.1)])
    assert len(axes.texts) == 0


@pytest.mark.parametrize("count", [3, 8, 15, 22, 25, 36, 43])
def test_cells_side_by_side_have_different_colours(count):
    angles = np.linspace(0, 2 * np.pi, count, endpoint=False)
    cells = mf.geometry.Cells(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    colours = cell_colours(cells)
    assert all(colours[k] != colours[k - 1] for k in range(count))


def test_a_cone_is_a_polygon_with_a_name_and_an_empty_one_nothing(axes):
    cells = mf.geometry.Cells(SQUARE)
    draw_polytope(cells.cone(0, 0.5), axes, label="cone", color=style.ROSE)
    draw_polytope(cells.cone(0, 50.0), axes)
    (patch,) = axes.patches
    np.testing.assert_allclose(patch.get_xy()[:-1], cells.cone(0, 0.5).corners)
    assert patch.get_label() == "cone"
    assert to_hex(patch.get_facecolor()) == style.ROSE


def test_the_form_is_drawn_over_the_hull_with_its_range(axes):
    cells = mf.geometry.Cells(SHRINKING, form=np.diag([1.0, 2.0]))
    draw_form(cells, axes, resolution=50)
    bar = axes.figure.axes[-1]
    assert bar.get_xlabel() == r"$\frac{1}{2}\,\langle Bx, x\rangle$"
    # The form is largest at the lowest vertex: (0 + 2 * 9) / 2.
    assert float(bar.get_xticks()[-1]) == pytest.approx(9.0)
    (outline,) = axes.patches
    np.testing.assert_allclose(outline.get_xy()[:-1], cells.hull.corners)
    assert axes.collections[0].get_clip_path() is not None


def test_leaders_are_stars_and_tied_tokens_are_white(axes):
    run = tied_run()
    draw_leaders(run, axes, step=2)
    discs, stars = axes.collections
    np.testing.assert_allclose(discs.get_offsets(), run.points[2, 4:6])
    np.testing.assert_allclose(stars.get_offsets(), SQUARE)
    faces = [to_hex(face) for face in discs.get_facecolor()]
    assert faces == [to_hex(stars.get_facecolor()[0]), "#ffffff"]
    # Tails of the tokens that are there, not of padding.
    assert len(axes.lines) == 6
    np.testing.assert_allclose(axes.lines[4].get_xydata(), run.points[:3, 4])
    (hull,) = axes.patches
    assert {tuple(point) for point in hull.get_xy()} == set(SQUARE)


def test_leaders_over_cells_have_one_colour_and_no_hull(axes):
    draw_leaders(tied_run(), axes, color=style.GOLD, has_tails=False)
    discs, stars = axes.collections
    assert {to_hex(face) for face in stars.get_facecolor()} == {style.GOLD}
    assert to_hex(discs.get_edgecolor()[0]) == style.GOLD
    assert len(axes.lines) == len(axes.patches) == 0


def test_two_leaders_have_a_segment_and_none_nothing(axes):
    draw_leaders(
        mf.flows.run_hardmax(mf.TokenCloud([(1.0, 0), (-1, 0)]), 1, step=0.5), axes
    )
    assert len(axes.patches) == 1
    turned = mf.flows.run_hardmax(mf.TokenCloud(SQUARE), 1, step=0.3, score=-np.eye(2))
    draw_leaders(turned, axes)


def test_figures_of_other_dimensions_and_steps_are_refused(axes):
    corners = np.concatenate([np.eye(3), -np.eye(3)])
    message = "the dimension is 3; this figure is of dimension 2"
    for draw in (draw_cells, draw_form):
        with pytest.raises(mf.InvalidInput, match=message):
            draw(mf.geometry.Cells(corners), axes)
    with pytest.raises(mf.InvalidInput, match=message):
        draw_polytope(mf.geometry.Cells(corners).cell(0), axes)
    with pytest.raises(mf.InvalidInput, match="step is 9; the run has steps 0 to 4"):
        draw_leaders(tied_run(), axes, step=9)
    with pytest.raises(mf.InvalidInput, match="opacity is 2; it must be between"):
        draw_cells(mf.geometry.Cells(SQUARE), axes, opacity=2)
