"""Runs on disk: written depth by depth, readable at any moment, restartable."""

import json

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray

import meanformer as mf
from meanformer import storage
from meanformer.experiments import reference_attention, reference_cloud
from meanformer.storage.format import METADATA
from meanformer.storage.run import TRAJECTORY, RunStore

STEPS = {"solver": mf.FixedStep(0.1)}


def flow():
    return mf.Flow(reference_attention())


def solve_into(folder, **options):
    return mf.solve(
        flow(),
        reference_cloud(),
        1.0,
        save=6,
        store=RunStore(folder),
        **STEPS | options,
    )


def test_a_stored_run_is_read_by_xarray_alone(tmp_path):
    path = solve_into(tmp_path, probes=reference_cloud().points[:2])
    dataset = xarray.open_zarr(tmp_path / TRAJECTORY)
    assert dict(dataset.sizes) == {"depth": 6, "token": 4, "coordinate": 2, "probe": 2}
    np.testing.assert_array_equal(dataset["points"], path.points)
    np.testing.assert_array_equal(dataset["depth"], path.depths)
    np.testing.assert_array_equal(dataset["probes"], path.probes)
    assert dataset["status"].attrs["flag_meanings"].startswith("reached")


def test_open_run_gives_back_the_trajectory(tmp_path):
    cloud = reference_cloud(positions=jnp.array([0.25, 0.5, 0.75, 1.0]))
    path = mf.solve(
        mf.Flow(mf.Masked(reference_attention())),
        cloud,
        1.0,
        save=3,
        store=RunStore(tmp_path),
    )
    again = mf.open_run(tmp_path)
    for name in ("depths", "points", "velocities", "weights", "positions"):
        np.testing.assert_array_equal(getattr(again, name), getattr(path, name))
    assert bool(again.status == mf.Status.reached)
    assert again.probes is None


def test_a_saved_trajectory_is_opened_like_a_run(tmp_path):
    path = mf.solve(flow(), reference_cloud(), 1.0, save=3)
    path.save(tmp_path / "path.zarr")
    np.testing.assert_array_equal(
        mf.open_run(tmp_path / "path.zarr").points, path.points
    )


def test_storing_does_not_change_the_result(tmp_path):
    stored = solve_into(tmp_path)
    plain = mf.solve(flow(), reference_cloud(), 1.0, save=6, **STEPS)
    np.testing.assert_allclose(stored.points, plain.points, atol=1e-14)


class PullThePlug(RunStore):
    """A store that fails at one depth, before or after its rows are written."""

    def __init__(self, path, index, *, after_rows):
        super().__init__(path)
        self.index, self.after_rows = index, after_rows

    def append(self, index, state, velocities):
        if index == self.index:
            if self.after_rows:
                super().append(index, state, velocities)
                self._arrays.commit(index)
            raise OSError("no space left on device")
        super().append(index, state, velocities)


@pytest.mark.parametrize("after_rows", [False, True])
@pytest.mark.parametrize("index", [0, 1, 3])
def test_what_was_written_before_a_full_disk_stays_and_is_continued(
    tmp_path, index, after_rows
):
    whole = solve_into(tmp_path / "whole")
    folder = tmp_path / "broken"
    store = PullThePlug(folder, index, after_rows=after_rows)
    with pytest.raises(OSError, match="no space left"):
        mf.solve(flow(), reference_cloud(), 1.0, save=6, store=store, **STEPS)
    if index > 0:
        assert len(mf.open_run(folder)) == index
    resumed = solve_into(folder)
    np.testing.assert_array_equal(resumed.points, whole.points)
    np.testing.assert_array_equal(resumed.velocities, whole.velocities)


def test_a_run_with_noise_is_continued_bit_for_bit(tmp_path):
    noisy = mf.Flow(reference_attention(), noise=0.3)

    def solved(folder, depths):
        return mf.solve(
            noisy,
            reference_cloud(),
            float(depths[-1]),
            save=depths,
            solver=mf.FixedStep(0.05),
            key=jr.key(7),
            store=RunStore(folder),
        )

    depths = jnp.array([0.0, 0.2, 0.4, 0.6, 0.8])
    whole = solved(tmp_path / "whole", depths)
    solved(tmp_path / "part", depths[:3])
    longer = solved(tmp_path / "part", depths)
    np.testing.assert_array_equal(longer.points, whole.points)


def test_a_run_that_stopped_is_not_taken_further(tmp_path):
    growing = mf.Flow(mf.identity_attention("linear", 2))
    cloud = mf.TokenCloud([[1.0, 0.0]])
    with pytest.warns(mf.StoppedEarly):
        first = mf.solve(growing, cloud, 1.0, store=RunStore(tmp_path))
    with pytest.warns(mf.StoppedEarly):
        second = mf.solve(growing, cloud, 1.0, store=RunStore(tmp_path))
    np.testing.assert_array_equal(first.points, second.points)
    assert bool(mf.open_run(tmp_path).status == mf.Status.blow_up_suspected)


def test_another_run_in_the_same_folder_is_refused(tmp_path):
    solve_into(tmp_path)
    with pytest.raises(mf.InvalidInput, match="other tokens"):
        mf.solve(
            flow(),
            mf.TokenCloud(2 * reference_cloud().points),
            1.0,
            save=6,
            store=RunStore(tmp_path),
        )
    with pytest.raises(mf.InvalidInput, match="other saved depths"):
        mf.solve(flow(), reference_cloud(), 1.0, save=11, store=RunStore(tmp_path))
    with pytest.raises(mf.InvalidInput, match="more than"):
        mf.solve(flow(), reference_cloud(), 1.0, save=3, store=RunStore(tmp_path))


def test_two_writers_at_once_are_refused(tmp_path):
    first, second = RunStore(tmp_path), RunStore(tmp_path)
    first.begin(jnp.arange(3.0), reference_cloud())
    with pytest.raises(mf.InvalidInput, match="another process"):
        second.begin(jnp.arange(3.0), reference_cloud())
    second.end()
    first.end()


def test_a_folder_without_a_run_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(mf.InvalidInput, match="does not exist"):
        mf.open_run(tmp_path / "nowhere")
    with pytest.raises(mf.InvalidInput, match="holds no trajectory"):
        mf.open_run(tmp_path)
    with pytest.raises(mf.InvalidInput, match="no run that can be resumed"):
        storage.resume(tmp_path)


def test_a_simulation_holds_all_it_takes_to_redo_it(config, tmp_path):
    folder = tmp_path / "out"
    path = storage.simulate(config, folder)
    record = json.loads((folder / "run.json").read_text())
    assert record["config"]["attention"]["beta"] == 4.0
    assert record["double_precision"] is True
    assert {"meanformer", "jax", "diffrax"} <= set(record["versions"])
    assert storage.changed_versions(folder) == {}
    again = tmp_path / "again"
    again.mkdir()
    (again / "run.json").write_text((folder / "run.json").read_text())
    np.testing.assert_array_equal(storage.resume(again).points, path.points)


def test_an_extended_run_equals_one_that_was_long_from_the_start(config, tmp_path):
    storage.simulate(config, tmp_path / "short")
    extended = storage.extend(tmp_path / "short", 4.0)
    config.write_text(config.read_text().replace("depth = 3.0", "depth = 4.0"))
    long = storage.simulate(config, tmp_path / "long")
    np.testing.assert_array_equal(extended.points, long.points)
    np.testing.assert_array_equal(extended.depths, long.depths)
    with pytest.raises(mf.InvalidInput, match="already goes to 4.0"):
        storage.extend(tmp_path / "short", 3.5)


def test_a_used_folder_is_refused_for_a_new_simulation(config, tmp_path):
    with pytest.raises(mf.InvalidInput, match="not empty"):
        storage.simulate(config, tmp_path)


def test_metadata_is_replaced_in_one_step(tmp_path):
    solve_into(tmp_path)
    assert not (tmp_path / TRAJECTORY / (METADATA + ".new")).exists()
    document = json.loads((tmp_path / TRAJECTORY / METADATA).read_text())
    assert document["metadata"]["points/.zarray"]["shape"] == [6, 4, 2]
