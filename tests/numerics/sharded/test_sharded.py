"""Pair sums over four devices against the sums over one, and against dense formulas."""

import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meanformer.errors import InvalidInput, SlowSums
from meanformer.numerics.fourier.levels import CIRCLE, Devices, Level
from meanformer.numerics.fourier.softmax import differentiable_sum
from meanformer.numerics.fourier.sums import Auto, Fourier
from meanformer.numerics.fourier.transforms import circle_convolution
from meanformer.numerics.pair_sums.dense import hardmax_shares
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import Blocked
from meanformer.numerics.sharded.sums import Sharded, spread_exactly
from pair_problems import dense_scores, dense_softmax, random_problem

OPTIONS = {"softmax": (), "kernel": (jnp.tanh,), "hardmax": (0.3,)}
KINDS = list(OPTIONS)


def mesh_of(*shape, names=("tokens", "copies")):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, names[: len(shape)])


SHARDED = Sharded(mesh_of(4))


def answer(sums, kind, pairs, values):
    return getattr(sums, kind)(pairs, values, *OPTIONS[kind])


def split(problem):
    """Separate what can be differentiated from the ranges."""
    return eqx.partition(problem, eqx.is_inexact_array)


def scalar(sums, kind, ranges):
    """A number that depends on both results of a sum, in a way that is not linear."""

    def loss(floats):
        first, second = answer(sums, kind, *eqx.combine(floats, ranges))
        first = jnp.where(first > -jnp.inf, first, 0)
        return jnp.sin(first).sum() + (second**3).sum()

    return loss


def assert_same(ours, theirs, tolerance=1e-12):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), tolerance, tolerance
        ),
        ours,
        theirs,
    )


def with_blind_queries(pairs):
    """Let query 3 see nothing, and query 4 an absent token only."""
    first, last = pairs.first.at[3:5].set(2), pairs.last.at[3:5].set(jnp.array([2, 3]))
    return eqx.tree_at(lambda p: (p.first, p.last), pairs, (first, last))


def dense_answer(kind, pairs, values):
    """The same by formulas in numpy."""
    if kind == "softmax":
        return dense_softmax(pairs, values)
    scores, weights = dense_scores(pairs), np.asarray(pairs.weights)
    if kind == "kernel":
        masses = np.where(scores > -np.inf, np.tanh(scores), 0) * weights
        return masses.sum(axis=1), masses @ np.asarray(values)
    best = scores.max(axis=1)
    masses = ((scores >= best[:, None] - 0.3) & (scores > -np.inf)) * weights
    mass = np.where(best > -np.inf, masses.sum(axis=1), 1)
    return best, masses @ np.asarray(values) / mass[:, None]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_thirteen_queries_and_seventeen_tokens_on_four_devices(kind, masked):
    pairs, values = random_problem(masked=masked)
    ours = answer(SHARDED, kind, pairs, values)
    assert_same(ours, dense_answer(kind, pairs, values))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_one_device(kind):
    pairs, values = random_problem(7, 9, masked=True)
    floats, ranges = split((with_blind_queries(pairs), values))
    gradients = [
        jax.jit(jax.grad(scalar(sums, kind, ranges)))(floats)
        for sums in (SHARDED, Blocked())
    ]
    assert_same(*gradients, 1e-11)
    np.testing.assert_array_equal(gradients[0][0].tilts[3:5], 0)


@pytest.mark.parametrize(
    "kind",
    [
        "softmax",
        pytest.param("kernel", marks=pytest.mark.slow),
        pytest.param("hardmax", marks=pytest.mark.slow),
    ],
)
def test_the_forward_derivative_agrees_with_finite_differences(kind):
    floats, ranges = split(random_problem(6, 7))
    # A weight that is zero may only grow; here all weights move both ways.
    floats = eqx.tree_at(lambda f: f[0].weights, floats, floats[0].weights + 0.05)
    random = np.random.default_rng(5)
    direction = jax.tree.map(
        lambda a: jnp.asarray(random.standard_normal(a.shape)), floats
    )
    loss = scalar(SHARDED, kind, ranges)

    @jax.jit
    def along(amount):
        return loss(jax.tree.map(lambda a, b: a + amount * b, floats, direction))

    slope = jax.jvp(along, (0.0,), (1.0,))[1]
    np.testing.assert_allclose(slope, (along(1e-5) - along(-1e-5)) / 2e-5, rtol=1e-6)


@pytest.mark.slow
def test_second_derivatives_are_those_of_one_device():
    floats, ranges = split(random_problem(5, 7, masked=True))

    def bend(sums):
        def slope(floats):
            gradient = jax.grad(scalar(sums, "softmax", ranges))(floats)
            return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(gradient))

        return jax.jit(jax.grad(slope))(floats)

    assert_same(bend(SHARDED), bend(Blocked()), 1e-9)


def test_the_derivative_by_the_weight_of_an_absent_token_alone_on_its_device():
    # Weights 1/2, 1/2 and w at scores 0, 1 and 2: the log-mass is known.
    pairs = Pairs(jnp.ones((1, 1)), jnp.arange(3.0)[:, None], jnp.array([0.5, 0.5, 0]))
    values = jnp.array([[1.0], [-2.0], [4.0]])

    @jax.jit
    def results(weight):
        weights = pairs.weights.at[2].set(weight)
        seen = Pairs(pairs.tilts, pairs.points, weights)
        log_mass, mean = SHARDED.softmax(seen, values)
        return log_mass[0], mean[0, 0]

    mass, moment = (1 + np.e) / 2, (1 - 2 * np.e) / 2
    slopes = np.exp(2) / mass, np.exp(2) * (4 - moment / mass) / mass
    np.testing.assert_allclose(jax.jacfwd(results)(0.0), slopes, rtol=1e-12)


@pytest.mark.parametrize(
    "dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)]
)
def test_an_absent_token_far_away_spoils_no_gradient(dtype):
    # One token per device; the exponential of the absent one's score overflows.
    pairs, values = random_problem(4, 4, dtype=dtype, offsets=False)
    pairs = eqx.tree_at(lambda p: p.points, pairs, pairs.points.at[2].set(5e3))
    floats, ranges = split((pairs, values))
    gradient = jax.jit(jax.grad(scalar(SHARDED, "softmax", ranges)))(floats)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    np.testing.assert_array_equal(gradient[0].points[2], 0)
    np.testing.assert_array_equal(gradient[1][2], 0)


@pytest.mark.parametrize("kind", ["softmax", "hardmax"])
def test_a_query_that_sees_nothing_has_no_mass(kind):
    pairs, values = random_problem(masked=True)
    log_mass, mean = answer(SHARDED, kind, with_blind_queries(pairs), values)
    np.testing.assert_array_equal(log_mass[3:5], -np.inf)
    np.testing.assert_array_equal(mean[3:5], 0)


def test_ties_do_not_depend_on_the_device_that_holds_the_token():
    # Scores 1, 0.8 and 0.6 on three devices: the last ties with the second alone.
    points = jnp.array([[1.0], [0.8], [0.6], [-1.0]])
    pairs = Pairs(jnp.ones((1, 1)), points, jnp.array([0.1, 0.3, 0.4, 0.2]))
    best, mean = SHARDED.hardmax(pairs, jnp.eye(4), 0.3)
    np.testing.assert_allclose(best, [1.0])
    np.testing.assert_allclose(mean, [[0.25, 0.75, 0, 0]], rtol=1e-15)
    # Scores that cancel tie up to the rounding of their terms.
    tokens = jnp.array([[1.0, 1, 1], [0, 0, 0], [-1, -1, -1], [-1, 0, 0]])
    pairs = Pairs(jnp.array([[0.1, 0.2, -0.3]]), tokens, pairs.weights)
    mean = SHARDED.hardmax(pairs, jnp.eye(4), 0.0)[1]
    assert_same(mean, hardmax_shares(pairs, 0.0))
    np.testing.assert_allclose(mean, [[0.125, 0.375, 0.5, 0]], rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 3e-6), ("bfloat16", 2e-2)]
)
def test_lower_precision_keeps_its_type_and_is_rounded_once(dtype, tolerance):
    pairs, values = random_problem(dtype=jnp.dtype(dtype))
    ours = SHARDED.softmax(pairs, values)
    assert all(array.dtype == jnp.dtype(dtype) for array in ours)
    assert_same(ours, dense_softmax(pairs, values), tolerance)


@pytest.mark.slow
def test_huge_scores_and_offsets_stay_finite():
    pairs, values = random_problem(12, 12)
    huge = 1e4 * pairs.tilts, pairs.offsets - 1e6
    pairs = eqx.tree_at(lambda p: (p.tilts, p.offsets), pairs, huge)
    assert_same(SHARDED.softmax(pairs, values), dense_softmax(pairs, values), 1e-8)


def test_devices_may_be_left_without_tokens_or_queries():
    pairs, values = random_problem(2, 1)
    ours = SHARDED.softmax(pairs, values)
    assert_same(ours, dense_softmax(pairs, values))
    none = eqx.tree_at(lambda p: p.tilts, pairs, pairs.tilts[:0])
    assert [part.shape for part in SHARDED.softmax(none, values)] == [(0,), (0, 2)]


@pytest.mark.parametrize(
    "kind", ["softmax", pytest.param("hardmax", marks=pytest.mark.slow)]
)
def test_vmap_over_clouds_agrees_with_single_calls(kind):
    problems = [random_problem(5, 6, masked=True, seed=seed) for seed in range(3)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    together = jax.jit(jax.vmap(lambda *p: answer(SHARDED, kind, *p)))(*batch)
    for index, problem in enumerate(problems):
        part = jax.tree.map(lambda a, i=index: a[i], together)
        assert_same(part, dense_answer(kind, *problem))


@pytest.mark.slow
def test_gradients_under_vmap_are_those_of_one_device():
    problems = [split(random_problem(5, 6, masked=True, seed=s)) for s in range(2)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)

    def gradients(sums):
        def one(floats, ranges):
            return jax.grad(scalar(sums, "softmax", ranges))(floats)

        return jax.jit(jax.vmap(one))(*batch)

    assert_same(gradients(SHARDED), gradients(Blocked()), 1e-10)


def test_a_profile_may_use_values_traced_outside():
    pairs, values = random_problem(6, 7)
    scores, weights = dense_scores(pairs), np.asarray(pairs.weights)
    scores = np.where(scores > -np.inf, scores, 0)
    expected = np.sum(weights * scores / np.cosh(1.5 * scores) ** 2)

    def mass(beta):
        return SHARDED.kernel(pairs, values, lambda s: jnp.tanh(beta * s))[0].sum()

    np.testing.assert_allclose(jax.jit(jax.grad(mass))(1.5), expected, rtol=1e-12)


@pytest.mark.slow
def test_one_axis_of_a_mesh_shares_and_the_other_repeats():
    assert Sharded(mesh_of(2, 2)).axis == "tokens"
    sums = Sharded(mesh_of(2, 2), Auto(), axis="copies")
    floats, ranges = split(random_problem(6, 7, offsets=False))
    gradient = jax.jit(jax.grad(scalar(sums, "kernel", ranges)))(floats)
    assert_same(gradient, jax.grad(scalar(Blocked(), "kernel", ranges))(floats), 1e-11)


def compiled_on(count, kind, of_gradient, tokens=2**14):
    """Compile a sum over arrays that lie on that many devices."""
    sums = Sharded(mesh_of(count), Blocked(128))
    layout = NamedSharding(sums.mesh, PartitionSpec("tokens"))

    def results(points, weights):
        return answer(sums, kind, Pairs(points, points, weights), points)

    def loss(points, weights):
        first, second = results(points, weights)
        return first.sum() + (second**2).sum()

    shapes = [(tokens, 8), (tokens,)]
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=layout) for s in shapes]
    function = jax.grad(loss, (0, 1)) if of_gradient else results
    return jax.jit(function).lower(*arrays).compile()


@pytest.mark.parametrize(
    ("kind", "of_gradient"),
    [
        ("kernel", False),
        pytest.param("softmax", False, marks=pytest.mark.slow),
        pytest.param("softmax", True, marks=pytest.mark.slow),
    ],
)
def test_memory_falls_with_the_number_of_devices_and_nothing_is_gathered(
    kind, of_gradient
):
    programs = {count: compiled_on(count, kind, of_gradient) for count in (1, 2, 4)}
    memory = {}
    for count, program in programs.items():
        sizes = program.memory_analysis()
        assert sizes.argument_size_in_bytes == 2**14 * 9 * 4 // count
        memory[count] = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    # A lone device keeps no tokens of others that travel.
    assert memory[2] < 0.75 * memory[1]
    assert memory[4] < 0.4 * memory[1]
    collectives = r"\b(all-gather|all-to-all|all-reduce|collective-permute)"
    found = set(re.findall(collectives, programs[4].as_text()))
    assert found == {"collective-permute"}


def line(count):
    """Identity attention on a line."""
    points = jnp.asarray(np.random.default_rng(4).standard_normal((count, 1)))
    return Pairs(points, points, jnp.full(count, 1 / count)), points


@pytest.mark.slow
def test_devices_that_share_a_fourier_sum_find_the_same():
    pairs, values = line(203)
    shared = Sharded(mesh_of(4), Fourier(1e-10))
    assert_same(shared.softmax(pairs, values), dense_softmax(pairs, values), 1e-10)


@pytest.mark.parametrize("modes", [24, 64])
def test_devices_share_a_series_on_the_circle(modes):
    random = np.random.default_rng(5)
    queries, tokens = jnp.asarray(random.uniform(-np.pi, np.pi, (2, 30, 1)))
    columns, rate = jnp.asarray(random.uniform(size=(2, 30))), jnp.asarray(0.7)
    level = Level(CIRCLE, modes, 1e-12, Devices(mesh_of(4), "tokens", spread_exactly))
    found = circle_convolution(queries, tokens, columns, rate, level)
    kernel = np.exp(0.7 * (np.cos(queries - tokens.T) - 1))
    np.testing.assert_allclose(found, columns @ kernel.T, atol=1e-10)


@pytest.mark.slow
def test_the_gradient_of_a_shared_fourier_sum_is_that_of_the_exact_one():
    pairs, values = line(203)

    def total(sums, points):
        moved = eqx.tree_at(lambda p: (p.tilts, p.points), pairs, (points, points))
        return jnp.sum(sums.softmax(moved, points)[1] ** 3)

    shared = Sharded(mesh_of(4), Fourier(1e-10))
    ours, theirs = (
        jax.grad(partial(total, sums))(values) for sums in (shared, Blocked())
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-8)


@pytest.mark.slow
def test_memory_of_a_shared_fourier_sum_falls_with_the_number_of_devices():
    memory = {}
    for count in (1, 4):
        shared = Sharded(mesh_of(count), Fourier(1e-6))
        pairs, values = shared.place(line(2**20))
        ladder = shared.ladder(pairs, values)
        program = differentiable_sum.lower(ladder, pairs, values).compile()
        sizes = program.memory_analysis()
        memory[count] = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    assert memory[4] < 0.4 * memory[1]


@pytest.mark.slow
def test_a_shared_sum_that_cannot_be_fast_says_so():
    pairs, values = line(3000)
    pairs = eqx.tree_at(lambda p: p.tilts, pairs, 200 * pairs.tilts)
    with pytest.warns(SlowSums, match="masses differ too much"):
        Sharded(mesh_of(4), Fourier()).softmax(pairs, values)


def test_placed_arrays_stay_in_place():
    pairs, values = SHARDED.place(random_problem(8, 20, masked=True))
    assert len({shard.device for shard in values.addressable_shards}) == 4
    log_mass, mean = SHARDED.softmax(pairs, values)
    assert mean.sharding.is_equivalent_to(values.sharding, 2)
    assert log_mass.addressable_shards[0].data.shape == (2,)
    assert_same((log_mass, mean), dense_softmax(pairs, values))


def test_what_is_not_a_mesh_is_refused(untyped):
    with pytest.raises(InvalidInput, match=r"mesh is a list; .*jax\.make_mesh"):
        Sharded(jax.devices())
    with pytest.raises(InvalidInput, match="axis is 'heads'; .*'tokens', 'copies'"):
        Sharded(mesh_of(2, 2), axis="heads")
    with pytest.raises(InvalidInput, match="sums is a Sharded; .*one device"):
        Sharded(mesh_of(4), SHARDED)
    with pytest.raises(InvalidInput, match="sums is a str"):
        Sharded(mesh_of(4), "blocked")


def test_what_devices_cannot_share_is_refused():
    with pytest.raises(InvalidInput, match="has 6 rows, which 4 devices .*pad"):
        SHARDED.place(jnp.ones((6, 2)))
    with pytest.raises(InvalidInput, match="has 1 rows"):
        SHARDED.place((jnp.ones((4, 2)), 3.0))
    mesh = jax.make_mesh((4,), ("tokens",), (AxisType.Explicit,))
    layout = NamedSharding(mesh, PartitionSpec("tokens"))
    pairs, values = random_problem(4, 4)
    with pytest.raises(InvalidInput, match=r"Explicit; .*place"):
        Sharded(mesh).softmax(pairs, jax.device_put(values, layout))
    assert_same(Sharded(mesh).softmax(pairs, values), dense_softmax(pairs, values))
