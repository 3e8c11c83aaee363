"""Order parameters of clouds and along trajectories."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from meanformer.attention import identity_attention
from meanformer.errors import InvalidInput
from meanformer.flows import Flow, solve
from meanformer.geometry import Euclidean, Sphere
from meanformer.measures import TokenCloud, UniformSphere, pad
from meanformer.observables import (
    first_passage,
    gram_histogram,
    inner_products,
    order_parameter,
    smallest_inner_product,
    span_dimension,
)

TOKENS = TokenCloud([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.6, 0.8, 0]])


def on_circle(angles, weights=None):
    angles = jnp.asarray(angles)
    return TokenCloud(jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1), weights)


def kuramoto():
    return Flow(identity_attention("softmax", 2, 0.0), space=Sphere())


def poisson_tokens(count, radius):
    """Equally spaced tokens with the masses of the Poisson kernel."""
    angles = 2 * np.pi * np.arange(count) / count
    density = (1 - radius**2) / (1 - 2 * radius * np.cos(angles) + radius**2)
    return on_circle(angles, density / density.sum())


@pytest.fixture(scope="module")
def pair_path():
    return solve(
        kuramoto(), on_circle([0.2, 2.2]), 4.0, save=41, rtol=1e-11, atol=1e-13
    )


def test_the_order_parameter_is_the_length_of_the_mean():
    np.testing.assert_allclose(order_parameter(on_circle([0.3, 1.3])), np.cos(0.5))
    weighted = on_circle([0.0, np.pi], [0.9, 0.1])
    np.testing.assert_allclose(order_parameter(weighted), 0.8, rtol=1e-14)
    three = on_circle(2 * np.pi * np.arange(3) / 3)
    np.testing.assert_allclose(order_parameter(three), 0, atol=1e-15)


def test_the_order_parameter_has_a_derivative_where_it_vanishes():
    cloud = TokenCloud([[1.0, 0.0], [-1.0, 0.0]])
    slopes = jax.grad(lambda x: order_parameter(cloud.moved(x)))(cloud.points)
    np.testing.assert_array_equal(slopes, 0)
    slopes = jax.grad(lambda x: order_parameter(TOKENS.moved(x)))(TOKENS.points)
    unit = np.asarray(TOKENS.mean()) / float(order_parameter(TOKENS))
    np.testing.assert_allclose(slopes, np.tile(unit / 4, (4, 1)), rtol=1e-12)


def test_two_tokens_of_kuramoto_follow_their_exact_law(pair_path):
    half = np.arctan(np.tan(1.0) * np.exp(-np.asarray(pair_path.depths)))
    measured = [float(order_parameter(pair_path.cloud(k))) for k in range(41)]
    np.testing.assert_allclose(measured, np.cos(half), rtol=1e-9)


@pytest.mark.slow
def test_a_poisson_kernel_under_kuramoto_follows_the_closed_law():
    path = solve(
        kuramoto(), poisson_tokens(64, 0.3), 2.0, save=3, rtol=1e-12, atol=1e-14
    )
    squares = 0.09 * np.exp([0.0, 1.0, 2.0])
    exact = np.sqrt(squares / (1 + 0.09 * np.expm1([0.0, 1.0, 2.0])))
    np.testing.assert_allclose(exact[-1], 0.6497905376, rtol=1e-9)
    measured = [float(order_parameter(path.cloud(k))) for k in range(3)]
    np.testing.assert_allclose(measured, exact, rtol=1e-9)


def test_inner_products_are_those_of_pairs_of_present_tokens():
    expected = [0, 0, 0.6, 0, 0.8, 0]
    np.testing.assert_allclose(inner_products(TOKENS), expected, atol=1e-15)
    np.testing.assert_allclose(inner_products(pad(TOKENS, 9)), expected, atol=1e-15)
    assert inner_products(TokenCloud([[1.0, 0.0]])).shape == (0,)


def test_inner_products_need_known_weights():
    with pytest.raises(InvalidInput, match="smallest_inner_product"):
        jax.jit(lambda cloud: inner_products(cloud))(TOKENS)


def test_the_smallest_inner_product_is_found_in_blocks(key, monkeypatch):
    cloud = TokenCloud(UniformSphere(3).sample(101, key=key))
    exact = float(inner_products(cloud).min())
    np.testing.assert_allclose(smallest_inner_product(cloud), exact, rtol=1e-14)
    monkeypatch.setattr("meanformer.observables.order.PAIRS_AT_ONCE", 1000)
    np.testing.assert_allclose(smallest_inner_product(cloud), exact, rtol=1e-14)
    np.testing.assert_allclose(
        jax.jit(smallest_inner_product)(cloud), exact, rtol=1e-14
    )


def test_absent_tokens_have_no_inner_products():
    cloud = TokenCloud([[1.0, 0.0], [0.8, 0.6], [-1.0, 0.0]], [0.5, 0.5, 0.0])
    np.testing.assert_allclose(smallest_inner_product(cloud), 0.8, rtol=1e-14)
    slopes = jax.grad(lambda x: smallest_inner_product(cloud.moved(x)))(cloud.points)
    np.testing.assert_array_equal(slopes[2], 0)
    assert np.isfinite(slopes).all()


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_the_span_counts_eigenvalues_of_the_gram_matrix(key, shape):
    factors = jr.split(key)
    points = jr.normal(factors[0], (shape[0], 3)) @ jr.normal(factors[1], (3, shape[1]))
    cloud = TokenCloud(points)
    assert int(span_dimension(cloud)) == 3
    values = np.linalg.eigvalsh(np.asarray(points @ points.T))
    middle = float(np.sqrt(values[-1] * values[-2]))
    assert int(span_dimension(cloud, tolerance=middle)) == 1
    assert int(jax.jit(span_dimension)(pad(cloud, 20))) == 3


def test_the_tolerance_of_the_span_is_absolute():
    cloud = TokenCloud([[1.0, 0.0], [1.0, 0.0], [0.0, 0.03]])
    assert int(span_dimension(cloud)) == 1
    assert int(span_dimension(cloud, tolerance=8e-4)) == 2
    with pytest.raises(InvalidInput, match="tolerance is 0"):
        span_dimension(cloud, tolerance=0.0)


def test_a_histogram_holds_all_pairs_with_their_masses(pair_path):
    found = gram_histogram(pair_path, 20)
    assert found.masses.shape == (41, 20)
    np.testing.assert_allclose(found.masses.sum(axis=1), 1, rtol=1e-12)
    # Half of the mass is that of tokens with themselves; the rest moves to one.
    np.testing.assert_allclose(found.masses[0, -1], 0.5)
    start = int(np.searchsorted(np.linspace(-1, 1, 21), np.cos(2.0))) - 1
    np.testing.assert_allclose(found.masses[0, start], 0.5)
    np.testing.assert_allclose(found.masses[-1, -1], 1)


def test_a_histogram_does_not_see_how_a_token_is_split(pair_path, monkeypatch):
    split = jnp.concatenate([pair_path.points, pair_path.points[:, :1]], axis=1)
    path = type(pair_path)(
        pair_path.depths,
        split,
        split,
        jnp.array([0.2, 0.5, 0.3]),
        None,
        None,
        pair_path.status,
        pair_path.accepted_steps,
        pair_path.rejected_steps,
    )
    expected = gram_histogram(pair_path, 7).masses
    np.testing.assert_allclose(gram_histogram(path, 7).masses, expected, rtol=1e-12)
    monkeypatch.setattr("meanformer.observables.order.PAIRS_AT_ONCE", 3)
    np.testing.assert_allclose(gram_histogram(path, 7).masses, expected, rtol=1e-12)


def test_bins_may_be_given_and_must_increase(pair_path):
    found = gram_histogram(pair_path, [-1.0, 0.0, 0.5])
    np.testing.assert_allclose(found.masses[-1], [0, 1])
    for bins in ([0.0], [1.0, 0.0]):
        with pytest.raises(InvalidInput, match="bins must"):
            gram_histogram(pair_path, bins)
    with pytest.raises(InvalidInput, match="bins is 0"):
        gram_histogram(pair_path, 0)


def test_first_passages_of_two_tokens_are_exact(pair_path):
    levels = [0.9, 0.0, -0.9, 0.99]
    # tan(phi/2) decays like exp(-t) from tan(1).
    angles = np.arccos(levels)
    exact = np.log(np.tan(1.0) / np.tan(angles / 2))
    found = first_passage(pair_path, levels)
    assert found[2] == 0.0
    np.testing.assert_allclose(np.array(found)[[0, 1, 3]], exact[[0, 1, 3]], atol=1e-6)
    assert first_passage(pair_path, [0.9999999]) == (None,)


def test_first_passages_in_space_need_no_sphere(pair_path):
    found = first_passage(pair_path, [0.0], space=Euclidean())
    exact = np.log(np.tan(1.0) / np.tan(np.pi / 4))
    np.testing.assert_allclose(found, [exact], atol=1e-5)
    with pytest.raises(InvalidInput, match="levels"):
        first_passage(pair_path, 0.5)


def test_tokens_off_the_space_have_no_first_passage(pair_path):
    half = eqx.tree_at(lambda path: path.points, pair_path, 0.5 * pair_path.points)
    with pytest.raises(InvalidInput, match="has norm 0.5"):
        first_passage(half, [0.1])
    found = first_passage(half, [0.1], space=Euclidean())
    assert 0 < found[0] < 4


def test_higher_levels_are_passed_later(pair_path):
    # Few saved depths, and velocities that make the interpolation go up and down.
    rough = eqx.tree_at(
        lambda path: (path.depths, path.points, path.velocities),
        pair_path,
        tuple(
            array[::20]
            for array in (pair_path.depths, pair_path.points, 30 * pair_path.velocities)
        ),
    )
    levels = np.linspace(-0.4, 0.95, 12)
    found = first_passage(rough, levels[::-1])[::-1]
    assert None not in found
    assert (np.diff(found) >= 0).all()
    # None is put at a saved depth for want of a sign change.
    inside = [depth for depth in found if depth not in (0.0, 2.0, 4.0)]
    assert len(inside) == len(found)
    reached = [
        float(smallest_inner_product(on_sphere(rough.at(depth)))) for depth in found
    ]
    assert (np.asarray(reached) >= levels - 1e-9).all()


def on_sphere(cloud):
    return cloud.moved(Sphere().retract(cloud.points))


def test_other_objects_than_trajectories_are_refused(untyped):
    for function in (lambda x: gram_histogram(x), lambda x: first_passage(x, [0.5])):
        with pytest.raises(InvalidInput, match="trajectory is a TokenCloud"):
            function(TOKENS)
