"""Cells of a hull, and the polytopes they are."""

import numpy as np
import pytest
import scipy.spatial

import meanformer as mf
from meanformer.geometry import Polytope

SIX = np.array(
    [
        (-0.5545570160, -0.7044997424),
        (0.3438614670, -0.6989979770),
        (-0.8013892839, 0.2975705945),
        (0.0873280988, 0.6064603748),
        (-0.9252040062, -0.3303699053),
        (0.8616398338, 0.3652868139),
    ]
)
AREAS = {
    "unit": [0.28031875, 0.31174743, 0.27476068, 0.20394601, 0.26689277, 0.34687950],
    "raw": [0.24492750, 0.26606200, 0.23714874, 0.10595056, 0.39754369, 0.43291265],
}
SQUARE = np.array([(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)])
SHRINKING = np.array([(2.0, 0.9), (-2.0, 0.9), (0.0, -3.0), (0.2, 0.95)])


def random_points(count, dimension, seed=0):
    return np.random.default_rng(seed).normal(size=(count, dimension))


def inside(cells, count=400):
    weights = np.random.default_rng(1).dirichlet(np.ones(len(cells)), count)
    return weights @ cells.vertices


@pytest.mark.parametrize("scores", ["unit", "raw"])
def test_areas_of_the_six_vertices(scores):
    cells = mf.geometry.Cells(SIX, scores=scores)
    np.testing.assert_allclose(cells.volumes, AREAS[scores], atol=1e-7)
    assert cells.volumes.sum() == pytest.approx(1.68454514, abs=1e-7)
    assert cells.hull.volume == pytest.approx(cells.volumes.sum(), rel=1e-14)


def test_the_six_vertices_are_the_second_draw_of_seed_42():
    generator = np.random.default_rng(42)
    for _ in range(2):
        angles, norms = generator.uniform(0, 2 * np.pi, 6), generator.uniform(0.4, 1, 6)
    drawn = norms[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(drawn, SIX, atol=1e-10)


@pytest.mark.parametrize("dimension", [1, 2, 3, 4])
def test_cells_cover_the_hull_without_overlap(dimension):
    root = random_points(dimension, dimension, 7)
    cells = mf.geometry.Cells(random_points(12, dimension), form=root @ root.T)
    hull = (
        np.ptp(cells.vertices)
        if dimension == 1
        else scipy.spatial.ConvexHull(cells.vertices).volume
    )
    assert cells.volumes.sum() == pytest.approx(hull, rel=1e-12)
    points = inside(cells)
    owners = cells.owner(points)
    for index in range(len(cells)):
        np.testing.assert_array_equal(
            cells.cell(index).contains(points), owners == index
        )


@pytest.mark.parametrize("scores", ["unit", "raw"])
@pytest.mark.parametrize(("count", "least"), [(5, 0.4), (9, 0.4), (16, 1.0), (18, 0.4)])
def test_areas_are_those_that_qhull_finds_from_the_half_planes(count, least, scores):
    generator = np.random.default_rng(42)
    angles, norms = generator.uniform(size=(2, count))
    lengths = least + (1 - least) * norms
    turn = 2 * np.pi * angles
    points = lengths * np.stack([np.cos(turn), np.sin(turn)])
    hull = mf.geometry.Cells(points.T).hull
    cells = mf.geometry.Cells(hull.frame, scores=scores)
    for index, area in enumerate(cells.volumes):
        cell, expected = cells.cell(index), 0.0
        if len(cell.corners) > 0:
            meets = scipy.spatial.HalfspaceIntersection(
                cell.halfspaces, cell.corners.mean(axis=0)
            )
            expected = scipy.spatial.ConvexHull(meets.intersections).volume
        assert area == pytest.approx(expected, abs=1e-12)


def test_volumes_in_space_are_those_of_counting():
    cells = mf.geometry.Cells(random_points(8, 3))
    low, high = cells.vertices.min(0), cells.vertices.max(0)
    points = np.random.default_rng(3).uniform(low, high, (200_000, 3))
    counts = np.bincount(cells.owner(points) + 1, minlength=9)[1:]
    counted = counts / 200_000 * np.prod(high - low)
    np.testing.assert_allclose(cells.volumes, counted, atol=0.02 * cells.hull.volume)


def test_cells_of_a_cube_are_its_octants():
    corners = np.array(np.meshgrid(*[[-1.0, 1.0]] * 3)).reshape(3, -1).T
    cells = mf.geometry.Cells(corners)
    np.testing.assert_allclose(cells.volumes, 1.0, rtol=1e-12)
    assert cells.keeps_vertex.all()


def test_cells_of_a_square_are_quadrants():
    cells = mf.geometry.Cells(SQUARE)
    for index, corner in enumerate(SQUARE):
        polygon = cells.cell(index).corners
        expected = {(0, 0), tuple(corner), (corner[0], 0), (0, corner[1])}
        assert {tuple(point) for point in polygon.round(12) + 0.0} == expected
        x, y = polygon.T
        assert np.sum(x * np.roll(y, -1) - y * np.roll(x, -1)) == pytest.approx(2.0)


def test_for_equal_norms_the_cells_are_those_of_the_nearest_vertex():
    angles = np.random.default_rng(42).uniform(0, 2 * np.pi, 9)
    cells = mf.geometry.Cells(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    points = inside(cells)
    gaps = np.linalg.norm(points[:, None] - cells.vertices[None], axis=2)
    np.testing.assert_array_equal(cells.owner(points), gaps.argmin(axis=1))
    assert cells.keeps_vertex.all()


def test_cells_are_cones_from_the_origin():
    cells = mf.geometry.Cells(SIX)
    points = inside(cells)
    np.testing.assert_array_equal(cells.owner(0.01 * points), cells.owner(points))


def test_a_form_acts_as_new_coordinates():
    root = np.array([[1.5, 0.4], [0.0, 0.7]])
    whole = mf.geometry.Cells(SIX, form=root.T @ root)
    turned = mf.geometry.Cells(SIX @ root.T)
    scale = np.linalg.det(root)
    np.testing.assert_allclose(turned.volumes, scale * whole.volumes, rtol=1e-12)


def test_order_and_rotation_of_the_vertices_do_not_matter():
    order, areas = [3, 0, 5, 1, 4, 2], mf.geometry.Cells(SIX).volumes
    np.testing.assert_allclose(
        mf.geometry.Cells(SIX[order]).volumes, areas[order], rtol=1e-13
    )
    turn = np.array([[0.6, -0.8], [0.8, 0.6]])
    np.testing.assert_allclose(
        mf.geometry.Cells(SIX @ turn.T).volumes, areas, rtol=1e-13
    )


@pytest.mark.parametrize("shift", [1e-150, 1e100])
def test_the_size_of_the_hull_does_not_matter(shift):
    scaled = mf.geometry.Cells(shift * SQUARE)
    np.testing.assert_allclose(scaled.volumes / shift**2, 1.0, rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6, 1e100])
def test_units_do_not_matter_in_space(scale):
    cells = mf.geometry.Cells(random_points(12, 3))
    scaled = mf.geometry.Cells(scale * cells.vertices)
    np.testing.assert_allclose(scaled.volumes / scale**3, cells.volumes, atol=1e-14)
    np.testing.assert_array_equal(scaled.keeps_vertex, cells.keeps_vertex)
    assert scaled.hull.size == pytest.approx(scale * cells.hull.size)


@pytest.mark.parametrize("scores", ["raw", "unit"])
@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300])
def test_units_whose_squares_are_no_numbers_do_not_matter(scale, scores):
    points, form = random_points(9, 2), np.diag([1.0, 3.0])
    cells = mf.geometry.Cells(points, form=form, scores=scores)
    scaled = mf.geometry.Cells(scale * points, form=form / scale, scores=scores)
    tokens = inside(cells, 50)
    np.testing.assert_array_equal(scaled.owner(scale * tokens), cells.owner(tokens))
    np.testing.assert_array_equal(scaled.keeps_vertex, cells.keeps_vertex)
    assert scaled.explain() == cells.explain()
    for index in range(9):
        corners = cells.cell(index).corners
        found = scaled.cell(index).corners / scale
        assert (len(found) == 0) == (len(corners) == 0)
        gaps = np.linalg.norm(found[:, None] - corners[None], axis=2)
        for axis in (0, 1):  # the tip may be several corners, up to rounding
            assert gaps.min(axis=axis, initial=9.0).max(initial=0.0) < 1e-12


def test_a_volume_that_is_no_number_is_refused_or_rounded_to_zero():
    with pytest.raises(mf.Overflow, match="about 1e400, too large for a number"):
        _ = mf.geometry.Cells(1e200 * SQUARE).volumes
    assert mf.geometry.Cells(1e-200 * SQUARE).volumes.tolist() == [0.0] * 4


def test_a_margin_beyond_all_numbers_leaves_nothing():
    assert mf.geometry.Cells(1e-200 * random_points(12, 3)).cone(0, 1e200).volume == 0
    assert mf.geometry.Cells(SQUARE).cone(0, 1e308).volume == 0


def test_halfspaces_that_bound_nothing_are_refused():
    corners = np.array(np.meshgrid(*[[-1.0, 1.0]] * 3)).reshape(3, -1).T
    open_box = Polytope(np.array([[1.0, 0, 0, -1], [0, 1.0, 0, -1]]), corners)
    with pytest.raises(mf.InvalidInput, match="do not bound a polytope"):
        _ = open_box.volume


def test_equal_vertices_share_their_cell():
    cells = mf.geometry.Cells(np.concatenate([SQUARE, SQUARE[:1]]))
    np.testing.assert_allclose(cells.volumes, 1.0)
    assert cells.keeps_vertex.all()


def test_a_vertex_that_is_not_in_its_own_cell_is_told():
    cells = mf.geometry.Cells(SHRINKING)
    assert cells.keeps_vertex.tolist() == [True, True, True, False]
    assert cells.hull.volume == pytest.approx(7.9)
    assert "the hull shrinks if it loses a vertex: 3." in cells.explain()


def test_empty_cells_are_told_when_the_origin_is_outside():
    cells = mf.geometry.Cells([(3, 0), (4, 1), (4, -1), (5, 0)])
    assert not cells.has_origin
    np.testing.assert_allclose(cells.volumes, [0, 0, 0, 2], atol=1e-15)
    assert "Empty: 0, 1, 2;" in cells.explain()
    assert "does not contain the origin" in cells.explain()
    assert len(cells.cell(0).corners) == 0


def test_a_point_inside_the_hull_wins_nowhere_with_raw_scores_only():
    points = np.concatenate([SQUARE, [(0.5, 0.1)]])
    raw, unit = mf.geometry.Cells(points), mf.geometry.Cells(points, scores="unit")
    assert raw.has_origin
    assert raw.volumes[4] == 0
    assert unit.volumes[4] > 0.1
    assert unit.volumes.sum() == pytest.approx(4.0)


def test_owners_outside_and_on_boundaries():
    cells = mf.geometry.Cells(SQUARE)
    owners = cells.owner(np.array([(2.0, 0.0), (0.5, 0.0), (-0.5, 0.2)]))
    assert owners.tolist() == [-1, 0, 3]
    table = cells.contains(np.array([(0.5, 0.0), (0.0, 0.0), (2.0, 0.0)]))
    assert table.tolist() == [[True, True, False, False], [True] * 4, [False] * 4]


def test_the_cone_of_a_square_is_a_smaller_quadrant():
    cone = mf.geometry.Cells(SQUARE).cone(0, 0.5)
    # <x, v_0 - v_j> is 2 y, 2 (x + y) and 2 x.
    np.testing.assert_allclose(cone.volume, 0.75**2, rtol=1e-14)
    np.testing.assert_allclose(cone.eroded(0.25).volume, 0.25**2, rtol=1e-13)
    assert cone.eroded(0.375).volume == 0
    assert cone.contains(np.array([(0.3, 0.3), (0.2, 0.3)])).tolist() == [True, False]
    assert mf.geometry.Cells(SQUARE).cone(0, 5.0).volume == 0


def test_cones_in_space_and_on_the_line():
    corners = np.array(np.meshgrid(*[[-1.0, 1.0]] * 3)).reshape(3, -1).T
    cone = mf.geometry.Cells(corners).cone(0, 0.5)
    assert cone.volume == pytest.approx(0.75**3, rel=1e-12)
    assert cone.eroded(0.25).volume == pytest.approx(0.25**3, rel=1e-11)
    assert cone.eroded(0.5).volume == 0
    line = mf.geometry.Cells([[-1.0], [2.0]])
    np.testing.assert_allclose(line.volumes, [1, 2])
    assert line.cone(1, 3.0).volume == pytest.approx(1.0)
    assert line.cone(1, 9.0).volume == 0


@pytest.mark.parametrize("count", [5, 7])
def test_the_published_cone_and_its_erosion(count):
    # Vertices of norm one, seed 42, the third in order around the hull.
    angles = np.random.default_rng(42).uniform(0, 2 * np.pi, count)
    hull = mf.geometry.Cells(np.stack([np.cos(angles), np.sin(angles)], axis=1)).hull
    cone = mf.geometry.Cells(hull.corners).cone(2, 0.05)
    corners = cone.corners
    sides = np.roll(corners, -1, axis=0) - corners
    headings = np.arctan2(*sides.T[::-1])
    turns = (headings - np.roll(headings, 1)) % (2 * np.pi)
    rim = 0.03 * np.linalg.norm(sides, axis=1).sum() - 9e-4 * np.tan(turns / 2).sum()
    assert cone.eroded(0.03).volume == pytest.approx(cone.volume - rim, abs=1e-14)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, 801)] * 2), axis=-1).reshape(-1, 2)
    counted = np.mean(cone.contains(grid)) * 4
    assert cone.volume == pytest.approx(counted, abs=2e-3)


def test_tokens_move_straight_inside_their_cells():
    cells, tokens = mf.geometry.Cells(SIX), inside(mf.geometry.Cells(SIX), 50)
    weights = np.append(np.full(6, 1 / 6), np.zeros(50))
    cloud = mf.TokenCloud(np.concatenate([SIX, tokens]), weights)
    path = mf.flows.run_hardmax(cloud, 20, step=0.3)
    owners = cells.owner(tokens)
    for points in path.points[:, 6:]:
        assert cells.contains(points)[np.arange(50), owners].all()
    np.testing.assert_array_equal(path.limits[6:], SIX[owners])


def test_a_polytope_without_volume_has_no_corners():
    rows = np.array([[1.0, 0, 0], [-1, 0, 0], [0, 1, -1], [0, -1, -1]])
    flat = Polytope(rows, SQUARE[::-1])
    assert flat.volume == 0
    assert flat.corners.shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vertices": [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]}, "lie in a hyperplane"),
        ({"vertices": [[1.0], [1.0]]}, "lie in a hyperplane"),
        ({"vertices": SQUARE, "scores": "best"}, 'it must be "raw" or "unit"'),
        ({"vertices": SQUARE, "form": np.eye(3)}, r"form has shape \(3, 3\)"),
        ({"vertices": [1.0, 2.0]}, "vertices has shape"),
        ({"vertices": np.zeros((0, 2))}, r"shape \(0, 2\); .* 3 or more vertices"),
        ({"vertices": SQUARE * np.nan}, "vertices holds nan"),
        (
            {"vertices": [*SQUARE, (0.0, 0.0)], "scores": "unit"},
            "vertex 4 is zero and has no direction",
        ),
    ],
)
def test_wrong_cells_are_refused(arguments, message):
    with pytest.raises(mf.InvalidInput, match=message):
        mf.geometry.Cells(**arguments)


def test_wrong_questions_are_refused():
    cells = mf.geometry.Cells(SQUARE)
    with pytest.raises(mf.InvalidInput, match="index is 4; it must be below 4"):
        cells.cell(4)
    with pytest.raises(mf.InvalidInput, match="margin is -1.0; it must be zero or"):
        cells.cone(0, -1.0)
    with pytest.raises(mf.InvalidInput, match="distance is -1.0; it must be zero"):
        cells.cell(0).eroded(-1.0)
    with pytest.raises(mf.InvalidInput, match="distance is inf; it must be .* finite"):
        cells.cell(0).eroded(np.inf)
    with pytest.raises(mf.InvalidInput, match="margin is inf; it must be .* finite"):
        mf.geometry.Cells(random_points(6, 3)).cone(0, np.inf)
    for ask in (cells.owner, cells.contains, cells.score, cells.hull.contains):
        with pytest.raises(mf.InvalidInput, match=r"x has shape \(2,\); it must be"):
            ask(SQUARE[0])
        with pytest.raises(mf.InvalidInput, match=r"\(4, 3\); it must be \(any, 2\)"):
            ask(np.zeros((4, 3)))
