"""Sums of products of softmax blocks."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer import expressivity
from meanformer.expressivity import block, coordinate, stack


@pytest.fixture
def cloud():
    points = jnp.array([-0.9, -0.2, 0.1, 0.7, 1.0])[:, None]
    return mf.TokenCloud(points, jnp.array([0.1, 0.3, 0.2, 0.25, 0.15]))


def drawn(key, dimension):
    """A block with normal entries."""
    keys = jr.split(key, 5)
    vectors = [jr.normal(one, (dimension,)) for one in keys[1:4]]
    score, constant = jr.normal(keys[0], (dimension,) * 2), jr.normal(keys[4], ())
    shift, direct, value = vectors
    return block(
        dimension,
        score=score,
        shift=shift,
        direct=direct,
        value=value,
        constant=constant,
    )


def test_a_block_takes_its_tabulated_value(cloud):
    gamma = block(1, shift=[0.7], value=[1.0])
    nowhere = jnp.zeros((1, 1))
    np.testing.assert_allclose(gamma(cloud, nowhere), 0.410970727668, rtol=1e-11)


def test_the_derivative_in_the_shift_is_the_next_mean(cloud):
    gamma = block(1, shift=[0.7], value=[1.0])

    @eqx.filter_grad
    def slope(gamma):
        return gamma(cloud, jnp.zeros((1, 1)))[0, 0]

    found = slope(gamma).factors.shift[0, 0, 0]
    np.testing.assert_allclose(found, 0.28136081498, rtol=1e-10)


def test_a_constant_block_is_one_everywhere(cloud):
    x = jnp.array([[3.0], [-1.0]])
    np.testing.assert_array_equal(block(1, constant=1.0)(cloud, x), jnp.ones((2, 1)))


def test_a_block_is_the_dense_formula(key):
    keys = jr.split(key, 4)
    tokens, weights = jr.normal(keys[0], (6, 3)), jr.dirichlet(keys[1], jnp.ones(6))
    x, gamma = jr.normal(keys[2], (4, 3)), drawn(keys[3], 3)
    parts = gamma.factors
    scores = (x @ parts.score[0, 0].T + parts.shift[0]) @ tokens.T
    masses = weights[None] * jnp.exp(scores)
    seen = masses @ tokens / masses.sum(axis=1, keepdims=True)
    expected = x @ parts.direct[0, 0] + parts.constant[0, 0] + seen @ parts.value[0, 0]
    found = gamma(mf.TokenCloud(tokens, weights), x)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-12)


def test_arithmetic_of_elements_is_that_of_their_values(key):
    keys = jr.split(key, 5)
    f, g, h = (drawn(one, 2) for one in keys[:3])
    mu, x = mf.TokenCloud(jr.normal(keys[3], (5, 2))), jr.normal(keys[4], (7, 2))
    element = 2 * f * g * h - 0.5 * f * (g - 3) + 1 - h
    a, b, c = (one(mu, x) for one in (f, g, h))
    expected = 2 * a * b * c - 0.5 * a * (b - 3) + 1 - c
    np.testing.assert_allclose(element(mu, x), expected, rtol=1e-12)
    pair = stack([element, f * f])
    np.testing.assert_allclose(pair(mu, x)[:, :1], expected, rtol=1e-12)
    np.testing.assert_allclose(pair(mu, x)[:, 1:], a * a, rtol=1e-12)


def test_like_terms_are_joined_and_constants_taken_out(key):
    f, g = (drawn(one, 2) for one in jr.split(key))
    element = (f * g + g * f + 2 * f - f - f).simplified()
    assert element.lengths == (2,)
    np.testing.assert_array_equal(element.coefficients, [[2.0]])
    assert (f - f).simplified().lengths == (1,)


def test_order_splitting_and_absent_tokens_change_nothing(key):
    keys = jr.split(key, 3)
    points, x = jr.normal(keys[0], (3, 2)), jr.normal(keys[1], (4, 2))
    element = drawn(keys[2], 2) * coordinate(2, 0)
    whole = element(mf.TokenCloud(points, jnp.array([0.5, 0.3, 0.2])), x)
    rows = jnp.concatenate([points[::-1], points[:1], 1e3 * points[1:2]])
    split = mf.TokenCloud(rows, jnp.array([0.2, 0.3, 0.1, 0.4, 0.0]))
    np.testing.assert_allclose(element(split, x), whole, rtol=1e-13)


def test_an_element_sees_a_gaussian_in_closed_form():
    gaussian = mf.Gaussian(jnp.array([1.0, 0.0]), jnp.diag(jnp.array([2.0, 0.5])))
    gamma = block(2, shift=[0.3, 0.4], value=[1.0, 2.0])
    found = gamma(gaussian, jnp.zeros((1, 2)))
    np.testing.assert_allclose(found, [[1 + 2 * 0.3 + 2 * 0.5 * 0.4]], rtol=1e-13)


def test_elements_of_other_sizes_are_refused():
    with pytest.raises(mf.InvalidInput, match="takes dimension 1 and returns 1"):
        block(1) + block(2)
    with pytest.raises(mf.InvalidInput, match="a factor or summand"):
        block(1) * "two"
    with pytest.raises(mf.InvalidInput, match=r"value has shape \(3,\)"):
        block(2, value=[1.0, 2.0, 3.0])
    with pytest.raises(mf.InvalidInput, match="elements take the dimensions"):
        expressivity.stack([block(1), block(2)])


def test_an_element_adds_to_other_maps_as_all_maps_do(cloud):
    gamma = coordinate(1, 0) + mf.identity_attention("softmax", 1, beta=1.0)
    x = jnp.array([[0.4]])
    expected = x + mf.identity_attention("softmax", 1, beta=1.0)(cloud, x)
    np.testing.assert_allclose(gamma(cloud, x), expected, rtol=1e-13)
