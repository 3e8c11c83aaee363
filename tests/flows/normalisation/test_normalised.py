"""Normalisation schemes: reference values, layers, invariances, degenerate tokens."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.integrate

import meanformer as mf
from meanformer.flows import (
    CustomScheme,
    MixNorm,
    Normalised,
    run_normalised_layers,
    status,
)

SCHEMES = {
    "post": (mf.flows.PostNorm(), 0.9987033043, 0.07384015),
    "pre": (mf.flows.PreNorm(), 0.4219170507, 0.07384015),
    "peri": (mf.flows.PeriNorm(), 0.5602673761, 0.09872135),
    "ngpt": (mf.flows.NGPT(), 0.9997645242, 0.09872135),
    "mix": (mf.flows.MixNorm(2.0), 0.9169127290, 0.07384015),
    "sqrt": (mf.flows.SqrtScaling(), 0.7861427632, 0.07384015),
}
EIGHT = mf.TokenCloud(jnp.eye(8))
ATTENTION = mf.identity_attention("softmax", 8, 3.0)
PLANE = mf.identity_attention("softmax", 2, 1.0)
REPULSIVE = mf.Softmax(jnp.eye(2), jnp.eye(2), -jnp.eye(2))
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def cosines(points):
    unit = np.asarray(points / np.linalg.norm(points, axis=-1, keepdims=True))
    return (unit @ unit.T)[np.triu_indices(len(unit), 1)]


def three_tokens(key, dimension=3):
    points = jr.normal(key, (3, dimension))
    return points / jnp.linalg.norm(points, axis=1, keepdims=True)


def general_attention(key, dimension=3):
    query, value = jr.normal(key, (2, dimension, dimension))
    return mf.Softmax(query, jnp.eye(dimension), value, beta=0.7)


def velocity_at(scheme, attention, cloud, depth=0.5):
    return mf.flows.normalised_flow(attention, scheme).field(
        jnp.asarray(depth), cloud, cloud.points
    )


@pytest.mark.slow
@every_scheme
def test_eight_orthonormal_tokens_have_the_tabulated_inner_product_at_depth_six(name):
    scheme, expected, _ = SCHEMES[name]
    flow = mf.flows.normalised_flow(ATTENTION, scheme)
    path = mf.solve(flow, EIGHT, 6.0, save=2, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(cosines(path.points[-1]), expected, atol=2e-10)


@every_scheme
def test_the_initial_slope_of_the_inner_product_is_tabulated(name):
    scheme, _, expected = SCHEMES[name]
    velocity = velocity_at(scheme, ATTENTION, EIGHT, 0.0)
    # Token i is the axis i, of radius 1: the derivative of the cosine is v_ij + v_ji.
    np.testing.assert_allclose(velocity[0, 1] + velocity[1, 0], expected, atol=5e-9)


def speeds(name, radius, radial, norm, depth):
    """The table of slowness and growth, written out."""
    one, zero = np.ones_like(radius), np.zeros_like(radius)
    return {
        "post": (one, zero),
        "pre": (radius, radial),
        "peri": (radius * norm, radial / norm),
        "ngpt": (norm, zero),
        "mix": (one, zero) if depth < 2 else (radius, radial),
        "sqrt": (np.sqrt(1 + depth) * one, zero),
    }[name]


@pytest.mark.slow
@every_scheme
def test_general_tokens_follow_the_equations_of_directions_and_radii(name, key):
    key_x, key_a = jr.split(key)
    start, attention = three_tokens(key_x), general_attention(key_a)
    query, value = np.asarray(attention.query), np.asarray(attention.value)

    def field(depth, flat):
        theta, radius = flat[:9].reshape(3, 3), flat[9:]
        masses = np.exp(0.7 * (theta @ query.T) @ theta.T)
        pull = masses @ theta @ value.T / masses.sum(1, keepdims=True)
        radial, norm = (theta * pull).sum(1), np.linalg.norm(pull, axis=1)
        slowness, growth = speeds(name, radius, radial, norm, depth)
        turning = (pull - radial[:, None] * theta) / slowness[:, None]
        return np.concatenate([turning.ravel(), growth])

    flat = np.append(np.asarray(start).ravel(), np.ones(3))
    for ends in ((0, 2), (2, 3)):
        exact = scipy.integrate.solve_ivp(
            field, ends, flat, method="DOP853", rtol=1e-11, atol=1e-12
        )
        flat = exact.y[:, -1]
    expected = flat[:9].reshape(3, 3) * flat[9:, None]
    flow = mf.flows.normalised_flow(attention, SCHEMES[name][0])
    path = mf.solve(flow, mf.TokenCloud(start), 3.0, save=2, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(path.points[-1], expected, atol=2e-8)


@pytest.mark.slow
def test_pre_norm_is_attention_on_directions_in_the_whole_space(key):
    points = 2.0 * jr.normal(key, (4, 3))
    cloud, attention = mf.TokenCloud(points), general_attention(jr.key(1))
    directions = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    expected = attention(mf.TokenCloud(directions), directions)
    np.testing.assert_allclose(
        velocity_at(mf.flows.PreNorm(), attention, cloud), expected, atol=1e-13
    )
    unit = expected / jnp.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(
        velocity_at(mf.flows.PeriNorm(), attention, cloud), unit, atol=1e-13
    )


def test_the_layers_are_the_compositions_of_the_table(key):
    points = three_tokens(key)
    cloud, attention = mf.TokenCloud(points), general_attention(jr.key(1))
    pull = attention(cloud, points)

    def unit(x):
        return x / jnp.linalg.norm(x, axis=1, keepdims=True)

    expected = {
        "post": unit(points + 0.5 * pull),
        "pre": points + 0.5 * pull,
        "peri": points + 0.5 * unit(pull),
        "ngpt": unit(points + 0.5 * unit(pull)),
        "mix": unit(points + 0.5 * pull),
        "sqrt": unit(points + 0.5 / np.sqrt(2.0) * pull),
    }
    for name, image in expected.items():
        layer = SCHEMES[name][0].layer(attention, 1.0, 0.5)
        np.testing.assert_allclose(layer(cloud, points), image, atol=1e-13)
    after = SCHEMES["mix"][0].layer(attention, 2.0, 0.5)
    np.testing.assert_allclose(after(cloud, points), expected["pre"], atol=1e-13)


@every_scheme
def test_a_network_is_its_layers_one_after_another(name, key):
    scheme = mf.flows.MixNorm(0.5) if name == "mix" else SCHEMES[name][0]
    cloud, attention = mf.TokenCloud(three_tokens(key)), general_attention(jr.key(1))
    path = run_normalised_layers(attention, scheme, cloud, 3, step=0.3)
    assert len(path) == 4
    for depth in (0.0, 0.3, 0.6):
        cloud = mf.push_forward(scheme.layer(attention, depth, 0.3), cloud)
    np.testing.assert_allclose(path.points[-1], cloud.points, atol=1e-13)


@pytest.mark.slow
@every_scheme
def test_networks_tend_to_the_flow_at_first_order(name):
    scheme, limit, _ = SCHEMES[name]
    errors = [
        run_normalised_layers(ATTENTION, scheme, EIGHT, count, step=6 / count)
        for count in (240, 480)
    ]
    errors = [cosines(path.points[-1])[0] - limit for path in errors]
    assert abs(errors[1]) < 0.013
    assert 0.8 < np.log2(errors[0] / errors[1]) < 1.2


def test_the_usual_step_is_one_over_the_number_of_layers():
    path = run_normalised_layers(ATTENTION, mf.flows.PostNorm(), EIGHT, 4)
    np.testing.assert_allclose(path.depths, [0, 0.25, 0.5, 0.75, 1])


@pytest.mark.slow
def test_a_rate_of_two_is_a_network_at_twice_the_depth():
    fast = mf.solve(
        mf.flows.normalised_flow(ATTENTION, mf.flows.NGPT(2.0)),
        EIGHT,
        3.0,
        save=2,
        rtol=1e-10,
    )
    np.testing.assert_allclose(cosines(fast.points[-1]), SCHEMES["ngpt"][1], atol=1e-8)


@pytest.mark.parametrize("name", ["post", "pre", "peri"])
def test_a_scheme_of_your_own_gives_the_presets_back(name, key):
    scheme = SCHEMES[name][0]
    grows = None if name == "post" else scheme.growth
    own = CustomScheme(scheme.slowness, grows)
    cloud, attention = mf.TokenCloud(three_tokens(key)), general_attention(jr.key(1))
    np.testing.assert_allclose(
        velocity_at(own, attention, cloud),
        velocity_at(scheme, attention, cloud),
        atol=1e-14,
    )
    assert type(own.space) is type(scheme.space)
    tokens = run_normalised_layers(attention, own, cloud, 2, step=1e-6).points[-1]
    # Both layers agree to the second order of the step.
    same = run_normalised_layers(attention, scheme, cloud, 2, step=1e-6).points[-1]
    np.testing.assert_allclose(tokens, same, atol=1e-10)


@pytest.mark.slow
def test_a_jump_of_your_own_scheme_is_given_to_the_solver():
    own = CustomScheme(
        lambda depth, radius, radial, norm: jnp.where(depth < 2, 1.0, radius),
        lambda depth, radius, radial, norm: jnp.where(depth < 2, 0.0, radial),
        jumps=[2.0],
    )
    flow = mf.flows.normalised_flow(ATTENTION, own)
    path = mf.solve(flow, EIGHT, 6.0, save=2, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(cosines(path.points[-1]), SCHEMES["mix"][1], atol=2e-10)


@every_scheme
def test_rotation_order_and_splitting_do_not_matter(name, key):
    scheme, attention = SCHEMES[name][0], mf.identity_attention("softmax", 3, 2.0)
    points = three_tokens(key)
    weights = jnp.array([0.5, 0.3, 0.2])
    plain = velocity_at(scheme, attention, mf.TokenCloud(points, weights))
    turn = jnp.linalg.qr(jr.normal(jr.key(3), (3, 3)))[0]
    turned = velocity_at(scheme, attention, mf.TokenCloud(points @ turn, weights))
    np.testing.assert_allclose(turned, plain @ turn, atol=1e-13)
    order = jnp.array([2, 0, 1])
    mixed = velocity_at(scheme, attention, mf.TokenCloud(points[order], weights[order]))
    np.testing.assert_allclose(mixed, plain[order], atol=1e-13)
    split = mf.TokenCloud(
        jnp.concatenate([points, points[:1]]), jnp.array([0.4, 0.3, 0.2, 0.1])
    )
    np.testing.assert_allclose(
        velocity_at(scheme, attention, split)[:3], plain, atol=1e-13
    )


@every_scheme
def test_padding_changes_no_value_and_no_gradient(name, key):
    scheme, points = SCHEMES[name][0], three_tokens(key)
    attention = mf.identity_attention("softmax", 3, 2.0)
    weights = jnp.array([0.5, 0.3, 0.2])

    def loss(points, weights):
        cloud = mf.TokenCloud(points, weights)
        field = Normalised(attention, scheme).velocity
        return jnp.sum(field(jnp.asarray(0.5), cloud, points, None)[:3] ** 3)

    padded = jnp.concatenate([points, jnp.zeros((1, 3))])
    value, slope = jax.value_and_grad(loss)(points, weights)
    other, grown = jax.value_and_grad(loss)(padded, jnp.append(weights, 0.0))
    np.testing.assert_allclose(other, value, rtol=1e-13)
    np.testing.assert_allclose(grown[:3], slope, atol=1e-12)
    np.testing.assert_array_equal(grown[3], 0)


@every_scheme
def test_gradients_agree_with_finite_differences(name, key):
    scheme, points = SCHEMES[name][0], three_tokens(key)
    attention = mf.identity_attention("softmax", 3, 2.0)

    def loss(points):
        field = Normalised(attention, scheme).velocity
        return jnp.sum(
            field(jnp.asarray(0.5), mf.TokenCloud(points), points, None) ** 3
        )

    step = 1e-5 * jr.normal(jr.key(5), points.shape)
    slope = jnp.sum(jax.grad(loss)(points) * step)
    np.testing.assert_allclose(
        (loss(points + step) - loss(points - step)) / 2, slope, rtol=1e-5
    )


def test_a_padded_token_at_the_origin_does_not_end_a_solve(key):
    points = jnp.concatenate([three_tokens(key), jnp.zeros((1, 3))])
    attention = mf.identity_attention("softmax", 3, 2.0)
    cloud = mf.TokenCloud(points, jnp.array([0.5, 0.3, 0.2, 0.0]))
    path = mf.solve(
        mf.flows.normalised_flow(attention, mf.flows.PreNorm()), cloud, 1.0, save=2
    )
    assert bool(path.status == mf.Status.reached)
    assert np.isfinite(path.points).all()


def test_under_repulsion_a_token_reaches_the_origin_and_the_solve_says_so():
    cloud = mf.TokenCloud(jnp.array([[1.0, 0.2], [0.3, 1.0], [0.5, 0.5]]))
    flow = mf.flows.normalised_flow(REPULSIVE, mf.flows.PreNorm())
    with pytest.warns(mf.errors.StoppedEarly, match="has no direction"):
        path = mf.solve(flow, cloud, 6.0)
    assert bool(path.status == mf.Status.undefined)
    assert status.status_name(path.status) == "undefined"
    assert np.isfinite(path.points).all()
    assert np.isfinite(path.velocities).all()
    assert np.linalg.norm(path.points[-1], axis=1).min() < 2e-8


def test_a_lone_token_under_repulsion_reaches_the_origin_at_its_radius():
    flow = mf.flows.normalised_flow(REPULSIVE, mf.flows.PreNorm())
    with pytest.warns(mf.errors.StoppedEarly, match="has no direction"):
        path = mf.solve(flow, mf.TokenCloud(jnp.array([[0.6, 0.8]])), 3.0)
    np.testing.assert_allclose(path.depths[-1], 1.0, atol=1e-6)


@pytest.mark.parametrize(
    "scheme", [mf.flows.PeriNorm(), mf.flows.NGPT()], ids=["peri", "ngpt"]
)
def test_vanishing_attention_is_refused_if_known_and_ends_the_solve_if_not(scheme):
    opposite = mf.TokenCloud(jnp.array([[1.0, 0.0], [-1.0, 0.0]]))
    flow = mf.flows.normalised_flow(mf.identity_attention("softmax", 2, 0.0), scheme)
    with pytest.raises(mf.InvalidInput, match="no meaning at token 0"):
        mf.solve(flow, opposite, 1.0)
    path = eqx.filter_jit(lambda cloud: mf.solve(flow, cloud, 1.0, save=2))(opposite)
    assert bool(path.status == mf.Status.undefined)
    np.testing.assert_array_equal(path.points[-1], opposite.points)
    assert np.isfinite(path.velocities).all()


def test_a_simplex_at_positive_beta_rests_and_has_a_meaning():
    opposite = mf.TokenCloud(jnp.array([[1.0, 0.0], [-1.0, 0.0]]))
    for scheme in (mf.flows.PeriNorm(), mf.flows.NGPT()):
        velocity = velocity_at(scheme, PLANE, opposite)
        growth = 1.0 if isinstance(scheme, mf.flows.PeriNorm) else 0.0
        np.testing.assert_allclose(velocity, growth * opposite.points, atol=1e-15)


def test_a_layer_that_sends_a_token_to_the_origin_ends_the_run():
    lone = mf.TokenCloud(jnp.array([[1.0, 0.0]]))
    with pytest.warns(mf.errors.StoppedEarly, match="finite"):
        path = run_normalised_layers(REPULSIVE, mf.flows.PostNorm(), lone, 3, step=1.0)
    np.testing.assert_array_equal(path.points, [[[1.0, 0.0]]])
    assert np.isfinite(path.velocities).all()


def test_a_token_at_the_origin_is_refused():
    cloud = mf.TokenCloud(jnp.array([[1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(mf.InvalidInput, match="token 1 is at the origin"):
        mf.solve(mf.flows.normalised_flow(PLANE, mf.flows.PreNorm()), cloud, 1.0)
    with pytest.raises(mf.InvalidInput, match="token 1 is at the origin"):
        run_normalised_layers(PLANE, mf.flows.PreNorm(), cloud, 2)


@pytest.mark.slow
def test_tokens_off_the_sphere_are_refused_where_the_radius_is_one():
    cloud = mf.TokenCloud(jnp.array([[2.0, 0.0], [0.0, 1.0]]))
    for scheme in (
        mf.flows.PostNorm(),
        mf.flows.NGPT(),
        mf.flows.SqrtScaling(),
        mf.flows.MixNorm(1.0),
    ):
        with pytest.raises(mf.InvalidInput, match="norm 2"):
            mf.solve(mf.flows.normalised_flow(PLANE, scheme), cloud, 1.0)
    path = mf.solve(
        mf.flows.normalised_flow(PLANE, mf.flows.PreNorm()), cloud, 0.1, save=2
    )
    assert bool(path.status == mf.Status.reached)


def test_a_larger_radius_slows_directions_down():
    cloud = mf.TokenCloud(jnp.array([[4.0, 0.0], [0.0, 4.0]]))
    tangent = velocity_at(mf.flows.PreNorm(), PLANE, cloud)[0, 1] / 4
    unit = mf.TokenCloud(cloud.points / 4)
    assert float(tangent) == pytest.approx(
        float(velocity_at(mf.flows.PostNorm(), PLANE, unit)[0, 1]) / 4
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mf.flows.NGPT(0.0), "alpha is 0.0"),
        (lambda: mf.flows.MixNorm(0.0), "switch is 0.0"),
        (lambda: CustomScheme(3.0), "slowness is 3.0"),
        (lambda: CustomScheme(jnp.ones_like, 3.0), "growth is 3.0"),
        (lambda: mf.flows.normalised_flow(PLANE, "pre"), "scheme is 'pre'"),
        (
            lambda: mf.flows.normalised_flow(3.0, mf.flows.PreNorm()),
            "attention is 3.0",
        ),
        (
            lambda: run_normalised_layers(
                PLANE, mf.flows.PreNorm(), mf.TokenCloud(jnp.eye(2)), 0
            ),
            "count is 0",
        ),
        (
            lambda: run_normalised_layers(
                PLANE, mf.flows.PreNorm(), mf.TokenCloud(jnp.eye(2)), 2, step=-1.0
            ),
            "step is -1.0",
        ),
    ],
)
def test_mistakes_are_told(make, message, untyped):
    with pytest.raises(mf.InvalidInput, match=message):
        make()


def test_a_measure_that_is_no_cloud_is_refused(untyped):
    flow = mf.flows.normalised_flow(PLANE, mf.flows.PreNorm())
    with pytest.raises(mf.InvalidInput):
        mf.solve(flow, mf.Gaussian(jnp.zeros(2), jnp.eye(2)), 1.0)
    with pytest.raises(mf.InvalidInput, match="TokenCloud"):
        run_normalised_layers(
            PLANE, mf.flows.PreNorm(), mf.Gaussian(jnp.zeros(2), jnp.eye(2)), 2
        )


@pytest.mark.slow
def test_single_precision_stays_single():
    cloud = mf.TokenCloud(jnp.eye(3, dtype=jnp.float32))
    identity = jnp.eye(3, dtype=jnp.float32)
    attention = mf.Softmax(identity, identity, identity, beta=1.0)
    for scheme, *_ in SCHEMES.values():
        velocity = Normalised(attention, scheme).velocity(
            jnp.zeros((), jnp.float32), cloud, cloud.points, None
        )
        assert velocity.dtype == jnp.float32
    path = run_normalised_layers(attention, MixNorm(0.5), cloud, 3)
    assert path.points.dtype == jnp.float32


@pytest.mark.slow
def test_masked_attention_heads_and_batches_have_schemes_too(key):
    attention = mf.Masked(mf.identity_attention("softmax", 3, 1.0))
    clouds = jax.vmap(three_tokens)(jr.split(key, 2))

    def end(points):
        cloud = mf.TokenCloud(points, positions=jnp.array([0.0, 0.5, 1.0]))
        return run_normalised_layers(attention, mf.flows.PeriNorm(), cloud, 2).points[
            -1
        ]

    both = jax.vmap(end)(clouds)
    np.testing.assert_allclose(both[1], end(clouds[1]), atol=1e-14)
    # The first token of a causal sequence sees itself alone, and only grows.
    np.testing.assert_allclose(both[0, 0], 2 * clouds[0, 0], atol=1e-12)


@pytest.mark.slow
def test_before_depth_minus_one_the_root_has_no_meaning_and_the_run_says_so():
    flow = mf.flows.normalised_flow(PLANE, mf.flows.SqrtScaling())
    cloud = mf.TokenCloud(jnp.array([[1.0, 0.0], [0.6, 0.8]]))
    with pytest.warns(mf.errors.StoppedEarly, match="At depth -1"):
        path = mf.solve(flow, cloud, -2.0, save=2)
    assert bool(path.status == mf.Status.undefined)
    with pytest.warns(mf.errors.StoppedEarly):
        path = mf.run_layers(flow, cloud, 8, step=-0.25)
    assert bool(path.status == mf.Status.undefined)
    np.testing.assert_allclose(path.depths[-1], -1.0)


def test_a_condition_sees_the_depth_of_a_backward_solve_itself():
    cloud = mf.TokenCloud(jnp.array([[1.0, 0.0], [0.6, 0.8]]))
    stop = mf.StopWhen(lambda depth, measure: depth < -0.7)
    path = mf.solve(mf.Flow(PLANE), cloud, -2.0, save=5, stop=stop)
    assert bool(path.status == mf.Status.condition_met)


def test_the_rule_changes_at_the_layer_whose_depth_is_the_switch_to_rounding():
    # 49 times the float 1/49 is just below one.
    path = run_normalised_layers(ATTENTION, MixNorm(1.0), EIGHT, 50, step=1 / 49)
    radii = np.linalg.norm(path.points[49:51, 0], axis=1)
    np.testing.assert_allclose(radii[0], 1.0)
    assert radii[1] > 1.001


@pytest.mark.parametrize(
    "scheme", [mf.flows.PeriNorm(), mf.flows.NGPT()], ids=["peri", "ngpt"]
)
def test_the_size_of_the_values_does_not_matter_where_attention_is_normalised(scheme):
    identity, cloud = jnp.eye(2), mf.TokenCloud(jnp.array([[1.0, 0.0], [0.6, 0.8]]))
    tiny = mf.Softmax(identity, identity, 1e-18 * identity)
    np.testing.assert_allclose(
        velocity_at(scheme, tiny, cloud), velocity_at(scheme, PLANE, cloud), rtol=1e-13
    )
    Normalised(tiny, scheme).check(cloud)
    angles = 0.3 + 2 * np.pi / 3 * np.arange(3)
    triangle = mf.TokenCloud(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    flat = mf.Softmax(identity, identity, 1e-18 * identity, beta=0.0)
    with pytest.raises(mf.InvalidInput, match="no meaning"):
        Normalised(flat, scheme).check(triangle)


def test_every_layer_takes_the_same_step_in_single_precision():
    still = mf.TokenCloud(jnp.zeros((1, 1), jnp.float32))
    push = mf.PointMap(lambda x: jnp.ones_like(x))
    path = mf.run_layers(mf.Flow(push), still, 4000, step=0.01)
    expected = np.cumsum(np.full(4000, 0.01, np.float32), dtype=np.float32)
    np.testing.assert_array_equal(path.points[1:, 0, 0], expected)


def test_a_step_that_is_no_number_is_refused(untyped):
    with pytest.raises(mf.InvalidInput, match="step is 'a'"):
        run_normalised_layers(
            PLANE, mf.flows.PreNorm(), mf.TokenCloud(jnp.eye(2)), 2, step="a"
        )


@pytest.mark.parametrize(("step", "arrival"), [(0.1, 5.60), (0.05, 5.45), (0.01, 5.30)])
def test_euler_steps_with_division_by_the_norm_arrive_late(step, arrival):
    # Thirty-two orthonormal tokens pass 0.999 at the depth 5.2703 of the flow.
    attention = mf.identity_attention("softmax", 32, 1.0)
    cloud = mf.TokenCloud(jnp.eye(32))
    path = run_normalised_layers(attention, mf.flows.PostNorm(), cloud, 600, step=step)
    found = np.einsum("td,td->t", path.points[:, 0], path.points[:, 1])
    reached = float(path.depths[np.argmax(found >= 0.999)])
    np.testing.assert_allclose(reached, arrival, atol=1e-9)
