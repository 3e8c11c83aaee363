"""Runs whose files were changed, cut or lost: told in one sentence, never believed."""

import json
import random
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import meanformer as mf
from meanformer import storage
from meanformer.experiments import reference_attention
from meanformer.storage.format import METADATA
from meanformer.storage.run import TRAJECTORY, RunStore

CONFIG = """
[tokens]
file = "points.npy"
in_order = true

[attention]
kind = "linear"
beta = 0.5
mask = "causal"

[solve]
depth = 0.2
save_every = 0.1
solver = "fixed"
step = 0.1
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run from a configuration, and its trajectory."""
    folder = tmp_path_factory.mktemp("whole")
    np.save(folder / "points.npy", np.array([[1.0, 0.0], [0.5, 2.0], [0.0, -1.0]]))
    (folder / "run.toml").write_text(CONFIG)
    return folder / "out", storage.simulate(folder / "run.toml", folder / "out")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, whole):
    """The folder of a trajectory that was saved by hand."""
    folder = tmp_path_factory.mktemp("saved") / "path.zarr"
    whole[1].save(folder)
    return folder


def files_of(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in found)


def changed(content, rng):
    """Return other bytes: one flipped, some set to zero, the end cut off."""
    place = rng.randrange(len(content))
    flipped = bytes([content[place] ^ rng.randrange(1, 256)])
    return rng.choice(
        [
            content[:place] + flipped + content[place + 1 :],
            content[:place] + flipped + content[place + 1 :],
            content[:place] + bytes(len(content[place:])),
            content[:place],
        ]
    )


def copy_with(folder, to, name, content):
    """Copy a folder, with other contents of one file, or without it."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    (to / name).unlink() if content is None else (to / name).write_bytes(content)
    return to


def assert_same(path, whole):
    """Check that a trajectory is the beginning of another, bit for bit."""
    for name in ("depths", "points", "velocities"):
        expected = getattr(whole, name)[: len(path)]
        np.testing.assert_array_equal(getattr(path, name), expected)
    np.testing.assert_array_equal(path.weights, whole.weights)
    np.testing.assert_array_equal(path.positions, whole.positions)


def assert_right_or_told(act, folder, whole):
    """Check that a trajectory is whole, or that one sentence says why it is not."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            path = act(folder)
        except mf.InvalidInput as error:
            sentence = str(error)
        else:
            assert_same(path, whole)
            assert len(path) == len(whole) or told
            sentence = "".join(str(warning.message) for warning in told)
    assert "\n" not in sentence


def test_a_flipped_byte_of_any_file_is_told_when_a_run_is_opened(whole, tmp_path):
    folder, _ = whole
    rng = random.Random(0)
    for name in files_of(folder):
        content = (folder / name).read_bytes()
        for _ in range(3 if content else 0):
            place = rng.randrange(len(content))
            flipped = bytes([content[place] ^ 1 << rng.randrange(8)])
            damaged = content[:place] + flipped + content[place + 1 :]
            copy = copy_with(folder, tmp_path / "copy", name, damaged)
            with pytest.raises(mf.InvalidInput, match=r"is damaged|run.json: "):
                mf.open_run(copy)


@pytest.mark.parametrize(
    "name", [f"{TRAJECTORY}/points/1.0.0", f"{TRAJECTORY}/weights/0", "tokens.npy"]
)
@pytest.mark.parametrize("act", [storage.resume, lambda run: storage.extend(run, 0.4)])
def test_a_flipped_byte_is_told_and_not_healed(act, name, whole, tmp_path):
    folder, _ = whole
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    copy = copy_with(folder, tmp_path / "copy", name, bytes(content))
    with pytest.raises(mf.InvalidInput, match=f"{name} is damaged .its checksum"):
        act(copy)
    for other in files_of(folder):
        expected = content if other == name else (folder / other).read_bytes()
        assert (copy / other).read_bytes() == expected


@pytest.mark.parametrize("kind", ["run", "saved"])
def test_what_is_read_from_a_damaged_folder_is_right_or_told(
    kind, whole, saved, tmp_path
):
    folder, path = (saved if kind == "saved" else whole[0]), whole[1]
    rng, names = random.Random(1), files_of(folder)
    for _ in range(40):
        name = rng.choice(names)
        content = (folder / name).read_bytes()
        lost = not content or rng.random() < 0.2
        other = None if lost else changed(content, rng)
        copy = copy_with(folder, tmp_path / "copy", name, other)
        assert_right_or_told(mf.open_run, copy, path)


@pytest.mark.slow
@pytest.mark.parametrize("act", [storage.resume, lambda run: storage.extend(run, 0.3)])
def test_what_goes_on_from_a_damaged_folder_is_right_or_told(act, whole, tmp_path):
    folder, _ = whole
    shutil.copytree(folder, tmp_path / "long")
    path = act(tmp_path / "long")
    rng, names = random.Random(2), files_of(folder)
    for _ in range(100):
        name = rng.choice(names)
        content = (folder / name).read_bytes()
        lost = not content or rng.random() < 0.2
        other = None if lost else changed(content, rng)
        copy = copy_with(folder, tmp_path / "copy", name, other)
        assert_right_or_told(act, copy, path)


@pytest.mark.parametrize("name", [METADATA, ".zattrs", ".zgroup", "../run.json"])
def test_metadata_cut_anywhere_are_told_in_one_sentence(name, whole, tmp_path):
    folder, _ = whole
    content = (folder / TRAJECTORY / name).read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path = f"{TRAJECTORY}/{name}"
        copy = copy_with(folder, tmp_path / "copy", path, content[:length])
        with pytest.raises(mf.InvalidInput):
            mf.open_run(copy)
        with pytest.raises(mf.InvalidInput):
            storage.resume(copy)


def test_a_run_without_its_metadata_is_not_taken_for_an_empty_one(whole, tmp_path):
    folder, _ = whole
    copy = copy_with(folder, tmp_path / "copy", f"{TRAJECTORY}/{METADATA}", None)
    with pytest.raises(mf.InvalidInput, match="it is missing"):
        mf.open_run(copy)
    with pytest.raises(mf.InvalidInput, match="it is missing"):
        storage.resume(copy)
    assert (copy / TRAJECTORY / "points" / "2.0.0").is_file()


def without_checksums(folder):
    """Turn a run into one from before there were checksums."""
    for path in (folder / TRAJECTORY).rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            path.write_bytes(path.read_bytes()[4:])
    metadata = folder / TRAJECTORY / METADATA
    document = json.loads(metadata.read_text())
    del document["crc32"], document["metadata"][".zattrs"]["parameters"]
    for key, entry in document["metadata"].items():
        if key.endswith(".zarray"):
            entry["compressor"] = None
            planned = entry | {"shape": [9, *entry["shape"][1:]]}
            (folder / TRAJECTORY / key).write_text(json.dumps(planned))
    metadata.write_text(json.dumps(document))
    attributes = json.dumps(document["metadata"][".zattrs"])
    (folder / TRAJECTORY / ".zattrs").write_text(attributes)
    record = json.loads((folder / "run.json").read_text())
    for key in [key for key in record if key.startswith("crc32")]:
        del record[key]
    (folder / "run.json").write_text(json.dumps(record))


@pytest.mark.slow
def test_a_run_from_before_there_were_checksums_is_opened_and_continued(
    whole, tmp_path
):
    folder, path = whole
    old, new = tmp_path / "old", tmp_path / "new"
    for copy in (old, new):
        shutil.copytree(folder, copy)
    without_checksums(old)
    assert_same(mf.open_run(old), path)
    assert_same(storage.resume(old), path)
    longer = storage.extend(old, 0.4)
    assert_same(longer, storage.extend(new, 0.4))
    assert_same(mf.open_run(old), longer)
    dataset = xarray.open_zarr(old / TRAJECTORY)
    np.testing.assert_array_equal(dataset["points"], longer.points)
    (old / TRAJECTORY / METADATA).write_text("{")
    with pytest.raises(mf.InvalidInput, match="is damaged"):
        storage.resume(old)


def test_a_trajectory_that_misses_a_chunk_is_not_filled_up(saved, tmp_path):
    copy = copy_with(saved, tmp_path / "copy", "velocities/0.0.0", None)
    with pytest.raises(mf.InvalidInput, match="velocities/0.0.0 is damaged"):
        mf.open_run(copy)


def test_a_run_from_a_configuration_has_its_flow_again(whole):
    folder, path = whole
    flow = mf.open_run(folder).flow
    for one, other in zip(*map(jax.tree.leaves, (flow, path.flow)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert jax.tree.structure(flow) == jax.tree.structure(path.flow)
    again = mf.solve(flow, path.cloud(0), 0.2, save=3, solver=mf.FixedStep(0.1))
    np.testing.assert_allclose(again.points, path.points, atol=1e-14)


def test_a_flow_that_the_configuration_does_not_describe_is_not_given_out(
    whole, tmp_path
):
    shutil.copytree(whole[0], tmp_path / "old")
    without_checksums(tmp_path / "old")
    record = tmp_path / "old" / "run.json"
    record.write_text(record.read_text().replace('"beta": 0.5', '"beta": 0.25'))
    assert mf.open_run(tmp_path / "old").flow is None


@pytest.mark.slow
def test_the_attributes_of_a_run_tell_its_parameters(whole, tmp_path):
    attributes = xarray.open_zarr(whole[0] / TRAJECTORY).attrs["parameters"]
    masked = attributes["flow"]["velocity"]["gamma"]
    assert masked["kind"] == "Masked"
    assert masked["attention"]["beta"] == 0.5
    assert masked["attention"]["query"] == [[1.0, 0.0], [0.0, 1.0]]
    assert attributes["flow"]["space"] == "Euclidean"
    assert attributes["tolerances"] == [1e-6, 1e-9]
    assert attributes["solver"] == {"kind": "FixedStep", "step": 0.1}
    cloud = mf.TokenCloud(jnp.zeros((50, 2)).at[0, 0].set(1.0))
    flow = mf.Flow(lambda depth: reference_attention(beta=jnp.exp(depth)))
    mf.solve(flow, cloud, 1.0, save=2, stop=mf.flows.EscapeRadius(9.0),
             solver=mf.FixedStep(0.5), store=RunStore(tmp_path))  # fmt: skip
    attributes = xarray.open_zarr(tmp_path / TRAJECTORY).attrs["parameters"]
    assert attributes["tokens"][0] == "float64 (50, 2)"
    assert attributes["stop conditions"][0][-1] == {
        "kind": "EscapeRadius",
        "radius": 9.0,
    }
    assert "<lambda>" in json.dumps(attributes["flow"])
