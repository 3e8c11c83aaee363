"""The front door: every promised name opens, and type checkers know the same ones."""

import re
from inspect import ismodule
from pathlib import Path

import pytest

import meanformer as mf


def test_every_name_of_the_front_door_opens():
    for name in dir(mf):
        assert getattr(mf, name) is not None


def test_the_stub_lists_the_same_names():
    stub = Path(mf.__file__).with_suffix(".pyi").read_text()
    listed = set(re.findall(r"^from meanformer\.\S+ import (\w+) as \w+", stub, re.M))
    assert listed == {name for name in dir(mf) if not ismodule(getattr(mf, name))}
    rooms = set(re.findall(r"^from meanformer import (\w+) as \w+", stub, re.M))
    assert rooms == {name for name in dir(mf) if ismodule(getattr(mf, name))}


def test_every_name_of_the_front_door_can_be_written():
    assert all(name.isidentifier() for name in dir(mf))


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(mf, "softmax_attention")
    assert mf.__version__


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("TokensCloud", "TokenCloud"),
        ("softmax", "Softmax"),
        ("observable", "observables"),
    ],
)
def test_a_misspelt_name_is_told_the_nearest_one(misspelt, meant):
    with pytest.raises(AttributeError, match=f"{misspelt}' .did you mean {meant}.+dir"):
        getattr(mf, misspelt)


def test_a_name_that_moved_to_its_room_still_works_and_says_where_it_is():
    for room, names in mf._MOVED.items():
        for name in names.split():
            said = f"meanformer.{name} is now meanformer.{room}.{name};"
            with pytest.warns(DeprecationWarning, match=re.escape(said)) as told:
                found = getattr(mf, name)
            assert found is getattr(getattr(mf, room), name)
            assert told[0].filename == __file__
            assert name not in dir(mf)


@pytest.mark.parametrize(
    ("room", "old", "new"),
    [("flows", "Moment", "Snapshot"), ("gaussian", "Outcome", "Classification")],
)
def test_a_renamed_class_is_found_by_its_old_name_with_a_warning(room, old, new):
    home = getattr(mf, room)
    with pytest.warns(DeprecationWarning, match=f"{room}.{old} is now {room}.{new}"):
        assert getattr(home, old) is getattr(home, new)
