"""The reference problem: every tabulated number of every attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference as ref
from meanformer.attention import (
    L2,
    Hardmax,
    Linear,
    Masked,
    MultiHead,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Unnormalised,
    attention_matrix,
    compose,
    push_forward,
)
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from reference import assert_matches, reference_attention, reference_cloud

PRECISIONS = pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
TABLE = {
    "softmax": (Softmax, {}, ref.SOFTMAX),
    "softmax at beta 0": (Softmax, {"beta": 0.0}, np.tile(ref.VALUE_OF_MEAN, (4, 1))),
    "hardmax": (Hardmax, {}, ref.HARDMAX),
    "l2": (L2, {}, ref.L2_VALUES),
    "one half-step": (Sinkhorn, {"half_steps": 1}, ref.L2_VALUES),
    "three half-steps": (Sinkhorn, {"half_steps": 3}, ref.SINKHORN_THREE_HALF_STEPS),
    "2001 half-steps": (Sinkhorn, {"half_steps": 2001}, ref.SINKHORN),
    "sinkhorn": (Sinkhorn, {}, ref.SINKHORN),
    "linear": (Linear, {}, ref.LINEAR),
    "unnormalised": (Unnormalised, {}, ref.UNNORMALISED),
    "sigmoid": (Sigmoid, {}, ref.SIGMOID),
}


@PRECISIONS
@pytest.mark.parametrize("name", TABLE)
def test_attention_has_the_tabulated_value(name, dtype):
    kind, options, expected = TABLE[name]
    cloud = reference_cloud(dtype)
    values = reference_attention(kind, dtype, **options)(cloud, cloud.points)
    assert values.dtype == dtype
    assert_matches(values, expected)


@PRECISIONS
def test_two_heads_have_the_tabulated_value(dtype):
    key, query, value = (
        jnp.asarray(matrix, dtype) for matrix in (ref.KEY, ref.QUERY, ref.SECOND_HEAD)
    )
    heads = MultiHead([reference_attention(dtype=dtype), Softmax(key, query, value)])
    cloud = reference_cloud(dtype)
    assert_matches(heads(cloud, cloud.points), ref.TWO_HEADS)


@PRECISIONS
def test_causal_attention_has_the_tabulated_value(dtype):
    cloud = reference_cloud(dtype, positions=ref.PLACES)
    causal = Masked(reference_attention(dtype=dtype))
    assert_matches(push_forward(causal, cloud).points, ref.CAUSAL)


@PRECISIONS
def test_ties_change_only_the_second_row_of_causal_attention(dtype):
    cloud = reference_cloud(dtype, positions=ref.TIED_PLACES)
    values = push_forward(Masked(reference_attention(dtype=dtype)), cloud).points
    assert_matches(values, np.insert(ref.CAUSAL[[0, 2, 3]], 1, ref.TIED_SECOND_ROW, 0))


@PRECISIONS
def test_attention_on_the_sphere_has_the_tabulated_value(dtype):
    unit = ref.POINTS / np.linalg.norm(ref.POINTS, axis=1, keepdims=True)
    cloud = TokenCloud(jnp.asarray(unit, dtype), jnp.asarray(ref.WEIGHTS, dtype))
    values = reference_attention(dtype=dtype)(cloud, cloud.points)
    tangent = Sphere().project(cloud.points, values)
    assert_matches(tangent, ref.ON_THE_SPHERE)
    radial = np.sum(np.asarray(tangent) * np.asarray(cloud.points), axis=1)
    np.testing.assert_allclose(radial, 0, atol=2 * jnp.finfo(dtype).eps)


def test_softmax_at_large_beta_is_hardmax():
    cloud = reference_cloud()
    values = reference_attention(beta=1e4)(cloud, cloud.points)
    np.testing.assert_allclose(values, ref.HARDMAX, rtol=0, atol=1e-12)


def test_moments_and_norms_are_the_tabulated_ones():
    cloud, attention = reference_cloud(), reference_attention()
    np.testing.assert_allclose(cloud.mean(), ref.MEAN, atol=1e-15)
    np.testing.assert_allclose(cloud.radius(), ref.RADIUS, atol=1e-15)
    np.testing.assert_allclose(attention.score, ref.SCORE, atol=1e-15)
    np.testing.assert_allclose(
        np.linalg.norm(attention.score, 2), ref.SCORE_NORM, atol=1e-14
    )
    np.testing.assert_allclose(np.linalg.norm(ref.VALUE, 2), ref.VALUE_NORM, atol=1e-14)


@pytest.mark.parametrize("kind", [Softmax, Sinkhorn])
def test_splitting_the_first_token_changes_nothing(kind):
    whole, attention = reference_cloud(), reference_attention(kind)
    split = TokenCloud(
        jnp.asarray(ref.POINTS[[0, 0, 1, 2, 3]]), jnp.array([0.1, 0.3, 0.3, 0.2, 0.1])
    )
    difference = attention(split, whole.points) - attention(whole, whole.points)
    np.testing.assert_allclose(difference, 0, atol=1e-12)


def test_sinkhorn_attention_keeps_the_mean_up_to_the_value_matrix():
    cloud = reference_cloud()
    values = reference_attention(Sinkhorn, half_steps=2001)(cloud, cloud.points)
    np.testing.assert_allclose(cloud.weights @ values, ref.VALUE_OF_MEAN, atol=1e-15)


@pytest.mark.parametrize(("half_steps", "error"), [(5, 1.545e-3), (21, 1.755e-11)])
def test_marginal_error_of_half_steps_is_the_tabulated_one(half_steps, error):
    attention = reference_attention(Sinkhorn, half_steps=half_steps)
    measured = attention.potentials(reference_cloud()).marginal_error
    # The second error is measured against rounding of sums near one.
    np.testing.assert_allclose(measured, error, rtol=1e-3, atol=2e-15)


def test_oscillation_of_the_score_is_the_tabulated_one():
    cloud, attention = reference_cloud(), reference_attention(Sinkhorn)
    np.testing.assert_allclose(attention.oscillation(cloud), 3.18, atol=1e-12)
    ratio = attention.contraction_ratio(cloud)
    np.testing.assert_allclose(ratio**2, 0.4372, atol=5e-5)


def test_each_round_contracts_the_potential_as_much_as_tabulated():
    cloud = reference_cloud()

    def potential(half_steps):
        attention = reference_attention(Sinkhorn, half_steps=half_steps)
        return np.asarray(attention.potentials(cloud).f)

    limit = potential(2001)
    spreads = [np.ptp(potential(count) - limit) for count in (3, 5, 7)]
    ratios = np.divide(spreads[1:], spreads[:-1])
    assert (ratios <= 0.4372).all()
    assert ((ratios > 0.0895) & (ratios < 0.1025)).all()


@pytest.mark.parametrize("kind", [L2, Sinkhorn])
def test_translation_moves_the_output_by_the_value_matrix(kind):
    key = jnp.asarray(ref.KEY)
    query = key if kind is L2 else jnp.asarray(ref.QUERY)
    attention, cloud = kind(query, key, jnp.asarray(ref.VALUE)), reference_cloud()
    shift = jnp.array([0.7, -1.3])
    moved = cloud.moved(cloud.points + shift[None])
    values = attention(moved, moved.points) - attention(cloud, cloud.points)
    expected = np.tile(ref.VALUE @ np.asarray(shift), (4, 1))
    np.testing.assert_allclose(values, expected, atol=1e-12)


def test_softmax_of_a_translate_is_that_of_the_reweighted_cloud():
    attention, cloud = reference_attention(beta=1.3), reference_cloud()
    shift = jnp.array([0.7, -1.3])
    moved = cloud.moved(cloud.points + shift[None])
    scores = 1.3 * (ref.QUERY @ np.asarray(shift)) @ (ref.KEY @ ref.POINTS.T)
    tilted = TokenCloud(
        cloud.points, jnp.asarray(ref.WEIGHTS * np.exp(scores)), normalize=True
    )
    expected = attention(tilted, cloud.points) + (ref.VALUE @ np.asarray(shift))[None]
    np.testing.assert_allclose(attention(moved, moved.points), expected, atol=1e-14)


def test_softmax_with_transposed_score_as_value_is_a_gradient():
    beta, cloud = 1.7, reference_cloud()
    attention = Softmax(ref.QUERY, ref.KEY, ref.SCORE.T, beta=beta)

    def potential(x):
        return cloud.log_laplace(beta * x[None] @ ref.SCORE.T)[0] / beta

    gradients = jax.vmap(jax.grad(potential))(cloud.points)
    values = attention(cloud, cloud.points)
    np.testing.assert_allclose(values, gradients, atol=1e-14)


def test_l2_is_softmax_where_all_keys_have_one_norm():
    angles = np.array([0.1, 0.9, 2.0, 4.0])
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    cloud = TokenCloud(circle, ref.WEIGHTS)
    rotation = np.array([[0.6, -0.8], [0.8, 0.6]])
    distance = L2(ref.QUERY, rotation, ref.VALUE, beta=0.8)
    product = Softmax(ref.QUERY, rotation, ref.VALUE, beta=1.6)
    np.testing.assert_allclose(
        distance(cloud, cloud.points), product(cloud, cloud.points), atol=1e-14
    )


def test_l2_with_identities_is_gaussian_mean_shift():
    beta, cloud, eye = 0.9, reference_cloud(), np.eye(2)

    def log_density(x):
        squares = jnp.sum((x[None] - cloud.points) ** 2, axis=1)
        return jnp.log(jnp.sum(cloud.weights * jnp.exp(-beta * squares)))

    shift = L2(eye, eye, eye, beta=beta)(cloud, cloud.points) - cloud.points
    expected = jax.vmap(jax.grad(log_density))(cloud.points) / (2 * beta)
    np.testing.assert_allclose(shift, expected, atol=1e-14)


def test_half_l2_at_twice_the_temperature_is_l2():
    cloud = reference_cloud()
    half = reference_attention(L2, beta=2.0, half=True)
    assert_matches(half(cloud, cloud.points), ref.L2_VALUES)


def test_kims_layer_multiplies_the_mean_by_the_scaled_score():
    key, cloud = ref.KEY, reference_cloud()
    plain = L2(key, key, np.eye(2))
    kim = L2(key, key, ref.VALUE, value_map="kim")
    twist = ref.VALUE @ (key.T @ key) / np.sqrt(2)
    expected = plain(cloud, cloud.points) @ twist.T
    np.testing.assert_allclose(kim(cloud, cloud.points), expected, atol=1e-15)


@pytest.mark.parametrize("options", [{"kernel": "dot", "beta": 2.0}, {"half": True}])
def test_the_start_of_sinkhorn_does_not_change_the_limit(options):
    cloud = reference_cloud()
    options = {"beta": 2.0, **options}
    values = reference_attention(Sinkhorn, **options)(cloud, cloud.points)
    assert_matches(values, ref.SINKHORN)


def test_a_warm_start_does_not_change_the_limit():
    cloud, cold = reference_cloud(), reference_attention(Sinkhorn)
    start = cold.potentials(cloud)
    warm = reference_attention(Sinkhorn, start=start.g)
    assert_matches(warm(cloud, cloud.points), ref.SINKHORN)
    assert warm.potentials(cloud).iterations == 0 < start.iterations


def test_potentials_make_a_plan_with_both_marginals():
    cloud, attention = reference_cloud(), reference_attention(Sinkhorn)
    found = attention.potentials(cloud)
    scores = ref.POINTS @ np.asarray(attention.form).T @ ref.POINTS.T
    plan = np.exp(scores + np.asarray(found.f)[:, None] + np.asarray(found.g)[None, :])
    np.testing.assert_allclose(plan @ ref.WEIGHTS, 1, atol=1e-13)
    np.testing.assert_allclose(ref.WEIGHTS @ plan, 1, atol=found.marginal_error + 1e-13)
    matrix = attention_matrix(attention, cloud)
    np.testing.assert_allclose(matrix, plan * ref.WEIGHTS, atol=1e-12)


def test_three_layers_compose_associatively():
    first = reference_attention()
    second = reference_attention(L2)
    third = reference_attention(Sigmoid)
    cloud = reference_cloud()
    left = compose(compose(third, second), first)(cloud, cloud.points)
    right = compose(third, compose(second, first))(cloud, cloud.points)
    by_hand = push_forward(third, push_forward(second, push_forward(first, cloud)))
    np.testing.assert_allclose(left, right, atol=1e-12)
    np.testing.assert_allclose(left, by_hand.points, atol=1e-12)
