"""Counting clusters by single linkage."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.integrate import solve_ivp

from meanformer.attention import Softmax, identity_attention
from meanformer.errors import InvalidInput, Unsupported
from meanformer.flows import Flow, LongDepth, solve
from meanformer.geometry import Euclidean, Sphere
from meanformer.measures import Gaussian, TokenCloud, UniformSphere, pad
from meanformer.numerics import linkage as linkage_module
from meanformer.observables import cluster_profile, count_clusters, count_modes
from meanformer.observables.clusters import counting
from memory_use import needs_linux, peak_increase

FIVE = np.array([0.0621971438, 0.2143229734, 1.8191226208, 2.9110710095, 3.1879369617])


def on_circle(angles, weights=None):
    angles = jnp.asarray(angles)
    points = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    return TokenCloud(points, weights)


def on_line(*places):
    return TokenCloud(np.array(places, float)[:, None])


def blobs(key, count=40, dimension=3):
    centres = 4 * jnp.eye(dimension)
    noise = 0.1 * jr.normal(key, (dimension, count, dimension))
    return TokenCloud((centres[:, None, :] + noise).reshape(-1, dimension))


def same_groups(first, second):
    first, second = np.asarray(first), np.asarray(second)
    same = first[:, None] == first[None, :]
    return np.array_equal(same, second[:, None] == second[None, :])


def five_tokens(depths):
    """The angles of the published run, without the library."""

    def velocity(_, angles):
        gaps = angles[None, :] - angles[:, None]
        masses = np.exp(4 * np.cos(gaps))
        return (masses * np.sin(gaps)).sum(1) / masses.sum(1)

    return solve_ivp(
        velocity, (0, depths[-1]), FIVE, "DOP853", depths, rtol=1e-10, atol=1e-12
    ).y.T


def test_the_five_token_run_has_three_groups_then_two_then_one():
    # At the threshold 0.25 the last two groups are one from depth 326.608 on.
    depths = [2.0, 3.4, 3.5, 5.0, 20.0, 200.0, 326.5, 326.7, 329.0, 400.0]
    found = [
        count_clusters(on_circle(angles), space=Sphere(), threshold=0.25)
        for angles in five_tokens(depths)
    ]
    counts = [clusters.count for clusters in found]
    assert counts == [3, 3, 2, 2, 2, 2, 2, 1, 1, 1]
    np.testing.assert_allclose(found[4].masses, [0.6, 0.4], rtol=1e-12)


def test_tokens_in_a_cluster_approach_each_other_like_the_exponential_of_depth():
    angles = five_tokens([5.0, 10.0])
    gaps = angles[:, 1] - angles[:, 0]
    np.testing.assert_allclose(gaps, [0.0010936, 7.484e-6], rtol=1e-3)
    np.testing.assert_allclose(np.log(gaps[0] / gaps[1]) / 5, 0.997, atol=1e-3)


@pytest.mark.slow
def test_a_profile_counts_along_a_long_walk():
    flow = Flow(identity_attention("softmax", 2, 4.0), space=Sphere())
    depths = jnp.array([0.0, 2.0, 5.0, 200.0, 326.0, 327.0, 400.0])
    path = solve(flow, on_circle(FIVE), 400.0, save=depths, solver=LongDepth())
    # The default of the sphere at this temperature is the angle 0.25.
    profile = cluster_profile(path, space=Sphere(), beta=4.0)
    np.testing.assert_array_equal(profile.counts, [4, 3, 2, 2, 2, 1, 1])
    assert profile.clusters[0].threshold == 0.25


def test_a_chain_is_one_cluster_although_the_matrix_of_close_pairs_has_rank_three():
    angle = np.arccos(0.9999) * 0.9
    chain = on_circle([0.0, angle, 2 * angle])
    close = np.asarray(chain.points @ chain.points.T) > 0.9999
    assert np.linalg.matrix_rank(close.astype(float)) == 3
    found = count_clusters(chain, space=Sphere(), threshold=np.arccos(0.9999))
    assert found.count == 1
    np.testing.assert_allclose(found.heights, [angle, angle], rtol=1e-9)


def test_heights_on_the_circle_are_the_gaps_without_the_largest():
    cloud = on_circle([0.1, 0.4, 2.0, -0.3, 3.1])
    found = count_clusters(cloud, space=Sphere(), threshold=0.5)
    np.testing.assert_allclose(found.heights, [0.3, 0.4, 1.1, 1.6], rtol=1e-12)
    assert found.count == 3
    np.testing.assert_array_equal(found.labels, [0, 0, 1, 0, 2])
    np.testing.assert_allclose(found.interval, (0.4, 1.1), rtol=1e-12)
    np.testing.assert_allclose(found.masses, [0.6, 0.2, 0.2], rtol=1e-12)


def test_two_opposite_tokens_are_pi_apart():
    found = count_clusters(on_circle([0.3, 0.3 + np.pi]), space=Sphere(), threshold=3.0)
    assert found.count == 2
    np.testing.assert_allclose(found.heights, [np.pi], rtol=1e-14)
    np.testing.assert_allclose(found.separations, [np.pi, np.pi], rtol=1e-14)


@pytest.mark.parametrize("dimension", [1, 2, 3, 7])
def test_heights_are_those_of_scipy(key, dimension):
    cloud = TokenCloud(jr.normal(key, (60, dimension)))
    found = count_clusters(cloud, threshold=0.3)
    tree = linkage(np.asarray(cloud.points), "single")
    np.testing.assert_allclose(found.heights, tree[:, 2], rtol=1e-12)
    assert same_groups(found.labels, fcluster(tree, 0.3, "distance"))


def test_heights_on_the_sphere_are_angles(key):
    cloud = TokenCloud(UniformSphere(3).sample(50, key=key))
    found = count_clusters(cloud, space=Sphere(), threshold=0.3)
    gram = np.clip(np.asarray(cloud.points @ cloud.points.T), -1, 1)
    upper = np.arccos(gram[np.triu_indices(50, 1)])
    tree = linkage(upper, "single")
    np.testing.assert_allclose(found.heights, tree[:, 2], rtol=1e-9)
    assert same_groups(found.labels, fcluster(tree, 0.3, "distance"))


def test_groups_have_centres_radii_and_separations(key):
    cloud = blobs(key)
    found = count_clusters(cloud, scale=cloud.diameter(), threshold=1.0)
    assert found.count == 3
    points = np.asarray(cloud.points).reshape(3, 40, 3)
    centres = points.mean(axis=1)
    np.testing.assert_allclose(found.centres, centres, atol=1e-12)
    radii = np.linalg.norm(points - centres[:, None], axis=2).max(axis=1)
    np.testing.assert_allclose(found.radii, radii, rtol=1e-12)
    gaps = np.linalg.norm(centres[:, None] - centres[None], axis=2)
    nearest = np.where(gaps > 0, gaps, np.inf).min(axis=1)
    np.testing.assert_allclose(found.separations, nearest, rtol=1e-12)


def test_the_centre_of_a_cluster_all_around_the_circle_is_one_of_its_tokens():
    found = count_clusters(
        on_circle(np.arange(8) * np.pi / 4), space=Sphere(), threshold=1.0
    )
    assert found.count == 1
    np.testing.assert_allclose(found.centres, [[1.0, 0.0]], atol=1e-15)
    np.testing.assert_allclose(found.radii, [np.pi], rtol=1e-12)
    assert found.separations.shape == (0,)
    assert found.interval[1] is None


def test_the_default_threshold_is_a_share_of_the_scale():
    cloud = on_line(0.0, 0.04, 0.1, 1.0)
    assert count_clusters(cloud, scale=1.0).count == 3
    assert count_clusters(cloud, scale=1.3).count == 2
    assert count_clusters(cloud, scale=cloud.diameter()).threshold == 0.05


@pytest.mark.parametrize(
    ("places", "count", "word"),
    [
        ((0, 1e-4, 1e-4, 2e-4), 1, "one cluster"),
        ((0, 1e-4, 1.0, 1.0001, 3.0), 3, "a gap"),
        ((0, 1e-12, 1.0, 3.0), 3, "a gap"),
        ((0, 0, 1.0, 3.0), 3, "a gap"),
        ((0, 1.0, 3.0), 3, "a gap"),
        ((0, 0, 0), 1, "one cluster"),
        ((0, 0.1, 0.25, 0.45), None, "undecided"),
        ((0, 1.0), 2, "a gap"),
        ((0.7,), 1, "one cluster"),
    ],
)
def test_the_automatic_rule_looks_for_a_ratio_of_ten(places, count, word):
    found = count_clusters(on_line(*places), threshold="auto", scale=3.0)
    assert found.count == count
    assert found.verdict.startswith(word)


def test_the_automatic_rule_takes_the_largest_ratio_above_the_floor():
    # Ratios 50 (below the floor of 1.5e-2), 20 and 40: the last one decides.
    heights = np.array([2e-4, 1e-2, 0.2, 8.0])
    places = np.append(0.0, np.cumsum(heights))
    found = count_clusters(on_line(*places), threshold="auto", scale=3.0)
    assert found.count == 2
    np.testing.assert_allclose(found.interval, (0.2, 8.0), rtol=1e-10)
    # On the sphere the floor is measured in beta^(-1/2).
    cold, hot = (
        count_clusters(
            on_circle(places / 4), space=Sphere(), threshold="auto", beta=beta
        ).count
        for beta in (400.0, 1e-4)
    )
    assert (cold, hot) == (2, 1)


@pytest.mark.slow
def test_the_automatic_rule_does_not_jump_as_tokens_meet_and_merge():
    angles = np.array([0.0, 0.02, 0.04, 1.2, 2.45])
    flow = Flow(identity_attention("softmax", 2, 100.0), space=Sphere())
    for merge in (None, 1e-9):
        path = solve(flow, on_circle(angles), 40.0, save=5, merge=merge)
        found = cluster_profile(path, space=Sphere(), beta=100.0, threshold="auto")
        np.testing.assert_array_equal(found.counts, 3)


@pytest.mark.parametrize("rest", [(1.0, 3.0), (0.1, 0.25), (1.0, 1.02, 2.5), (0.014,)])
def test_the_automatic_rule_does_not_change_as_a_distance_goes_to_zero(rest):
    verdicts = {
        count_clusters(
            on_line(0.0, distance, *rest), threshold="auto", scale=3.0
        ).verdict
        for distance in (0.0, 1e-300, 1e-12, 1e-6, 1e-3)
    }
    alone = count_clusters(on_line(0.0, *rest), threshold="auto", scale=3.0)
    # The first step of the rest is shorter by the last distance.
    assert len({word.split(" factor")[0] for word in verdicts | {alone.verdict}}) == 1


def test_light_clusters_are_dropped_on_request():
    cloud = TokenCloud([[0.0], [0.1], [5.0]], [0.5, 0.45, 0.05])
    found = count_clusters(cloud, threshold=1.0, smallest_mass=0.1)
    assert found.count == 1
    np.testing.assert_array_equal(found.labels, [0, 0, -1])
    np.testing.assert_allclose(found.masses, [0.95], rtol=1e-12)
    np.testing.assert_allclose(found.centres, [[0.045 / 0.95]], rtol=1e-12)
    nothing = count_clusters(cloud, threshold=1.0, smallest_mass=2.0)
    assert nothing.count == 0
    assert nothing.centres.shape == (0, 1)


def test_absent_tokens_are_absent(key):
    cloud = blobs(key, count=5)
    bridge = jnp.full((1, 3), 4 / 3)
    points = jnp.concatenate([cloud.points, bridge])
    padded = TokenCloud(points, jnp.append(cloud.weights, 0.0))
    found, same = (count_clusters(c, threshold=4.0) for c in (cloud, padded))
    assert found.count == same.count == 3
    assert int(same.labels[-1]) == -1
    np.testing.assert_array_equal(found.heights, same.heights)
    assert count_clusters(pad(cloud, 20), threshold=4.0).count == 3


def test_the_order_of_tokens_and_splitting_one_do_not_matter(key):
    cloud = blobs(key, count=7)
    order = np.asarray(jr.permutation(key, 21))
    shuffled = TokenCloud(cloud.points[order], cloud.weights[order])
    half = cloud.weights.at[0].multiply(0.5)
    split = TokenCloud(
        jnp.concatenate([cloud.points, cloud.points[:1]]), jnp.append(half, half[0])
    )
    found = count_clusters(cloud, threshold=1.0)
    other = count_clusters(shuffled, threshold=1.0)
    assert same_groups(found.labels[order], other.labels)
    np.testing.assert_allclose(other.heights, found.heights, rtol=1e-12)
    again = count_clusters(split, threshold=1.0)
    assert same_groups(again.labels[:-1], found.labels)
    np.testing.assert_allclose(np.sort(again.masses), np.sort(found.masses), rtol=1e-12)


def test_rotations_do_not_matter(key):
    cloud = TokenCloud(UniformSphere(3).sample(40, key=key))
    turn = jnp.linalg.qr(jr.normal(key, (3, 3)))[0]
    first = count_clusters(cloud, space=Sphere(), beta=9.0)
    second = count_clusters(cloud.moved(cloud.points @ turn), space=Sphere(), beta=9.0)
    assert same_groups(first.labels, second.labels)
    np.testing.assert_allclose(first.radii, second.radii, atol=1e-12)
    np.testing.assert_allclose(second.centres, first.centres @ turn, atol=1e-12)


@pytest.mark.parametrize(("dimension", "distance"), [(2, 0.05), (3, 0.2), (8, 1.9)])
def test_groups_without_a_tree_are_those_of_the_tree(key, dimension, distance):
    points = np.asarray(jr.normal(key, (400, dimension)))
    edges = linkage_module.spanning_edges(points)
    lengths = np.linalg.norm(points[edges[:, 0]] - points[edges[:, 1]], axis=1)
    tree = linkage_module.components(400, edges[lengths <= distance])
    assert 1 < tree.max() + 1 < 400
    assert same_groups(linkage_module.close_components(points, distance), tree)


def test_cells_are_linked_by_points_other_than_their_first():
    # Two full cells, their first points far apart, and one short step between them.
    left = np.stack([np.linspace(0.0, 0.66, 12), np.zeros(12)], axis=1)
    right = np.stack([np.linspace(2.2, 1.5, 12), np.zeros(12)], axis=1)
    points = np.concatenate([left, right])
    assert linkage_module.close_components(points, 1.0).max() == 0
    assert linkage_module.close_components(points, 0.83).max() == 1


def test_equal_points_are_one_group_at_distance_zero():
    points = np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    labels = linkage_module.close_components(points, 0.0)
    assert same_groups(labels, [0, 1, 0])


def test_many_tokens_are_counted_at_a_threshold_and_not_automatically(key, monkeypatch):
    cloud = TokenCloud(UniformSphere(3).sample(300, key=key))
    exact = count_clusters(cloud, space=Sphere(), threshold=0.15)
    monkeypatch.setattr(counting, "MOST_FOR_TREE", 100)
    found = count_clusters(cloud, space=Sphere(), threshold=0.15)
    assert found.count == exact.count > 3
    assert same_groups(found.labels, exact.labels)
    assert found.heights is None
    assert found.interval is None
    with pytest.raises(Unsupported, match="300 are more than 100"):
        count_clusters(cloud, space=Sphere(), threshold="auto", beta=4.0)


def test_a_threshold_beyond_half_a_turn_joins_all_tokens_without_a_tree(monkeypatch):
    monkeypatch.setattr(counting, "MOST_FOR_TREE", 1)
    poles = TokenCloud([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]])
    assert count_clusters(poles, space=Sphere(), threshold=4.0).count == 1


@pytest.mark.slow
def test_fifty_thousand_tokens_are_counted(key):
    cloud = blobs(key, count=17_000)
    found = count_clusters(cloud, threshold=1.0)
    assert found.count == 3
    np.testing.assert_allclose(found.masses, 1 / 3, rtol=1e-9)


@pytest.mark.slow
@needs_linux
def test_tokens_that_are_nearly_all_close_are_linked_in_little_memory():
    before = (
        "import numpy as np, scipy.spatial, scipy.sparse.csgraph\n"
        "from meanformer.numerics.linkage import close_components\n"
        "points = np.random.default_rng(0).normal(size=(12_000, 6))"
    )
    call = "assert len(np.unique(close_components(points, 1.0))) > 1"
    # All pairs near enough to be looked at, two indices each, take more than a GiB.
    assert peak_increase(before, call) < 300


@pytest.mark.parametrize("dimension", [2, 7])
def test_long_chains_are_followed_to_their_end(dimension):
    points = np.zeros((3000, dimension))
    points[:, -1] = np.arange(3000)
    points = points[np.random.default_rng(0).permutation(3000)]
    assert linkage_module.close_components(points, 1.0).max() == 0
    assert linkage_module.close_components(points, 0.99).max() == 2999


@pytest.mark.parametrize(("dimension", "distance"), [(2, 0.1), (5, 0.8)])
def test_pairs_in_several_passes_give_the_same_groups(
    key, dimension, distance, monkeypatch
):
    points = np.asarray(jr.normal(key, (300, dimension)))
    once = linkage_module.close_components(points, distance)
    assert 1 < once.max() + 1 < 300
    monkeypatch.setattr(linkage_module, "PAIRS_AT_ONCE", 50)
    assert same_groups(linkage_module.close_components(points, distance), once)


def test_a_grid_that_would_be_too_fine_is_not_made():
    points = np.zeros((500, 3))
    points[:, 0] = np.random.default_rng(0).random(500)
    points[1] = points[0]
    assert linkage_module.close_components(points, 1e-20).max() + 1 == 499
    far = np.concatenate([points, np.full((1, 3), 1e25)])
    labels = linkage_module.close_components(far, 0.1)
    assert same_groups(labels, np.append(np.zeros(500), 1))


def test_counts_agree_with_and_without_a_tree_where_rounding_decides(monkeypatch):
    single = np.zeros((3, 2), np.float32)
    single[:, 0] = [0.0, 0.1, 0.2]
    exact = on_circle(0.1 * np.arange(9)).points
    cases = [
        (TokenCloud(single), Euclidean()),
        (TokenCloud(single.astype(float)), Euclidean()),
        (TokenCloud(jnp.pad(exact, ((0, 0), (0, 1)))), Sphere()),
    ]

    def counts(threshold):
        return [
            count_clusters(cloud, space=space, threshold=threshold).count
            for cloud, space in cases
        ]

    thresholds = [0.1, float(np.float32(0.1)), np.nextafter(0.1, 1)]
    with_tree = [counts(threshold) for threshold in thresholds]
    # In double precision the steps of the first are just longer than one tenth.
    assert (with_tree[0][0], with_tree[1][0]) == (3, 1)
    monkeypatch.setattr(counting, "MOST_FOR_TREE", 1)
    assert [counts(threshold) for threshold in thresholds] == with_tree


@pytest.mark.parametrize("size", [1e160, 1e-170, 1e307])
@pytest.mark.parametrize("most", [20_000, 1])
def test_sizes_near_the_ends_of_floats_are_no_obstacle(size, most, monkeypatch):
    monkeypatch.setattr(counting, "MOST_FOR_TREE", most)
    cloud = TokenCloud(size * jnp.array([[0.0, 0], [5, 0], [1, 0], [5.5, 0]]))
    found = count_clusters(cloud, threshold=1.1 * size)
    np.testing.assert_array_equal(found.labels, [0, 1, 0, 1])
    np.testing.assert_allclose(found.separations / size, 4.75, rtol=1e-12)
    if most > 1:
        np.testing.assert_allclose(found.heights / size, [0.5, 1, 4], rtol=1e-12)


def test_a_smallest_mass_is_reached_up_to_rounding():
    cloud = TokenCloud(np.zeros((10, 2)))
    assert count_clusters(cloud, threshold=1.0, smallest_mass=1.0).count == 1
    assert count_clusters(cloud, threshold=1.0, smallest_mass=1.001).count == 0


def test_splitting_a_token_does_not_change_the_automatic_rule():
    places = [0.0, 0.1, 0.25, 0.45]
    for copies in (1, 2, 5):
        cloud = on_line(*[0.0] * (copies - 1), *places)
        found = count_clusters(cloud, threshold="auto", scale=3.0)
        assert found.count is None


def test_only_trajectories_of_tokens_have_a_profile(untyped):
    with pytest.raises(InvalidInput, match="trajectory is a TokenCloud"):
        cluster_profile(on_line(0.0, 1.0), threshold=0.5)


def test_single_precision_stays_single_precision(key):
    points = blobs(key).points.astype(jnp.float32)
    found = count_clusters(TokenCloud(points), threshold=1.0)
    assert found.count == 3
    dtypes = {found.masses.dtype, found.centres.dtype, found.heights.dtype}
    assert dtypes == {jnp.dtype("float32")}


@pytest.mark.slow
def test_a_profile_in_space_takes_the_scale_of_the_start():
    flow = Flow(Softmax(np.eye(1), np.eye(1), -np.eye(1)))
    path = solve(flow, on_line(-1.0, -0.95, 1.0), 3.0, save=4)
    profile = cluster_profile(path)
    assert profile.clusters[0].threshold == profile.clusters[-1].threshold == 0.1
    assert profile.counts[0] == 2
    undecided = cluster_profile(path, threshold="auto", scale=100.0)
    assert set(np.asarray(undecided.counts)) <= {-1, 1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": Sphere()}, "pass beta"),
        ({"space": Sphere(), "beta": 0.0}, "beta is 0.0"),
        ({}, "pass scale"),
        ({"space": Euclidean(), "scale": -1.0}, "scale is -1.0"),
        ({"threshold": -1.0}, "threshold is -1.0"),
        ({"threshold": "often"}, "threshold is 'often'"),
        ({"threshold": 1.0, "smallest_mass": -0.1}, "smallest_mass is -0.1"),
    ],
)
def test_wrong_options_are_refused_with_advice(options, message):
    with pytest.raises(InvalidInput, match=message):
        count_clusters(TokenCloud([[1.0, 0.0], [0.0, 1.0]]), **options)


def test_tokens_off_the_sphere_are_refused_there():
    with pytest.raises(InvalidInput, match="token 0 has norm 2"):
        count_clusters(TokenCloud([[2.0, 0.0]]), space=Sphere(), threshold=1.0)


def test_other_objects_and_traced_tokens_are_refused(untyped):
    with pytest.raises(InvalidInput, match="cloud is a Gaussian"):
        count_clusters(Gaussian(jnp.zeros(2), jnp.eye(2)), threshold=1.0)
    with pytest.raises(InvalidInput, match="outside"):
        jax.jit(lambda x: count_clusters(TokenCloud(x), threshold=1.0).masses)(
            jnp.eye(2)
        )


def test_a_batch_is_refused_with_how_to_count_it(untyped):
    batch = jax.vmap(TokenCloud)(jnp.stack([jnp.eye(2), 2 * jnp.eye(2)]))
    with pytest.raises(InvalidInput, match="a batch; count cloud by cloud"):
        count_clusters(batch, threshold=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "six_starts"),
    [
        (9.0, [3.3, 4.0, 3.3, 3.0]),
        (25.0, [5.7, 5.7, 5.3, 5.3]),
        (81.0, [10.5, 10.8, 9.8, 9.0]),
    ],
)
def test_modes_then_clusters_are_as_many_as_in_six_starts_of_another_program(
    beta, six_starts
):
    # Modes at depth 0, clusters at 10, 30 and 100; the table is known to about 0.5.
    flow = Flow(identity_attention("softmax", 2, beta), space=Sphere())
    found = []
    for start in range(12):
        angles = 2 * jnp.pi * jr.uniform(jr.fold_in(jr.key(0), start), (200,))
        cloud = on_circle(angles)
        path = solve(flow, cloud, 100.0, save=jnp.array([0.0, 10.0, 30.0, 100.0]))
        counts = [
            count_clusters(path.cloud(place), space=Sphere(), beta=beta).count
            for place in (1, 2, 3)
        ]
        modes = count_modes(cloud, beta, space=Sphere()).count
        found.append([modes, *map(int, counts)])
    np.testing.assert_allclose(np.mean(found, 0), six_starts, rtol=0, atol=1.0)
