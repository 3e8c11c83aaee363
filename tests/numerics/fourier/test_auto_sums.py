"""The choice between exact and fast sums: by cost, with reasons."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.numerics.fourier.levels import GAUSSIAN, Level, full_ladder
from meanformer.numerics.fourier.sums import Auto, Fourier, fast_seconds
from meanformer.numerics.pair_sums.pairs import Pairs, thinned
from meanformer.numerics.pair_sums.sums import Blocked, Sizes


def sphere(count, dimension=3):
    """Random points on the unit sphere."""
    points = np.random.default_rng(0).standard_normal((count, dimension))
    return jnp.asarray(points / np.linalg.norm(points, axis=1, keepdims=True))


def pairs_of(count, dimension=3):
    points = sphere(count, dimension)
    return Pairs(4 * points, points, jnp.full(count, 1 / count)), points


def test_few_tokens_are_summed_exactly_and_many_are_not():
    assert Auto().ladder(*pairs_of(1000)) is None
    assert Auto().ladder(*pairs_of(50_000)) is not None


def test_many_dimensions_are_summed_exactly():
    assert Auto().ladder(*pairs_of(50_000, 4)) is None


def test_levels_slower_than_the_exact_sum_are_left_out():
    pairs, values = pairs_of(20_000)
    everything = full_ladder(3, 1e-8, jnp.dtype(jnp.float64))
    kept = Auto().ladder(pairs, values)
    assert 0 < len(kept.levels) < len(everything.levels)
    sizes = Sizes(20_000, 20_000, 3, 4)
    for level in everything.levels:
        is_faster = fast_seconds(level, sizes) < sizes.exact_seconds()
        assert (level in kept.levels) == is_faster


@pytest.mark.slow
def test_what_was_chosen_automatically_agrees_with_the_exact_sum():
    points = sphere(16_000, 2)
    cloud = mf.TokenCloud(points)
    layer = mf.identity_attention("softmax", 2, 6.0)
    queries = points[:64]
    assert Auto().explain(cloud, layer).plans[0].method == "fourier"
    exact = layer(mf.TokenCloud(points, sums=Blocked()), queries)
    np.testing.assert_allclose(layer(cloud, points)[:64], exact, atol=1e-8)


@pytest.mark.slow
def test_an_explanation_tells_each_sum_and_why():
    cloud = mf.TokenCloud(sphere(20_000))
    heads = mf.MultiHead(
        [mf.identity_attention(kind, 3, 2.0) for kind in ("softmax", "sigmoid")]
    )
    explanation = Auto().explain(cloud, heads)
    fast, exact = explanation.plans
    assert fast.method == "fourier"
    assert fast.seconds < fast.exact_seconds
    assert exact.method == "exact"
    text = str(explanation)
    assert "20000 queries, 20000 tokens: fourier sums (Gaussian, 32 modes" in text
    assert "since the kernel is no exponential" in text
    assert len(text.splitlines()) == 2


@pytest.mark.slow
def test_explanations_of_sums_that_were_asked_for():
    cloud = mf.TokenCloud(sphere(2000))
    layer = mf.identity_attention("softmax", 3, 4.0)
    assert "exact sums were asked for" in str(Blocked().explain(cloud, layer))
    assert "Fourier was asked for" in str(Fourier().explain(cloud, layer))
    hard = mf.identity_attention("hardmax", 3, 4.0)
    assert "the largest score is sought" in str(Auto().explain(cloud, hard))
    causal = mf.Masked(layer, mf.Causal())
    placed = mf.TokenCloud(cloud.points, positions=jnp.linspace(0, 1, 2000))

    def at_its_places(mu, x):
        return causal(mu, x, positions=placed.positions)

    assert "a mask gives each query" in str(Auto().explain(placed, at_its_places))
    assert str(Auto().explain(cloud, lambda mu, x: x)).startswith("no sum over pairs")
    twice = mf.MultiHead([layer, layer])
    assert str(Blocked().explain(cloud, twice)).startswith("2 times: ")


@pytest.mark.slow
def test_a_range_too_wide_is_explained():
    points = 3 * np.random.default_rng(0).standard_normal((4000, 1))
    layer = mf.identity_attention("softmax", 1, 25.0)
    text = str(Fourier().explain(mf.TokenCloud(points), layer))
    assert "exact sums" in text
    assert "the masses differ too much" in text


def test_thinned_tokens_keep_their_share_of_a_mask():
    pairs, values = pairs_of(4000)
    ends = jnp.arange(4000)
    masked = dataclasses.replace(pairs, first=0 * ends, last=ends)
    few, some = thinned(masked, values, 1000)
    assert len(few.points) == len(some) == 1000
    assert int(few.last.max()) == 1000


def test_costs_grow_with_what_is_done():
    small, large = Level(GAUSSIAN, 20, 1e-6), Level(GAUSSIAN, 80, 1e-12)
    sizes = Sizes(10_000, 10_000, 3, 4)
    assert fast_seconds(small, sizes) < fast_seconds(large, sizes)
    assert sizes.exact_seconds() < sizes._replace(queries=20_000).exact_seconds()


def test_choosing_writes_nothing_and_times_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("MEANFORMER_CACHE", str(tmp_path / "cache"))
    pairs, values = pairs_of(50_000)
    kept = jax.eval_shape(Auto().softmax, pairs, values)
    assert kept[1].shape == values.shape
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("softmax", marks=pytest.mark.slow),
        "l2",
        pytest.param("unnormalised", marks=pytest.mark.slow),
    ],
)
def test_keys_with_few_rows_make_sums_in_few_dimensions(kind):
    random = np.random.default_rng(2)
    query, key = random.standard_normal((2, 1, 7))
    points = jnp.asarray(random.standard_normal((40, 7)) / 3)
    kinds = {"softmax": mf.Softmax, "l2": mf.L2, "unnormalised": mf.Unnormalised}
    layer = kinds[kind](query, key, np.eye(7), beta=0.7)
    padded = kinds[kind](
        np.vstack([query, np.zeros((7, 7))]),
        np.vstack([key, np.zeros((7, 7))]),
        np.eye(7),
        beta=0.7,
    )
    cloud = mf.TokenCloud(points)
    narrow, wide = (
        Blocked().explain(cloud, gamma).plans[-1].seconds for gamma in (layer, padded)
    )
    assert narrow < wide
    np.testing.assert_allclose(
        layer(cloud, points[:5]), padded(cloud, points[:5]), rtol=1e-12
    )
    fast = mf.TokenCloud(points, sums=Fourier())
    np.testing.assert_allclose(layer(fast, points), padded(cloud, points), atol=1e-7)


def test_fourier_explains_only_what_it_would_sum():
    cloud = mf.TokenCloud(np.eye(2))
    for kind in ("sigmoid", "hardmax"):
        gamma = mf.identity_attention(kind, 2, 1.0)
        with pytest.raises(mf.Unsupported, match=r"use sums=Auto\(\)"):
            mf.Fourier().explain(cloud, gamma)
        assert "exact sums" in str(mf.Auto().explain(cloud, gamma))


def test_without_the_fast_transform_sums_are_exact_and_say_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_finufft", None)
    cloud = mf.TokenCloud(sphere(50_000))
    layer = mf.identity_attention("softmax", 3, 2.0)
    assert Auto().ladder(*pairs_of(50_000)) is None
    why = "jax-finufft is not installed (pip install 'meanformer[fourier]')"
    text = str(Auto().explain(cloud, layer))
    assert "exact sums" in text
    assert text.endswith(f"since {why}")
    with pytest.raises(mf.Unsupported) as refusal:
        Fourier(1e-6)
    assert str(refusal.value) == (
        f"Fourier sums cannot be used: {why}; use sums=Auto(), which sums exactly "
        "there."
    )
