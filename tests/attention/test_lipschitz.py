"""Local Lipschitz constants: reference values, invariances, derivatives."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from map_zoo import cast
from meanformer.attention import (
    L2,
    Hardmax,
    Masked,
    MultiHead,
    Perceptron,
    Residual,
    Sigmoid,
    Sinkhorn,
    Softmax,
    compose,
    identity_attention,
    push_forward,
)
from meanformer.attention.lipschitz import lipschitz_report, local_lipschitz
from meanformer.errors import InvalidInput, StoppedEarly, Unsupported
from meanformer.measures import Gaussian, TokenCloud, pad
from meanformer.numerics.pair_sums.sums import Blocked
from reference import KEY, PLACES, POINTS, QUERY, VALUE, VALUE_NORM, WEIGHTS

EQUAL = TokenCloud(POINTS)
WEIGHTED = TokenCloud(POINTS, WEIGHTS)
SOFTMAX = Softmax(QUERY, KEY, VALUE)

REFERENCE = {
    "softmax": (SOFTMAX, EQUAL, 1.0152212941194),
    "l2": (L2(QUERY, KEY, VALUE), EQUAL, 0.941431386844287),
    "causal": (
        Masked(SOFTMAX),
        TokenCloud(POINTS, positions=PLACES),
        1.0332015233234815,
    ),
    "weighted": (SOFTMAX, WEIGHTED, 0.9689388784815384),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["power", "svd"])
def test_sinkhorn_on_equal_weights_is_exactly_as_steep_as_its_values(method):
    found = local_lipschitz(Sinkhorn(QUERY, KEY, VALUE), EQUAL, method=method)
    np.testing.assert_allclose(found, 0.8251970862147358, atol=1e-10)


@pytest.mark.slow
def test_sinkhorn_is_at_least_as_steep_as_its_values(key):
    cloud = TokenCloud(jr.normal(key, (6, 2)), [0.3, 0.1, 0.2, 0.15, 0.05, 0.2])
    constant = local_lipschitz(Sinkhorn(QUERY, KEY, VALUE), cloud)
    assert constant >= VALUE_NORM - 1e-12


@pytest.mark.parametrize("method", ["power", "svd"])
@pytest.mark.parametrize("name", REFERENCE)
def test_the_constants_in_the_table_are_reproduced(name, method):
    gamma, cloud, expected = REFERENCE[name]
    found = local_lipschitz(gamma, cloud, method=method)
    np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("name", REFERENCE)
def test_in_single_precision_they_are_reproduced_to_five_digits(name):
    gamma, cloud, expected = REFERENCE[name]
    found = local_lipschitz(*cast((gamma, cloud), jnp.float32), method="svd")
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_sinkhorn_in_single_precision_is_as_steep_as_its_values():
    problem = cast((Sinkhorn(QUERY, KEY, VALUE), EQUAL), jnp.float32)
    np.testing.assert_allclose(local_lipschitz(*problem), VALUE_NORM, atol=1e-5)


def test_half_precision_is_computed_in_single():
    gamma, cloud = cast((SOFTMAX, EQUAL), jnp.bfloat16)
    found = local_lipschitz(gamma, cloud)
    assert found.dtype == jnp.bfloat16
    wide = local_lipschitz(*cast((gamma, cloud), jnp.float32))
    np.testing.assert_allclose(float(found), wide, rtol=2**-8)


def test_the_weighted_norm_agrees_with_a_dense_matrix():
    def field(points):
        return SOFTMAX(WEIGHTED.moved(points), points)

    jacobian = np.asarray(jax.jacfwd(field)(WEIGHTED.points)).reshape(8, 8)
    roots = np.repeat(np.sqrt(WEIGHTS), 2)
    weighted = np.linalg.norm(roots[:, None] * jacobian / roots[None, :], 2)
    np.testing.assert_allclose(local_lipschitz(SOFTMAX, WEIGHTED), weighted, rtol=1e-12)
    plain = local_lipschitz(SOFTMAX, WEIGHTED, norm="frobenius")
    np.testing.assert_allclose(plain, np.linalg.norm(jacobian, 2), rtol=1e-12)


def test_power_iteration_and_decomposition_agree_on_a_larger_cloud(key):
    cloud = TokenCloud(jr.normal(key, (60, 3)))
    gamma = Softmax(
        jr.normal(jr.key(1), (2, 3)), jr.normal(jr.key(2), (2, 3)), np.eye(3)
    )
    power = lipschitz_report(gamma, cloud)
    dense = lipschitz_report(gamma, cloud, method="svd")
    assert power.converged
    np.testing.assert_allclose(power.value, dense.value, rtol=1e-10)
    np.testing.assert_allclose(power.gap, dense.gap, atol=1e-4)


def test_values_of_another_dimension_than_the_tokens_are_allowed():
    gamma = Softmax(QUERY, KEY, np.array([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0]]))
    power = local_lipschitz(gamma, WEIGHTED)
    dense = local_lipschitz(gamma, WEIGHTED, method="svd")
    np.testing.assert_allclose(power, dense, rtol=1e-12)


@pytest.mark.slow
def test_the_jacobian_of_few_tokens_is_decomposed_and_that_of_many_is_not(key):
    assert lipschitz_report(SOFTMAX, WEIGHTED).iterations == 0
    assert lipschitz_report(SOFTMAX, WEIGHTED, method="power").iterations > 0
    assert lipschitz_report(SOFTMAX, TokenCloud(jr.normal(key, (33, 2)))).iterations > 0


def test_the_reported_move_is_amplified_by_the_constant():
    report = lipschitz_report(SOFTMAX, WEIGHTED)
    length = np.sqrt(WEIGHTS @ np.sum(np.asarray(report.move) ** 2, axis=1))
    np.testing.assert_allclose(length, 1, rtol=1e-12)
    step = 1e-6
    ahead, behind = (
        WEIGHTED.points + sign * step * report.move for sign in (1.0, -1.0)
    )
    change = SOFTMAX(WEIGHTED.moved(ahead), ahead) - SOFTMAX(
        WEIGHTED.moved(behind), behind
    )
    growth = np.sqrt(WEIGHTS @ np.sum(np.asarray(change) ** 2, axis=1)) / (2 * step)
    np.testing.assert_allclose(growth, report.value, rtol=1e-8)
    assert float(report) == float(report.value)


def test_padding_and_order_of_tokens_change_nothing():
    expected = local_lipschitz(SOFTMAX, WEIGHTED)
    padded = pad(WEIGHTED, 7)
    far_away = padded.moved(padded.points.at[5].set(jnp.array([30.0, -40.0])))
    np.testing.assert_allclose(local_lipschitz(SOFTMAX, far_away), expected, rtol=1e-12)
    order = np.array([2, 0, 3, 1])
    shuffled = TokenCloud(POINTS[order], WEIGHTS[order])
    np.testing.assert_allclose(local_lipschitz(SOFTMAX, shuffled), expected, rtol=1e-12)


def test_splitting_a_token_cannot_lower_the_constant():
    split = TokenCloud(
        np.concatenate([POINTS, POINTS[:1]]), np.array([0.1, 0.3, 0.2, 0.1, 0.3])
    )
    # The parts may move apart, so there are more moves to choose from.
    assert local_lipschitz(SOFTMAX, split) >= local_lipschitz(SOFTMAX, WEIGHTED) - 1e-12


def test_a_layer_without_values_has_the_constant_zero():
    report = lipschitz_report(Softmax(QUERY, KEY, 0 * VALUE), WEIGHTED)
    assert report.value == 0
    assert report.residual == 0
    assert report.gap == 0
    slope = jax.grad(lambda v: local_lipschitz(Softmax(QUERY, KEY, v), WEIGHTED))
    assert np.isfinite(slope(jnp.zeros((2, 2)))).all()


def test_one_token_moves_by_the_value_matrix():
    constant = local_lipschitz(SOFTMAX, TokenCloud([[0.3, -0.7]]))
    np.testing.assert_allclose(constant, VALUE_NORM, rtol=1e-12)


def test_hardmax_is_refused_wherever_it_hides():
    heads = MultiHead([SOFTMAX, Hardmax(QUERY, KEY, VALUE)])
    for gamma in (Hardmax(QUERY, KEY, VALUE), heads, Residual(heads)):
        with pytest.raises(Unsupported, match="hardmax"):
            local_lipschitz(gamma, EQUAL)


def test_what_is_not_a_cloud_is_refused():
    with pytest.raises(Unsupported, match="quadrature"):
        local_lipschitz(SOFTMAX, Gaussian([0.0, 0.0], np.eye(2)))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("method", "guess"),
        ("norm", "nuclear"),
        ("tolerance", 0.0),
        ("vectors", 0),
        ("max_steps", 0),
    ],
)
def test_a_wrong_option_is_named(option, value):
    with pytest.raises(InvalidInput, match=option):
        local_lipschitz(SOFTMAX, EQUAL, **{option: value})


def test_an_unfinished_iteration_warns_with_its_residual(key):
    cloud = TokenCloud(jr.normal(key, (60, 2)))
    with pytest.warns(StoppedEarly, match="residual"):
        local_lipschitz(identity_attention("softmax", 2), cloud, max_steps=1)


@pytest.mark.slow
def test_the_gradient_agrees_with_finite_differences():
    def constant(points):
        return local_lipschitz(SOFTMAX, WEIGHTED.moved(points))

    slope = jax.grad(constant)(WEIGHTED.points)
    step, numerical = 1e-5, np.zeros((4, 2))
    for place in np.ndindex(4, 2):
        ahead = constant(WEIGHTED.points.at[place].add(step))
        behind = constant(WEIGHTED.points.at[place].add(-step))
        numerical[place] = (ahead - behind) / (2 * step)
    np.testing.assert_allclose(slope, numerical, atol=1e-8)


@pytest.mark.slow
def test_jit_and_vmap_give_the_plain_value():
    def constant(points):
        return local_lipschitz(SOFTMAX, WEIGHTED.moved(points))

    expected = constant(WEIGHTED.points)
    np.testing.assert_allclose(jax.jit(constant)(WEIGHTED.points), expected, rtol=1e-12)
    both = jnp.stack([WEIGHTED.points, 2 * WEIGHTED.points])
    np.testing.assert_allclose(jax.vmap(constant)(both)[0], expected, rtol=1e-12)


def test_single_precision_stays_single_and_is_close():
    narrow = Softmax(*(np.float32(matrix) for matrix in (QUERY, KEY, VALUE)))
    constant = local_lipschitz(narrow, TokenCloud(np.float32(POINTS)))
    assert constant.dtype == jnp.float32
    np.testing.assert_allclose(constant, 1.0152212941194, atol=1e-5)


@pytest.mark.slow
def test_l2_attention_with_singular_keys_is_not_globally_lipschitz():
    tied = L2(np.array([[1.0, 0.0]]), np.array([[1.0, 0.0]]), np.eye(2))
    ratios = [
        float(local_lipschitz(tied, TokenCloud([[0.0, 0.0], [0.5, z]]))) / z
        for z in (100.0, 1000.0)
    ]
    np.testing.assert_allclose(ratios, 0.49, atol=0.005)


@pytest.mark.slow
def test_the_layers_of_a_network_bound_the_whole():
    perceptron = Perceptron(QUERY, np.array([0.1, -0.2]), VALUE, activation=jnp.tanh)
    network = compose(
        Residual(Sigmoid(KEY, QUERY, VALUE)), perceptron, Residual(SOFTMAX)
    )
    cloud, bound = WEIGHTED, 1.0
    for layer in network.layers:
        bound *= local_lipschitz(layer, cloud)
        cloud = push_forward(layer, cloud)
    assert local_lipschitz(network, WEIGHTED) <= bound * (1 + 1e-12)


def test_no_array_of_all_pairs_is_held(key):
    count = 20_000
    cloud = TokenCloud(jr.normal(key, (count, 2)), sums=Blocked())
    gamma = identity_attention("softmax", 2)

    def constant(points):
        return local_lipschitz(gamma, cloud.moved(points))

    compiled = jax.jit(constant).lower(cloud.points).compile()
    for_one_array_of_pairs = 8 * count**2
    held = compiled.memory_analysis().temp_size_in_bytes
    assert held < for_one_array_of_pairs / 4
