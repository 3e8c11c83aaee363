"""Derivatives of every map, and the map under `jit`, `vmap` and other precisions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
import reference as ref
from map_zoo import (
    DIFFERENTIABLE,
    MAPS,
    MASSES,
    PLACES,
    QUERIES,
    QUERY_PLACES,
    SINKHORNS,
    TOKENS,
    cast,
    cloud_of,
    evaluate,
    every_map,
)
from meanformer.attention import (
    L2,
    Hardmax,
    Linear,
    Masked,
    Residual,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Unnormalised,
    in_order,
)
from meanformer.measures import TokenCloud, batch
from reference import reference_attention, reference_cloud

KINDS = [Softmax, L2, Sinkhorn, Linear, Unnormalised, Sigmoid, Hardmax]
STEP = 3e-3


def problem(name):
    """Return a function of all floating-point inputs of a map, and a point."""
    parameters, rest = eqx.partition(MAPS[name], eqx.is_inexact_array)

    def values(inputs):
        parameters, points, weights, queries = inputs
        cloud = TokenCloud(points, weights, positions=jnp.asarray(PLACES))
        gamma = eqx.combine(parameters, rest)
        return gamma(cloud, queries, positions=jnp.asarray(QUERY_PLACES))

    arrays = (jnp.asarray(array) for array in (TOKENS, MASSES, QUERIES))
    return values, (parameters, *arrays)


def direction_of(inputs):
    """Return a fixed direction in all inputs; the weights keep their total."""
    leaves, structure = jax.tree.flatten(inputs)
    keys = jr.split(jr.key(7), len(leaves))
    moves = [jr.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    parameters, points, weights, queries = jax.tree.unflatten(structure, moves)
    return parameters, points, 0.1 * (weights - weights.mean()), queries


def shifted(inputs, direction, amount):
    return jax.tree.map(lambda leaf, move: leaf + amount * move, inputs, direction)


@every_map(DIFFERENTIABLE, slow=SINKHORNS - {"tied sinkhorn"})
def test_derivatives_agree_with_finite_differences_and_each_other(name):
    values, inputs = problem(name)
    direction = direction_of(inputs)

    def moved(amount):
        return np.asarray(values(shifted(inputs, direction, amount)))

    _, tangents = jax.jvp(values, (inputs,), (direction,))
    # Fourth order, so that the step can be long and rounding small.
    near, far = moved(STEP) - moved(-STEP), moved(2 * STEP) - moved(-2 * STEP)
    expected = (8 * near - far) / (12 * STEP)
    np.testing.assert_allclose(tangents, expected, rtol=2e-7, atol=2e-7)
    probe = jr.normal(jr.key(8), tangents.shape)
    (cotangents,) = jax.vjp(values, inputs)[1](probe)
    products = jax.tree.map(jnp.vdot, cotangents, direction)
    paired = sum(jax.tree.leaves(products))
    np.testing.assert_allclose(paired, jnp.vdot(probe, tangents), rtol=1e-9, atol=1e-10)


@every_map(slow=SINKHORNS)
def test_batched_values_are_the_plain_ones(name):
    values, inputs = problem(name)
    direction = direction_of(inputs)

    def moved(amount):
        return values(shifted(inputs, direction, amount))

    amounts = jnp.array([0.0, 0.4])
    for amount, found in zip(amounts, jax.vmap(moved)(amounts), strict=True):
        np.testing.assert_allclose(found, moved(amount), atol=1e-10)


@every_map(slow=SINKHORNS)
def test_compiled_values_are_the_plain_ones(name):
    values, inputs = problem(name)
    found, expected = jax.jit(values)(inputs), values(inputs)
    np.testing.assert_allclose(found, expected, atol=1e-10)


# Closed forms


def tilted(query, beta=1.0):
    """Mean and covariance of the reference tokens as a query sees them."""
    masses = ref.WEIGHTS * np.exp(beta * ref.POINTS @ ref.SCORE @ query)
    shares = masses / masses.sum()
    mean = shares @ ref.POINTS
    centred = ref.POINTS - mean
    return shares, mean, centred.T @ (shares[:, None] * centred)


def test_softmax_varies_with_the_query_by_the_tilted_covariance():
    beta, cloud = 1.4, reference_cloud()
    attention = reference_attention(beta=beta)
    query = np.array([0.3, -0.9])
    jacobian = jax.jacfwd(lambda x: attention(cloud, x[None])[0])(jnp.asarray(query))
    covariance = tilted(query, beta)[2]
    expected = beta * ref.VALUE @ covariance @ ref.SCORE
    np.testing.assert_allclose(jacobian, expected, atol=1e-14)


def test_l2_varies_with_the_query_by_twice_the_tilted_covariance():
    beta, cloud = 0.8, reference_cloud()
    attention = reference_attention(L2, beta=beta)
    query = np.array([0.3, -0.9])
    jacobian = jax.jacfwd(lambda x: attention(cloud, x[None])[0])(jnp.asarray(query))
    differences = ref.QUERY @ query - ref.POINTS @ ref.KEY.T
    shares = ref.WEIGHTS * np.exp(-beta * np.sum(differences**2, axis=1))
    shares /= shares.sum()
    centred = ref.POINTS - shares @ ref.POINTS
    covariance = centred.T @ (shares[:, None] * centred)
    expected = 2 * beta * ref.VALUE @ covariance @ ref.SCORE
    np.testing.assert_allclose(jacobian, expected, atol=1e-14)


def test_softmax_varies_with_the_tokens_as_the_block_formula_says():
    cloud, attention = reference_cloud(), reference_attention()

    def move(points):
        return attention(cloud.moved(points), points)

    jacobian = np.asarray(jax.jacrev(move)(cloud.points))
    for i, query in enumerate(ref.POINTS):
        shares, mean, covariance = tilted(query)
        for j, token in enumerate(ref.POINTS):
            block = (
                shares[j]
                * ref.VALUE
                @ (np.eye(2) + np.outer(token - mean, ref.SCORE @ query))
            )
            if i == j:
                block = block + ref.VALUE @ covariance @ ref.SCORE
            np.testing.assert_allclose(jacobian[i, :, j], block, atol=1e-14)


def test_softmax_varies_with_the_weights_as_the_influence_function_says():
    cloud, attention = reference_cloud(), reference_attention()
    query = np.array([0.3, -0.9])
    atom = 2

    def mixed(share):
        move = jnp.zeros(4).at[atom].set(1.0) - cloud.weights
        context = TokenCloud(cloud.points, cloud.weights + share * move)
        return attention(context, jnp.asarray(query)[None])[0]

    shares, mean, _ = tilted(query)
    density = shares[atom] / ref.WEIGHTS[atom]
    expected = density * ref.VALUE @ (ref.POINTS[atom] - mean)
    np.testing.assert_allclose(jax.jacfwd(mixed)(0.0), expected, atol=1e-14)


def test_the_influence_of_an_absent_token_is_known():
    attention, query = reference_attention(), np.array([[0.3, -0.9]])
    weights = jnp.array([0.5, 0.5, 0.0])
    points = jnp.asarray(ref.POINTS[:3])

    def mixed(share):
        context = TokenCloud(
            points, weights + share * (jnp.array([0, 0, 1.0]) - weights)
        )
        return attention(context, jnp.asarray(query))[0]

    forward = (mixed(1e-4) - mixed(0.0)) / 1e-4
    np.testing.assert_allclose(jax.jacfwd(mixed)(0.0), forward, atol=1e-4)


# Objects built from traced parameters, as schedules do


@pytest.mark.parametrize("kind", KINDS)
def test_attention_can_be_built_from_traced_parameters(kind):
    cloud, queries = cloud_of(), jnp.asarray(QUERIES)

    def layer(time):
        query, key, value = (
            jnp.asarray(matrix) * (1 + time)
            for matrix in (ref.QUERY, ref.KEY, ref.VALUE)
        )
        attention = kind(query, key, value, beta=0.5 + time, value_bias=time * value[0])
        return Residual(attention, time)(cloud, queries)

    times = jnp.array([0.0, 0.3])
    batched = jax.jit(jax.vmap(layer))(times)
    for time, values in zip(times, batched, strict=True):
        np.testing.assert_allclose(values, layer(time), atol=1e-10)


def test_the_bias_of_sigmoid_attention_can_be_trained():
    cloud = reference_cloud()

    def total(bias):
        return reference_attention(Sigmoid, bias=bias)(cloud, cloud.points).sum()

    expected = (total(1e-5) - total(-1e-5)) / 2e-5
    np.testing.assert_allclose(jax.jit(jax.grad(total))(0.0), expected, rtol=1e-8)


def test_clouds_of_unequal_size_are_batched_by_padding():
    attention = reference_attention()
    clouds = [TokenCloud(ref.POINTS), TokenCloud(TOKENS, MASSES)]
    queries = jnp.asarray(QUERIES)
    batched = jax.vmap(attention, in_axes=(0, None))(batch(clouds), queries)
    for cloud, values in zip(clouds, batched, strict=True):
        np.testing.assert_allclose(values, attention(cloud, queries), atol=1e-14)


# Precision


def shapes(gamma, cloud, dtype):
    def values(cloud, queries):
        return gamma(cloud, queries, positions=jnp.asarray(QUERY_PLACES))

    def total(queries, cloud):
        return values(cloud, queries).sum()

    queries = jnp.asarray(QUERIES, dtype)
    value = jax.eval_shape(values, cloud, queries)
    gradient = jax.eval_shape(jax.grad(total), queries, cloud)
    return value, gradient


@every_map()
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_single_and_half_precision_stay_what_they_are(name, dtype):
    # Strict promotion is on: tracing alone finds every mixture of types.
    value, gradient = shapes(cast(MAPS[name], dtype), cloud_of(dtype=dtype), dtype)
    assert value.dtype == dtype
    assert gradient.dtype == dtype


@every_map(["softmax", "l2", "linear", "sigmoid"])
def test_half_precision_is_computed_in_single_precision(name):
    gamma, cloud = cast(MAPS[name], jnp.bfloat16), cloud_of(dtype=jnp.bfloat16)
    half = evaluate(gamma, cloud).astype(np.float64)
    queries = np.asarray(jnp.asarray(QUERIES, jnp.bfloat16), np.float64)
    single = evaluate(cast(gamma, jnp.float32), cast(cloud, jnp.float32), queries)
    # Only the result is rounded to eight bits.
    np.testing.assert_allclose(half, single, rtol=2**-8, atol=0)


@pytest.mark.slow
def test_sinkhorn_attention_is_the_gradient_of_the_entropic_energy():
    form = np.array([[0.8, 0.3], [0.3, -0.4]])
    cloud = reference_cloud()
    attention = Sinkhorn(form, np.eye(2), form, beta=0.5)

    def energy(points):
        found = attention.potentials(cloud.moved(points))
        return -cloud.weights @ (found.f + found.g)

    value, gradient = jax.value_and_grad(energy)(cloud.points)
    np.testing.assert_allclose(value, 0.13647165486171767, atol=1e-10)
    ascent = gradient / (2 * cloud.weights[:, None])
    np.testing.assert_allclose(ascent, attention(cloud, cloud.points), atol=1e-9)


# Accuracy far from the origin


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["softmax", "few keys", "causal"])
def test_the_derivative_of_softmax_is_as_accurate_as_a_covariance_far_off(kind, dtype):
    random = np.random.default_rng(4)
    points = (random.normal(size=(50, 3)) + 1e4 * np.array([0.6, -0.8, 0.3])).astype(
        dtype
    )
    query = random.normal(size=3).astype(dtype)
    key = np.eye(3, dtype=dtype)[: 1 if kind == "few keys" else 3]
    attention = Softmax(key, key, np.eye(3, dtype=dtype))
    gamma = Masked(attention) if kind == "causal" else attention
    cloud = in_order(TokenCloud(points))

    def value(x):
        return gamma(cloud, x[None])[0]

    centred = points.astype(np.longdouble) - points.astype(np.longdouble).mean(axis=0)
    shares = np.exp(centred @ key.T @ (key @ query.astype(np.longdouble)))
    shares /= shares.sum()
    centred -= shares @ centred
    expected = centred.T @ (shares[:, None] * centred) @ key.T @ key
    for jacobian in (jax.jacfwd(value), jax.jacrev(value)):
        found = jacobian(jnp.asarray(query))
        error = np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()
        assert error < 200 * np.finfo(dtype).eps


@every_map(["softmax", "l2"])
def test_a_token_far_away_takes_no_digits_from_the_others(name):
    gamma, plain = cast((MAPS[name], cloud_of()), jnp.float32)
    far = np.array([-1e9, 2e9])
    weights = np.append(0.8 * MASSES, 0.2)
    cloud = cloud_of(np.append(TOKENS, [far], axis=0), weights, None, jnp.float32)
    # Softmax repels these queries from the far token, L2 repels all.
    queries = QUERIES[np.asarray(MAPS["softmax"].tilts(jnp.asarray(QUERIES))) @ far < 0]
    queries = cast(queries, jnp.float32)
    found, expected = gamma(cloud, queries), gamma(plain, queries)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_second_derivatives_of_softmax_are_those_of_the_dense_formula():
    points = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)))
    probes = jnp.cos(jnp.arange(10.0)).reshape(5, 2)

    def blocked(points):
        gamma = mf.identity_attention("softmax", 2, 1.3)
        return jnp.sum(probes * gamma(mf.TokenCloud(points), points))

    def dense(points):
        return jnp.sum(probes * (jax.nn.softmax(1.3 * points @ points.T) @ points))

    found = jax.jit(jax.hessian(blocked))(points)
    expected = jax.jit(jax.hessian(dense))(points)
    np.testing.assert_allclose(found, expected, atol=1e-12)
