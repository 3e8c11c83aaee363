"""Values of the pair sums against dense formulas, and what must leave them alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meanformer.errors import InvalidInput
from meanformer.numerics.fourier.sums import Auto
from meanformer.numerics.pair_sums.dense import hardmax_shares
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import Blocked
from meanformer.numerics.pair_sums.tiles import sight, tile_shape
from pair_problems import (
    dense_scores,
    dense_softmax,
    ordered_problem,
    random_problem,
)

BLOCK_SIZES = ["auto", 1, 5, 17, 1000]


def replaced(pairs, **fields):
    names = ("tilts", "points", "weights", "offsets", "first", "last")
    return Pairs(**{name: fields.get(name, getattr(pairs, name)) for name in names})


def assert_same(results, expected, rtol=1e-12):
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_softmax_is_the_dense_formula(block_size, masked):
    pairs, values = random_problem(masked=masked)
    assert_same(
        Blocked(block_size).softmax(pairs, values), dense_softmax(pairs, values)
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block_size", ["auto", 5])
def test_kernel_is_the_dense_formula(block_size, masked):
    pairs, values = random_problem(masked=masked)
    scores = dense_scores(pairs)
    factors = np.where(scores > -np.inf, np.tanh(scores), 0) * np.asarray(pairs.weights)
    results = Blocked(block_size).kernel(pairs, values, jnp.tanh)
    assert_same(results, (factors.sum(axis=1), factors @ np.asarray(values)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block_size", ["auto", 5])
def test_hardmax_averages_over_the_tokens_within_tolerance(block_size, masked):
    pairs, values = random_problem(masked=masked, tokens=40)
    scores = dense_scores(pairs)
    best = scores.max(axis=1)
    shares = (scores >= best[:, None] - 0.3) * np.asarray(pairs.weights)
    shares = shares / shares.sum(axis=1, keepdims=True)
    assert ((shares > 0).sum(axis=1) > 1).any()
    results = Blocked(block_size).hardmax(pairs, values, 0.3)
    assert_same(results, (best, shares @ np.asarray(values)))


@settings(deadline=None, max_examples=15)
@given(
    queries=st.integers(1, 12),
    tokens=st.integers(1, 12),
    dimension=st.integers(1, 4),
    block_size=st.sampled_from(["auto", 1, 3, 8]),
    masked=st.booleans(),
    offsets=st.booleans(),
)
def test_softmax_agrees_for_every_shape(
    queries, tokens, dimension, block_size, masked, offsets
):
    masked = masked and tokens > 1
    pairs, values = random_problem(
        queries, tokens, dimension, masked=masked, offsets=offsets, seed=tokens
    )
    ours = Blocked(block_size).softmax(pairs, values)
    assert_same(ours, dense_softmax(pairs, values), 1e-11)


@pytest.mark.parametrize("sums", [Blocked(), Blocked(96), Auto()])
@pytest.mark.parametrize("masked", [False, True])
def test_many_pairs_take_the_path_by_bounds_and_agree(sums, masked):
    pairs, values = random_problem(301, 517, masked=masked)
    assert_same(sums.softmax(pairs, values), dense_softmax(pairs, values), 1e-11)


@pytest.mark.parametrize("block_size", ["auto", 600])
@pytest.mark.parametrize("mask", ["causal", "window", "prefix"])
def test_tiles_that_are_cut_into_pieces_give_the_dense_formula(mask, block_size):
    pairs, values = ordered_problem(1100, mask)
    sums = Blocked(block_size)
    assert_same(sums.softmax(pairs, values), dense_softmax(pairs, values), 1e-11)
    scores = dense_scores(pairs)
    factors = np.where(scores > -np.inf, np.tanh(scores), 0) * np.asarray(pairs.weights)
    results = sums.kernel(pairs, values, jnp.tanh)
    assert_same(results, (factors.sum(axis=1), factors @ np.asarray(values)), 1e-11)
    best = sums.hardmax(pairs, values, 0.0)[0]
    np.testing.assert_allclose(best, scores.max(axis=1), rtol=1e-12)


def test_every_sum_of_auto_is_the_blocked_one():
    pairs, values = random_problem()
    assert_same(Auto().softmax(pairs, values), Blocked().softmax(pairs, values))
    ours = Auto().kernel(pairs, values, jnp.cos)
    assert_same(ours, Blocked().kernel(pairs, values, jnp.cos))
    assert_same(
        Auto().hardmax(pairs, values, 0.1), Blocked().hardmax(pairs, values, 0.1)
    )


@pytest.mark.parametrize("count", [20, 400])
def test_bounds_too_loose_to_be_accurate_are_noticed(count):
    # All tokens but one are far from the ball's surface in the direction of the tilt.
    pairs, values = random_problem(count, count, offsets=False)
    points = pairs.points.at[0].set(-5000.0)
    pairs = replaced(pairs, points=points, tilts=jnp.abs(pairs.tilts) + 0.1)
    results = Blocked(128).softmax(pairs, values)
    assert_same(results, dense_softmax(pairs, values), 1e-11)


@pytest.mark.parametrize("count", [20, 400])
def test_a_tiny_weight_on_a_large_score_hides_nothing(count):
    # Single precision cannot hold e^-92, by which the other scores lie below the best.
    pairs, values = random_problem(count, count, 1, dtype=np.float32, offsets=False)
    pairs = replaced(
        pairs,
        tilts=jnp.full_like(pairs.tilts, 92.0),
        points=jnp.zeros_like(pairs.points).at[0].set(1.0),
        weights=pairs.weights.at[0].set(3e-38),
    )
    values = 2 + jnp.abs(values)
    assert_same(Blocked(128).softmax(pairs, values), dense_softmax(pairs, values), 2e-5)


@pytest.mark.parametrize("count", [30, 300])
def test_huge_scores_and_offsets_stay_finite(count):
    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 1e-2)):
        pairs, values = random_problem(count, count, dtype=dtype)
        tilts = 1e4 * pairs.tilts
        pairs = replaced(pairs, tilts=tilts, offsets=pairs.offsets - 1e6)
        results = Blocked(100).softmax(pairs, values)
        assert all(np.isfinite(result).all() for result in results)
        log_mass, mean = dense_softmax(pairs, values)
        np.testing.assert_allclose(results[0], log_mass, rtol=1e-6)
        clear = np.sort(dense_scores(pairs))[:, -2:] @ [-1, 1] > 50
        assert clear.sum() > count / 2
        np.testing.assert_allclose(
            results[1][clear], mean[clear], rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("count", [20, 300])
@pytest.mark.parametrize("kind", ["softmax", "kernel", "hardmax"])
def test_absent_tokens_change_nothing(kind, count):
    pairs, values = random_problem(count, count)
    absent = 1e3 * jnp.ones((7, 3))
    padded = replaced(
        pairs,
        points=jnp.concatenate([absent, pairs.points]),
        weights=jnp.concatenate([jnp.zeros(7), pairs.weights]),
        offsets=jnp.concatenate([jnp.full(7, 1e5), pairs.offsets]),
    )
    padded_values = jnp.concatenate([jnp.full((7, 2), 1e5), values])
    options = {"softmax": (), "kernel": (jnp.exp,), "hardmax": (0.1,)}[kind]
    ours = getattr(Blocked(64), kind)(padded, padded_values, *options)
    assert_same(ours, getattr(Blocked(64), kind)(pairs, values, *options))


@pytest.mark.parametrize("kind", ["softmax", "kernel", "hardmax"])
def test_the_order_of_tokens_does_not_matter(kind):
    pairs, values = random_problem(tokens=30)
    order = np.random.default_rng(1).permutation(30)
    mixed = replaced(
        pairs,
        points=pairs.points[order],
        weights=pairs.weights[order],
        offsets=pairs.offsets[order],
    )
    options = {"softmax": (), "kernel": (jnp.exp,), "hardmax": (0.1,)}[kind]
    ours = getattr(Blocked(8), kind)(mixed, values[order], *options)
    assert_same(ours, getattr(Blocked(8), kind)(pairs, values, *options))


@pytest.mark.parametrize("count", [12, 300])
def test_queries_that_see_nothing_get_minus_infinity_and_zero(count):
    pairs, values = random_problem(count, count, masked=True)
    pairs = replaced(
        pairs, first=pairs.first.at[3].set(5), last=pairs.last.at[3].set(5)
    )
    only_absent = replaced(
        pairs, first=pairs.first.at[4].set(2), last=pairs.last.at[4].set(3)
    )
    for block_size in ("auto", 5):
        sums = Blocked(block_size)
        for log_mass, mean in (
            sums.softmax(only_absent, values),
            sums.hardmax(only_absent, values, 0.0),
        ):
            np.testing.assert_array_equal(log_mass[3:5], -np.inf)
            np.testing.assert_array_equal(mean[3:5], 0)
        mass, moment = sums.kernel(only_absent, values, jnp.exp)
        np.testing.assert_array_equal(mass[3:5], 0)
        np.testing.assert_array_equal(moment[3:5], 0)


def test_no_queries_get_no_answers():
    pairs, values = random_problem(0, 5)
    for first, second in (
        Blocked().softmax(pairs, values),
        Blocked().kernel(pairs, values, jnp.exp),
        Blocked().hardmax(pairs, values, 0.0),
    ):
        assert first.shape == (0,)
        assert second.shape == (0, 2)


def test_a_cloud_without_weight_is_seen_as_nothing():
    pairs, values = random_problem(300, 300)
    pairs = replaced(pairs, weights=jnp.zeros(300))
    log_mass, mean = Blocked(64).softmax(pairs, values)
    np.testing.assert_array_equal(log_mass, -np.inf)
    np.testing.assert_array_equal(mean, 0)


@pytest.mark.parametrize("count", [20, 300])
def test_a_nan_in_the_input_is_not_swallowed(count):
    for dtype in (np.float32, np.float64):
        pairs, values = random_problem(count, count, dtype=dtype)
        tilts = pairs.tilts.at[1, 0].set(jnp.nan)
        log_mass, mean = Blocked(64).softmax(replaced(pairs, tilts=tilts), values)
        assert np.isnan(log_mass[1])
        assert np.isnan(mean[1]).all()
        assert np.isfinite(mean[0]).all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 3e-6), ("float16", 2e-3), ("bfloat16", 2e-2)]
)
@pytest.mark.parametrize("count", [20, 300])
def test_lower_precision_keeps_its_type_and_sums_in_single(dtype, tolerance, count):
    pairs, values = random_problem(count, count, dtype=jnp.dtype(dtype))
    for ours, theirs in zip(
        Blocked(64).softmax(pairs, values), dense_softmax(pairs, values), strict=True
    ):
        assert ours.dtype == jnp.dtype(dtype)
        ours = np.asarray(ours, np.float64)
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("count", [9, 300])
@pytest.mark.parametrize("kind", ["softmax", "kernel", "hardmax"])
def test_vmap_over_clouds_and_jit_agree_with_single_calls(kind, count):
    problems = [random_problem(count, count, masked=True, seed=s) for s in range(3)]
    options = {"softmax": (), "kernel": (jnp.sin,), "hardmax": (0.1,)}[kind]

    def sums(pairs, values):
        return getattr(Blocked(280), kind)(pairs, values, *options)

    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    together = jax.jit(jax.vmap(sums))(*batch)
    for index, (pairs, values) in enumerate(problems):
        assert_same((part[index] for part in together), sums(pairs, values))


def test_exact_ties_are_shared_by_weight_even_without_tolerance():
    points = jnp.array([[1.0, 0.1], [1.0, 0.1], [0.3, 0.3]])
    weights = jnp.array([0.2, 0.6, 0.2])
    pairs = Pairs(jnp.array([[0.7, 0.9]]), points, weights)
    best, mean = Blocked().hardmax(pairs, jnp.array([[0.0], [1.0], [5.0]]), 0.0)
    np.testing.assert_allclose(best, [0.79])
    np.testing.assert_allclose(mean, [[0.75]])


def test_a_profile_may_use_values_traced_outside():
    pairs, values = random_problem()

    def mass(beta):
        return Blocked(5).kernel(pairs, values, lambda s: jnp.tanh(beta * s))[0].sum()

    step = 1e-6
    slope = (mass(1.5 + step) - mass(1.5 - step)) / (2 * step)
    np.testing.assert_allclose(jax.jit(jax.grad(mass))(1.5), slope, rtol=1e-8)


@pytest.mark.parametrize("block_size", [0, -3, True, "big"])
def test_a_wrong_block_size_is_refused(block_size):
    with pytest.raises(InvalidInput, match=r"block_size is .*'auto'"):
        Blocked(block_size)


def test_a_wrong_tolerance_is_refused():
    with pytest.raises(InvalidInput, match="tolerance is 0"):
        Auto(0.0)


@pytest.mark.parametrize("queries", [1, 100, 1025, 8192, 10**6])
@pytest.mark.parametrize("tokens", [1, 100, 1025, 8192, 10**6])
def test_automatic_tiles_are_small_and_waste_little(queries, tokens):
    rows, columns = tile_shape(queries, tokens, "auto")
    assert rows * columns <= 1.05 * 2**21  # 8 MiB in single precision
    assert (-queries % rows) / queries < 0.05
    assert (-tokens % columns) / tokens < 0.05


def test_blocks_that_no_query_sees_are_skipped_and_whole_ones_are_not_masked():
    # Queries 4 to 7 of a causal sum, whose tokens come in blocks of four.
    ranges = jnp.zeros(4, jnp.int32), jnp.arange(5, 9, dtype=jnp.int32)
    starts = jnp.arange(0, 16, 4, dtype=jnp.int32)
    assert sight(ranges, starts, 4).tolist() == [2, 1, 0, 0]
    empty = jnp.full(4, 6, jnp.int32)
    assert sight((empty, empty), starts, 4).tolist() == [0, 0, 0, 0]


def test_a_best_score_that_cancels_still_has_its_ties():
    query, points = [[0.1, 0.2, -0.3]], [[1.0, 1, 1], [0, 0, 0], [-1, -1, -1]]
    for dtype in (np.float64, np.float32):
        tilts, tokens = jnp.asarray(query, dtype), jnp.asarray(points, dtype)
        pairs = Pairs(tilts, tokens, jnp.asarray([0.25, 0.5, 0.25], dtype))
        for block_size in (1, "auto"):
            mean = Blocked(block_size).hardmax(pairs, tokens, 0.0)[1]
            np.testing.assert_allclose(mean, np.zeros((1, 3)), atol=1e-7)
        shares = hardmax_shares(pairs, 0.0)
        np.testing.assert_allclose(shares, [[0.25, 0.5, 0.25]], rtol=1e-6)


@pytest.mark.parametrize("count", [4, 300])
def test_norms_that_overflow_do_not_spoil_scores_that_do_not(count):
    points = np.random.default_rng(3).normal(size=(count, 2)).astype(np.float32)
    points[0] = 3e38
    weights = np.full(count, 1 / (count - 1), np.float32)
    weights[0] = 0
    tilts = jnp.asarray(points[1:3].repeat(150, axis=0))
    pairs = Pairs(tilts, jnp.asarray(points), jnp.asarray(weights))
    log_mass, mean = Blocked().softmax(pairs, pairs.points)
    present = Pairs(tilts, pairs.points[1:], pairs.weights[1:])
    expected = Blocked().softmax(present, present.points)
    np.testing.assert_allclose(log_mass, expected[0], atol=1e-5)
    np.testing.assert_allclose(mean, expected[1], atol=1e-5)
    flat = Pairs(0 * tilts, 1e20 * present.points, present.weights)
    assert np.isfinite(Blocked().softmax(flat, flat.points)[1]).all()
