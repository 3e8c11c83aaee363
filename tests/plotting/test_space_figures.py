"""Figures of space, sphere, circle, hulls and leaders show the numbers they get."""

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb, to_rgba_array

import meanformer as mf
from meanformer.plotting import (
    canvas,
    cluster_colours,
    draw_angles,
    draw_attention,
    draw_circle,
    draw_clusters,
    draw_cone,
    draw_direction,
    draw_hull,
    draw_hyperplanes,
    draw_leader_graph,
    draw_paths_3d,
    draw_sphere,
    draw_sphere_density,
    style,
)
from meanformer.plotting.clouds import cross_section
from meanformer.plotting.hulls import hull_facets
from meanformer.plotting.matrices import leaders_of
from meanformer.plotting.token_paths import choose_coordinates, paths_of, resample

CUBE = np.array(np.meshgrid([0, 1], [0, 1], [0, 1])).reshape(3, -1).T.astype(float)


@pytest.fixture
def axes():
    return canvas()[1]


@pytest.fixture
def room():
    return canvas(subplot_kw={"projection": "3d"})[1]


def walk(points, weights=None, *, layers=4, beta=2.0, space=None):
    """A few layers of attention, with one padded token if weights say so."""
    flow = mf.Flow(
        mf.identity_attention("softmax", points.shape[1], beta),
        space=space or mf.Euclidean(),
    )
    return mf.run_layers(flow, mf.TokenCloud(points, weights), layers)


def random_points(count, dimension, *, is_round=False):
    points = np.random.default_rng(3).normal(size=(count, dimension))
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    return jnp.asarray(points / norms if is_round else points)


def segments_3d(collection):
    return np.array(collection._segments3d)


def positions_3d(discs):
    return np.stack([np.asarray(side) for side in discs._offsets3d], axis=1)


def test_paths_of_space_are_coloured_by_depth_without_absent_tokens(room):
    weights = jnp.array([0.5, 0.0, 0.25, 0.25])
    path = walk(random_points(4, 3), weights)
    draw_paths_3d(path, room)
    lines, first, last = room.collections
    present = np.asarray(path.points)[:, [0, 2, 3]]
    assert segments_3d(lines).shape == (4 * 3, 2, 3)
    np.testing.assert_allclose(segments_3d(lines)[0], present[:2, 0])
    np.testing.assert_allclose(
        lines.get_array(), np.repeat([1 / 8, 3 / 8, 5 / 8, 7 / 8], 3)
    )
    np.testing.assert_allclose(positions_3d(first), present[0])
    np.testing.assert_allclose(positions_3d(last), present[-1])
    assert (to_hex(first.get_facecolor()[0]), to_hex(last.get_facecolor()[0])) == (
        style.BLUE,
        style.GOLD,
    )
    areas = first.get_sizes()
    np.testing.assert_allclose(areas / areas.sum(), [0.5, 0.25, 0.25])
    assert room.figure.axes[-1].get_ylabel() == "depth $t$"


def test_a_room_has_equal_scales_and_no_walls(room):
    draw_paths_3d(walk(random_points(5, 3)), room, is_labelled=False)
    sides = np.ptp([room.get_xlim(), room.get_ylim(), room.get_zlim()], axis=1)
    aspect = np.asarray(room._box_aspect)
    np.testing.assert_allclose(sides / sides.max(), aspect / aspect.max(), rtol=1e-10)
    assert all(
        axis.pane.get_facecolor()[3] == 0
        for axis in (room.xaxis, room.yaxis, room.zaxis)
    )
    assert len(room.figure.axes) == 1


def test_clusters_have_a_colour_each_and_the_rest_is_grey(axes):
    points = random_points(5, 2)
    weights = jnp.array([0.25, 0.25, 0.25, 0.0, 0.25])
    cloud = mf.TokenCloud(points, weights)
    draw_clusters(cloud, [1, -1, 0, 0, 1], axes, legend=True)
    loose, first, second = axes.collections
    np.testing.assert_allclose(loose.get_offsets(), points[1:2])
    np.testing.assert_allclose(first.get_offsets(), points[2:3])
    np.testing.assert_allclose(second.get_offsets(), points[jnp.array([0, 4])])
    colours = [to_hex(discs.get_facecolor()[0]) for discs in axes.collections]
    assert colours == [style.GREY, style.PALETTE[0], style.PALETTE[1]]
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert words == ["no cluster: 1", "cluster 1: 1", "cluster 2: 2"]
    with pytest.raises(mf.InvalidInput, match="2 labels for 5 tokens"):
        draw_clusters(cloud, [0, 1], axes)


def test_equal_labels_have_equal_colours_even_beyond_the_palette():
    colours = cluster_colours([0, 9, 0, -1])
    assert colours[0] == colours[2]
    assert colours[3] == style.GREY
    assert style.GREY not in colours[:3]


def test_the_hull_of_a_cube_has_six_square_facets_around_its_vertices():
    inside = np.random.default_rng(0).uniform(0.1, 0.9, size=(20, 3))
    facets = hull_facets(np.concatenate([CUBE, inside]))
    assert [facet.shape for facet in facets] == [(4, 3)] * 6
    np.testing.assert_allclose(np.unique(np.concatenate(facets), axis=0), CUBE[
        np.lexsort(CUBE.T[::-1])
    ])  # fmt: skip
    for facet in facets:
        edges = np.roll(facet, -1, axis=0) - facet
        np.testing.assert_allclose(np.linalg.norm(edges, axis=1), 1.0)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(
    ("directions", "shapes"),
    [(0, [(1, 3)]), (1, [(2, 3)]), (2, [(4, 3)])],
)
def test_flat_points_have_a_flat_hull(directions, shapes, size):
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    square = CUBE * (np.arange(3) < directions)
    facets = hull_facets(size * (square @ turn + 0.3))
    assert [facet.shape for facet in facets] == shapes


def test_small_hulls_far_away_have_their_volume():
    near = np.random.default_rng(0).random((30, 2))
    far = hull_facets(1e-6 * near + 1e4)
    assert [facet.shape for facet in far] == [hull_facets(near)[0].shape]
    assert [len(facet) for facet in hull_facets(np.full((5, 3), 1e4 / 3))] == [1]
    tiny = hull_facets(1e-200 * CUBE)
    assert [facet.shape for facet in tiny] == [(4, 3)] * 6


def test_the_hull_of_the_plane_is_a_polygon_of_its_area(axes):
    points = np.random.default_rng(5).normal(size=(30, 2))
    draw_hull(points, axes, vertices=True, color=style.GREEN)
    polygon, dots = axes.collections
    corners = polygon.get_paths()[0].vertices[:-1]
    x, y = corners.T
    area = abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2
    from scipy.spatial import ConvexHull

    np.testing.assert_allclose(area, ConvexHull(points).volume)
    np.testing.assert_allclose(
        np.sort(dots.get_offsets(), axis=0), np.sort(corners, axis=0)
    )
    assert to_hex(polygon.get_edgecolor()[0]) == style.GREEN


def test_a_hull_of_space_leaves_absent_tokens_out(room):
    points = jnp.concatenate([jnp.asarray(CUBE), jnp.full((1, 3), 9.0)])
    weights = jnp.append(jnp.full(8, 1 / 8), 0.0)
    draw_hull(mf.TokenCloud(points, weights), room, opacity=0.3)
    (facets,) = room.collections
    room.figure.canvas.draw()
    assert len(facets.get_facecolor()) == 6
    np.testing.assert_allclose(facets.get_facecolor()[:, 3], 0.3)
    assert len(np.unique(facets.get_facecolor().round(6), axis=0)) > 1, "shaded"
    assert room.get_zlim()[0] < CUBE[:, 2].min() < CUBE[:, 2].max() < room.get_zlim()[1]
    with pytest.raises(mf.InvalidInput, match="dimension 4"):
        draw_hull(np.eye(4), room)
    with pytest.raises(mf.InvalidInput, match="opacity is 2"):
        draw_hull(points, room, opacity=2.0)


def test_a_hyperplane_of_a_box_is_where_it_cuts_the_edges():
    limits = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    hexagon = cross_section(np.ones(3), 1.5, limits)
    assert hexagon.shape == (6, 3)
    np.testing.assert_allclose(hexagon.sum(axis=1), 1.5)
    edges = np.linalg.norm(np.roll(hexagon, -1, axis=0) - hexagon, axis=1)
    np.testing.assert_allclose(edges, np.sqrt(0.5))
    assert cross_section(np.ones(3), 3.5, limits).shape == (0, 3)
    assert cross_section(np.array([1.0, 0, 0]), 0.25, limits).shape == (4, 3)


def test_hyperplanes_keep_the_limits_and_miss_what_is_outside(axes, room):
    axes.set(xlim=(-1, 1), ylim=(2, -2))
    draw_hyperplanes([1.0, 1.0], [0.0, 0.5, 9.0], axes, label="limit")
    assert (axes.get_xlim(), axes.get_ylim()) == ((-1, 1), (2, -2))
    assert len(axes.lines) == 2
    for line, offset in zip(axes.lines, (0.0, 0.5), strict=True):
        np.testing.assert_allclose(line.get_xydata().sum(axis=1), offset, atol=1e-12)
    assert axes.get_legend_handles_labels()[1] == ["limit"]
    room.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
    draw_hyperplanes(jnp.array([0.0, 0.0, 2.0]), 1.0, room)
    (plane,) = room.collections
    np.testing.assert_allclose(np.asarray(plane._faces)[0][:, 2], 0.5)


@pytest.mark.parametrize(
    "normal", [[0.0, 0.0], [1.0], [1.0, 0, 0, 0], [1.0, float("nan")]]
)
def test_a_normal_has_two_or_three_entries(normal, axes):
    with pytest.raises(mf.InvalidInput, match="two or three entries"):
        draw_hyperplanes(normal, 0.0, axes)


@pytest.mark.parametrize("draw", [draw_hyperplanes, draw_direction])
def test_vectors_of_space_need_axes_of_space(draw, axes, room):
    offsets = [0.0] if draw is draw_hyperplanes else []
    with pytest.raises(mf.InvalidInput, match="3 coordinates is given for rectilinear"):
        draw([1.0, 0.0, 0.0], *offsets, axes)
    with pytest.raises(mf.InvalidInput, match="2 coordinates is given for 3d axes"):
        draw([1.0, 0.0], *offsets, room)


def test_figures_of_space_need_axes_of_space(axes):
    points, labels = np.eye(3), [0, 1, 2]
    figures = (
        lambda axes: draw_sphere(points, axes),
        lambda axes: draw_clusters(points, labels, axes),
        lambda axes: draw_cone([np.eye(2)[None]], axes),
    )
    for draw in figures:
        with pytest.raises(mf.InvalidInput, match="3 coordinates is given for rect"):
            draw(axes)
        with pytest.raises(
            mf.InvalidInput, match='NoneType axes; .*"projection": "3d"'
        ):
            draw(None)


def test_a_direction_is_an_arrow_of_its_length(axes, room):
    draw_direction([1.0, 2.0], axes, start=[0.5, 0.0], label=r"$\varphi_1$")
    (arrow,) = axes.collections
    assert (float(arrow.U[0]), float(arrow.V[0]), arrow.scale) == (1.0, 2.0, 1)
    np.testing.assert_allclose(axes.texts[0].get_position(), (0.5 + 1.08, 2.16))
    assert axes.get_ylim()[1] > 2.16
    draw_direction([0.0, 0.0, 1.0], room)
    ends = np.concatenate(room.collections[0]._segments3d)
    assert float(ends[:, 2].max()) == 1.0
    with pytest.raises(mf.InvalidInput, match="two or three entries"):
        draw_direction([1.0, 2.0], axes, start=[0.0])


def tails_and_discs(room):
    """The tails behind and in front of a sphere, then the discs."""
    net = {0, 1, 2}  # the disc of the outline, the nets behind and in front
    drawn = [c for index, c in enumerate(room.collections) if index not in net]
    return drawn[:2], drawn[2:]


def test_the_hidden_side_of_the_sphere_is_paler(room):
    points = jnp.array([[1.0, 0, 0], [-1.0, 0, 0], [0.8, 0, 0.6]])
    draw_sphere(points, room, view=(0.0, 0.0))
    _, (behind, before) = tails_and_discs(room)
    np.testing.assert_allclose(positions_3d(behind), points[1:2])
    np.testing.assert_allclose(positions_3d(before), points[jnp.array([0, 2])])
    assert behind.get_alpha() < before.get_alpha() == 1
    assert behind.get_zorder() < before.get_zorder()
    assert (room.elev, room.azim) == (0.0, 0.0)


def test_tails_on_the_sphere_follow_the_path_and_fade(room):
    path = walk(random_points(6, 3, is_round=True), space=mf.Sphere(), layers=10)
    draw_sphere(path, room, index=7, tail=3)
    tails, discs = tails_and_discs(room)
    pieces = np.concatenate([segments_3d(t) for t in tails if len(segments_3d(t))])
    assert pieces.shape == (3 * 6, 2, 3)
    points = np.asarray(path.points)
    expected = np.stack([points[4:7], points[5:8]], axis=2).reshape(-1, 2, 3)
    order = lambda array: array[np.lexsort(array.reshape(len(array), -1).T)]  # noqa: E731
    np.testing.assert_allclose(order(pieces), order(expected), atol=1e-12)
    shades = np.concatenate([to_rgba_array(t.get_colors()) for t in tails])
    colour = style.depth_colours()(0.7)[:3]
    np.testing.assert_allclose(shades[:, :3], np.tile(colour, (18, 1)), atol=1e-7)
    assert len(np.unique(shades[:, 3].round(9))) >= 3
    shown = np.concatenate([positions_3d(disc) for disc in discs])
    np.testing.assert_allclose(order(shown), order(points[7]), atol=1e-12)


def test_the_first_depth_has_no_tails(room, axes):
    path = walk(random_points(4, 3, is_round=True), space=mf.Sphere())
    draw_sphere(path, room, index=0)
    tails, _ = tails_and_discs(room)
    assert [len(segments_3d(tail)) for tail in tails] == [0, 0]
    flat = walk(random_points(4, 2, is_round=True), space=mf.Sphere())
    draw_circle(flat, axes, index=0)
    assert axes.collections[0].get_segments() == []


def test_tails_on_the_circle_lean_inwards_with_age(axes):
    path = walk(random_points(5, 2, is_round=True), space=mf.Sphere())
    draw_circle(path, axes, tail=4, labels=[0, 0, 1, 1, 2])
    lines, discs = axes.collections
    radii = np.linalg.norm(np.array(lines.get_segments()), axis=2).reshape(4, 5, 2)
    np.testing.assert_allclose(radii[:, 0, 0], [0.7, 0.775, 0.85, 0.925], rtol=1e-9)
    np.testing.assert_allclose(radii[-1, :, 1], 1.0)
    np.testing.assert_allclose(discs.get_offsets(), path.points[-1], atol=1e-12)
    assert to_hex(discs.get_facecolor()[2]) == style.PALETTE[1]
    assert tuple(lines.get_colors()[4][:3]) == to_rgb(style.PALETTE[2])
    np.testing.assert_allclose(lines.get_colors()[-1][3], 1.0)


def test_angles_do_not_jump_where_a_token_passes_zero(axes):
    angles = np.linspace(0.3, -0.4, 8)
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)[:, None]
    paths = paths_of(points[0])
    turning = type(paths)(np.arange(8.0), points, np.ones(1))
    draw_angles(turning, axes)
    (line,) = axes.collections[0].get_segments()
    np.testing.assert_allclose(line, np.stack([np.arange(8), angles], 1), atol=1e-12)
    assert "$0$" in [tick.get_text() for tick in axes.get_yticklabels()]


@pytest.mark.parametrize("draw", [draw_sphere, draw_circle])
def test_tokens_off_the_sphere_are_refused(draw, axes, room):
    axes = room if draw is draw_sphere else axes
    with pytest.raises(mf.InvalidInput, match="away from the unit sphere"):
        draw(2 * np.eye(3 if draw is draw_sphere else 2), axes)
    with pytest.raises(mf.InvalidInput, match="dimension 4"):
        draw(np.eye(4), axes)
    with pytest.raises(mf.InvalidInput, match="index is 1; there are 1 depths"):
        draw(np.eye(3 if draw is draw_sphere else 2), axes, index=1)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("draw", [draw_sphere, draw_circle])
def test_a_tail_is_a_number_of_depths(draw, axes, room):
    axes = room if draw is draw_sphere else axes
    with pytest.raises(mf.InvalidInput, match="tail is 2.5; it must be an integer"):
        draw(np.eye(3 if draw is draw_sphere else 2), axes, tail=2.5)


def test_a_map_of_the_sphere_is_of_tokens_on_it():
    axes = canvas(subplot_kw={"projection": "mollweide"})[1]
    with pytest.raises(mf.InvalidInput, match="9 away from the unit sphere"):
        draw_sphere_density(mf.TokenCloud([[10.0, 0, 0]]), axes)
    with pytest.raises(mf.InvalidInput, match="cells is 1; it must be 2 or more"):
        draw_sphere_density(mf.TokenCloud([[1.0, 0, 0]]), axes, cells=1)
    cloud = mf.TokenCloud([[1.0, 0, 0], [9.0, 0, 0]], [1.0, 0.0])
    mesh = draw_sphere_density(cloud, axes, cells=4)
    assert sorted(np.ravel(mesh.get_array())) == [0.01] * 7 + [8.0]


def test_rows_of_an_attention_matrix_are_grouped_by_leader(axes):
    matrix = np.eye(6)[[4, 1, 1, 4, 4, 1]]
    draw_attention(jnp.asarray(matrix), axes, rank=2)
    rows = [int(tick.get_text()) - 1 for tick in axes.get_yticklabels()]
    assert rows == [1, 2, 5, 0, 3, 4]
    np.testing.assert_allclose(axes.images[0].get_array(), matrix[rows])
    marks = axes.lines[-1]
    np.testing.assert_allclose(marks.get_xdata(), [1, 4])
    assert axes.lines[0].get_ydata()[0] == 2.5, "a line between the groups"
    assert axes.get_title("left") == "rank 2"


def test_rows_can_be_left_or_ordered_by_hand(axes):
    matrix = jnp.asarray(np.eye(3)[[0, 0, 2]])
    draw_attention(matrix, axes, order=None, leaders=[2])
    np.testing.assert_allclose(axes.images[0].get_array(), matrix)
    np.testing.assert_allclose(axes.lines[-1].get_xdata(), [2])
    draw_attention(matrix, axes, order=[2, 0, 1])
    np.testing.assert_allclose(
        axes.images[1].get_array(), np.asarray(matrix)[[2, 0, 1]]
    )
    for order, complaint in (
        ([0, 0, 1], "each of the 3 rows once"),
        ("size", "order is 'size'"),
    ):
        with pytest.raises(mf.InvalidInput, match=complaint):
            draw_attention(matrix, axes, order=order)
    with pytest.raises(mf.InvalidInput, match="leaders is empty"):
        draw_attention(matrix, axes, leaders=[])


def test_tokens_that_have_met_have_one_leader_and_the_largest_weight_full_colour(axes):
    blocks = np.kron(np.eye(2), np.full((3, 3), 1 / 3))
    blocks[1, 2] += 1e-9
    draw_attention(jnp.asarray(blocks), axes)
    np.testing.assert_allclose(axes.lines[-1].get_xdata(), [0, 3])
    assert axes.images[0].get_clim()[1] == blocks.max()
    draw_attention(jnp.asarray(blocks), axes, largest=1.0)
    assert axes.images[1].get_clim() == (-1.0, 1.0)


def test_leaders_are_the_largest_also_where_all_are_negative():
    matrix = -np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    assert leaders_of(matrix).tolist() == [0, 2]
    assert leaders_of(np.zeros((2, 2))).tolist() == [0]


def test_a_matrix_may_be_a_list_and_leaders_are_among_its_tokens(axes):
    draw_attention([[0.5, 0.5], [0.2, 0.8]], axes)
    np.testing.assert_allclose(axes.lines[-1].get_xdata(), [0, 1])
    with pytest.raises(mf.InvalidInput, match=r"leaders is \[7\]; .* from 0 to 2"):
        draw_attention(np.eye(3), axes, leaders=[7])
    with pytest.raises(mf.InvalidInput, match="a leader is .*1.5.*; it must be an int"):
        draw_leader_graph(np.eye(2), jnp.eye(2), axes, leaders=[1.5])
    with pytest.raises(mf.InvalidInput, match=r"shape \(2, 5\); it must be square"):
        draw_attention(np.ones((2, 5)), axes)


def test_numbers_of_many_leaders_do_not_overlap(axes):
    matrix = jnp.asarray(np.eye(128)[np.repeat([0, 1, 40, 127], 32)])
    draw_attention(matrix, axes)
    np.testing.assert_allclose(axes.get_xticks(), [0, 1, 40, 127])
    words = [tick.get_text() for tick in axes.get_xticklabels()]
    assert words == ["1", "", "41", "128"]
    assert len(axes.texts) == 0


def test_arrows_go_from_queries_to_tokens_and_are_as_wide_as_heavy(axes):
    points = jnp.array([[0.0, 0], [1.0, 0], [0.0, 1.0]])
    matrix = jnp.array([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.3, 0.7, 0.0]])
    draw_leader_graph(points, matrix, axes)
    ends = [(tuple(p._posA_posB[0]), tuple(p._posA_posB[1])) for p in axes.patches]
    drawn = [(0, 1), (1, 0), (2, 0), (2, 1)]
    assert ends == [(tuple(points[i]), tuple(points[j])) for i, j in drawn]
    widths = np.array([patch.get_linewidth() for patch in axes.patches])
    np.testing.assert_allclose(widths / widths[1], np.array([0.1, 0.8, 0.3, 0.7]) / 0.8)
    assert widths.min() > 0.1, "visible"
    _, leaders = axes.collections
    np.testing.assert_allclose(leaders.get_offsets(), points[:2])
    assert [text.get_text() for text in axes.texts] == ["1", "2"]
    with pytest.raises(mf.InvalidInput, match="shape \\(3, 3\\) for 2 tokens"):
        draw_leader_graph(points[:2], matrix, axes)


def test_paths_at_other_depths_is_what_the_trajectory_gives():
    path = walk(random_points(4, 3), jnp.array([0.5, 0.5, 0.0, 0.0]))
    depths = [0.0, 0.3, 1.0]
    paths = resample(path, depths)
    for index, depth in enumerate(depths):
        np.testing.assert_allclose(paths.points[index], path.at(depth).points[:2])
    assert [paths.share(index) for index in (0, 1, -1)] == [0.0, 0.3, 1.0]
    with pytest.raises(mf.InvalidInput, match="depth is 1.5"):
        resample(path, [0.0, 1.5])
    with pytest.raises(mf.InvalidInput, match="TokenCloud has no tokens along depth"):
        resample(path.cloud(0), [0.0])


def test_some_coordinates_of_a_trajectory_move_as_they_did():
    path = walk(random_points(4, 5))
    shown = choose_coordinates(path, [3, 0])
    np.testing.assert_allclose(
        shown.at(0.4).points, path.at(0.4).points[:, jnp.array([3, 0])]
    )
    with pytest.raises(mf.InvalidInput, match="coordinates are 6; .* from 1 to 5"):
        choose_coordinates(path, [5])
    with pytest.raises(
        mf.InvalidInput, match="coordinates are 1, 1; each can be shown"
    ):
        choose_coordinates(path, [0, 0])


def test_drawings_of_space_take_their_ink_from_the_page(room):
    draw_paths_3d(walk(random_points(4, 3)), room)
    draw_hull(random_points(6, 3), room)
    drawing = style.to_svg(room.figure)
    assert style.INK not in drawing
    assert "currentColor" in drawing
