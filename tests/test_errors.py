"""Numbers that users give are checked with their bounds in one call."""

import numpy as np
import pytest

from meanformer.errors import InvalidInput, as_number, check_kind


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, np.array(2.0)])
def test_a_number_outside_its_bounds_is_refused_in_the_words_given(value):
    with pytest.raises(InvalidInput, match="share is .*; it must be in .0, 2.."):
        as_number("share", value, "in [0, 2)", least=0, below=2)


def test_an_open_bound_refuses_its_own_value_and_a_closed_one_does_not():
    assert as_number("step", 0, least=0) == 0.0
    with pytest.raises(InvalidInput, match="step is 0; it must be positive"):
        as_number("step", 0, "positive", above=0)


def test_without_bounds_every_number_passes():
    assert np.isnan(as_number("value", float("nan")))


def test_what_is_of_another_kind_is_shown_if_it_is_short_and_named_if_not():
    check_kind("space", None, str | None, "a text")
    with pytest.raises(InvalidInput, match="space is 'torus'; it must be a number."):
        check_kind("space", "torus", int | float, "a number")
    with pytest.raises(InvalidInput, match="space is a ndarray; it must be a number."):
        check_kind("space", np.zeros((9, 9)), int | float, "a number")
