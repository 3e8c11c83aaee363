"""Derivatives of the pair sums: forward, backward, second, at the edges."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import Blocked
from pair_problems import ordered_problem, random_problem, traceable_softmax

PROFILES = {"tanh": jnp.tanh, "exp": jnp.exp}


def split(problem):
    """Separate what can be differentiated from the ranges."""
    return eqx.partition(problem, eqx.is_inexact_array)


def scalar(sums, ranges):
    """A number that depends on both results of a sum, in a way that is not linear."""

    def loss(floats):
        first, second = sums(*eqx.combine(floats, ranges))
        return jnp.sin(first).sum() + (second**3).sum()

    return loss


def assert_close(ours, theirs, rtol=1e-9):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol),
        ours,
        theirs,
    )


def tangent_like(tree, seed=5):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(random.standard_normal(a.shape)), tree)


def difference(function, point, direction, step=1e-5):
    """Central finite difference of a scalar function along a direction."""

    def moved(amount):
        return jax.tree.map(lambda a, b: a + amount * b, point, direction)

    return (function(moved(step)) - function(moved(-step))) / (2 * step)


def inner(left, right):
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, left, right)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block_size", ["auto", 1, 5])
def test_the_gradient_of_softmax_is_that_of_the_dense_formula(block_size, masked):
    floats, ranges = split(random_problem(masked=masked))
    ours = jax.grad(scalar(Blocked(block_size).softmax, ranges))(floats)
    # A dense gradient at a zero weight is not defined by that formula: leave it out.
    theirs = jax.grad(scalar(traceable_softmax, ranges))(floats)
    pairs, values = ours
    dense_pairs, dense_values = theirs
    present = floats[0].weights > 0
    assert_close(pairs.weights[present], dense_pairs.weights[present])
    assert_close(pairs.tilts, dense_pairs.tilts)
    assert_close(pairs.points, dense_pairs.points)
    assert_close(pairs.offsets, dense_pairs.offsets)
    assert_close(values, dense_values)


@pytest.mark.parametrize("kind", ["softmax", "tanh", "exp", "hardmax"])
@pytest.mark.parametrize("block_size", ["auto", 5])
def test_derivatives_agree_with_finite_differences(kind, block_size):
    floats, ranges = split(random_problem(masked=True))
    # A weight that is zero may only grow; here all weights move both ways.
    floats = eqx.tree_at(lambda f: f[0].weights, floats, floats[0].weights + 0.05)
    sums = Blocked(block_size)

    def chosen(pairs, values):
        if kind == "softmax":
            return sums.softmax(pairs, values)
        if kind == "hardmax":
            return sums.hardmax(pairs, values, 1e-3)
        return sums.kernel(pairs, values, PROFILES[kind])

    loss = jax.jit(scalar(chosen, ranges))
    direction = tangent_like(floats)
    slope = jax.jvp(loss, (floats,), (direction,))[1]
    np.testing.assert_allclose(slope, difference(loss, floats, direction), rtol=1e-6)
    np.testing.assert_allclose(
        inner(jax.grad(loss)(floats), direction), slope, rtol=1e-9
    )


@pytest.mark.parametrize("mask", ["causal", "window", "prefix"])
def test_the_gradient_over_tiles_cut_into_pieces_is_that_of_the_dense_formula(mask):
    floats, ranges = split(ordered_problem(700, mask))
    # All weights are positive, where the dense formula has a derivative.
    floats = eqx.tree_at(lambda f: f[0].weights, floats, floats[0].weights + 0.05)
    ours = jax.grad(scalar(Blocked(500).softmax, ranges))(floats)
    assert_close(ours, jax.grad(scalar(traceable_softmax, ranges))(floats))


@pytest.mark.parametrize("block_size", [128, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_forward_and_backward_derivatives_are_adjoint_over_many_tiles(
    masked, block_size
):
    floats, ranges = split(random_problem(301, 403, masked=masked))

    def sums(floats):
        return Blocked(block_size).softmax(*eqx.combine(floats, ranges))

    direction = tangent_like(floats)
    results, pushed = jax.jvp(sums, (floats,), (direction,))
    covector = tangent_like(results, seed=6)
    (pulled,) = jax.vjp(sums, floats)[1](covector)
    np.testing.assert_allclose(inner(covector, pushed), inner(pulled, direction), 1e-9)


@pytest.mark.parametrize("name", ["tilts", "points", "weights", "offsets", "values"])
def test_one_argument_alone_can_be_differentiated(name):
    problem = random_problem()
    floats, ranges = split(problem)
    loss = scalar(Blocked(5).softmax, ranges)
    everything = jax.grad(loss)(floats)

    def pick(floats):
        return floats[1] if name == "values" else getattr(floats[0], name)

    def of_one(array):
        return loss(eqx.tree_at(pick, floats, array))

    assert_close(jax.grad(of_one)(pick(floats)), pick(everything))
    direction = tangent_like(pick(floats))
    slope = jax.jvp(of_one, (pick(floats),), (direction,))[1]
    np.testing.assert_allclose(slope, inner(pick(everything), direction), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", ["auto", 5])
def test_second_derivatives_agree_with_the_dense_formula(block_size):
    floats, ranges = split(random_problem(5, 7, masked=True))
    weights = floats[0].weights + 0.05
    floats = eqx.tree_at(lambda f: f[0].weights, floats, weights)
    direction = tangent_like(floats)

    def slope(sums):
        return lambda f: inner(jax.grad(scalar(sums, ranges))(f), direction)

    ours, dense = slope(Blocked(block_size).softmax), slope(traceable_softmax)
    expected = jax.grad(dense)(floats)
    assert_close(jax.grad(ours)(floats), expected, 1e-8)
    forward = jax.jvp(ours, (floats,), (direction,))[1]
    np.testing.assert_allclose(forward, inner(expected, direction), rtol=1e-8)


def three_tokens(weight):
    """Three tokens of which the last has this weight."""
    return Pairs(
        tilts=jnp.array([[0.3, -0.2], [1.0, 0.5]]),
        points=jnp.array([[1.0, 0.0], [0.0, 1.0], [0.7, -0.4]]),
        weights=jnp.array([0.5, 0.5, 0.0]).at[2].set(weight),
    ), jnp.array([[1.0], [-2.0], [4.0]])


@pytest.mark.parametrize("block_size", ["auto", 2])
@pytest.mark.parametrize("kind", ["softmax", "kernel"])
def test_the_derivative_by_a_zero_weight_is_the_limit_of_adding_the_token(
    kind, block_size
):
    def loss(weight):
        pairs, values = three_tokens(weight)
        options = (jnp.exp,) if kind == "kernel" else ()
        first, second = getattr(Blocked(block_size), kind)(pairs, values, *options)
        return first.sum() + (second**2).sum()

    one_sided = (-3 * loss(0.0) + 4 * loss(1e-6) - loss(2e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(loss)(0.0), one_sided, rtol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(loss)(0.0), one_sided, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["softmax", "kernel", "hardmax"])
@pytest.mark.parametrize("block_size", ["auto", 8])
def test_absent_tokens_have_no_derivative_and_spoil_none(kind, block_size, dtype):
    pairs, values = random_problem(dtype=dtype)
    # The exponential of this score overflows in both precisions.
    points = pairs.points.at[2].set(5e3)
    pairs = eqx.tree_at(lambda p: p.points, pairs, points)
    floats, ranges = split((pairs, values))
    options = {"softmax": (), "kernel": (jnp.exp,), "hardmax": (0.1,)}[kind]

    def sums(pairs, values):
        return getattr(Blocked(block_size), kind)(pairs, values, *options)

    loss = scalar(sums, ranges)
    pulled, pulled_values = jax.grad(loss)(floats)
    np.testing.assert_array_equal(pulled.points[2], 0)
    np.testing.assert_array_equal(pulled.offsets[2], 0)
    np.testing.assert_array_equal(pulled_values[2], 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(pulled))
    # Forward: moving the absent token moves nothing, moving all stays finite.
    still = jax.tree.map(jnp.zeros_like, floats)
    only_absent = eqx.tree_at(
        lambda f: f[0].points, still, still[0].points.at[2].set(1.0)
    )
    assert jax.jvp(loss, (floats,), (only_absent,))[1] == 0
    ones = jax.tree.map(jnp.ones_like, floats)
    assert np.isfinite(jax.jvp(loss, (floats,), (ones,))[1])


@pytest.mark.parametrize("block_size", ["auto", 2])
def test_a_profile_without_derivative_at_an_absent_token_spoils_nothing(block_size):
    pairs, values = three_tokens(0.0)
    pairs = eqx.tree_at(lambda p: p.points, pairs, jnp.abs(pairs.points).at[2].set(0.0))

    def mass(tilts):
        moved = eqx.tree_at(lambda p: p.tilts, pairs, tilts)
        return Blocked(block_size).kernel(moved, values, jnp.sqrt)[0].sum()

    tilts = jnp.array([[0.3, 0.2], [1.0, 0.5]])
    expected = 0.25 / jnp.sqrt(tilts)
    np.testing.assert_allclose(jax.grad(mass)(tilts), expected, rtol=1e-12)
    np.testing.assert_allclose(jax.jacfwd(mass)(tilts), expected, rtol=1e-12)


@pytest.mark.parametrize("block_size", ["auto", 5])
def test_a_query_that_sees_nothing_has_zero_derivatives(block_size):
    pairs, values = random_problem(masked=True)
    # Query 3 has an empty range, query 4 only an absent token in its range.
    first, last = pairs.first.at[3:5].set(2), pairs.last.at[3:5].set(jnp.array([2, 3]))
    pairs = eqx.tree_at(lambda p: (p.first, p.last), pairs, (first, last))
    floats, ranges = split((pairs, values))

    def row(floats):
        log_mass, mean = Blocked(block_size).softmax(*eqx.combine(floats, ranges))
        return jnp.where(log_mass > -jnp.inf, log_mass, 0), mean

    gradient = jax.grad(lambda f: row(f)[0].sum() + row(f)[1].sum())(floats)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    np.testing.assert_array_equal(gradient[0].tilts[3:5], 0)
    alone = jax.grad(lambda f: row(f)[0][3:5].sum() + row(f)[1][3:5].sum())(floats)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(alone))


@pytest.mark.slow
def test_gradients_of_huge_scores_are_finite():
    for dtype in (np.float32, np.float64):
        pairs, values = random_problem(dtype=dtype)
        pairs = eqx.tree_at(
            lambda p: (p.tilts, p.offsets),
            pairs,
            (1e4 * pairs.tilts, pairs.offsets - 1e6),
        )
        floats, ranges = split((pairs, values))
        gradient = jax.grad(scalar(Blocked(5).softmax, ranges))(floats)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("count", [20, 300])
def test_gradients_by_the_values_add_up_to_the_queries_at_any_sharpness(count):
    # Probabilities sum to one only if value and derivative use the same scores.
    pairs, values = random_problem(count, count, dtype=np.float32)
    pairs = eqx.tree_at(lambda p: p.tilts, pairs, 1e4 * pairs.tilts)

    def total(values):
        return Blocked(128).softmax(pairs, values)[1].sum()

    np.testing.assert_allclose(jax.grad(total)(values).sum(axis=0), count, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_keep_the_type_of_the_input(dtype):
    floats, ranges = split(random_problem(dtype=jnp.dtype(dtype)))
    gradient = jax.grad(scalar(Blocked(5).softmax, ranges))(floats)
    exact = jax.tree.map(lambda a: a.astype(jnp.float64), floats)
    expected = jax.grad(scalar(Blocked(5).softmax, ranges))(exact)
    tolerance = 30 * float(jnp.finfo(dtype).eps)
    for ours, theirs in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        assert ours.dtype == dtype
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours.astype(float), theirs, atol=tolerance * scale)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_under_vmap_and_jit_agree_with_single_ones(masked):
    problems = [split(random_problem(masked=masked, seed=s)) for s in range(2)]

    def gradient(floats, ranges):
        return jax.grad(scalar(Blocked(5).softmax, ranges))(floats)

    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    together = jax.jit(jax.vmap(gradient))(*batch)
    for index, problem in enumerate(problems):
        alone = gradient(*problem)
        assert_close(jax.tree.map(lambda a, i=index: a[i], together), alone)
