import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer import training
from training_problems import contexts_of_sizes, random_problem


def test_a_transformer_is_an_in_context_map_that_composes(key):
    model, data = random_problem(key, sizes=(4, 4))
    cloud, x = data.contexts[0], data.queries[0]
    pushed = mf.push_forward(model, cloud)
    np.testing.assert_allclose(pushed.points, model(cloud, cloud.points), atol=1e-14)
    twice = (model @ model)(cloud, x)
    np.testing.assert_allclose(twice, model(pushed, model(cloud, x)), atol=1e-13)


def test_a_query_that_is_a_token_goes_where_the_token_goes(key):
    model, data = random_problem(key, sizes=(4, 4))
    path = model.run(data.contexts[0], data.contexts[0].points[:1])
    np.testing.assert_allclose(path.probes[:, 0], path.points[:, 0], atol=1e-14)


def test_its_layers_are_those_of_run_layers(key):
    model, data = random_problem(key, sizes=(4, 4))
    cloud, x = data.contexts[0], data.queries[0]
    path = mf.run_layers(model.flow(), cloud, model.layers, probes=x)
    np.testing.assert_allclose(model(cloud, x), path.probes[-1], atol=1e-14)


def test_heads_are_averaged(key):
    model, data = random_problem(key, layers=1, sizes=(3, 3))
    cloud, x = data.contexts[0], data.queries[0]
    heads = model.parameters.heads
    images = [
        mf.Softmax(heads.query[0, m], heads.key[0, m], heads.value[0, m])(cloud, x)
        for m in range(model.heads)
    ]
    expected = x + sum(images) / len(images)
    np.testing.assert_allclose(model(cloud, x), expected, atol=1e-14)


def test_a_frozen_context_stays(key):
    model, data = random_problem(key, context="frozen", sizes=(3, 3))
    cloud, x = data.contexts[0], data.queries[0]
    heads = model.parameters.heads
    for layer in range(model.layers):
        velocity = sum(
            mf.Softmax(*(leaf[layer, m] for leaf in heads[:3]))(cloud, x)
            for m in range(model.heads)
        )
        x = x + velocity / (model.layers * model.heads)
    np.testing.assert_allclose(model(cloud, data.queries[0]), x, atol=1e-14)
    found = training.outputs(model, data)[0]
    np.testing.assert_allclose(found, x, atol=1e-14)


@pytest.mark.parametrize("style", ["antithetic", "zero values"])
def test_some_starts_are_the_identity(key, style):
    model, data = random_problem(key, style=style)
    np.testing.assert_allclose(training.outputs(model, data), data.queries, atol=1e-15)
    value = training.gradient(model, data).parameters.heads
    assert jnp.any(value.value)
    assert jnp.any(value.query) == (style == "antithetic")


def test_the_same_heads_at_every_layer(key):
    model, _ = random_problem(key, style="every layer", layers=3)
    query = model.parameters.heads.query
    np.testing.assert_array_equal(query[0], query[2])


def test_heads_are_a_measure_with_depths_as_positions(key):
    model, _ = random_problem(key, depths=jnp.array([0.0, 0.2, 0.7, 1.0]))
    measure = model.measure()
    assert measure.points.shape == (6, 12)
    np.testing.assert_allclose(measure.weights[::2], [0.1, 0.25, 0.15], rtol=1e-12)
    np.testing.assert_allclose(measure.positions[::2], [0, 0.2, 0.7])


def test_shares_of_interpolated_layers_are_those_of_hats(key):
    model, _ = random_problem(key, depths=jnp.array([0.0, 0.4, 1.0]), interpolate=True)
    np.testing.assert_allclose(model.shares, [0.2, 0.5, 0.3], rtol=1e-12)


@pytest.mark.slow
def test_many_heads_take_turns(key, monkeypatch):
    model, data = random_problem(key, heads=5)
    risk, found = training.risk(model, data), training.gradient(model, data)
    monkeypatch.setattr(training.layer, "MOST_PAIRS", 60)
    jax.clear_caches()
    np.testing.assert_allclose(training.risk(model, data), risk, rtol=1e-13)
    again = training.gradient(model, data)
    np.testing.assert_allclose(again.squared_norm, found.squared_norm, rtol=1e-12)
    jax.clear_caches()


@pytest.mark.slow
def test_single_precision_stays_single(key):
    model, data = random_problem(key)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), data)
    found = training.gradient(single, small)
    assert found.risk.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(found.parameters)} == {
        jnp.dtype(jnp.float32)
    }
    np.testing.assert_allclose(found.risk, training.risk(model, data), rtol=1e-5)
    with pytest.raises(mf.InvalidInput, match="data is float64, the heads are float32"):
        training.risk(single, data)


def test_contexts_are_padded_and_given_back(key):
    clouds = contexts_of_sizes((2, 5), 2, key)
    data = training.Dataset(clouds, jr.normal(key, (2, 2)))
    assert data.tokens.shape == (2, 5, 2)
    for cloud, back in zip(clouds, data.contexts, strict=True):
        np.testing.assert_array_equal(cloud.points, back.points)
        np.testing.assert_allclose(cloud.weights, back.weights, rtol=1e-15)


def test_mistakes_are_told(key, untyped):
    model, data = random_problem(key)
    heads = model.parameters.heads[:3]
    create = training.MeanFieldTransformer
    for options, message in (
        ({"context": "still"}, "context is 'still'"),
        ({"depths": [0.0, 0.5, 0.5, 1.0]}, "it must increase strictly"),
        ({"depths": [0.0, 1.0]}, "depths has shape"),
        ({"neurons": 3}, r"neurons is 3; it must be Neurons\(…\)"),
        ({"value_bias": jnp.zeros(2)}, "value_bias has shape"),
    ):
        with pytest.raises(mf.InvalidInput, match=message):
            create(*heads, **options)
    with pytest.raises(mf.InvalidInput, match="layers is 1; at least two"):
        create(*(leaf[:1] for leaf in heads), interpolate=True)
    with pytest.raises(mf.InvalidInput, match="antithetic heads come in pairs"):
        create.draw(1, 3, 2, key=key, style="antithetic")
    with pytest.raises(mf.InvalidInput, match="layers is 0"):
        create.draw(0, 3, 2, key=key)
    with pytest.raises(mf.InvalidInput, match="contexts is empty"):
        training.Dataset([], [[0.0, 0.0]])
    with pytest.raises(mf.InvalidInput, match="queries has shape"):
        training.Dataset(data.contexts, [[0.0, 0.0]])
    with pytest.raises(mf.InvalidInput, match="targets has shape"):
        training.Dataset(data.contexts, data.queries, [[0.0, 0.0]])
    with pytest.raises(mf.InvalidInput, match="finite"):
        create(heads[0].at[0].set(jnp.nan), *heads[1:])
    with pytest.raises(mf.InvalidInput, match="mu is a"):
        model(data.tokens[0], data.queries[0])
    assert isinstance(create(*heads, method=diffrax.Heun()).method, diffrax.Heun)
