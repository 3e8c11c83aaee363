"""Paths of Gaussians on disk."""

import re

import numpy as np
import pytest

import meanformer as mf
from gaussian_reference import COVARIANCE, MEAN
from meanformer.errors import InvalidInput
from meanformer.flows import GaussianTrajectory


@pytest.fixture(scope="module")
def path():
    gamma = mf.Softmax(np.eye(2), np.eye(2), -np.eye(2))
    start = mf.Gaussian(MEAN, COVARIANCE)
    return mf.run_layers(mf.Flow(gamma), start, 4, step=0.2)


def test_a_path_of_gaussians_is_read_as_it_was_saved(path, tmp_path):
    path.save(tmp_path / "run")
    found = mf.open_run(tmp_path / "run")
    assert isinstance(found, GaussianTrajectory)
    for name in ("means", "covariances", "linear", "log_volumes", "slopes", "drifts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(path, name))
    for name in ("depths", "root", "accepted_steps", "rejected_steps"):
        np.testing.assert_array_equal(getattr(found, name), getattr(path, name))
    assert bool(found.status == path.status)
    np.testing.assert_array_equal(found.at(0.3).mean(), path.at(0.3).mean())


def test_a_path_is_not_saved_over_another(path, tmp_path):
    folder = tmp_path / "run"
    path.save(folder)
    with pytest.raises(InvalidInput, match=re.escape(f"{folder} exists")):
        path.save(folder)
