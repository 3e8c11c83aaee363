"""Figures show the numbers they are given."""

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_hex

import meanformer as mf
from meanformer.experiments import reference_attention, reference_cloud
from meanformer.plotting import (
    canvas,
    draw_field,
    draw_matrix,
    draw_paths,
    draw_rate,
    draw_slope,
    draw_tokens,
    mark_sizes,
    style,
)


@pytest.fixture
def axes():
    return canvas()[1]


def test_tokens_are_discs_whose_area_is_their_weight(axes):
    cloud = reference_cloud()
    (discs,) = draw_tokens(cloud, axes, color=style.ROSE).collections
    np.testing.assert_allclose(discs.get_offsets(), cloud.points)
    areas = discs.get_sizes()
    np.testing.assert_allclose(areas / areas.sum(), cloud.weights)
    assert to_hex(discs.get_facecolor()[0]) == style.ROSE


def test_paths_are_coloured_by_depth(axes):
    cloud = reference_cloud()
    path = mf.run_layers(mf.Flow(reference_attention()), cloud, 3)
    lines, first, last = draw_paths(path, axes).collections
    np.testing.assert_allclose(lines.get_segments()[0], path.points[:2, 0])
    middles = np.repeat([1 / 6, 1 / 2, 5 / 6], cloud.count)
    np.testing.assert_allclose(lines.get_array(), middles)
    np.testing.assert_allclose(first.get_offsets(), path.points[0])
    np.testing.assert_allclose(last.get_offsets(), path.points[-1])
    assert axes.figure.axes[-1].get_ylabel() == "depth $t$"


def test_the_field_is_the_map(axes):
    cloud, gamma = reference_cloud(), reference_attention()
    grid, moves, _ = draw_field(gamma, cloud, axes, resolution=3).collections
    places = jnp.asarray(grid.get_offsets())
    np.testing.assert_allclose(np.stack([grid.U, grid.V], 1), gamma(cloud, places))
    np.testing.assert_allclose(
        np.stack([moves.U, moves.V], 1), gamma(cloud, cloud.points)
    )


def test_a_matrix_shows_its_entries_and_numbers_from_one(axes):
    matrix = mf.attention_matrix(reference_attention(), reference_cloud())
    draw_matrix(matrix, axes)
    np.testing.assert_allclose(axes.images[0].get_array(), matrix)
    shown = [float(text.get_text()) for text in axes.texts]
    np.testing.assert_allclose(shown, np.ravel(matrix), atol=0.005)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list("1234")


def test_a_rate_has_the_line_of_its_slope_through_its_last_point(axes):
    draw_rate([1, 10, 100], [5.0, 0.4, 0.03], axes, label="error", slope=-1)
    data, line = axes.lines
    np.testing.assert_allclose(data.get_ydata(), [5.0, 0.4, 0.03])
    np.testing.assert_allclose(line.get_ydata(), [3.0, 0.3, 0.03])
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    draw_slope([2, 8], 4.0, 0.5, axes)
    np.testing.assert_allclose(axes.lines[-1].get_ydata(), [2.0, 4.0])


def test_ticks_are_at_the_sizes(axes):
    axes.set(xscale="log")
    mark_sizes([5, 10, 640], axes)
    np.testing.assert_allclose(axes.get_xticks(), [5, 10, 640])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["5", "10", "640"]
    assert len(axes.get_xticks(minor=True)) == 0


@pytest.mark.parametrize("draw", [draw_tokens, draw_paths])
def test_tokens_of_space_are_refused(draw, axes):
    cloud = mf.TokenCloud(np.eye(3))
    flow = mf.Flow(mf.identity_attention("softmax", 3))
    subject = cloud if draw is draw_tokens else mf.run_layers(flow, cloud, 1)
    with pytest.raises(mf.InvalidInput, match="dimension 3"):
        draw(subject, axes)
