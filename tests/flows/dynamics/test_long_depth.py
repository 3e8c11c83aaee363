"""Exponentially long depth: dwell times, balances, steps, refusals.

Most tests walk five tokens in the plane, some of weight zero, so that one compiled
program serves them all.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.integrate import quad

import meanformer as mf
from meanformer.attention.log_domain import scaled_field, scaled_velocity

FIVE = [0.0621971438, 0.2143229734, 1.8191226208, 2.9110710095, 3.1879369617]


def on_circle(angles):
    angles = jnp.asarray(angles)
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)


def padded(angles, weights=None):
    """Tokens on the circle, made five by tokens of weight zero."""
    missing = 5 - len(angles)
    if weights is None:
        weights = np.full(len(angles), 1 / len(angles))
    points = on_circle(np.concatenate([angles, np.full(missing, 5.5)]))
    return mf.TokenCloud(points, jnp.concatenate([weights, jnp.zeros(missing)]))


def walked(angles, beta, depth=1e30, *, weights=None, merge=1e-9, rtol=1e-11):
    flow = mf.Flow(mf.identity_attention("softmax", 2, beta), space=mf.Sphere())
    return mf.solve(
        flow,
        padded(angles, weights),
        depth,
        save=2,
        solver=mf.LongDepth(),
        merge=merge,
        rtol=rtol,
    )


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile once, before the first test is timed."""
    walked([0.0, 1.0], 1.0, 1.0)


def angles_of(points):
    return np.arctan2(points[..., 1], points[..., 0])


def dwell_time(beta, start, end, masses=(0.5, 0.5)):
    """Time of the two-group law from one angle to another, by quadrature."""
    first, second = masses

    def slowness(angle, shift):
        fall = beta * (np.cos(angle) - 1)
        one = second / (first + second * np.exp(fall))
        two = first / (second + first * np.exp(fall))
        return np.exp(-fall - shift) / ((one + two) * np.sin(angle))

    # The largest exponent is taken out, and the region near it is resolved.
    shift = beta * (1 - np.cos(start))
    places = start - (start - end) * np.array([0, 1e-3, 1e-2, 0.1, 0.3, 1])
    parts = [
        quad(slowness, low, high, args=(shift,), epsabs=0, epsrel=1e-12)[0]
        for high, low in zip(places[:-1], places[1:], strict=True)
    ]
    return np.exp(shift) * sum(parts)


@pytest.mark.parametrize(
    ("beta", "tabulated"),
    [
        (4.0, 10.021878351631),
        (10.0, 1129.33847345),
        (20.0, 12191759.4252),
        (40.0, 2.94602185e15),
    ],
)
def test_two_groups_meet_at_the_depth_of_the_two_group_law(beta, tabulated):
    path = walked([0.0, np.pi / 2], beta, merge=0.1)
    np.testing.assert_allclose(path.merges.depths, tabulated, rtol=3e-9)
    exact = dwell_time(beta, np.pi / 2, 0.1)
    np.testing.assert_allclose(path.merges.depths, exact, rtol=1e-10)
    assert bool(path.status == mf.Status.reached)


def test_unequal_masses_meet_at_the_depth_of_the_two_group_law():
    path = walked([0.0, np.pi / 2], 10.0, weights=jnp.array([0.7, 0.3]), merge=0.1)
    np.testing.assert_allclose(path.merges.depths, 818.7785778, rtol=1e-9)
    exact = dwell_time(10.0, np.pi / 2, 0.1, (0.7, 0.3))
    np.testing.assert_allclose(path.merges.depths, exact, rtol=1e-10)


@pytest.mark.parametrize("beta", [60.0, 150.0, 600.0])
def test_steps_grow_with_the_logarithm_of_the_depth(beta):
    path = walked([0.0, np.pi / 2], beta, 1e300, merge=0.1, rtol=1e-6)
    exact = dwell_time(beta, np.pi / 2, 0.1)
    np.testing.assert_allclose(path.merges.depths, exact, rtol=1e-7 * beta)
    assert exact > 1e23
    assert int(path.accepted_steps[-1] + path.rejected_steps[-1]) < 25


@pytest.mark.slow
def test_a_depth_inside_a_metastable_phase_is_hit():
    path = walked([0.0, np.pi / 2], 40.0, 2e15)
    first, second = angles_of(np.asarray(path.points[-1]))[:2]
    reached = dwell_time(40.0, np.pi / 2, float(second - first))
    np.testing.assert_allclose(reached, 2e15, rtol=1e-8)
    assert len(path.merges) == 0


def test_the_five_token_run_joins_the_tabulated_tokens():
    path = walked(FIVE, 4.0, 350.0, merge=0.01)
    np.testing.assert_array_equal(path.merges.leaders, [0, 3, 2, 0])
    np.testing.assert_array_equal(path.merges.tokens, [1, 4, 3, 2])
    np.testing.assert_allclose(path.merges.masses, [0.4, 0.4, 0.6, 1.0])


@pytest.mark.parametrize(
    ("pair", "depth"),
    [((0, 1), 2.78), ((3, 4), 4.09), ((2, 3), 6.70), ((1, 2), 329.87)],
)
def test_the_five_tokens_come_close_where_it_is_tabulated(pair, depth):
    # Nothing is joined by then that could shift it: the gap just before and just after.
    before, after = (
        np.diff(angles_of(np.asarray(walked(FIVE, 4.0, end).points[-1]))[list(pair)])[0]
        for end in (depth - 0.02, depth + 0.02)
    )
    assert after < 0.01 < before


def test_the_five_token_run_ends_at_the_tabulated_angle():
    path = walked(FIVE, 4.0, 350.0)
    angles = angles_of(np.asarray(path.points[-1]))
    np.testing.assert_allclose(angles, 1.8378870993, atol=2e-10)
    assert int(path.statistics["atom_count"][-1]) == 1


@pytest.mark.parametrize(
    ("beta", "tabulated"),
    [(10.0, 0.3116278), (40.0, 0.2772760), (160.0, 0.2604620), (640.0, 0.2520972)],
)
def test_two_groups_meet_near_the_point_of_squared_masses(beta, tabulated):
    path = walked([0.0, np.pi / 2], beta, 1e300, weights=jnp.array([0.7, 0.3]))
    place = angles_of(np.asarray(path.merges.points[0]))
    np.testing.assert_allclose(place, tabulated, atol=1e-7)


@pytest.mark.parametrize(
    "angles",
    [[0.3, 0.3 + np.pi], [0.3, 0.3 + 2 * np.pi / 3, 0.3 + 4 * np.pi / 3]],
    ids=["antipodes", "triangle"],
)
def test_a_balance_is_steady_and_no_rounding_tips_it(angles):
    path = walked(angles, 20.0)
    assert bool(path.status == mf.Status.steady)
    assert "came to rest" in path.message
    np.testing.assert_array_equal(path.points[-1], path.points[0])


def test_equal_gaps_join_at_one_depth():
    # The middle token is at a balance that any rounding would tip: the gaps close
    # faster and faster, in the end by 1e14.
    path = walked([0.0, 1.2, -1.2], 60.0, 1e40)
    assert len(path.merges) == 2
    assert float(path.merges.depths[0]) == float(path.merges.depths[1])
    np.testing.assert_array_equal(path.merges.leaders, [0, 0])
    angles = angles_of(np.asarray(path.points[-1]))[:3]
    np.testing.assert_allclose(angles, 0, atol=1e-9)


def test_equal_tokens_are_one_atom_from_the_start_and_rest():
    path = walked([1.0, 1.0, 1.0], 5.0)
    np.testing.assert_array_equal(path.merges.depths, [0, 0])
    np.testing.assert_array_equal(path.points[-1], path.points[0])
    assert float(path.depths[-1]) == 1e30


def test_tokens_of_weight_zero_rest_and_change_nothing():
    far, near = (
        mf.solve(
            mf.Flow(mf.identity_attention("softmax", 2, 10.0), space=mf.Sphere()),
            mf.TokenCloud(
                on_circle([0.0, np.pi / 2, place, place, place]),
                jnp.array([0.5, 0.5, 0, 0, 0]),
            ),
            1e30,
            save=2,
            solver=mf.LongDepth(),
            merge=1e-9,
        )
        for place in (5.5, 0.1)
    )
    np.testing.assert_array_equal(far.points[:, :2], near.points[:, :2])
    np.testing.assert_array_equal(near.points[1, 2:], near.points[0, 2:])


def test_the_path_has_the_length_of_the_angles_travelled():
    path = walked([0.0, 1.0], 10.0, merge=1e-9)
    # Both of two equal groups travel half of the angle between them.
    np.testing.assert_allclose(
        path.statistics["arc_length"], [0, np.sqrt(0.5)], atol=1e-8
    )


def test_splitting_a_token_changes_no_depth():
    whole = walked([0.0, 1.2], 15.0, weights=jnp.array([0.6, 0.4]))
    split = walked([0.0, 1.2, 0.0], 15.0, weights=jnp.array([0.25, 0.4, 0.35]))
    assert float(split.merges.depths[0]) == 0
    np.testing.assert_allclose(
        split.merges.depths[1], whole.merges.depths[0], rtol=1e-10
    )
    np.testing.assert_allclose(split.points[-1, :2], whole.points[-1, :2], atol=1e-12)


@pytest.mark.parametrize("kind", [mf.Softmax, mf.Unnormalised])
def test_scale_times_direction_is_the_velocity(kind, key):
    keys = jr.split(key, 4)
    query, side = jr.normal(keys[0], (4, 3)), jr.normal(keys[1], (4, 3))
    gamma = kind(query, side, 0.7 * jnp.eye(3), beta=1.3, query_bias=jnp.arange(4.0))
    points = jr.normal(keys[2], (6, 3))
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    weights = jr.dirichlet(keys[3], jnp.ones(6)).at[2].set(0)
    cloud = mf.TokenCloud(points, weights, normalize=True)
    both = mf.MultiHead([gamma, mf.identity_attention("softmax", 3, 2.0)])
    velocity = both + gamma
    log_scale, scaled, _ = eqx.filter_jit(scaled_velocity)(
        velocity, points, cloud.weights
    )
    flow = mf.Flow(velocity, space=mf.Sphere())
    expected = eqx.filter_jit(flow.field)(jnp.zeros(()), cloud, points)
    rows = np.asarray(cloud.weights) > 0
    np.testing.assert_allclose(
        np.exp(log_scale) * np.asarray(scaled)[rows], expected[rows], atol=1e-12
    )
    np.testing.assert_array_equal(scaled[2], 0)


@pytest.mark.slow
def test_a_query_beside_a_token_feels_it_too(key):
    gamma = mf.identity_attention("softmax", 3, 2.0) + mf.identity_attention(
        "unnormalised", 3, 1.0
    )
    points = mf.Sphere().retract(jr.normal(key, (4, 3)))
    queries = mf.Sphere().retract(points + 0.01 * jr.normal(jr.key(1), (4, 3)))
    weights = jnp.array([0.2, 0.3, 0.5, 0.0])
    beside = eqx.filter_jit(scaled_field)(gamma, points, weights, queries)
    flow, cloud = mf.Flow(gamma, space=mf.Sphere()), mf.TokenCloud(points, weights)
    expected = eqx.filter_jit(flow.field)(jnp.zeros(()), cloud, queries)
    unit = jnp.linalg.norm(expected) / jnp.linalg.norm(beside)
    np.testing.assert_allclose(unit * beside, expected, atol=1e-12)


def test_directions_are_right_where_velocities_underflow():
    # Extended precision reaches 1e-4932.
    beta, angles = 2000.0, np.array([0.0, 0.9, 2.3])
    points = on_circle(angles)
    gamma = mf.identity_attention("softmax", 2, beta)
    log_scale, scaled, _ = eqx.filter_jit(scaled_velocity)(
        gamma, points, jnp.full(3, 1 / 3)
    )
    wide = angles.astype(np.longdouble)
    gaps = wide[None, :] - wide[:, None]
    masses = np.exp(beta * np.cos(gaps) - beta)
    speeds = (masses * np.sin(gaps)).sum(1) / masses.sum(1)
    tangents = np.stack([-np.sin(angles), np.cos(angles)], axis=1)
    found = (np.asarray(scaled) * tangents).sum(1)
    unit = np.exp(np.longdouble(log_scale))
    assert float(speeds[0]) == 0
    np.testing.assert_allclose(found[:2], (speeds / unit).astype(float)[:2], rtol=1e-11)


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (mf.Flow(mf.identity_attention("l2", 2), space=mf.Sphere()), "knows Softmax"),
        (mf.Flow(mf.identity_attention("softmax", 2)), "where a lone token rests"),
        (
            mf.Flow(
                mf.Softmax(jnp.eye(2), jnp.eye(2), jnp.diag(jnp.array([1.0, 2.0]))),
                space=mf.Sphere(),
            ),
            "multiple of the identity",
        ),
        (
            mf.Flow(
                mf.Softmax(jnp.eye(2), jnp.eye(2), jnp.eye(2), value_bias=jnp.ones(2)),
                space=mf.Sphere(),
            ),
            "value_bias moves",
        ),
        (
            mf.Flow(
                mf.Schedule([mf.identity_attention("softmax", 2)] * 2),
                space=mf.Sphere(),
            ),
            "same map at every depth",
        ),
    ],
    ids=["kind", "space", "value", "bias", "schedule"],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(flow, message):
    with pytest.raises(mf.Unsupported, match=message):
        mf.solve(flow, padded([0.0, 1.0]), 10.0, solver=mf.LongDepth())


def test_values_that_are_not_known_are_refused_before_anything_is_compiled():
    # What is not a multiple of the identity could not be told from what is.
    def end(value):
        gamma = mf.Softmax(jnp.eye(2), jnp.eye(2), value)
        flow = mf.Flow(gamma, space=mf.Sphere())
        return mf.solve(flow, padded([0.0, 1.0]), 10.0, solver=mf.LongDepth()).points

    with pytest.raises(mf.Unsupported, match="close over the map"):
        jax.jit(end)(jnp.diag(jnp.array([1.0, -1.0])))


def test_probes_are_refused_with_the_reason():
    flow = mf.Flow(mf.identity_attention("softmax", 2), space=mf.Sphere())
    cloud = padded([0.0, 1.0])
    with pytest.raises(mf.Unsupported, match="probes move"):
        mf.solve(flow, cloud, 10.0, solver=mf.LongDepth(), probes=cloud.points)


@pytest.mark.slow
@pytest.mark.parametrize("angles", [[1.0, 1.0001], [1.0, 1.0001, 2.5]])
def test_the_bound_grows_where_the_tokens_of_an_atom_repel_each_other(angles):
    gamma = mf.Softmax(jnp.eye(2), jnp.eye(2), -jnp.eye(2), beta=9.0)
    flow, cloud = mf.Flow(gamma, space=mf.Sphere()), padded(angles)
    options = {"save": 2, "merge": 1e-3}
    walk = mf.solve(flow, cloud, 5.0, solver=mf.LongDepth(), **options)
    plain = mf.solve(flow, cloud, 5.0, **options)
    bounds = [path.statistics["log10_merge_bound"] for path in (walk, plain)]
    np.testing.assert_allclose(bounds[0], bounds[1], atol=0.05)
    # A pair parts at rate one.
    assert float(bounds[1][1] - bounds[1][0]) > 0.9 * 5 / np.log(10)


@pytest.mark.slow
def test_logarithmic_depths_can_be_saved():
    flow = mf.Flow(mf.identity_attention("softmax", 2, 4.0), space=mf.Sphere())
    depths = jnp.concatenate([jnp.zeros(1), jnp.array([5.0, 20, 200, 300, 350])])
    path = mf.solve(
        flow,
        mf.TokenCloud(on_circle(FIVE)),
        350.0,
        save=depths,
        solver=mf.LongDepth(),
        rtol=1e-10,
    )
    gram = np.exp(4 * (np.einsum("tid,tjd->tij", path.points, path.points) - 1))
    energies = gram.mean(axis=(1, 2))
    expected = [
        0.3597121382,
        0.5193066515,
        0.5203299883,
        0.5206017439,
        0.5223793884,
        1,
    ]
    np.testing.assert_allclose(energies, expected, atol=2e-9)
    np.testing.assert_array_equal(path.depths, depths)


@pytest.mark.slow
def test_single_precision_meets_at_the_same_depth():
    cloud = mf.TokenCloud(on_circle(jnp.array([0.0, np.pi / 2], jnp.float32)))
    gamma = mf.Softmax(*[jnp.eye(2, dtype=jnp.float32)] * 3, beta=jnp.float32(20.0))
    path = mf.solve(
        mf.Flow(gamma, space=mf.Sphere()),
        cloud,
        1e20,
        save=2,
        solver=mf.LongDepth(),
        merge=0.1,
        rtol=1e-5,
    )
    assert path.points.dtype == jnp.float32
    np.testing.assert_allclose(path.merges.depths, 12191759.4252, rtol=1e-3)


@pytest.mark.slow
def test_the_staircase_has_the_tabulated_arc_lengths():
    # Depths are below the smallest number here: the order is that of the lengths.
    unit = 0.5 * np.log(2000) / np.sqrt(2000)
    flow = mf.Flow(mf.identity_attention("unnormalised", 2, 4000.0), space=mf.Sphere())
    cloud = mf.TokenCloud(on_circle(unit * np.array([0, 0.5, 2, 4, 7])))
    path = mf.solve(flow, cloud, 1e300, save=2, solver=mf.LongDepth())
    lengths = [0.03004521, 0.15147146, 0.33174269, 0.76617045]
    np.testing.assert_allclose(path.merges.arc_lengths, lengths, rtol=1e-4)
    np.testing.assert_array_equal(path.merges.tokens, [1, 2, 4, 3])
    np.testing.assert_array_equal(path.merges.depths, 0)


@pytest.mark.slow
def test_it_agrees_with_the_adaptive_solver_on_the_sphere_and_under_jit(key):
    points = jr.normal(key, (4, 3))
    cloud = mf.TokenCloud(
        points / jnp.linalg.norm(points, axis=1, keepdims=True),
        jnp.array([0.4, 0.3, 0.2, 0.1]),
    )
    score = jnp.eye(3) + 0.2 * jr.normal(jr.key(1), (3, 3))
    gamma = mf.Softmax(score, jnp.eye(3), jnp.eye(3), beta=3.0)
    flow = mf.Flow(gamma, space=mf.Sphere())
    plain = mf.solve(flow, cloud, 4.0, save=5, rtol=1e-11, atol=1e-13)
    walk = jax.jit(
        lambda cloud: mf.solve(
            flow, cloud, 4.0, save=5, solver=mf.LongDepth(), rtol=1e-11
        )
    )(cloud)
    np.testing.assert_allclose(walk.points, plain.points, atol=1e-8)
    np.testing.assert_allclose(walk.velocities, plain.velocities, atol=1e-8)
