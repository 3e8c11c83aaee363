"""Fast sums agree with exact ones, or say that they are not used."""

import warnings
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meanformer as mf
from meanformer.errors import InvalidInput, SlowSums, Unsupported
from meanformer.numerics.fourier import transforms
from meanformer.numerics.fourier.frames import circle_frame
from meanformer.numerics.fourier.levels import (
    CIRCLE,
    GAUSSIAN,
    Level,
    full_ladder,
    working_dtype,
)
from meanformer.numerics.fourier.report import MODES, NONE, RANGE
from meanformer.numerics.fourier.softmax import fourier_softmax
from meanformer.numerics.fourier.sums import Auto, Fourier
from meanformer.numerics.fourier.transforms import (
    circle_convolution,
    circle_modes,
    gaussian_convolution,
    gaussian_modes,
)
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import Blocked
from pair_problems import dense_softmax

COUNT = 300
TOLERANCE = 1e-8


def cloud(kind, dimension, random):
    """Points of a kind, of diameter about two."""
    points = random.standard_normal((COUNT, dimension))
    if kind == "sphere":
        return points / np.linalg.norm(points, axis=1, keepdims=True)
    if kind == "clusters":
        centres = random.standard_normal((4, dimension))
        return centres[random.integers(0, 4, COUNT)] + 1e-3 * points
    if kind == "equal":
        return np.broadcast_to(points[:1], points.shape)
    return points / 2


def problem(
    kind="sphere", dimension=3, beta=4.0, *, seed=0, dtype=np.float64, form="softmax"
):
    """Identity attention at a cloud's own tokens, a third of them absent."""
    random = np.random.default_rng(seed)
    points = cloud(kind, dimension, random).astype(dtype)
    weights = random.uniform(size=COUNT) * (random.uniform(size=COUNT) < 0.67)
    weights[0] = 1.0
    sharpness = beta if form == "l2" else 0.0
    offsets = -sharpness * np.sum(points**2, axis=1) / 2
    arrays = beta * points, points, weights / weights.sum(), offsets
    pairs = Pairs(*[jnp.asarray(array, dtype) for array in arrays])
    return pairs, jnp.asarray(points)


def errors(result, pairs, values):
    """Relative errors of log-mass and mean against numpy in double precision."""
    log_mass, mean = dense_softmax(pairs, values)
    present = np.asarray(pairs.weights) > 0
    width = np.ptp(np.asarray(values, float)[present], axis=0).max()
    rounding = 16 * np.finfo(result[1].dtype).eps * np.abs(mean)
    beyond = np.abs(np.asarray(result[1], float) - mean) - rounding
    return (
        np.abs(np.expm1(np.asarray(result[0], float) - log_mass)).max(),
        max(beyond.max(), 0) / max(width, 1e-300),
    )


PROBLEMS = {
    "kind": st.sampled_from(["sphere", "gauss", "clusters", "equal"]),
    "dimension": st.sampled_from([1, 2, 3]),
    "beta": st.floats(0.0, 100.0),
    "form": st.sampled_from(["softmax", "l2"]),
    "seed": st.integers(0, 2**16),
    "dtype": st.sampled_from([np.float32, np.float64]),
}


@given(**PROBLEMS)
@settings(max_examples=4, deadline=None)
def test_fast_sums_are_within_the_tolerance_or_exact(**drawn):
    check_within_tolerance_or_exact(**drawn)


@pytest.mark.slow
@given(**PROBLEMS)
@settings(max_examples=300, deadline=None)
def test_many_fast_sums_are_within_the_tolerance_or_exact(**drawn):
    check_within_tolerance_or_exact(**drawn)


def check_within_tolerance_or_exact(kind, dimension, beta, form, seed, dtype):
    pairs, values = problem(kind, dimension, beta, seed=seed, dtype=dtype, form=form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowSums)
        result = Fourier(TOLERANCE).softmax(pairs, values)
    report = Fourier(TOLERANCE).report(pairs, values)
    assert all(np.isfinite(part).all() for part in result)
    assert all(part.dtype == dtype for part in result)
    # Scores of single precision carry its rounding into the exponent.
    rounding = 4 * np.finfo(dtype).eps * (1 + 4 * beta)
    assert max(errors(result, pairs, values)) <= TOLERANCE + rounding
    assert float(report.bound) <= TOLERANCE
    assert bool(report.is_exact) or float(report.observed) <= TOLERANCE


def many(kind, dimension, count=5000):
    """Points, so many that the grid has few nodes for each."""
    points = np.random.default_rng(dimension).standard_normal((count, dimension))
    if kind == "sphere":
        points /= np.linalg.norm(points, axis=1, keepdims=True)
    return jnp.asarray(points if kind == "sphere" else points / 2)


EVERY_DIMENSION = [
    (1, "gauss", "softmax", [0.5, 3.0]),
    (1, "gauss", "l2", [4.0, 50.0]),
    (2, "gauss", "softmax", [0.5, 2.0]),
    (2, "sphere", "softmax", [10.0, 60.0]),
    (2, "gauss", "l2", [4.0, 20.0]),
    (3, "sphere", "softmax", [1.0, 9.0]),
    (3, "gauss", "l2", [1.0, 3.0]),
]


@pytest.mark.parametrize(
    ("tolerance", "dimension", "kind", "form", "betas"),
    [
        (1e-7, *EVERY_DIMENSION[0]),
        *[
            pytest.param(tolerance, *each, marks=pytest.mark.slow)
            for tolerance in (1e-4, 1e-6, 1e-8, 1e-10)
            for each in EVERY_DIMENSION
        ],
    ],
)
def test_errors_are_below_the_tolerance_and_not_far_below(
    tolerance, dimension, kind, form, betas
):
    points = many(kind, dimension)
    weights = jnp.full(len(points), 1 / len(points))
    for beta in betas:
        sharpness = beta if form == "l2" else 0.0
        offsets = -sharpness / 2 * jnp.sum(points**2, axis=1)
        pairs = Pairs(beta * points, points, weights, offsets)
        result, report = fourier_softmax(
            pairs, points, Fourier(tolerance).ladder(pairs, points)
        )
        exact = Blocked().softmax(pairs, points)
        mass = np.abs(np.expm1(result[0] - exact[0])).max()
        mean = np.abs(result[1] - exact[1]).max() / np.ptp(points, axis=0).max()
        assert not bool(report.is_exact)
        assert tolerance / 100 <= max(mass, mean) <= tolerance
        assert max(mass, mean) <= float(report.bound) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "l2", "unnormalised", "sinkhorn"])
@pytest.mark.parametrize(
    ("dimension", "tolerance"), [(1, 1e-5), (1, 1e-9), (2, 1e-9), (3, 1e-7)]
)
def test_velocities_of_every_kind_are_within_the_tolerance(kind, dimension, tolerance):
    points = many("gauss", dimension, 1500)
    gamma = mf.identity_attention(kind, dimension, 1.5)
    fast, exact = (
        gamma(mf.TokenCloud(points, sums=sums), points)
        for sums in (Fourier(tolerance), Blocked())
    )
    scale = np.ptp(points, axis=0).max() * max(1, np.abs(exact).max())
    assert np.abs(fast - exact).max() <= tolerance * scale


@pytest.mark.slow
def test_a_cloud_whose_measured_queries_tell_little_has_no_error_above_its_bound():
    # Of some thousand such clouds the one whose measured queries tell the least.
    random = np.random.default_rng(1798)
    points = random.normal(size=(1000, 2))
    tilts = 2 * random.uniform(-3, 3, size=(1000, 2))
    weights = 10 ** random.uniform(-8, 0, size=1000)
    pairs = Pairs(*map(jnp.asarray, (tilts, points, weights / weights.sum())))
    ladder = full_ladder(2, 1e-5, pairs.tilts.dtype)
    result, report = fourier_softmax(pairs, pairs.points, ladder)
    assert not report.is_exact
    assert max(map(float, errors(result, pairs, pairs.points))) <= report.bound


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("weight", [1.0, 1e-3])
def test_tokens_apart_from_the_others_are_within_the_tolerance(share, weight):
    # A cluster in one place, wherever that is on the grid, does not average errors out.
    count = 6000
    few = max(1, int(share * count))
    apart = np.array([[0.0, 0.0, 1.5]]) + 1e-6 * np.asarray(many("gauss", 3, few))
    bulk = np.asarray(many("sphere", 3, count - few)) * [1, 1, 0.2]
    points = jnp.asarray(np.concatenate([bulk, apart]))
    weights = jnp.asarray(np.r_[np.ones(count - few), np.full(few, weight)])
    pairs = Pairs(9 * points, points, weights / weights.sum())
    for tolerance in (1e-5, 1e-8):
        result = Fourier(tolerance).softmax(pairs, points)
        assert max(errors(result, pairs, points)) <= tolerance


@pytest.mark.parametrize("dimension", [1, 2, 3])
@pytest.mark.parametrize("accuracy", [1e-4, 1e-8, 1e-12])
def test_a_gaussian_convolution_is_as_accurate_as_its_level(dimension, accuracy):
    random = np.random.default_rng(dimension)
    queries, tokens = random.uniform(-3, 3, (2, 40, dimension))
    columns = random.uniform(size=(3, 40))
    spans = jnp.full(dimension, 6.0)
    modes = int(np.ceil(gaussian_modes(spans, accuracy)))
    found = gaussian_convolution(
        *map(jnp.asarray, (queries, tokens, columns)),
        spans,
        Level(GAUSSIAN, modes, accuracy),
    )
    squares = np.sum((queries[:, None] - tokens[None]) ** 2, axis=2)
    expected = columns @ np.exp(-squares / 2).T
    error = np.abs(found - expected).max() / columns.sum(axis=1).max()
    assert error <= 2 * accuracy


@pytest.mark.parametrize("concentration", [0.0, 0.1, 5.0, 100.0, 2000.0])
@pytest.mark.parametrize("accuracy", [1e-4, 1e-12])
def test_a_circle_convolution_is_as_accurate_as_its_level(concentration, accuracy):
    random = np.random.default_rng(1)
    queries, tokens = random.uniform(-np.pi, np.pi, (2, 50, 1))
    columns = random.uniform(size=(2, 50))
    modes = int(np.ceil(circle_modes(jnp.asarray(concentration), accuracy)))
    found = circle_convolution(
        *map(jnp.asarray, (queries, tokens, columns)),
        jnp.asarray(concentration),
        Level(CIRCLE, modes, accuracy),
    )
    kernel = np.exp(concentration * (np.cos(queries - tokens.T) - 1))
    error = np.abs(found - columns @ kernel.T).max() / columns.sum(axis=1).max()
    assert error <= 2 * accuracy


def test_a_short_series_is_the_same_by_either_way(monkeypatch):
    random = np.random.default_rng(2)
    queries, tokens = jnp.asarray(random.uniform(-4, 4, (2, 40, 1)))
    columns = jnp.asarray(random.standard_normal((3, 40)))

    def slope():
        def loss(columns):
            level, rate = Level(CIRCLE, 31, 1e-13), jnp.asarray(0.5)
            sums = circle_convolution(queries, tokens, columns, rate, level)
            return jnp.sum(jnp.sin(sums)), sums

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(columns)

    direct = slope()
    monkeypatch.setattr(transforms, "DIRECT_MODES", 0)
    for one, other in zip(*map(jax.tree.leaves, (direct, slope())), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-11)


@pytest.mark.slow
def test_radii_that_are_equal_to_rounding_are_on_the_circle():
    pairs, values = problem(dimension=2, beta=100.0)
    defect = float(circle_frame(pairs, pairs.weights > 0).defect())
    sums = Fourier(1e-10)
    level = sums.ladder(pairs, values).levels[int(sums.report(pairs, values).level)]
    assert 0 < defect < 1e-12
    assert level.kind == CIRCLE
    assert max(errors(sums.softmax(pairs, values), pairs, values)) <= 1e-10


@pytest.mark.parametrize("roughness", [1e-9, 1e-4])
def test_almost_a_circle_is_within_the_tolerance(roughness):
    pairs, values = problem(dimension=2, beta=10.0)
    radii = 1 + roughness * jnp.sin(jnp.arange(COUNT))[:, None]
    pairs = eqx.tree_at(lambda p: p.points, pairs, radii * pairs.points)
    result = Fourier(1e-7).softmax(pairs, values)
    assert max(errors(result, pairs, values)) <= 1e-7


def test_the_circle_is_summed_by_angle():
    pairs, values = problem(dimension=2, beta=30.0)
    report = Fourier().report(pairs, values)
    levels = full_ladder(2, 1e-8, working_dtype()).levels
    assert levels[int(report.level)].kind == CIRCLE
    off = eqx.tree_at(lambda p: p.points, pairs, 1.01 * pairs.points.at[0].mul(0.9))
    report = Fourier().report(off, values)
    assert levels[int(report.level)].kind == GAUSSIAN


@pytest.mark.slow
def test_far_queries_are_summed_exactly_one_by_one():
    pairs, _ = problem(beta=100.0)
    side = jnp.where(jnp.arange(COUNT) % 2 == 0, 1.0, -1.0)
    points = (0.01 * pairs.points).at[:, 0].add(side)
    tilts = 100 * points.at[:5].set(0.0)
    offsets = -50 * jnp.sum(points**2, axis=1)
    pairs, values = Pairs(tilts, points, pairs.weights, offsets), points
    report = Fourier().report(pairs, values)
    assert int(report.patched) == 5
    assert int(report.reason) == NONE
    result = Fourier().softmax(pairs, values)
    assert max(errors(result, pairs, values)) <= TOLERANCE


@pytest.mark.slow
def test_a_range_too_wide_is_summed_exactly_and_said_so():
    random = np.random.default_rng(0)
    points = jnp.asarray(3 * random.standard_normal((3000, 1)))
    pairs = Pairs(25.0 * points, points, jnp.full(3000, 1 / 3000))
    with pytest.warns(SlowSums, match="masses differ too much"):
        result = Fourier().softmax(pairs, points)
    expected = Blocked().softmax(pairs, points)
    np.testing.assert_array_equal(result[1], expected[1])
    assert int(Fourier().report(pairs, points).reason) == RANGE


def test_scores_too_large_for_every_grid_are_summed_exactly():
    pairs, values = problem(beta=1e6)
    with pytest.warns(SlowSums, match="too large for the grids"):
        result = Fourier().softmax(pairs, values)
    assert max(errors(result, pairs, values)) <= TOLERANCE
    assert int(Fourier().report(pairs, values).reason) == MODES


def test_absent_tokens_may_be_anywhere():
    pairs, values = problem()
    absent = (pairs.weights == 0)[:, None]
    far = eqx.tree_at(lambda p: p.points, pairs, jnp.where(absent, 1e200, pairs.points))
    moved = jnp.where(absent, 1e200, values)
    near = Fourier().softmax(pairs, values)
    for ours, theirs in zip(near, Fourier().softmax(far, moved), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-14)


@pytest.mark.parametrize(
    ("dimension", "kind"),
    [
        (1, "gauss"),
        pytest.param(2, "sphere", marks=pytest.mark.slow),
        pytest.param(3, "l2", marks=pytest.mark.slow),
    ],
)
def test_derivatives_agree_with_those_of_the_exact_sum(dimension, kind):
    form, shape = ("l2", "gauss") if kind == "l2" else ("softmax", kind)
    pairs, values = problem(shape, dimension, 3.0, form=form)
    random = np.random.default_rng(5)

    def like(tree):
        return jax.tree.map(lambda a: jnp.asarray(random.normal(size=a.shape)), tree)

    def fast(pairs, values):
        return Fourier().softmax(pairs, values)

    def exact(pairs, values):
        return Blocked().softmax(pairs, values)

    moving = like((pairs, values))
    ours, theirs = (jax.jvp(f, (pairs, values), moving)[1] for f in (fast, exact))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, theirs)
    back = like(theirs)
    ours, theirs = (jax.vjp(f, pairs, values)[1](back) for f in (fast, exact))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, theirs)


@pytest.mark.parametrize(
    ("dimension", "kind"),
    [
        (1, "gauss"),
        pytest.param(2, "gauss", marks=pytest.mark.slow),
        pytest.param(2, "sphere", marks=pytest.mark.slow),
        pytest.param(3, "sphere", marks=pytest.mark.slow),
    ],
)
def test_the_derivative_far_from_the_origin_is_a_covariance(dimension, kind):
    points, place = np.asarray(many(kind, dimension, 400)), 1e6
    random = np.random.default_rng(8)
    moving, back = random.standard_normal((2, *points.shape))
    layer = mf.identity_attention("softmax", dimension, 2.0)

    @jax.jit
    def both(tokens, queries):
        cloud = mf.TokenCloud(tokens, sums=Fourier(1e-9))
        found, pull = jax.vjp(lambda x: layer(cloud, x), queries)
        return found, jax.jvp(lambda x: layer(cloud, x), (queries,), (moving,))[1], pull

    _, forward, pull = both(jnp.asarray(points + place), jnp.asarray(points))
    # The tokens as they are there, rounded, measured from the place.
    near = (points + place) - place
    shares = np.exp(2 * points @ near.T)
    shares /= shares.sum(axis=1, keepdims=True)
    apart = near[None] - (shares @ near)[:, None]
    jacobians = 2 * np.einsum("mn,mni,mnj->mij", shares, apart, apart)
    size = np.abs(jacobians).max()
    expected = np.einsum("mij,mj->mi", jacobians, moving)
    np.testing.assert_allclose(forward, expected, atol=1e-9 * size)
    expected = np.einsum("mij,mi->mj", jacobians, back)
    np.testing.assert_allclose(pull(jnp.asarray(back))[0], expected, atol=1e-9 * size)


@pytest.mark.slow
@pytest.mark.parametrize("far", [0.5, 10.0, 30.0, 300.0])
def test_the_weight_of_an_absent_token_anywhere_has_its_derivative(far):
    points = jnp.linspace(-1, 1, 200)[:, None].at[0].set(far)
    weights = jnp.full(200, 1 / 199).at[0].set(0.0)

    def total(sums, tilts, points, weights):
        log_mass, mean = sums.softmax(Pairs(tilts, points, weights), points)
        return jnp.sum(jnp.sin(log_mass[1:])) + jnp.sum(mean[1:] ** 2)

    for ours, theirs in zip(
        *(
            jax.grad(partial(total, sums), (0, 1, 2))(2 * points, points, weights)
            for sums in (Fourier(), Blocked())
        ),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_second_derivatives_on_the_circle_are_those_of_the_exact_sum():
    angle = jnp.asarray(np.random.default_rng(1).uniform(0, 6.28, 40))
    points = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    direction = jnp.asarray(np.random.default_rng(2).standard_normal((40, 2)))

    def total(sums, points):
        pairs = Pairs(2 * points, points, jnp.full(40, 1 / 40))
        log_mass, mean = sums.softmax(pairs, points)
        return jnp.sum(jnp.sin(3 * log_mass)) + jnp.sum(mean**3)

    def bent(sums):
        def slope(points):
            return jax.jvp(partial(total, sums), (points,), (direction,))[1]

        return jax.jvp(slope, (points,), (direction,))[1]

    assert Fourier().report(
        Pairs(2 * points, points, jnp.full(40, 1 / 40)), points
    ).level < len(full_ladder(2, 1e-8, working_dtype()).levels)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(bent(Fourier()), bent(Blocked()), rtol=1e-7)
        gradient = jax.grad(partial(total, Fourier()))
        with pytest.raises(Exception, match="no derivative of their gradient"):
            jax.block_until_ready(jax.jvp(gradient, (points,), (direction,)))


@pytest.mark.slow
def test_second_derivatives_on_the_line_are_those_of_the_exact_sum():
    points = jnp.asarray(np.random.default_rng(1).standard_normal((40, 1)))
    direction = jnp.cos(points)

    def total(sums, points):
        pairs = Pairs(points, points, jnp.full(40, 1 / 40))
        log_mass, mean = sums.softmax(pairs, points)
        return jnp.sum(jnp.sin(3 * log_mass)) + jnp.sum(mean**3)

    def bent(sums):
        gradient = jax.grad(partial(total, sums))
        return jax.jvp(gradient, (points,), (direction,))[1]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(bent(Fourier()), bent(Blocked()), atol=1e-6)


@pytest.mark.slow
def test_a_batch_gets_what_its_members_get():
    pairs, values = problem("gauss", 1)
    strengths = jnp.asarray([0.5, 1.0, 3.0])

    def mean(strength):
        tilts = strength * pairs.tilts
        stronger = eqx.tree_at(lambda p: p.tilts, pairs, tilts)
        return Fourier().softmax(stronger, values)[1]

    together = jax.jit(jax.vmap(mean))(strengths)
    for one, strength in zip(together, strengths, strict=True):
        np.testing.assert_allclose(one, mean(strength), atol=1e-8)


@pytest.mark.slow
def test_single_precision_keeps_what_it_can_and_refuses_the_rest():
    with jax.enable_x64(False):
        pairs, values = problem("gauss", 1, 1.0, dtype=np.float32)
        with pytest.raises(
            Unsupported, match="float32 can keep a tolerance of 1.6e-05"
        ):
            Fourier(1e-8).softmax(pairs, values)
        assert Auto(1e-8).ladder(pairs, values) is None
        result = Fourier(1e-3).softmax(pairs, values)
        report = Fourier(1e-3).report(pairs, values)
    assert not bool(report.is_exact)
    assert max(errors(result, pairs, values)) <= 1e-3


def test_what_cannot_be_fast_is_refused_with_the_reason():
    pairs, values = problem()
    with pytest.raises(Unsupported, match="5 dimensions, more than three"):
        Fourier().softmax(
            Pairs(jnp.ones((4, 5)), jnp.ones((3, 5)), jnp.ones(3) / 3),
            jnp.ones((3, 1)),
        )
    first = jnp.zeros(COUNT, int)
    masked = Pairs(pairs.tilts, pairs.points, pairs.weights, None, first, first + 2)
    with pytest.raises(Unsupported, match="a mask gives each query its own sum"):
        Fourier().softmax(masked, values)
    with pytest.raises(Unsupported, match="use sums=Auto"):
        Fourier().kernel(pairs, values, jnp.tanh)
    with pytest.raises(Unsupported, match="float64 can keep a tolerance of 2.4e-13"):
        Fourier(1e-14).softmax(pairs, values)
    with pytest.raises(Unsupported, match="largest score"):
        Fourier().hardmax(pairs, values, 0.0)
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        Fourier(0.0)
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        Auto(-1.0)
