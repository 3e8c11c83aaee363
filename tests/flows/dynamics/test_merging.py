"""Joining tokens that have met: masses, places, events, what it costs, refusals."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer.flows.bounds.rates import internal_rate, largest_rate
from meanformer.flows.dynamics.merging import Gap, Merge, initial_atoms, join

CONTRACTION = mf.Flow(mf.PointMap(jnp.negative, takes=2))


def joined(points, weights, distance, space=None):
    gap = Gap(Merge(distance).prepared(jnp.dtype("float64")), space or mf.Euclidean())
    cloud = mf.TokenCloud(points, weights)
    atoms = initial_atoms(jnp.zeros(()), cloud.points, False)
    return join(gap, cloud, jnp.array(2.5), atoms), cloud


def test_a_pair_becomes_its_weighted_mean_at_the_cost_in_transport():
    points = jnp.array([[0.0, 0.0], [3.0, 0.0], [0.0, 0.01]])
    (moved, atoms), cloud = joined(points, [0.3, 0.5, 0.2], 0.02)
    np.testing.assert_allclose(moved, [[0, 0.004], [3, 0], [0, 0.004]], atol=1e-15)
    np.testing.assert_array_equal(atoms.leaders, [0, 1, 0])
    np.testing.assert_allclose(atoms.weights(cloud), [0.5, 0.5, 0])
    np.testing.assert_allclose(atoms.jumps, np.sqrt(0.3 * 0.2 / 0.5) * 0.01)
    np.testing.assert_allclose(np.exp(atoms.log_bound), atoms.jumps)
    np.testing.assert_array_equal(atoms.joined_depths, [0, 0, 2.5])
    np.testing.assert_allclose(atoms.distances, [0, 0, 0.01])
    np.testing.assert_allclose(atoms.masses, [0, 0, 0.5])


@pytest.mark.slow
def test_the_jump_of_a_join_is_its_distance_in_transport(key):
    centres = 5 * jr.normal(key, (4, 1, 2))
    points = centres + 0.01 * jr.normal(jr.key(1), (4, 3, 2))
    (moved, atoms), cloud = joined(points.reshape(12, 2), None, 0.2)
    assert int((atoms.leaders == jnp.arange(12)).sum()) == 4
    exact = mf.wasserstein(cloud, cloud.moved(moved))
    np.testing.assert_allclose(atoms.jumps, exact, rtol=1e-9)


def test_a_chain_joins_as_a_whole_and_absent_tokens_do_not_link_it():
    points = jnp.array([[0.0], [0.9], [1.8], [2.5], [3.4], [9.0]])
    weights = jnp.array([0.2, 0.2, 0.2, 0.0, 0.2, 0.2])
    (moved, atoms), cloud = joined(points, weights, 1.0)
    np.testing.assert_array_equal(atoms.leaders, [0, 0, 0, 3, 4, 5])
    np.testing.assert_allclose(moved[:, 0], [0.9, 0.9, 0.9, 2.5, 3.4, 9.0])
    np.testing.assert_allclose(atoms.counts(cloud), [3, 0, 0, 0, 1, 1])


def test_on_the_sphere_the_mean_is_retracted():
    angles = jnp.array([0.0, 0.02, 2.0])
    points = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    (moved, _), _ = joined(points, jnp.full(3, 1 / 3), 0.03, mf.Sphere())
    np.testing.assert_allclose(jnp.arctan2(moved[:, 1], moved[:, 0]), [0.01, 0.01, 2])
    np.testing.assert_allclose(jnp.linalg.norm(moved, axis=1), 1, rtol=1e-15)
    np.testing.assert_array_equal(moved[2], points[2])


@pytest.mark.parametrize(("distance", "leader"), [(0.97, 1), (1.01, 0), (4.0, 0)])
def test_on_the_sphere_the_distance_is_the_angle_and_not_the_chord(distance, leader):
    # The chord of the angle 1 is 0.9589.
    angles = jnp.array([0.0, 1.0])
    points = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    (_, atoms), _ = joined(points, jnp.full(2, 0.5), distance, mf.Sphere())
    assert int(atoms.leaders[1]) == leader


def test_a_distance_below_rounding_is_raised_to_it():
    cloud = mf.TokenCloud(jnp.array([[1e6, 0.0], [0.0, 1.0]]))
    gap = Gap(Merge().prepared(jnp.dtype("float64")), mf.Euclidean())
    np.testing.assert_allclose(gap.distance(cloud), 512 * 1e6 * 2.0**-52)


def contracted(distance, **options):
    """Tokens under x' = -x: a gap g is closed to r at the depth log(g/r)."""
    points = jnp.array([[1.0, 0.0], [1.0, 1e-3], [-1.0, 0.0], [-1.0, 1e-3]])
    weights = jnp.array([0.1, 0.3, 0.4, 0.2])
    cloud = mf.TokenCloud(points, weights)
    return mf.solve(CONTRACTION, cloud, 25.0, save=2, merge=distance, **options)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile once, before the first test is timed."""
    contracted(1e-9)


def test_gaps_in_the_plane_close_at_the_depths_of_the_closed_form():
    path = contracted(1e-9)
    close, far = np.log(1e-3 / 1e-9), np.log(2 / 1e-9)
    np.testing.assert_allclose(path.merges.depths, [close, close, far], rtol=2e-6)
    assert float(path.merges.depths[0]) == float(path.merges.depths[1])
    np.testing.assert_array_equal(path.merges.leaders, [0, 2, 0])
    np.testing.assert_array_equal(path.merges.tokens, [1, 3, 2])
    np.testing.assert_allclose(path.merges.masses, [0.4, 0.6, 1.0])
    assert bool(path.status == mf.Status.reached)


def test_an_atom_that_lands_beside_a_third_token_takes_it_in():
    r = 1e-6
    # The third is farther than r from both others, and closer to their mean.
    near = r * jnp.array([[0.0, 0.0], [0.99, 0.0], [0.495, 0.95]])
    cloud = mf.TokenCloud(jnp.concatenate([near, jnp.array([[1.0, 0.0]])]))
    path = mf.solve(CONTRACTION, cloud, 25.0, save=2, merge=r)
    np.testing.assert_array_equal(path.merges.tokens, [1, 2, 3])
    np.testing.assert_array_equal(path.merges.depths[:2], [0.0, 0.0])
    np.testing.assert_allclose(path.merges.depths[2], np.log(1 / r), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [None, mf.LongDepth()], ids=["adaptive", "long"])
def test_joins_do_not_depend_on_the_depths_that_are_saved(solver, key):
    flow = mf.Flow(mf.identity_attention("softmax", 3, 4.0), space=mf.Sphere())
    cloud = mf.TokenCloud(mf.UniformSphere(3).sample(64, key=key))
    few, many = (
        mf.solve(flow, cloud, 40.0, save=save, merge=1e-6, solver=solver, rtol=1e-9)
        for save in (2, 21)
    )
    assert len(few.merges) == len(many.merges) > 50
    np.testing.assert_allclose(few.merges.depths, many.merges.depths, rtol=1e-4)
    for index in range(len(many)):
        atoms = np.unique(np.asarray(many.points[index]), axis=0)
        gaps = np.linalg.norm(atoms[:, None] - atoms[None], axis=2)
        assert gaps[np.triu_indices(len(atoms), 1)].min() > 0.99e-6


def test_a_number_is_the_distance_and_the_bound_is_the_contracted_error():
    path = contracted(1e-6)
    # Each pair jumps by sqrt(w w'/(w + w')) r; the flow then shrinks it by e^-t.
    first = np.sqrt((0.1 * 0.3 / 0.4 + 0.4 * 0.2 / 0.6) * 1e-12)
    second = np.sqrt(0.4 * 0.6 * 1e-12)
    np.testing.assert_allclose(
        path.statistics["merge_error"][-1], first + second, rtol=2e-5
    )
    depths = np.asarray(path.merges.depths)[[0, 2]]
    carried = first * np.exp(depths[0] - 25) + second * np.exp(depths[1] - 25)
    np.testing.assert_allclose(
        path.statistics["log10_merge_bound"][-1], np.log10(carried), atol=1e-3
    )
    np.testing.assert_array_equal(path.statistics["atom_count"], [4, 1])


def test_without_merge_nothing_is_recorded():
    path = mf.solve(CONTRACTION, mf.TokenCloud([[1.0, 0.0]]), 1.0, save=2)
    assert path.merges is None
    assert path.atoms is None
    assert "merge_error" not in path.statistics


def test_the_dense_rate_is_the_largest_eigenvalue_on_tangent_vectors(key):
    matrix = jr.normal(key, (2, 2))
    cloud = mf.TokenCloud(jr.normal(key, (3, 2)), jnp.array([0.5, 0.5, 0.0]))
    rate = largest_rate(lambda x: x @ matrix.T, cloud, mf.Euclidean())
    expected = np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1]
    np.testing.assert_allclose(rate, expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rates_of_atoms_and_inside_of_them_are_those_of_all_their_tokens(sign):
    # The same measure twice: three atoms, and five tokens of which two pairs coincide.
    value = sign * jnp.array([[1.0, 0.3, 0], [0, 0.8, 0], [0.2, 0, 1.1]])
    gamma = mf.Softmax(jnp.eye(3), jnp.eye(3), value, beta=3.0)
    flow, zero = mf.Flow(gamma, space=mf.Sphere()), jnp.zeros(())
    points = sphere_clusters().points[jnp.array([0, 1, 3])]
    atoms = mf.TokenCloud(points, jnp.array([0.5, 0.3, 0.2]))
    tokens = mf.TokenCloud(
        points[jnp.array([0, 0, 1, 2, 2])], jnp.array([0.2, 0.3, 0.3, 0.15, 0.05])
    )

    def rate(cloud):
        def field(x):
            return flow.field(zero, cloud.moved(x), x)

        return largest_rate(field, cloud, flow.space)

    inside = internal_rate(
        lambda x: flow.field(zero, atoms, x),
        points,
        jnp.array([True, False, True]),
        flow.space,
    )
    expected = max(float(rate(atoms)), float(inside))
    np.testing.assert_allclose(rate(tokens), expected, rtol=1e-10)
    assert (float(inside) > float(rate(atoms))) == (sign < 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge": 0.0}, "must be positive"),
        ({"merge": True}, "must be Merge"),
        ({"merge": "near"}, "must be Merge"),
        ({"merge": 1e-9, "depth": -1.0}, "cannot run backward"),
    ],
    ids=["zero", "true", "text", "backward"],
)
def test_a_wrong_merge_is_refused(options, message, untyped):
    depth = options.pop("depth", 1.0)
    with pytest.raises(mf.InvalidInput, match=message):
        mf.solve(CONTRACTION, mf.TokenCloud([[1.0, 0.0]]), depth, **options)


def test_positions_and_noise_are_refused_with_the_reason():
    cloud = mf.TokenCloud([[1.0, 0.0], [0.0, 1.0]], positions=[0.5, 1.0])
    with pytest.raises(mf.Unsupported, match="positions"):
        mf.solve(CONTRACTION, cloud, 1.0, merge=Merge())
    noisy = mf.Flow(mf.PointMap(jnp.negative, takes=2), noise=0.1)
    with pytest.raises(mf.Unsupported, match="noise drives them apart"):
        mf.solve(
            noisy,
            mf.TokenCloud([[1.0, 0.0]]),
            1.0,
            merge=Merge(),
            solver=mf.FixedStep(0.1),
            key=jr.key(0),
        )


@pytest.mark.slow
def test_a_derivative_is_refused_with_the_reason():
    def loss(points):
        path = mf.solve(CONTRACTION, mf.TokenCloud(points), 1.0, save=2, merge=0.1)
        return path.points.sum()

    with pytest.raises(mf.Unsupported, match="has no derivative"):
        jax.grad(loss)(jnp.array([[1.0, 0.0], [0.0, 1.0]]))


def sphere_clusters():
    """Two loose pairs and a token on the sphere, without symmetry."""
    points = jnp.array(
        [[1, 0.1, 0], [0, 1, 0.3], [1, 0, 0.12], [-0.1, 0.2, 1], [0.05, 1, 0.4]]
    )
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    return mf.TokenCloud(points, jnp.array([0.3, 0.2, 0.1, 0.25, 0.15]))


@pytest.mark.slow
def test_the_merged_flow_is_off_by_less_than_the_bound_and_by_first_order():
    flow = mf.Flow(mf.identity_attention("softmax", 3, 6.0), space=mf.Sphere())
    options = {"save": 41, "rtol": 1e-11, "atol": 1e-13}
    cloud = sphere_clusters()
    exact = mf.solve(flow, cloud, 8.0, **options)
    errors = []
    for distance in (0.02, 0.01, 0.005):
        path = mf.solve(flow, cloud, 8.0, merge=distance, **options)
        squares = jnp.sum((path.points - exact.points) ** 2, axis=2)
        # Token by token: no less than the Wasserstein distance.
        error = np.sqrt(squares @ cloud.weights)
        bound = 10 ** path.statistics["log10_merge_bound"]
        began = np.asarray(path.statistics["atom_count"]) < 5
        assert (error[began] <= 1.01 * bound[began]).all()
        assert (error[~began] < 1e-8).all()
        errors.append(error.max())
    assert 0.4 < errors[1] / errors[0] < 0.6
    assert 0.4 < errors[2] / errors[1] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["attractive", "repulsive"])
def test_the_bound_holds_where_joined_tokens_would_have_parted(sign):
    points = jnp.array([[1, 0, 0], [1, 5e-4, 0], [0, 1, 0.2], [-0.3, 0.1, 1]])
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    gamma = mf.Softmax(jnp.eye(3), jnp.eye(3), sign * jnp.eye(3), beta=4.0)
    flow, cloud = mf.Flow(gamma, space=mf.Sphere()), mf.TokenCloud(points)
    exact = mf.solve(flow, cloud, 10.0, save=11)
    path = mf.solve(flow, cloud, 10.0, save=11, merge=Merge(1e-3))
    assert float(path.merges.depths[0]) == 0
    distances = [float(mf.wasserstein(path.cloud(k), exact.cloud(k))) for k in (3, 10)]
    bound = 10 ** path.statistics["log10_merge_bound"]
    assert distances[0] <= float(bound[3])
    assert distances[1] <= float(bound[10])
    # Without the rate inside of the pair the bound would not exceed its first jump.
    assert (distances[1] > 0.1) == (sign < 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver",
    [mf.Stiff(), mf.FixedStep(0.02), mf.LongDepth()],
    ids=["stiff", "fixed", "long"],
)
def test_every_solver_joins_the_same_tokens_at_the_same_depths(solver):
    flow = mf.Flow(mf.identity_attention("softmax", 3, 6.0), space=mf.Sphere())
    cloud = sphere_clusters()
    options = {"save": 2, "merge": 1e-5}
    plain = mf.solve(flow, cloud, 15.0, **options)
    other = mf.solve(flow, cloud, 15.0, solver=solver, **options)
    assert len(plain.merges) == 3
    np.testing.assert_array_equal(other.merges.tokens, plain.merges.tokens)
    np.testing.assert_allclose(other.merges.depths, plain.merges.depths, atol=1e-3)


@pytest.mark.slow
def test_it_runs_under_jit_and_vmap_with_a_row_for_every_token():
    def records(points):
        cloud = mf.TokenCloud(points)
        return mf.solve(CONTRACTION, cloud, 12.0, save=2, merge=1e-4).merges

    points = jnp.array([[1.0, 0.0], [1.0, 0.5], [-1.0, 0.0]])
    merges = jax.jit(jax.vmap(records))(jnp.stack([points, 2 * points]))
    depths = np.log(np.array([[0.5, 2.0], [1.0, 4.0]]) / 1e-4)
    rows = jnp.array([1, 2])
    np.testing.assert_allclose(merges.depths[:, rows], depths, atol=0.2)
    np.testing.assert_array_equal(merges.leaders, jnp.zeros((2, 3), int))


@pytest.mark.slow
def test_single_precision_joins_too():
    cloud = mf.TokenCloud(jnp.array([[1.0, 0.0], [1.0, 0.1]], jnp.float32))
    path = mf.solve(CONTRACTION, cloud, 10.0, save=2, merge=Merge(), rtol=1e-4)
    assert path.points.dtype == jnp.float32
    np.testing.assert_allclose(path.merges.depths, np.log(0.1 / 1e-4), atol=0.02)


@pytest.mark.slow
def test_padding_and_order_change_no_join(key):
    flow = mf.Flow(mf.identity_attention("softmax", 3, 6.0), space=mf.Sphere())
    cloud = sphere_clusters()
    order = jnp.array([3, 1, 0, 4, 2])
    shuffled = mf.TokenCloud(cloud.points[order], cloud.weights[order])
    plain, other = (
        mf.solve(flow, mu, 15.0, save=2, merge=1e-5) for mu in (cloud, shuffled)
    )
    np.testing.assert_allclose(other.merges.depths, plain.merges.depths, rtol=1e-9)
    np.testing.assert_allclose(other.points[-1], plain.points[-1][order], atol=1e-9)
