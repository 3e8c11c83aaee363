"""Runs whose tokens are joined: stored, read again, continued bit for bit."""

import dataclasses
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import meanformer as mf
from meanformer import storage
from meanformer.storage.run import TRAJECTORY, RunStore

FIVE = np.array([0.0621971438, 0.2143229734, 1.8191226208, 2.9110710095, 3.1879369617])
# The fourth depth lies in the middle of the phase of two clusters.
DEPTHS = jnp.array([0.0, 3.0, 10.0, 200.0, 300.0, 340.0])


def long_run(folder, store=None, **options):
    points = np.stack([np.cos(FIVE), np.sin(FIVE)], axis=1)
    flow = mf.Flow(mf.identity_attention("softmax", 2, 4.0), space=mf.Sphere())
    return mf.solve(
        flow,
        mf.TokenCloud(points),
        340.0,
        save=DEPTHS,
        store=store or RunStore(folder),
        **{"merge": 1e-3, "solver": mf.LongDepth()} | options,
    )


class PullThePlug(RunStore):
    """A store that fails at one depth."""

    def append(self, index, row):
        if index == 4:
            raise OSError("no space left on device")
        super().append(index, row)


def assert_same(first, second):
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


def resumed_and_whole(tmp_path, **options):
    whole = long_run(tmp_path / "whole", **options)
    folder = tmp_path / "broken"
    with pytest.raises(OSError, match="no space left"):
        long_run(folder, PullThePlug(folder), **options)
    assert len(mf.open_run(folder)) == 4
    return long_run(folder, **options), whole


@pytest.mark.slow
def test_a_long_run_killed_inside_a_phase_is_continued_bit_for_bit(tmp_path):
    resumed, whole = resumed_and_whole(tmp_path)
    assert len(whole.merges) == 4
    assert_same(resumed, whole)
    # A run that a script started does not tell its flow.
    unknown = dataclasses.replace(whole, flow=None)
    assert_same(mf.open_run(tmp_path / "broken"), unknown)


@pytest.mark.slow
def test_a_merging_run_of_another_solver_is_continued_bit_for_bit(tmp_path):
    resumed, whole = resumed_and_whole(tmp_path, solver=mf.Adaptive())
    assert len(whole.merges) == 4
    assert_same(resumed, whole)


@pytest.mark.slow
def test_the_joins_of_a_run_are_read_by_xarray_alone(tmp_path):
    path = long_run(tmp_path / "run")
    dataset = xarray.open_zarr(tmp_path / "run" / TRAJECTORY).isel(depth=-1)
    joined = np.flatnonzero(dataset["joined_leader"] != np.arange(5))
    order = joined[np.argsort(dataset["joined_depth"].values[joined])]
    np.testing.assert_array_equal(order, path.merges.tokens)
    np.testing.assert_array_equal(dataset["joined_depth"][order], path.merges.depths)
    path.save(tmp_path / "saved.zarr")
    assert_same(mf.open_run(tmp_path / "saved.zarr"), path)
    with pytest.raises(mf.InvalidInput, match="other merging"):
        long_run(tmp_path / "run", merge=1e-4)


@pytest.mark.slow
def test_a_run_without_merging_is_not_one_with_it(tmp_path):
    flow = mf.Flow(mf.PointMap(jnp.negative, takes=2))
    cloud = mf.TokenCloud([[1.0, 0.0]])

    def run(**options):
        return mf.solve(flow, cloud, 1.0, save=2, store=RunStore(tmp_path), **options)

    plain = run()
    assert mf.open_run(tmp_path).merges is None
    with pytest.raises(mf.InvalidInput, match="other merging"):
        run(merge=1e-9)
    np.testing.assert_array_equal(run().points, plain.points)


CONFIG = """
[tokens]
points = [[1, 0], [0, 1], [0.6, 0.8]]

[attention]
beta = 20.0

[flow]
space = "sphere"

[solve]
depth = {depth}
saves_per_decade = 1
first_depth = 1e10
solver = "long-depth"
merge = 1e-6
"""


@pytest.mark.slow
def test_a_long_simulation_is_extended_as_if_it_had_been_long(tmp_path):
    paths = []
    for depth in ("1e12", "1e20"):
        config = tmp_path / f"{depth}.toml"
        config.write_text(textwrap.dedent(CONFIG.format(depth=depth)))
        paths.append(storage.simulate(config, tmp_path / f"run-{depth}"))
    extended = storage.extend(tmp_path / "run-1e12", 1e20)
    assert_same(extended, paths[1])
    np.testing.assert_allclose(extended.depths[1:], 10.0 ** np.arange(10, 21))
    assert len(extended.merges) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('merge = "near"', "solve.merge is 'near'"),
        ("merge = -1.0", "must be true, false, or a positive distance"),
        ('solver = "long"', "did you mean long-depth"),
        ("depth = 3e20", r"the nearest are 1e\+20 and 1e\+21"),
        ("saves_per_decade = 2.5", "must be a whole number"),
    ],
)
def test_a_mistake_about_merging_is_told(line, message, tmp_path):
    config = tmp_path / "run.toml"
    text = textwrap.dedent(CONFIG.format(depth="1e20"))
    key = line.partition(" ")[0]
    lines = [line if row.startswith(key) else row for row in text.splitlines()]
    config.write_text("\n".join(lines))
    with pytest.raises(mf.InvalidInput, match=message):
        storage.simulate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_flow_that_long_depth_cannot_follow_is_told(
    tmp_path,
):
    config = tmp_path / "run.toml"
    text = textwrap.dedent(CONFIG.format(depth="1e20"))
    config.write_text(text.replace("sphere", "euclidean"))
    with pytest.raises(mf.InvalidInput, match="is for the sphere"):
        storage.simulate(config, tmp_path / "run")
