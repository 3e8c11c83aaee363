"""Verdicts follow from the numbers, and only from them."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meanformer.experiments import (
    Claim,
    InvalidExperiment,
    closed_form,
    conjecture,
    observation,
    other_method,
    published,
    tabulated,
    theorem,
    theory,
)
from meanformer.experiments.framework.claims import Reference
from meanformer.experiments.framework.report.verdicts import ORIGINS

CLAIM = Claim("toy", "Something is true.", "observation")
SOURCE = closed_form("a formula")
reals = st.floats(-1e6, 1e6)
tolerances = st.floats(0, 1e3)


@given(reals, reals, tolerances)
def test_close_to_is_a_distance_at_most_the_tolerance(measured, expected, tolerance):
    finding = CLAIM.close_to(measured, expected, tolerance=tolerance, source=SOURCE)
    assert finding.holds == (abs(measured - expected) <= tolerance)


@given(reals, reals)
def test_order_relations_agree_with_python(measured, expected):
    assert CLAIM.at_most(measured, expected, source=SOURCE).holds == (
        measured <= expected
    )
    assert CLAIM.at_least(measured, expected, source=SOURCE).holds == (
        measured >= expected
    )
    assert CLAIM.above(measured, expected, source=SOURCE).holds == (measured > expected)
    assert CLAIM.below(measured, expected, source=SOURCE).holds == (measured < expected)


@given(reals, reals, reals)
def test_inside_is_a_closed_interval(measured, first, second):
    low, high = sorted((first, second))
    finding = CLAIM.inside(measured, low, high, source=SOURCE)
    assert finding.holds == (low <= measured <= high)


@pytest.mark.parametrize("ends", [(0.0, np.inf), (-np.inf, 0.0), (np.nan, 1.0)])
def test_an_interval_without_an_end_is_refused(ends):
    with pytest.raises(InvalidExperiment, match="use at_least or at_most"):
        CLAIM.inside(0.0, *ends, source=SOURCE)


@pytest.mark.parametrize(
    "source", [closed_form, other_method, tabulated, published, theory]
)
def test_every_kind_of_source_is_told_in_reports(source):
    assert source("detail").kind in ORIGINS
    assert str(source("detail")) == f"{source().kind}: detail"


def test_a_bound_may_be_missed_by_the_tolerance_and_no_more():
    assert CLAIM.at_most(1.25, 1.0, tolerance=0.25, source=SOURCE).holds
    assert not CLAIM.at_most(1.26, 1.0, tolerance=0.25, source=SOURCE).holds
    assert CLAIM.at_least(0.75, 1.0, tolerance=0.25, source=SOURCE).holds
    assert not CLAIM.at_least(0.74, 1.0, tolerance=0.25, source=SOURCE).holds


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_holds(value):
    findings = [
        CLAIM.close_to(value, 0.0, tolerance=1.0, source=SOURCE),
        CLAIM.at_most(value, 1.0, source=SOURCE),
        CLAIM.at_least(value, 1.0, source=SOURCE),
        CLAIM.inside(value, 0.0, 1.0, source=SOURCE),
        CLAIM.above(value, 1.0, source=SOURCE),
        CLAIM.below(value, 1.0, source=SOURCE),
    ]
    assert not any(finding.holds for finding in findings)


def test_one_bad_entry_in_an_array_decides():
    good = CLAIM.at_most(jnp.array([0.1, 0.9, 0.5]), 1.0, source=SOURCE)
    bad = CLAIM.at_most(jnp.array([0.1, 1.9, 0.5]), 1.0, source=SOURCE)
    undefined = CLAIM.at_most(np.array([0.1, np.nan, 0.5]), 1.0, source=SOURCE)
    assert good.holds
    assert (good.measured, good.comparisons) == (0.9, 3)
    assert not bad.holds
    assert bad.measured == 1.9
    assert not undefined.holds
    assert math.isnan(undefined.measured)


def test_arrays_are_compared_entry_by_entry():
    finding = CLAIM.at_most(np.array([1.0, 2.0]), np.array([5.0, 2.5]), source=SOURCE)
    assert (finding.measured, finding.expected) == (2.0, 2.5)
    assert finding.margin == pytest.approx(0.5)


def test_a_relative_tolerance_scales_with_the_expected_value():
    finding = CLAIM.close_to(101.0, 100.0, relative_tolerance=0.02, source=SOURCE)
    assert finding.holds
    assert finding.tolerance == pytest.approx(2.0)


@pytest.mark.parametrize("slack", [{}, {"tolerance": 1.0, "relative_tolerance": 1.0}])
def test_closeness_needs_exactly_one_tolerance(slack):
    with pytest.raises(InvalidExperiment, match="tolerance"):
        CLAIM.close_to(1.0, 1.0, source=SOURCE, **slack)


@pytest.mark.parametrize(
    ("expected", "tolerance"), [(math.nan, 0.0), (math.inf, 0.0), (1.0, -1.0)]
)
def test_an_expectation_must_be_finite(expected, tolerance):
    with pytest.raises(InvalidExperiment, match="finite"):
        CLAIM.at_most(1.0, expected, tolerance=tolerance, source=SOURCE)


def test_nothing_measured_is_an_error():
    with pytest.raises(InvalidExperiment, match="empty"):
        CLAIM.at_most(np.array([]), 1.0, source=SOURCE)


def test_references_have_keys_and_places():
    claim = Claim("a", "b", "theorem", "CACP25, Theorem 3.1 (i), page 4; GLPR23")
    assert claim.references == (
        Reference("CACP25", "Theorem 3.1 (i), page 4"),
        Reference("GLPR23"),
    )


def test_a_theorem_must_cite_something():
    with pytest.raises(InvalidExperiment, match="cites nothing"):
        Claim("a", "b", "theorem")


def test_a_claim_has_a_name_for_command_lines():
    with pytest.raises(InvalidExperiment, match="kebab-case"):
        Claim("Not Kebab", "b", "observation")


def test_a_source_reads_as_words():
    assert str(published("Table 2")) == "published: Table 2"


def test_a_claim_is_declared_by_its_status():
    assert theorem("a", "b", "CACP25") == Claim("a", "b", "theorem", "CACP25")
    assert observation("a", "b") == Claim("a", "b", "observation")
    assert conjecture("a", "b", "CACP25") == Claim("a", "b", "conjecture", "CACP25")


def test_a_claim_says_where_its_expected_values_come_from():
    formula = closed_form("$e^x$")
    declared = observation("one", "One is one.", source=formula)
    other = other_method("by hand")
    assert declared.close_to(1.0, 1.0, tolerance=0.0).source == formula
    assert declared.close_to(1.0, 1.0, tolerance=0.0, source=other).source == other
    silent = observation("two", "Two is two.")
    with pytest.raises(InvalidExperiment, match="where its expected value comes"):
        silent.at_most(2.0, 2.0)
