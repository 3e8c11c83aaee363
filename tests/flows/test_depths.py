"""Jumps of the velocity, saved depths and layers that meet to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.experiments import reference_attention, reference_cloud
from meanformer.flows.inputs import layer_depths, put_on_jumps, saved_depths
from meanformer.flows.schedule import FunctionOfDepth, piece_at
from meanformer.storage.run import RunStore

MOST = 96
PRECISIONS = (np.float64, np.float32)


def unchanged(x):
    """No activation."""
    return x


def growth(rate):
    """The velocity that is a multiple of the point."""
    eye = jnp.eye(2, dtype=rate.dtype)
    zero = jnp.zeros((2,), rate.dtype)
    return mf.Perceptron(rate * eye, zero, eye, activation=unchanged)


def rates_of(count, dtype):
    """A rate for every layer, neighbours far apart."""
    return jnp.asarray(np.where(np.arange(count) % 2, -0.4, 0.5), dtype)


def grids(count, dtype):
    """The same depths, computed in different ways."""
    for span in (1.0, float(count), 3.7):
        step = dtype(span / count)
        counted = np.arange(count + 1).astype(dtype)
        yield (
            span,
            [
                np.asarray(jnp.linspace(0, span, count + 1, dtype=dtype)),
                np.linspace(0, span, count + 1).astype(dtype),
                counted * step,
                counted / dtype(count) * dtype(span),
                np.cumsum(np.r_[0, np.full(count, step)], dtype=dtype),
                np.linspace(dtype(span), 0, count + 1, dtype=dtype)[::-1],
            ],
        )


def snaps(count, dtype):
    """Whether depths computed in any way are put on jumps computed in any other."""
    pairs = [
        (jumps, depths[::direction], direction)
        for _, same in grids(count, dtype)
        for jumps in same
        for depths in same
        for direction in (1, -1)
    ]
    jumps, depths, directions = (np.array(part) for part in zip(*pairs, strict=True))
    put = np.array(jax.vmap(put_on_jumps)(jnp.asarray(depths), jumps[:, 1:-1]))
    put[directions < 0] = put[directions < 0, ::-1]
    np.testing.assert_array_equal(put[:, 1:-1], jumps[:, 1:-1])


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_depths_that_meet_jumps_to_rounding_are_put_on_them(dtype):
    for count in (7, 12, 49, MOST):
        snaps(count, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_depths_of_every_number_of_layers_are_put_on_their_jumps(dtype):
    for count in range(2, MOST + 1):
        snaps(count, dtype)


def test_depths_that_differ_by_more_than_rounding_stay_apart():
    jumps = jnp.array([1.0, 7.0])
    depths = jnp.array([0.0, 1 + 1e-10, 7 - 1e-10, 12.0])
    np.testing.assert_array_equal(put_on_jumps(depths, jumps), depths)
    # Rounding of the last depth is no rounding of the first ones.
    decades = jnp.array([0.0, 1e-3, 1e-2, 1e9, 1e12])
    near = jnp.array([1e-3 * (1 + 1e-9), 2e-2])
    np.testing.assert_array_equal(put_on_jumps(decades, near), decades)


def test_a_depth_that_is_zero_to_rounding_is_put_on_a_jump_there():
    depths = -0.3 + 0.1 * np.arange(7)
    assert 0 < depths[3] < 1e-16
    assert float(put_on_jumps(jnp.asarray(depths), jnp.zeros(1))[3]) == 0


def test_a_stretch_a_hair_longer_than_a_multiple_of_the_step_takes_no_other_step():
    found = mf.FixedStep(0.3333333333).first_step(jnp.array(0.0), jnp.array(1.0))
    assert float(found) == pytest.approx(1 / 3, rel=1e-14)


def test_the_derivative_in_a_depth_survives_where_it_is_put_on_a_jump():
    def last(depth):
        return saved_depths(depth, 13, np.float64, jnp.arange(1.0, 13.0))[7]

    assert last(12.0) == 7.0
    np.testing.assert_allclose(jax.grad(last)(jnp.array(12.0)), 7 / 12)


@pytest.mark.parametrize("ends", [(0.0, 12.0), (7.0, 0.0)])
def test_a_schedule_of_many_layers_is_one_flow_after_the_other(ends):
    count = int(max(ends))
    rates = rates_of(count, float)
    flow = mf.Flow(mf.Schedule([growth(r) for r in rates], depths=np.arange(count)))
    path = mf.solve(flow, reference_cloud(), ends, save=count + 1)
    assert path.status == mf.Status.reached
    np.testing.assert_array_equal(path.depths, np.linspace(*ends, count + 1))
    sign = 1 if ends[1] else -1
    factors = np.exp(sign * np.cumsum(rates[::sign]))
    expected = factors[:, None, None] * np.asarray(reference_cloud().points)
    np.testing.assert_allclose(path.points[1:], expected, rtol=1e-5)


def test_fixed_steps_keep_their_order_where_a_saved_depth_meets_a_jump_to_rounding():
    maps = [growth(rate) for rate in rates_of(2, float)]
    for jump in (np.nextafter(0.5, 0), 0.5, np.nextafter(0.5, 1)):
        flow = mf.Flow(mf.Schedule(maps, [0.0, jump]))
        path = mf.solve(flow, reference_cloud(), 1.0, save=3, solver=mf.FixedStep(0.1))
        expected = np.exp(0.05) * reference_cloud().points
        np.testing.assert_allclose(path.points[-1], expected, rtol=1e-7)


def run_padded(start, dtype):
    """Return a compiled solve that serves every number of layers up to the most."""

    @jax.jit
    def run(jumps, rates, depths):
        velocity = FunctionOfDepth(
            lambda depth: growth(
                rates[jnp.searchsorted(jumps.astype(depth.dtype), depth, side="right")]
            ),
            jumps,
        )
        path = mf.solve(
            mf.Flow(velocity), start, (depths[0], depths[-1]), save=depths, rtol=1e-5
        )
        where = path.means if isinstance(start, mf.Gaussian) else path.points[:, 0]
        return path.depths, where, path.status == mf.Status.reached

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokens", "Gaussian"])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_every_number_of_layers_is_solved_in_both_directions(dtype, kind):
    first = jnp.array([1.0, 0.5], dtype)
    start = mf.TokenCloud(first[None])
    if kind == "Gaussian":
        start = mf.Gaussian(first, jnp.eye(2, dtype=dtype))
    run = run_padded(start, dtype)
    padding = jnp.inf * jnp.ones((MOST,), dtype)
    for count in range(2, MOST + 1):
        rates = np.resize(np.asarray(rates_of(count, dtype)), MOST + 1)
        for span, same in grids(count, dtype):
            jumps = padding.at[: count - 1].set(jnp.asarray(same[count % 6][1:-1]))
            for ends in ((0.0, span), (span, 0.0)):
                depths = saved_depths(ends, count + 1, dtype, jumps)
                padded = jnp.append(depths, jnp.full(MOST - count, depths[-1]))
                found, where, is_reached = run(jumps, jnp.asarray(rates), padded)
                assert is_reached
                np.testing.assert_array_equal(found, padded)
                sign = 1 if ends[1] else -1
                exponents = np.cumsum(rates[:count][::sign]) * span / count * sign
                np.testing.assert_allclose(
                    where[1 : count + 1, 0], np.exp(exponents), rtol=2e-3
                )


@pytest.mark.slow
def test_a_stretch_of_the_length_of_rounding_is_reached():
    depths = [0.0, 0.5, np.nextafter(0.5, 1), np.nextafter(0.5, 1) + 4e-16, 1.0]
    for flow in (
        mf.Flow(reference_attention()),
        mf.Flow(mf.Schedule([reference_attention()] * 2)),
    ):
        path = mf.solve(flow, reference_cloud(), 1.0, save=depths)
        assert path.status == mf.Status.reached
        assert path.depths[-1] == 1.0


def test_two_jumps_at_the_distance_of_rounding_are_no_blow_up():
    maps = [growth(rate) for rate in jnp.array([1.0, 3.0, -1.0])]
    for distance in (1, 2, 3, 5, 30):
        second = 0.5 + distance * np.spacing(0.5)
        flow = mf.Flow(mf.Schedule(maps, [0.0, 0.5, second]))
        path = mf.solve(flow, reference_cloud(), 1.0, save=2)
        assert path.status == mf.Status.reached
        np.testing.assert_allclose(path.points[-1], reference_cloud().points, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tokens", "Gaussian"])
def test_tokens_of_another_precision_than_the_jumps_are_moved(kind):
    first = jnp.array([1.0, 0.5], jnp.float32)
    start = mf.TokenCloud(first[None])
    if kind == "Gaussian":
        start = mf.Gaussian(first, jnp.eye(2, dtype=jnp.float32))
    maps = [growth(rate) for rate in rates_of(3, np.float32)]
    path = mf.solve(mf.Flow(mf.Schedule(maps)), start, 1.0, save=4)
    where = path.means[-1] if kind == "Gaussian" else path.points[-1, 0]
    np.testing.assert_allclose(where[0], np.exp(0.2), rtol=1e-5)


@pytest.mark.slow
def test_a_density_passes_jumps_that_are_saved_to_rounding():
    pulls = [mf.identity_attention("softmax", 2, beta) for beta in (1.0, 2.0)]
    density = mf.FourierDensity(jnp.array([[0.1, 0.0], [0.05, 0.02]]))

    def last(jump):
        flow = mf.Flow(mf.Schedule(pulls, [0.0, jump]), space=mf.Sphere())
        path = mf.solve(flow, density, 1.0, save=3)
        assert path.status == mf.Status.reached
        assert path.depths[1] == jump
        return path

    paths = [last(jump) for jump in (0.5, np.nextafter(0.5, 0), np.nextafter(0.5, 1))]
    for path in paths[1:]:
        assert path.accepted_steps[-1] == paths[0].accepted_steps[-1]
        np.testing.assert_allclose(path.moments, paths[0].moments, atol=1e-14)


@pytest.mark.slow
def test_a_stored_run_through_jumps_is_continued_bit_for_bit(tmp_path):
    class Enough(Exception):
        """Raised to end a run."""

    class Interrupt(mf.flows.AbstractProgress):
        def update(self, done, total):
            if done == 5:
                raise Enough

    flow = mf.Flow(mf.Schedule([growth(r) for r in rates_of(7, float)], np.arange(7)))

    def run(folder, **options):
        store = RunStore(tmp_path / folder)
        return mf.solve(flow, reference_cloud(), 7.0, save=8, store=store, **options)

    whole = run("whole")
    with pytest.raises(Enough):
        run("broken", progress=Interrupt())
    resumed = run("broken")
    assert resumed.status == mf.Status.reached
    np.testing.assert_array_equal(resumed.depths, np.arange(8.0))
    np.testing.assert_array_equal(resumed.points, whole.points)


@pytest.mark.parametrize("kind", ["tokens", "Gaussian"])
def test_a_layer_whose_depth_meets_a_jump_to_rounding_is_behind_it(kind):
    # Seven times a twelfth is less than seven twelfths, in floating point.
    assert 7 * (1 / 12) < 7 / 12
    rates = rates_of(12, float)
    flow = mf.Flow(mf.Schedule([growth(rate) for rate in rates], np.arange(12) / 12))
    first = jnp.array([1.0, 0.5])
    start = mf.TokenCloud(first[None])
    if kind == "Gaussian":
        start = mf.Gaussian(first, jnp.eye(2))
    path = mf.run_layers(flow, start, 12)
    where = path.means if kind == "Gaussian" else path.points[:, 0]
    expected = np.cumprod(1 + np.asarray(rates) / 12)
    np.testing.assert_allclose(where[1:, 0], expected, rtol=1e-14)


@pytest.mark.slow
def test_every_layer_of_every_network_takes_its_own_map():
    for dtype in PRECISIONS:
        for count in range(2, MOST + 1):
            starts = jnp.arange(count) / count
            flow = mf.Flow(FunctionOfDepth(growth, starts[1:]))
            step = jnp.asarray(1 / count, dtype)
            depths = layer_depths(flow, count, step)[:-1]
            found = jax.vmap(lambda depth, s=starts: piece_at(s, depth))(depths)
            np.testing.assert_array_equal(found, np.arange(count))


@pytest.mark.parametrize("save", [2, 7])
def test_a_large_depth_in_single_precision_is_not_moved_to_the_next_jump(save):
    ends = np.array([1e4, 1e4 + 0.6], np.float32)
    jumps = jnp.linspace(*ends, 7, dtype=jnp.float32)[1:-1]
    depths = saved_depths(tuple(map(float, ends)), save, jnp.float32, jumps)
    np.testing.assert_array_equal(depths[jnp.array([0, -1])], ends)
    if save == 7:
        np.testing.assert_array_equal(depths[1:-1], jumps)
