"""Tests of networks with other numbers of layers and heads."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from meanformer.errors import InvalidInput, Unsupported
from meanformer.training.data import Dataset
from meanformer.training.distance import cot_distance
from meanformer.training.gradients import outputs, risk
from meanformer.training.limits import refined, resample, resampling_gaps
from meanformer.training.transformer import MeanFieldTransformer

LAYERS, HEADS = 4, 6


def drawn(seed, layers=LAYERS, heads=HEADS, **options):
    return MeanFieldTransformer.draw(layers, heads, 2, key=jr.key(seed), **options)


@pytest.fixture(scope="module")
def model():
    return drawn(0, neurons=3)


@pytest.fixture(scope="module")
def data():
    tokens = jr.normal(jr.key(5), (3, 4, 2))
    return Dataset(tokens, jr.normal(jr.key(6), (3, 2)), jr.normal(jr.key(7), (3, 2)))


def values(model):
    return np.asarray(model.parameters.heads.value)


def test_a_refined_network_is_the_same_measure(model):
    fine = refined(model, 3)
    assert fine.layers == 12
    np.testing.assert_allclose(fine.depths[::3], model.depths, rtol=1e-15)
    assert cot_distance(model, fine) == 0


@pytest.mark.slow
def test_refining_converges_to_the_flow_at_first_order(data):
    model = drawn(1, 2, 3)
    ends = [outputs(refined(model, factor), data) for factor in (8, 16, 32)]
    coarse, fine = (np.abs(one - ends[2]).max() for one in ends[:2])
    # Errors a/8 - a/32 and a/16 - a/32: three to one.
    np.testing.assert_allclose(coarse / fine, 3, rtol=0.15)


def test_uneven_depths_are_refined_each_on_its_own():
    fine = refined(drawn(0, 2, 1, depths=[0, 0.2, 1]), 2)
    np.testing.assert_allclose(fine.depths, [0, 0.1, 0.2, 0.6, 1], rtol=1e-15)


@pytest.mark.slow
def test_as_many_layers_and_heads_are_the_same_network(model, key):
    same = resample(model, LAYERS, HEADS, key=key)
    assert cot_distance(model, same) == 0
    assert not np.array_equal(values(model), values(same))


@pytest.mark.slow
def test_multiples_of_layers_and_heads_are_the_same_measure(model, key):
    larger = resample(model, 2 * LAYERS, 2 * HEADS, neurons=6, key=key)
    assert (larger.layers, larger.heads) == (2 * LAYERS, 2 * HEADS)
    assert larger.parameters.neurons.bias_in.shape == (2 * LAYERS, 6)
    assert cot_distance(model, larger) == 0


@pytest.mark.slow
def test_fewer_heads_are_some_of_them_none_twice(model, key):
    fewer = resample(model, LAYERS, 4, key=key)
    for before, after in zip(values(model), values(fewer), strict=True):
        found = {tuple(one.ravel()) for one in after}
        assert len(found) == 4
        assert found <= {tuple(one.ravel()) for one in before}


def test_fewer_layers_draw_from_all_depths_they_cover(model, key):
    coarse = resample(model, 2, HEADS, key=key)
    assert coarse.layers == 2
    for half in range(2):
        covered = values(model)[2 * half : 2 * half + 2]
        pools = [{tuple(one.ravel()) for one in layer} for layer in covered]
        found = [tuple(one.ravel()) for one in values(coarse)[half]]
        assert [sum(one in pool for one in found) for pool in pools] == [3, 3]


def test_layers_that_do_not_fit_draw_by_their_overlap(key):
    model = drawn(0, 3, HEADS)
    coarse = resample(model, 2, HEADS, key=key)
    pools = [{tuple(one.ravel()) for one in layer} for layer in values(model)]
    found = [tuple(one.ravel()) for one in values(coarse)[0]]
    assert [sum(one in pool for one in found) for pool in pools] == [4, 2, 0]


def test_the_mean_over_draws_is_the_mean_of_the_heads(key):
    model = drawn(0, 3, 5)
    draws = jax.vmap(lambda key: resample(model, 2, 2, key=key).parameters.heads.value)
    mean = draws(jr.split(key, 4000)).mean(axis=(0, 2))
    halves = [values(model)[[0, 0, 1]], values(model)[[1, 2, 2]]]
    exact = [half.mean(axis=(0, 1)) for half in halves]
    np.testing.assert_allclose(mean, exact, atol=0.05)


def test_uneven_depths_stay_where_the_number_of_layers_does(key):
    model = drawn(0, 2, 2, depths=[0, 0.2, 1])
    np.testing.assert_array_equal(resample(model, 2, 4, key=key).depths, model.depths)
    assert cot_distance(model, resample(model, 2, 2, key=key)) == 0


def test_gaps_are_risks_of_resampled_networks_less_that_of_all_heads(data, key):
    model = drawn(0)
    gaps = resampling_gaps(model, data, LAYERS, 2, draws=3, key=key)
    networks = [resample(model, LAYERS, 2, key=one) for one in jr.split(key, 3)]
    exact = [float(risk(one, data) - risk(model, data)) for one in networks]
    np.testing.assert_allclose(gaps, exact, rtol=1e-10)
    same = resampling_gaps(model, data, LAYERS, HEADS, draws=3, key=key)
    np.testing.assert_allclose(same, 0, atol=1e-13)


def test_fewer_heads_cost_their_variance(data, key):
    model = drawn(3, 8, 32)
    same = data.with_targets(outputs(model, data))
    few, more = (
        resampling_gaps(model, same, 8, kept, draws=200, key=key).mean()
        for kept in (2, 8)
    )
    exact = (1 / 2 - 1 / 32) / (1 / 8 - 1 / 32)
    np.testing.assert_allclose(few / more, exact, rtol=0.3)


def test_bad_input_is_refused_with_advice(model, data, key, untyped):
    hats = MeanFieldTransformer(*model.parameters.heads[:3], interpolate=True)
    with pytest.raises(Unsupported, match="interpolates its heads.*interpolate=False"):
        resample(hats, 2, 2, key=key)
    with pytest.raises(InvalidInput, match="heads is 0; it must be 1 or more"):
        resample(model, 2, 0, key=key)
    with pytest.raises(InvalidInput, match="layers is 1.5; it must be an integer"):
        resample(model, 1.5, 2, key=key)
    with pytest.raises(InvalidInput, match="factor is 0; it must be 1 or more"):
        refined(model, 0)
    with pytest.raises(
        InvalidInput, match="model is a Dataset; it must be a MeanField"
    ):
        refined(data, 2)
    with pytest.raises(InvalidInput, match="key is 0; it must be a random key"):
        resample(model, 2, 2, key=0)
    with pytest.raises(InvalidInput, match="draws is 0; it must be 1 or more"):
        resampling_gaps(drawn(0), data, 2, 2, draws=0, key=key)
    assert jnp.isfinite(resample(model, 1, 1, key=key).parameters.heads.query).all()
