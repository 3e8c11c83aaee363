"""Runs of Gaussians and of densities: killed, continued, extended, opened."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import meanformer as mf
from meanformer import flows, storage
from meanformer.errors import InvalidInput, Unsupported
from meanformer.flows import DensityTrajectory, GaussianTrajectory, Spectral
from meanformer.storage.run import TRAJECTORY, RunStore

GAUSSIAN = """
[gaussian]
mean = [0.3, -0.2]
covariance = [[1.0, 0.2], [0.2, 0.5]]
[attention]
value = -1
[solve]
depth = {depth}
save_every = 0.5
"""
DENSITY = """
[density]
concentration = 0.5
angle = 1.0
[attention]
beta = 2.0
[flow]
space = "sphere"
[solve]
depth = {depth}
save_every = 1.0
most_modes = 256
"""
FILES = {
    "gaussian": (GAUSSIAN, GaussianTrajectory),
    "density": (DENSITY, DensityTrajectory),
}
KINDS = pytest.mark.parametrize("kind", FILES)


class PullThePlug(RunStore):
    """A store that fails at one depth."""

    def append(self, index, row):
        if index == 3:
            raise OSError("no space left on device")
        super().append(index, row)


def written(tmp_path, kind, depth):
    text, expected = FILES[kind]
    config = tmp_path / f"{kind}-{depth}.toml"
    config.write_text(text.format(depth=depth))
    return config, expected


def assert_same(first, second):
    assert type(first) is type(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


@KINDS
def test_a_killed_simulation_is_resumed_bit_for_bit(kind, tmp_path, monkeypatch):
    config, expected = written(tmp_path, kind, 5.0)
    whole = storage.simulate(config, tmp_path / "whole")
    assert isinstance(whole, expected)
    folder = tmp_path / "broken"
    with monkeypatch.context() as patched:
        patched.setattr("meanformer.storage.simulation.RunStore", PullThePlug)
        with pytest.raises(OSError, match="no space left"):
            storage.simulate(config, folder)
    broken = mf.open_run(folder)
    assert len(broken) == 3
    assert broken.status == flows.Status.interrupted
    assert_same(storage.resume(folder), whole)
    assert_same(mf.open_run(folder), whole)


@KINDS
def test_an_extended_simulation_equals_a_long_one(kind, tmp_path):
    short, _ = written(tmp_path, kind, 3.0)
    long, _ = written(tmp_path, kind, 5.0)
    storage.simulate(short, tmp_path / "short")
    extended = storage.extend(tmp_path / "short", 5.0)
    assert_same(extended, storage.simulate(long, tmp_path / "long"))


def test_modes_that_are_added_on_the_way_are_known_again(tmp_path):
    config, _ = written(tmp_path, "density", 5.0)
    path = storage.simulate(config, tmp_path / "run")
    modes = np.asarray(path.modes)
    assert modes[0] < modes[-1] == path.moments.shape[1]
    assert not np.any(np.asarray(path.moments)[0, modes[0] :])


def test_a_stored_density_is_what_solve_returns(tmp_path):
    config, _ = written(tmp_path, "density", 3.0)
    stored = storage.simulate(config, tmp_path / "run")

    def bell(angles):
        return jnp.exp(0.5 * (jnp.cos(angles - 1.0) - 1))

    flow = mf.Flow(mf.identity_attention("softmax", 2, 2.0), space=mf.Sphere())
    start = mf.FourierDensity.from_function(bell, normalize=True)
    path = mf.solve(flow, start, 3.0, save=4, solver=Spectral(256))
    np.testing.assert_allclose(stored.moments, path.moments, atol=1e-12)


@pytest.mark.slow
def test_a_saved_density_is_opened_like_a_run(tmp_path):
    flow = mf.Flow(mf.identity_attention("softmax", 2, 1.0), space=mf.Sphere())
    path = mf.solve(flow, mf.FourierDensity([[0.2, 0.1]]), 0.5, save=3)
    path.save(tmp_path / "density")
    assert_same(mf.open_run(tmp_path / "density"), path)


@KINDS
def test_a_run_of_another_measure_is_refused(kind, tmp_path):
    config, _ = written(tmp_path, kind, 3.0)
    storage.simulate(config, tmp_path / "run")
    flow = mf.Flow(mf.identity_attention("softmax", 2, 1.0))
    cloud = mf.TokenCloud([[1.0, 0.0], [0.0, 1.0]])
    with pytest.raises(mf.errors.InvalidInput, match="holds a run that differs in"):
        mf.solve(flow, cloud, 1.0, store=RunStore(tmp_path / "run"))


def test_covariances_are_read_by_xarray_alone(tmp_path):
    config, _ = written(tmp_path, "gaussian", 3.0)
    path = storage.simulate(config, tmp_path / "run")
    dataset = xarray.open_zarr(tmp_path / "run" / TRAJECTORY)
    np.testing.assert_allclose(dataset["covariances"], path.covariances, rtol=1e-14)
    np.testing.assert_array_equal(dataset["depth"], path.depths)


def test_two_measures_in_one_file_are_refused(tmp_path):
    config = tmp_path / "both.toml"
    config.write_text(GAUSSIAN.format(depth=1.0) + "[tokens]\npoints = [[0.0, 1.0]]\n")
    with pytest.raises(mf.errors.InvalidInput, match=r"\[tokens\] and \[gaussian\]"):
        storage.simulate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_noise_on_a_gaussian_is_refused_whatever_the_steps(tmp_path):
    config, _ = written(tmp_path, "gaussian", 2.0)
    config.write_text(config.read_text() + "[flow]\nnoise = 0.1\nseed = 1\n")
    with pytest.raises(Unsupported, match="a Gaussian flows without noise"):
        storage.simulate(config, tmp_path / "run")


def test_an_angle_beside_moments_is_refused(tmp_path):
    config = tmp_path / "density.toml"
    table = "moments = [[0.1, 0.2]]\nangle = 1.0"
    text = DENSITY.replace("concentration = 0.5\nangle = 1.0", table)
    config.write_text(text.format(depth=2.0))
    with pytest.raises(InvalidInput, match="angle goes with concentration"):
        storage.simulate(config, tmp_path / "run")


class Decay(flows.AbstractTrajectory):
    """Numbers along depth."""

    AXES: ClassVar = {
        "depth": ("depth",),
        "numbers": ("depth", "number"),
        "accepted_steps": ("depth",),
        "rejected_steps": ("depth",),
    }
    UNMOVED: ClassVar = ()

    depths: Any
    numbers: Any
    status: Any
    accepted_steps: Any
    rejected_steps: Any

    def columns(self):
        return {
            "depth": self.depths,
            "numbers": self.numbers,
            "accepted_steps": self.accepted_steps,
            "rejected_steps": self.rejected_steps,
        }

    @classmethod
    def from_columns(cls, columns, status):
        first = (columns["depth"], columns["numbers"], status)
        return cls(*first, columns["accepted_steps"], columns["rejected_steps"])


class Decaying(flows.AbstractIntegrated):
    """Numbers that decay."""

    settings: flows.Settings

    def stretch(self, state, end, mode):
        equation = flows.term(lambda depth, moving: -moving, state, end)
        return flows.in_depth(state, end, equation, self.settings, mode)

    def rates(self, state):
        return -state.moving

    def trajectory(self, states, rates):
        steps = (states.accepted_steps, states.rejected_steps)
        return Decay(states.depth, states.moving, states.status, *steps)

    def resumed(self, trajectory):
        return flows.State.at_end_of(trajectory, trajectory.numbers)

    def request(self, start):
        return {"numbers": start.moving, **self.settings.request()}


@pytest.mark.slow
def test_a_trajectory_of_ones_own_is_continued_and_opened(tmp_path):
    dynamics, depths = Decaying(flows.Settings(mf.Adaptive())), jnp.linspace(0, 2, 5)
    start = flows.State.first(depths[0], jnp.array([1.0, 2.0]))
    whole = flows.drive(dynamics, start, depths)
    flows.drive(dynamics, start, depths[:3], store=RunStore(tmp_path))
    longer = flows.drive(dynamics, start, depths, store=RunStore(tmp_path))
    opened = mf.open_run(tmp_path, kind=Decay)
    expected = np.exp(-depths)[:, None] * np.array([1.0, 2.0])
    np.testing.assert_allclose(whole.numbers, expected, atol=2e-6)
    for other in (longer, opened):
        np.testing.assert_array_equal(other.numbers, whole.numbers)
    with pytest.raises(InvalidInput, match="give its class as kind"):
        mf.open_run(tmp_path)
