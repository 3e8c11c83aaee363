"""A solve says how accurate its fast sums were, and a stored run keeps it."""

import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.storage import RunStore

NAMES = {"sum_bound", "sum_error", "patched_queries", "exact_sums"}


def cloud(sums, count=64):
    points = np.random.default_rng(0).standard_normal((count, 1)) / 2
    return mf.TokenCloud(points, sums=sums)


def flow(beta=1.0):
    return mf.Flow(mf.identity_attention("softmax", 1, beta))


def solved(sums, **options):
    steps = mf.FixedStep(0.5)
    return mf.solve(flow(), cloud(sums), 1.0, save=3, solver=steps, **options)


@pytest.mark.slow
def test_fast_sums_are_in_the_statistics_along_depth():
    statistics = solved(mf.Fourier(1e-6)).statistics
    assert statistics.keys() >= NAMES
    assert all(statistics[name].shape == (3,) for name in NAMES)
    assert float(statistics["sum_error"].max()) <= 1e-6
    assert float(statistics["sum_bound"].max()) <= 1e-6
    assert int(statistics["exact_sums"].sum()) == 0


@pytest.mark.slow
def test_exact_sums_have_no_such_statistics():
    assert not solved(mf.Blocked()).statistics.keys() & NAMES
    assert not solved(mf.Auto()).statistics.keys() & NAMES


@pytest.mark.slow
def test_the_tokens_move_as_with_exact_sums():
    fast, exact = solved(mf.Fourier(1e-9)), solved(mf.Blocked())
    np.testing.assert_allclose(fast.points, exact.points, atol=1e-8)


@pytest.mark.slow
def test_a_stored_run_keeps_them_and_goes_on_bit_for_bit(tmp_path):
    sums = mf.Fourier(1e-6)
    whole = solved(sums, store=RunStore(tmp_path / "whole"))
    for name in NAMES:
        np.testing.assert_array_equal(
            mf.open_run(tmp_path / "whole").statistics[name], whole.statistics[name]
        )
    again = solved(sums, store=RunStore(tmp_path / "whole"))
    np.testing.assert_array_equal(again.points, whole.points)
    assert set(whole.to_xarray()) >= NAMES


@pytest.mark.slow
def test_sums_inside_of_loops_keep_their_reports_to_themselves():
    layer = mf.identity_attention("sinkhorn", 1, 1.0)
    trajectory = mf.solve(
        mf.Flow(layer), cloud(mf.Fourier(1e-6)), 0.5, save=2, solver=mf.FixedStep(0.5)
    )
    assert jnp.isfinite(trajectory.points).all()
