"""The nearest other token: hardmax attention on the sphere without oneself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf


def on_circle(angles):
    return jnp.stack(
        [jnp.cos(jnp.asarray(angles)), jnp.sin(jnp.asarray(angles))], axis=1
    )


def angles_of(points):
    return np.arctan2(points[..., 1], points[..., 0])


def sphere_flow(**options):
    return mf.Flow(mf.attention.NearestOther(**options), space=mf.Sphere())


@pytest.mark.slow
def test_two_tokens_follow_the_angle_law_and_meet_at_the_midpoint():
    depths = jnp.linspace(0.0, 3.0, 7)
    path = mf.solve(
        sphere_flow(),
        mf.TokenCloud(on_circle([0.3, 1.5])),
        3.0,
        save=depths,
        rtol=1e-10,
        atol=1e-12,
    )
    angles = angles_of(np.asarray(path.points))
    gaps = 2 * np.arctan(np.exp(-2 * np.asarray(depths)) * np.tan(0.6))
    np.testing.assert_allclose(angles[:, 1] - angles[:, 0], gaps, atol=1e-9)
    np.testing.assert_allclose(angles.sum(axis=1), 1.8, atol=1e-9)


@pytest.mark.slow
def test_joined_pairs_go_on_as_one_until_all_have_met():
    cloud = mf.TokenCloud(on_circle([0.3, 1.0, 2.0, 4.0, 5.0]))
    path = mf.solve(sphere_flow(), cloud, 40.0, merge=1e-6)
    assert np.ptp(angles_of(np.asarray(path.points[-1]))) < 1e-5
    apart = mf.solve(sphere_flow(), cloud, 40.0)
    assert np.ptp(angles_of(np.asarray(apart.points[-1]))) > 0.1


@pytest.mark.slow
def test_it_is_the_nearest_by_brute_force():
    generator = np.random.default_rng(0)
    points = generator.normal(size=(30, 3))
    output = mf.attention.NearestOther()(mf.TokenCloud(points), jnp.asarray(points))
    gaps = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(gaps, np.inf)
    np.testing.assert_array_equal(output, points[gaps.argmin(axis=1)])


def test_tokens_equally_near_are_averaged_with_their_weights():
    cloud = mf.TokenCloud(on_circle([0.0, 0.5, -0.5]), [0.25, 0.5, 0.25])
    output = mf.attention.NearestOther()(cloud, cloud.points)
    expected = (2 * cloud.points[1] + cloud.points[2]) / 3
    np.testing.assert_allclose(output[0], expected, atol=1e-15)


@pytest.mark.slow
def test_tokens_at_the_point_itself_are_left_out():
    cloud = mf.TokenCloud(on_circle([0.0, 0.0, 1e-4, 1.0]))
    np.testing.assert_array_equal(
        mf.attention.NearestOther()(cloud, cloud.points)[:2],
        jnp.stack([cloud.points[2], cloud.points[2]]),
    )
    near = mf.attention.NearestOther(tolerance=1e-3)
    np.testing.assert_array_equal(near(cloud, cloud.points)[0], cloud.points[3])


def test_a_token_alone_has_no_velocity():
    cloud = mf.TokenCloud(on_circle([0.7, 0.7]))
    np.testing.assert_array_equal(
        mf.attention.NearestOther()(cloud, cloud.points), cloud.points
    )
    velocity = sphere_flow().field(jnp.zeros(()), cloud, cloud.points)
    np.testing.assert_allclose(velocity, 0, atol=1e-15)


def test_tokens_of_weight_zero_are_nobody_s_neighbour():
    cloud = mf.TokenCloud(on_circle([0.0, 0.1, 1.0]), [0.5, 0.0, 0.5])
    output = mf.attention.NearestOther()(cloud, cloud.points)
    np.testing.assert_array_equal(output[0], cloud.points[2])

    def total(points):
        return mf.attention.NearestOther()(cloud.moved(points), cloud.points[:1]).sum()

    gradient = jax.grad(total)(cloud.points)
    np.testing.assert_array_equal(gradient, [[0, 0], [0, 0], [1, 1]])


@pytest.mark.slow
def test_order_and_splitting_do_not_matter_and_jit_and_vmap_agree():
    points = on_circle([0.0, 0.4, -0.4, 2.0])
    cloud = mf.TokenCloud(points, [0.1, 0.5, 0.3, 0.1])
    output = mf.attention.NearestOther()(cloud, points)
    split = mf.TokenCloud(
        jnp.concatenate([points[::-1], points[1:2]]), [0.1, 0.3, 0.2, 0.1, 0.3]
    )
    np.testing.assert_allclose(
        mf.attention.NearestOther()(split, points), output, atol=1e-15
    )
    jitted = jax.jit(lambda cloud, x: mf.attention.NearestOther()(cloud, x))
    np.testing.assert_allclose(jitted(cloud, points), output, atol=1e-15)
    both = jax.vmap(lambda x: mf.attention.NearestOther()(cloud, x))(
        jnp.stack([points, points])
    )
    np.testing.assert_allclose(both, jnp.stack([output, output]), atol=1e-15)


def test_single_precision_stays_single():
    points = on_circle([0.0, 1.0]).astype(jnp.float32)
    output = mf.attention.NearestOther()(mf.TokenCloud(points), points)
    assert output.dtype == jnp.float32
    np.testing.assert_array_equal(output, points[::-1])


def test_wrong_input_is_refused():
    with pytest.raises(mf.InvalidInput, match="tolerance is -1.0; it must not be neg"):
        mf.attention.NearestOther(tolerance=-1.0)
    gaussian = mf.Gaussian(jnp.zeros(2), jnp.eye(2))
    with pytest.raises(mf.Unsupported, match="only among tokens is one the nearest"):
        mf.attention.NearestOther()(gaussian, jnp.zeros((1, 2)))


def test_no_query_gives_no_answer():
    cloud = mf.TokenCloud(on_circle([0.0, 1.0]))
    assert mf.attention.NearestOther()(cloud, jnp.zeros((0, 2))).shape == (0, 2)
