"""Figures of Gaussians show their moments."""

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_hex

import meanformer as mf
from meanformer.experiments import reference_attention
from meanformer.plotting import (
    canvas,
    draw_cone,
    draw_eigenvalues,
    draw_ellipse,
    draw_ellipses,
    draw_tokens,
    style,
)

MEAN = np.array([0.3, -0.4])
COVARIANCE = np.array([[1.0, 0.3], [0.3, 0.6]])


@pytest.fixture
def axes():
    return canvas()[1]


@pytest.fixture
def cone():
    return canvas(subplot_kw={"projection": "3d"})[1]


@pytest.fixture(scope="module")
def path():
    mu = mf.Gaussian(jnp.array(MEAN), jnp.array(COVARIANCE))
    return mf.run_layers(mf.Flow(reference_attention()), mu, 4)


def distances(curve, mean, covariance):
    """How many standard deviations the points of a curve are away from the mean."""
    offsets = curve - mean
    return np.sqrt(np.sum(offsets * np.linalg.solve(covariance, offsets.T).T, axis=1))


@pytest.mark.parametrize("deviations", [1.0, 2.0])
def test_an_ellipse_is_at_one_distance_in_standard_deviations(axes, deviations):
    mu = mf.Gaussian(jnp.array(MEAN), jnp.array(COVARIANCE))
    draw_ellipse(mu, axes, deviations=deviations, color=style.ROSE)
    (line,) = axes.lines
    found = distances(line.get_xydata(), MEAN, COVARIANCE)
    np.testing.assert_allclose(found, deviations, rtol=1e-12)
    np.testing.assert_allclose(line.get_xydata()[0], line.get_xydata()[-1], atol=1e-12)
    assert to_hex(line.get_color()) == style.ROSE


def test_an_ellipse_of_rank_one_is_a_segment(axes):
    mu = mf.Gaussian(jnp.zeros(2), factor=jnp.array([[3.0], [4.0]]))
    draw_ellipse(mu, axes)
    x, y = axes.lines[0].get_xydata().T
    np.testing.assert_allclose(3 * y, 4 * x, atol=1e-12)
    assert np.hypot(x, y).max() == pytest.approx(5)


def test_an_ellipse_goes_over_tokens(axes):
    mu = mf.Gaussian(jnp.array(MEAN), jnp.array(COVARIANCE))
    draw_ellipse(mu, draw_tokens(mf.gaussian.matched_tokens(mu, 16), axes))
    assert len(axes.collections) == len(axes.lines) == 1


def test_ellipses_are_those_of_the_saved_depths_coloured_by_depth(axes, path):
    draw_ellipses(path, axes, count=3, deviations=2)
    (curves,) = axes.collections
    assert len(curves.get_segments()) == 3
    for curve, index in zip(curves.get_segments(), (0, 2, 4), strict=True):
        found = distances(curve, np.asarray(path.means[index]), path.covariances[index])
        np.testing.assert_allclose(found, 2, rtol=1e-12)
    np.testing.assert_allclose(curves.get_array(), path.depths[jnp.array([0, 2, 4])])
    np.testing.assert_allclose(axes.lines[0].get_xydata(), path.means)
    assert axes.figure.axes[-1].get_ylabel() == "depth $t$"


def test_eigenvalues_are_drawn_from_positive_depths_on_logarithmic_axes(axes):
    depths, values = np.array([0.0, 1.0, 10.0]), np.array([[5, 4], [2, 0.6], [2, 0.06]])
    draw_eigenvalues(depths, values, axes, label="softmax")
    small, large, _ = axes.lines
    np.testing.assert_allclose(small.get_xydata(), [[1, 0.6], [10, 0.06]])
    np.testing.assert_allclose(large.get_ydata(), [2, 2])
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_legend_handles_labels()[1] == ["softmax"]


def test_the_guide_has_its_slope_and_its_name(axes):
    draw_eigenvalues([1.0, 100.0], [[1.0], [0.01]], axes, slope=-2.0)
    x, y = axes.lines[-1].get_xydata().T
    np.testing.assert_allclose(np.diff(np.log(y)) / np.diff(np.log(x)), -2)
    assert (y < 0.01 * (x / 100) ** -2).all()
    assert axes.texts[0].get_text() == "slope $-2$"


@pytest.mark.parametrize(
    ("values", "slope"), [([[1.0], [0.01]], None), ([[1.0], [0.0]], -1.0)]
)
def test_there_is_no_guide_without_a_slope_or_to_a_zero(axes, values, slope):
    draw_eigenvalues([1.0, 100.0], values, axes, slope=slope)
    assert len(axes.lines) == 1


def test_eigenvalues_and_depths_must_match(axes):
    with pytest.raises(mf.InvalidInput, match="must be"):
        draw_eigenvalues([1.0, 2.0], [[1.0], [2.0], [3.0]], axes)


def paths_of(cone):
    """The curves of the covariances, which lie over those of the cone."""
    return [np.stack(line.get_data_3d(), 1) for line in cone.lines if line.zorder == 3]


def test_covariances_are_points_of_the_cone(cone):
    rank_one, spread = np.array([[4.0, 2.0], [2.0, 1.0]]), np.eye(2)
    draw_cone([np.stack([COVARIANCE, rank_one, spread])], cone)
    curve, start, end = paths_of(cone)
    np.testing.assert_allclose(curve, [[0.4, 0.6, 1.6], [3, 4, 5], [0, 0, 2]])
    assert np.hypot(*curve[1, :2]) == pytest.approx(curve[1, 2])
    np.testing.assert_allclose(np.stack([start[0], end[0]]), curve[[0, -1]])
    assert cone.get_zlim() == (0, 5)


def test_the_outcome_sets_the_colour_and_the_legend(cone):
    one, other = np.stack([COVARIANCE, np.eye(2)]), np.stack([np.eye(2), COVARIANCE])
    draw_cone([one, other, one], cone, outcomes=["converges", "blows up", "converges"])
    labels = [text.get_text() for text in cone.get_legend().get_texts()]
    assert labels == ["converges", "blows up"]
    colours = [line.get_color() for line in cone.lines if line.zorder == 3][::3]
    assert colours == [style.BLUE, style.ORANGE, style.BLUE]


def test_a_path_is_cut_off_at_the_height(cone):
    spreads = np.array([1.0, 2.0, 1e9])[:, None, None] * np.eye(2)
    draw_cone([spreads], cone, height=6.0)
    curve = paths_of(cone)[0]
    np.testing.assert_allclose(curve, [[0, 0, 2], [0, 0, 4], [0, 0, 6]])
    with pytest.raises(mf.InvalidInput, match="starts at trace 2"):
        draw_cone([spreads], cone, height=1.0)


def test_covariances_of_space_are_refused(axes, cone):
    mu = mf.Gaussian(jnp.zeros(3), jnp.eye(3))
    with pytest.raises(mf.InvalidInput, match="dimension 3"):
        draw_ellipse(mu, axes)
    with pytest.raises(mf.InvalidInput, match=r"\(1, 3, 3\)"):
        draw_cone([np.eye(3)[None]], cone)
    with pytest.raises(mf.InvalidInput, match="2 outcomes"):
        draw_cone([np.eye(2)[None]], cone, outcomes=["one", "two"])
