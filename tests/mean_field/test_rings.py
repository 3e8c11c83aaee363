"""Rings around an axis: attention between them, flows, quadrature nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.mean_field import (
    Axisymmetric,
    degree_powers,
    growth_rates,
    ring_nodes,
    unfold_rings,
)
from meanformer.numerics.special.zonal import zonal_polynomials


def uneven(heights):
    return (1 + 0.5 * heights + 0.3 * heights**2) / 1.3


def rings(dimension, count=12):
    return ring_nodes(uneven, count, dimension=dimension, normalize=True)


def blocks(matrix, dimension):
    first, last = jnp.diag(matrix)
    return jnp.diag(jnp.append(jnp.full(dimension - 1, first), last))


@pytest.mark.parametrize("dimension", [2, 3, 4])
@pytest.mark.parametrize("kind", [mf.Softmax, mf.Unnormalised, mf.Linear])
def test_attention_between_rings_is_that_between_all_their_tokens(kind, dimension):
    query = jnp.diag(jnp.array([1.3, -0.7]))
    value = jnp.diag(jnp.array([0.9, 1.4]))
    small = kind(query, jnp.eye(2), value, beta=2.0)
    large = kind(
        blocks(query, dimension), jnp.eye(dimension), blocks(value, dimension), beta=2.0
    )
    half_circle = rings(dimension)
    tokens = unfold_rings(half_circle, dimension, 24)
    queries = tokens.points.reshape(12, -1, dimension)[:, 0]
    directions = queries[:, :-1] / jnp.linalg.norm(
        queries[:, :-1], axis=1, keepdims=True
    )
    seen = large(tokens, queries)
    away = jnp.sum(seen[:, :-1] * directions, axis=1)
    found = Axisymmetric(small, dimension)(half_circle, half_circle.points)
    np.testing.assert_allclose(found, jnp.stack([away, seen[:, -1]], 1), atol=1e-13)


@pytest.mark.slow
def test_a_flow_of_rings_is_the_flow_of_their_tokens():
    layer = mf.identity_attention("softmax", 2, 4.0)
    start = rings(3, 10)
    flow = mf.Flow(Axisymmetric(layer, 3), space=mf.Sphere())
    moved = mf.solve(flow, start, 1.5, save=2, rtol=1e-10, atol=1e-12).points[-1]
    full = mf.Flow(mf.identity_attention("softmax", 3, 4.0), space=mf.Sphere())
    cloud = unfold_rings(start, 3, 30)
    tokens = mf.solve(full, cloud, 1.5, save=2, rtol=1e-10, atol=1e-12).points[-1]
    heights = tokens[:, 2].reshape(10, -1)
    np.testing.assert_allclose(
        heights, jnp.broadcast_to(moved[:, 1:], heights.shape), atol=1e-8
    )


@pytest.mark.parametrize("dimension", [2, 3, 8, 1000])
@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_the_linearised_field_of_rings_has_the_growth_rates(kind, dimension):
    layer = mf.identity_attention(kind, 2, 4.0)
    uniform = ring_nodes(jnp.ones_like, 40, dimension=dimension)
    heights = uniform.points[:, 1]
    field = mf.Flow(Axisymmetric(layer, dimension), space=mf.Sphere()).field

    def velocity(weights):
        cloud = mf.TokenCloud(uniform.points, weights)
        return field(jnp.zeros(()), cloud, cloud.points)[:, 1]

    found = []
    for degree in (1, 2, 3):

        def polynomial(z, degree=degree):
            return zonal_polynomials(dimension, z, degree + 1)[degree]

        wave, slope = jax.jvp(polynomial, (heights,), (jnp.ones_like(heights),))
        still, pushed = jax.jvp(velocity, (uniform.weights,), (uniform.weights * wave,))
        np.testing.assert_allclose(still, 0, atol=1e-12)
        mass = jnp.dot(uniform.weights, wave**2)
        found.append(jnp.dot(uniform.weights, slope * pushed) / mass)
    exact = growth_rates(layer, [1, 2, 3], dimension=dimension)
    np.testing.assert_allclose(jnp.stack(found), exact, rtol=1e-9)


@pytest.mark.slow
def test_small_waves_grow_at_their_rates_along_the_flow_on_the_sphere():
    layer = mf.identity_attention("softmax", 2, 4.0)
    flow = mf.Flow(Axisymmetric(layer, 3), space=mf.Sphere())

    def grown(size):
        start = ring_nodes(
            lambda z: 1 + size * zonal_polynomials(3, z, 4)[3], 40, dimension=3
        )
        path = mf.solve(flow, start, 1.0, save=2, rtol=1e-11, atol=1e-14)
        return start.weights @ zonal_polynomials(3, path.points[-1, :, 1], 4)[3]

    # Odd parts have no second order; Richardson takes the third away.
    coarse, fine = ((grown(e) - grown(-e)) / (2 * e) for e in (2e-3, 1e-3))
    amplitude = 7 * (4 * fine - coarse) / 3
    rate = growth_rates(layer, [3], dimension=3)[0]
    np.testing.assert_allclose(jnp.log(amplitude), rate, atol=1e-8)


@pytest.mark.slow
def test_the_energy_of_rings_is_that_of_tokens_and_rises():
    eye = jnp.eye(2)
    layer = mf.Unnormalised(eye, eye, eye, beta=3.0, shift=3.0)
    half_circle = rings(3)
    between = Axisymmetric(layer, 3)
    full = mf.Unnormalised(jnp.eye(3), jnp.eye(3), jnp.eye(3), beta=3.0, shift=3.0)
    tokens = unfold_rings(half_circle, 3, 24)
    np.testing.assert_allclose(
        between.energy(half_circle), mf.observables.energy(full, tokens), rtol=1e-12
    )
    path = mf.solve(mf.Flow(between, space=mf.Sphere()), half_circle, 4.0, save=6)
    energies = [between.energy(path.cloud(index)) for index in range(6)]
    assert np.all(np.diff(energies) > 0)


@pytest.mark.slow
def test_nodes_of_a_smooth_density_on_the_sphere_converge_spectrally():
    layer = mf.identity_attention("softmax", 2, 4.0)
    flow = mf.Flow(Axisymmetric(layer, 3), space=mf.Sphere())

    def height(count):
        start = ring_nodes(uneven, count, dimension=3, normalize=True)
        path = mf.solve(flow, start, 2.0, save=2, rtol=1e-11, atol=1e-13)
        return float(start.weights @ path.points[-1, :, 1])

    exact = height(48)
    errors = [abs(height(count) - exact) for count in (6, 12, 24)]
    assert errors[1] < 2e-2 * errors[0]
    assert errors[2] < 1e-9


def test_rings_integrate_polynomials_of_the_height():
    for dimension in (2, 3, 6):
        cloud = ring_nodes(jnp.ones_like, 5, dimension=dimension)
        squares = cloud.weights @ cloud.points**2
        np.testing.assert_allclose(
            squares, [1 - 1 / dimension, 1 / dimension], rtol=1e-13
        )


@pytest.mark.slow
def test_splitting_a_ring_and_absent_rings_change_nothing():
    layer = Axisymmetric(mf.identity_attention("softmax", 2, 4.0), 3)
    points = jnp.array([[0.6, 0.8], [0.8, -0.6], [1.0, 0.0]])
    whole = mf.TokenCloud(points, jnp.array([0.5, 0.5, 0.0]))
    split = mf.TokenCloud(points[jnp.array([0, 1, 1])], jnp.array([0.5, 0.2, 0.3]))
    np.testing.assert_allclose(layer(whole, points), layer(split, points), rtol=1e-14)

    def total(rows):
        return jnp.sum(layer(whole.moved(rows), points[:2]))

    np.testing.assert_array_equal(jax.grad(total)(points)[2], 0)


def test_rings_in_single_precision_and_at_large_beta_stay_finite():
    single = jnp.eye(2, dtype=jnp.float32)
    layer = Axisymmetric(mf.Softmax(single, single, single, beta=jnp.float32(500)), 3)
    points = jnp.array([[0.0, 1.0], [1.0, 0.0], [0.6, -0.8]], jnp.float32)
    seen = layer(mf.TokenCloud(points), points)
    assert seen.dtype == jnp.float32
    assert bool(jnp.isfinite(seen).all())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (mf.identity_attention("l2", 2), "Softmax, Unnormalised or Linear"),
        (mf.identity_attention("softmax", 3), "both must be 2"),
        (
            mf.Softmax(jnp.array([[1.0, 0.2], [0.0, 1.0]]), jnp.eye(2), jnp.eye(2)),
            "score .* diagonal",
        ),
        (
            mf.Softmax(jnp.eye(2), jnp.eye(2), jnp.eye(2), value_bias=jnp.ones(2)),
            "no biases",
        ),
    ],
    ids=["kind", "dimension", "matrix", "bias"],
)
def test_attention_that_rings_do_not_survive_is_refused(layer, message):
    with pytest.raises(mf.InvalidInput, match=message):
        Axisymmetric(layer, 3)


def test_rings_need_a_cloud_of_points_in_the_half_plane():
    layer = Axisymmetric(mf.identity_attention("softmax", 2), 3)
    with pytest.raises(mf.InvalidInput, match="TokenCloud"):
        layer(mf.UniformSphere(2), jnp.array([[1.0, 0.0]]))
    with pytest.raises(mf.InvalidInput, match="dimension 3"):
        unfold_rings(mf.TokenCloud(jnp.eye(3)), 3, 4)
    with pytest.raises(mf.InvalidInput, match="2 or more"):
        Axisymmetric(mf.identity_attention("softmax", 2), 1)
    with pytest.raises(mf.InvalidInput, match="beta is 0"):
        Axisymmetric(mf.identity_attention("softmax", 2, 0.0), 3).energy(rings(3))
    with pytest.raises(mf.Unsupported, match="no energy"):
        Axisymmetric(mf.identity_attention("linear", 2), 3).energy(rings(3))


def test_powers_of_degrees_on_the_circle_are_those_of_fourier_coefficients(key):
    angles = jax.random.uniform(key, (50,), maxval=2 * jnp.pi)
    cloud = mf.TokenCloud(jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1))
    exact = [
        np.abs(np.mean(np.exp(1j * k * np.asarray(angles)))) ** 2 for k in range(9)
    ]
    np.testing.assert_allclose(degree_powers(cloud, range(9)), exact, atol=1e-13)


@pytest.mark.parametrize("dimension", [3, 5])
def test_powers_of_degrees_do_not_turn_and_vanish_for_the_uniform_measure(
    key, dimension
):
    points = jax.random.normal(key, (40, dimension))
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    turn = jnp.linalg.qr(jax.random.normal(key, (dimension, dimension)))[0]
    cloud = mf.TokenCloud(points)
    powers = degree_powers(cloud, range(6))
    np.testing.assert_allclose(
        powers, degree_powers(mf.TokenCloud(points @ turn), range(6)), atol=1e-13
    )
    np.testing.assert_allclose(powers[1], jnp.sum(cloud.mean() ** 2), rtol=1e-12)
    rule = mf.quadrature(mf.UniformSphere(dimension), 4)
    np.testing.assert_allclose(degree_powers(rule, range(4)), [1, 0, 0, 0], atol=1e-14)
    one = mf.TokenCloud(points[:1])
    np.testing.assert_allclose(degree_powers(one, [0, 3, 5]), 1, rtol=1e-12)


def test_an_absent_token_has_no_power_and_no_derivative():
    points = jnp.eye(3)
    cloud = mf.TokenCloud(points, jnp.array([0.5, 0.5, 0.0]))
    present = degree_powers(mf.TokenCloud(points[:2]), [1, 2])
    np.testing.assert_allclose(degree_powers(cloud, [1, 2]), present, rtol=1e-14)
    slope = jax.grad(lambda rows: jnp.sum(degree_powers(cloud.moved(rows), [1, 2])))
    np.testing.assert_array_equal(slope(points)[2], 0)
    with pytest.raises(mf.InvalidInput, match="2 or more"):
        degree_powers(mf.TokenCloud(jnp.ones((1, 1))), [1])
