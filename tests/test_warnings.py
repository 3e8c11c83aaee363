"""Warnings point at the line of the user, however deep they arise."""

import jax
import numpy as np
import pytest

import meanformer as mf


def line_of(record) -> str:
    (warning,) = record
    return warning.filename


def test_a_loss_of_digits_is_told_at_the_users_line():
    with jax.enable_x64(False), pytest.warns(mf.errors.PrecisionWarning) as record:
        mf.TokenCloud(np.eye(2))
    assert line_of(record) == __file__


def test_a_solve_that_stops_early_is_told_at_the_users_line():
    flow = mf.Flow(mf.identity_attention("linear", 1))
    with pytest.warns(mf.errors.StoppedEarly) as record:
        mf.solve(flow, mf.TokenCloud([[1.0]]), 1.0, save=2)
    assert line_of(record) == __file__


@pytest.mark.slow
def test_sinkhorn_attention_that_has_not_converged_is_told_at_the_users_line():
    gamma = mf.Sinkhorn(np.eye(2), np.eye(2), np.eye(2), beta=5.0, max_steps=1)
    cloud = mf.TokenCloud(np.array([[0.0, 1.0], [0.3, 0.2], [-1.0, 0.5]]))
    with pytest.warns(mf.errors.StoppedEarly) as record:
        gamma(cloud, cloud.points)
    assert line_of(record) == __file__
