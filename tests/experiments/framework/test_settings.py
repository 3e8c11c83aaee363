"""Parameters are typed, documented, and read from the command line with care."""

import dataclasses
from typing import Literal

import pytest

from meanformer import experiments
from meanformer.errors import InvalidInput
from meanformer.experiments import Claim, Experiment, InvalidExperiment, setting
from meanformer.experiments.framework.settings import (
    as_json,
    choose,
    read_value,
    split_assignments,
)


class Parameters(experiments.Parameters):
    depth: float = setting(1.0, full=10.0, help="depth", above=0)
    count: int = setting(8, full=512, help="tokens", at_least=1, at_most=1000)
    betas: tuple[float, ...] = setting((1.0, 2.0), help="temperatures", above=0)
    kind: Literal["softmax", "l2"] = setting("softmax", help="attention")
    is_causal: bool = setting(False, help="mask")
    limit: float | None = setting(None, help="stop there")
    seed: int = setting(0, help="seed")


def test_profiles_differ_where_a_full_value_is_given():
    assert choose(Parameters, "quick", {}) == Parameters()
    full = choose(Parameters, "full", {})
    assert (full.depth, full.count, full.kind) == (10.0, 512, "softmax")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("depth", "2.5", 2.5),
        ("count", "12", 12),
        ("count", "1e2", 100),
        ("betas", "1, 2.5,3", (1.0, 2.5, 3.0)),
        ("betas", "[4]", (4.0,)),
        ("kind", "l2", "l2"),
        ("is_causal", "Yes", True),
        ("is_causal", "false", False),
        ("limit", "none", None),
        ("limit", "3", 3.0),
    ],
)
def test_texts_are_read_by_the_type_of_the_field(name, text, value):
    read = getattr(choose(Parameters, "quick", {name: text}), name)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("depth", "deep", "depth is 'deep'; it must be a number."),
        ("depth", "0", "depth is 0.0; it must be larger than 0."),
        ("depth", "nan", "depth is nan; it must be finite."),
        ("depth", "inf", "depth is inf; it must be finite."),
        ("count", "2.5", "count is '2.5'; it must be a whole number."),
        ("count", "inf", "count is 'inf'; it must be a whole number."),
        ("seed", "1e20", f"seed is {10**20}; it must be smaller than 2^63."),
        ("count", "0", "count is 0; it must be at least 1."),
        ("count", "1001", "count is 1001; it must be at most 1000."),
        ("betas", "1,x", "betas is 'x'; it must be a number."),
        ("betas", "1,-2", "betas is -2.0; it must be larger than 0."),
        ("kind", "l3", "kind is 'l3'; it must be 'softmax' or 'l2'."),
        ("is_causal", "maybe", "is_causal is 'maybe'; it must be true or false."),
        ("betta", "1", "There is no parameter 'betta'; did you mean betas?"),
    ],
)
def test_a_bad_value_is_told_in_one_sentence(name, text, sentence):
    with pytest.raises(InvalidInput) as caught:
        choose(Parameters, "quick", {name: text})
    assert str(caught.value) == sentence


def test_an_empty_list_is_a_list():
    assert read_value("betas", "", tuple[float, ...]) == ()


def test_assignments_split_at_the_first_equals_sign():
    assert split_assignments(["a=1", "is-causal = x=y"]) == {
        "a": "1",
        "is_causal": "x=y",
    }


@pytest.mark.parametrize("text", ["depth", "=3", ""])
def test_an_assignment_without_key_or_value_is_refused(text):
    with pytest.raises(InvalidInput, match="key=value"):
        split_assignments([text])


def test_json_of_settings_holds_lists():
    assert as_json(Parameters())["betas"] == [1.0, 2.0]


def declare(parameters):
    claim = Claim("a", "b", "observation")
    return Experiment("toy", "Toy", "numerics", parameters, print, claims=(claim,))


def test_parameters_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Parameters().depth = 2.0


def test_parameters_must_be_frozen():
    @dataclasses.dataclass
    class Thawed:
        depth: float = setting(1.0, help="depth")

    with pytest.raises(InvalidExperiment, match="frozen"):
        declare(Thawed)


def test_every_parameter_must_be_documented():
    @dataclasses.dataclass(frozen=True)
    class Undocumented:
        depth: float = 1.0

    with pytest.raises(InvalidExperiment, match="depth must be declared with setting"):
        declare(Undocumented)
