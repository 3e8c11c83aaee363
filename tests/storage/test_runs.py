"""Runs on disk: written depth by depth, readable at any moment, restartable."""

import fcntl
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray

import meanformer as mf
from meanformer import storage
from meanformer.experiments import reference_attention, reference_cloud
from meanformer.storage.format import METADATA, replace_file
from meanformer.storage.run import TRAJECTORY, RunStore

STEPS = {"solver": mf.FixedStep(0.1)}


def flow():
    return mf.Flow(reference_attention())


def solve_into(folder, **options):
    return mf.solve(
        options.pop("flow", flow()),
        options.pop("cloud", reference_cloud()),
        1.0,
        store=RunStore(folder),
        **{"save": 6} | STEPS | options,
    )


@pytest.mark.slow
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


def test_a_run_that_goes_on_knows_its_flow(tmp_path):
    solve_into(tmp_path / "run")
    again = solve_into(tmp_path / "run")
    given = flow().velocity.gamma.value
    np.testing.assert_array_equal(again.flow.velocity.gamma.value, given)


def test_storing_does_not_change_the_result(tmp_path):
    stored = solve_into(tmp_path)
    plain = mf.solve(flow(), reference_cloud(), 1.0, save=6, **STEPS)
    np.testing.assert_allclose(stored.points, plain.points, atol=1e-14)


class PullThePlug(RunStore):
    """A store that fails at one depth, before or after its rows are written."""

    def __init__(self, path, index, *, after_rows):
        super().__init__(path)
        self.index, self.after_rows = index, after_rows

    def append(self, index, row):
        if index == self.index:
            if self.after_rows:
                super().append(index, row)
                self._arrays.commit(index)
            raise OSError("no space left on device")
        super().append(index, row)


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


@pytest.mark.slow
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
    with pytest.warns(mf.errors.StoppedEarly):
        first = mf.solve(growing, cloud, 1.0, store=RunStore(tmp_path))
    with pytest.warns(mf.errors.StoppedEarly):
        second = mf.solve(growing, cloud, 1.0, store=RunStore(tmp_path))
    np.testing.assert_array_equal(first.points, second.points)
    assert bool(mf.open_run(tmp_path).status == mf.Status.blow_up_suspected)


def test_a_run_with_other_depths_in_the_same_folder_is_refused(tmp_path):
    solve_into(tmp_path)
    with pytest.raises(mf.InvalidInput, match="other saved depths; list in save="):
        solve_into(tmp_path, save=11)
    with pytest.raises(mf.InvalidInput, match="more than"):
        solve_into(tmp_path, save=3)


OTHERS = {
    "flow": {"flow": mf.Flow(reference_attention(beta=2.0))},
    "tokens": {"cloud": mf.TokenCloud(2 * reference_cloud().points)},
    "weights": {"cloud": mf.TokenCloud(reference_cloud().points)},
    "probes": {"probes": [[0.0, 1.0]]},
    "solver": {"solver": mf.FixedStep(0.05)},
    "tolerances": {"rtol": 1e-3},
    "stop conditions": {"stop": mf.flows.EscapeRadius(9.0)},
}


@pytest.mark.parametrize("part", OTHERS)
def test_points_of_one_run_are_never_given_out_as_those_of_another(tmp_path, part):
    solve_into(tmp_path)
    with pytest.raises(mf.InvalidInput, match=f"a run that differs in .*{part}"):
        solve_into(tmp_path, **OTHERS[part])


@pytest.mark.slow
def test_a_run_is_known_by_the_number_of_its_devices_not_by_their_names(tmp_path):
    def on(devices):
        mesh = jax.sharding.Mesh(np.array(devices), ("tokens",))
        points, weights = reference_cloud().points, reference_cloud().weights
        return mf.TokenCloud(points, weights, sums=mf.Sharded(mesh))

    devices = jax.devices()
    path = solve_into(tmp_path, cloud=on(devices[:2]))
    np.testing.assert_allclose(path.points, solve_into(tmp_path / "one").points)
    assert len(solve_into(tmp_path, cloud=on(devices[2:]))) == 6
    with pytest.raises(mf.InvalidInput, match="a run that differs in tokens"):
        solve_into(tmp_path, cloud=on(devices))


@pytest.mark.slow
def test_a_run_with_noise_is_refused_another_key(tmp_path):
    noisy = mf.Flow(reference_attention(), noise=0.3)
    solve_into(tmp_path, flow=noisy, key=jr.key(7))
    with pytest.raises(mf.InvalidInput, match="a run that differs in key"):
        solve_into(tmp_path, flow=noisy, key=jr.key(8))


@pytest.mark.slow
def test_a_function_is_known_by_its_name_and_what_it_encloses(tmp_path):
    def cooling(rate):
        return mf.Flow(lambda depth: reference_attention(beta=1 + rate * depth))

    solve_into(tmp_path, flow=cooling(1.0))
    assert len(solve_into(tmp_path, flow=cooling(1.0))) == 6
    with pytest.raises(mf.InvalidInput, match="a run that differs in flow"):
        solve_into(tmp_path, flow=cooling(2.0))


def test_a_trajectory_saved_by_hand_is_not_overwritten(tmp_path):
    path = mf.solve(flow(), reference_cloud(), 1.0, save=6, **STEPS)
    path.save(tmp_path / TRAJECTORY)
    with pytest.raises(mf.InvalidInput, match="not written by a run"):
        solve_into(tmp_path)
    assert len(mf.open_run(tmp_path)) == 6


@pytest.mark.parametrize(
    ("chunk", "left"),
    [("points/3.0.0", 3), ("status/5", 5), ("accepted_steps/0", 0), ("weights/0", 0)],
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_row_that_the_disk_lost_is_told_and_computed_again(
    tmp_path, chunk, left, is_cut
):
    whole = solve_into(tmp_path)
    lost = tmp_path / TRAJECTORY / chunk
    lost.unlink()
    if is_cut:
        lost.touch()
    told = f"from number {left} on, of 6, are missing"
    with pytest.warns(mf.errors.LostDepths, match=told):
        assert_opened(tmp_path, whole, left)
    with pytest.warns(mf.errors.LostDepths, match=told):
        np.testing.assert_array_equal(solve_into(tmp_path).points, whole.points)
    np.testing.assert_array_equal(mf.open_run(tmp_path).points, whole.points)


def assert_opened(folder, whole, left):
    """Check that so many depths are there, or that one says that there are none."""
    if left > 0:
        shorter = mf.open_run(folder).points
        np.testing.assert_array_equal(shorter, whole.points[:left])
    else:
        with pytest.raises(mf.InvalidInput, match="no finished depth"):
            mf.open_run(folder)


def test_what_is_announced_has_reached_the_disk(tmp_path, monkeypatch):
    flushed, flush = set(), os.fsync

    def watch(handle):
        flushed.add(os.path.realpath(f"/proc/self/fd/{handle}"))
        flush(handle)

    def announce(temporary, path):
        if path.name == METADATA:
            on_disk = path.parent.rglob("*")
            written = {str(p) for p in on_disk if not p.name.startswith(METADATA)}
            assert written <= flushed
        os.replace(temporary, path)

    monkeypatch.setattr(os, "fsync", watch)
    monkeypatch.setattr(Path, "replace", announce)
    solve_into(tmp_path)
    assert str(tmp_path / TRAJECTORY / METADATA) + ".new" in flushed


def test_two_writers_at_once_are_refused(tmp_path):
    class Intruder(RunStore):
        """A store that finds a second writer at its side."""

        def append(self, index, row):
            with pytest.raises(mf.InvalidInput, match="another process"):
                solve_into(self.path)
            super().append(index, row)

    store = Intruder(tmp_path)
    mf.solve(flow(), reference_cloud(), 1.0, save=6, store=store, **STEPS)
    assert len(solve_into(tmp_path)) == 6


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


@pytest.mark.slow
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


def edited(config, **changes):
    """Write other values of some keys into a configuration file."""
    text = config.read_text()
    for name, value in changes.items():
        text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
    config.write_text(text)
    return config


@pytest.mark.parametrize(
    "extra",
    [
        "rtol = -1.0",
        "atol = 0",
        "[tokens]\npoints = [[2.0, 0.0]]",
        "[flow]\nspace = 'sphere'\nnoise = 0.1",
        "[attention]\nmask = 'causal'",
        "[attention]\nbeta = -1.0",
        "[attention]\nvalue = [[1.0, 0.0, 0.0]]",
    ],
)
def test_bad_input_leaves_no_folder_behind(extra, config, tmp_path):
    text = config.read_text()
    if extra.startswith("["):
        table = extra.partition("\n")[0]
        before, _, after = text.partition(table)
        text = before + extra + "\n\n[" + after.partition("\n\n[")[2]
    else:
        text += extra
    config.write_text(text)
    with pytest.raises(mf.InvalidInput) as caught:
        storage.simulate(config, tmp_path / "out")
    assert not re.search(r"\w\(|\w=", str(caught.value))  # nothing of Python
    assert not (tmp_path / "out").exists()


def test_a_flow_that_cannot_be_traced_leaves_no_folder_behind(tmp_path):
    masked = mf.Flow(mf.Masked(reference_attention()))
    with pytest.raises(mf.InvalidInput):
        solve_into(tmp_path / "out", flow=masked)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "names", [(".lock",), ("run.json.new", ".lock"), ("run.json.new", "tokens.npy")]
)
def test_a_run_killed_before_its_record_was_whole_starts_anew(names, config, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(mf.InvalidInput, match="start one with simulate"):
        storage.resume(folder)
    edited(config, depth=0.2)
    np.save(tmp_path / "points.npy", np.eye(3))
    text = config.read_text().partition("[attention]")
    config.write_text(f"[tokens]\nfile = 'points.npy'\n{''.join(text[1:])}")
    assert len(storage.simulate(config, folder)) == 3
    (tmp_path / "points.npy").unlink()
    assert len(storage.resume(folder)) == 3


def test_a_file_of_the_users_own_makes_a_folder_used(config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokens.npy").touch()
    with pytest.raises(mf.InvalidInput, match="not empty"):
        storage.simulate(config, tmp_path / "out")


@pytest.mark.slow
def test_extending_waits_for_the_lock_and_keeps_the_versions(
    config, tmp_path, monkeypatch
):
    folder = tmp_path / "out"
    storage.simulate(edited(config, depth=0.2), folder)
    record = (folder / "run.json").read_text()
    with (folder / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(mf.InvalidInput, match="another process"):
            storage.extend(folder, 0.4)
    assert (folder / "run.json").read_text() == record
    monkeypatch.setattr("meanformer.storage.simulation.version", lambda name: "9.9")
    assert len(storage.extend(folder, 0.4)) == 5
    longer, then = json.loads((folder / "run.json").read_text()), json.loads(record)
    assert longer["versions"] == then["versions"]
    (line,) = longer["history"]
    assert (line["action"], line["depth"]) == ("extend", 0.4)
    assert line["versions"]["jax"] == "9.9"


def test_a_run_is_resumed_by_other_versions(config, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    path = storage.simulate(edited(config, depth=0.2), folder)
    monkeypatch.setattr("meanformer.storage.simulation.version", lambda name: "9.9")
    np.testing.assert_array_equal(storage.resume(folder).points, path.points)
    record = json.loads((folder / "run.json").read_text())
    assert [line["action"] for line in record["history"]] == ["resume"]
    assert storage.changed_versions(folder)["jax"] == (record["versions"]["jax"], "9.9")


def test_an_edited_record_is_refused_rather_than_mixed(config, tmp_path):
    folder = tmp_path / "out"
    storage.simulate(edited(config, depth=0.2), folder)
    record = folder / "run.json"
    record.write_text(record.read_text().replace('"beta": 4.0', '"beta": 2.0'))
    with pytest.raises(mf.InvalidInput, match="checksum does not match"):
        storage.resume(folder)
    unsealed = json.loads(record.read_text())
    del unsealed["crc32"]
    record.write_text(json.dumps(unsealed))
    with pytest.raises(mf.InvalidInput, match="a run that differs in flow"):
        storage.resume(folder)


@pytest.mark.parametrize("depth", [0.25, float("inf"), float("nan"), 0.1])
def test_a_depth_that_would_not_be_reached_is_refused(depth, config, tmp_path):
    folder = tmp_path / "out"
    storage.simulate(edited(config, depth=0.2), folder)
    record = (folder / "run.json").read_text()
    with pytest.raises(mf.InvalidInput, match="depth is"):
        storage.extend(folder, depth)
    assert (folder / "run.json").read_text() == record


def test_a_run_in_32_bits_goes_on_in_32_bits(config, tmp_path):
    folder = tmp_path / "out"
    edited(config, depth=0.2, save_every="0.1\\nsolver = 'fixed'\\nstep = 0.1")
    with jax.enable_x64(False):
        short = storage.simulate(config, folder)
    assert short.points.dtype == jnp.float32
    longer = storage.extend(folder, 0.4)
    assert longer.points.dtype == jnp.float32
    np.testing.assert_array_equal(longer.points[:3], short.points)
    np.testing.assert_array_equal(storage.resume(folder).points, longer.points)
    assert jax.config.read("jax_enable_x64")


def test_folders_and_files_may_be_given_as_texts(config, tmp_path):
    folder = str(tmp_path / "run")
    path = storage.simulate(str(config), folder)
    assert not storage.changed_versions(folder)
    np.testing.assert_array_equal(storage.resume(folder).points, path.points)
    with pytest.raises(mf.InvalidInput, match="the run already goes to"):
        storage.extend(folder, float(path.depths[-1]))


def test_a_record_cut_in_half_is_told_to_be_restored_and_not_to_start_anew(
    config, tmp_path
):
    storage.simulate(config, tmp_path / "run")
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text()[:200])
    for door in (mf.open_run, storage.resume):
        with pytest.raises(mf.InvalidInput, match=r"run.json is damaged .+ a copy"):
            door(tmp_path / "run")


@pytest.mark.parametrize(
    "text", ["[]", "{}", "3", '{"config": {}, "versions": {}}', '{"config": []}', "{"]
)
def test_a_damaged_record_is_told_in_one_sentence(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(mf.InvalidInput, match="no run that can be resumed"):
        storage.resume(tmp_path)
    with pytest.raises(mf.InvalidInput, match="no run that can be resumed"):
        storage.changed_versions(tmp_path)


def test_a_run_without_a_finished_depth_is_told_in_one_sentence(tmp_path):
    store = PullThePlug(tmp_path, 0, after_rows=True)
    with pytest.raises(OSError, match="no space left"):
        mf.solve(flow(), reference_cloud(), 1.0, save=6, store=store, **STEPS)
    with pytest.raises(mf.InvalidInput, match="no finished depth yet"):
        mf.open_run(tmp_path)


def test_metadata_is_replaced_in_one_step(tmp_path, monkeypatch):
    metadata, seen = tmp_path / TRAJECTORY / METADATA, []

    def look(handle):
        # Whatever is being flushed, a reader finds the old document or the new one.
        if metadata.exists():
            document = json.loads(metadata.read_text())["metadata"]
            seen.append(document["points/.zarray"]["shape"][0])

    monkeypatch.setattr(os, "fsync", look)
    solve_into(tmp_path)
    assert seen == sorted(seen)
    assert set(seen) == set(range(7))
    monkeypatch.setattr(Path, "replace", lambda *names: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replace_file(metadata, "half of a docu")
    assert len(mf.open_run(tmp_path)) == 6
