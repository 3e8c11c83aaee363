"""Tests of null spaces and spans of rows."""

import numpy as np
import pytest

from meanformer.numerics.row_spaces import null_rows, small_integers, spanned

RNG = np.random.default_rng(5)


def test_null_rows_span_the_null_space():
    table = RNG.standard_normal((2, 5))
    rows = null_rows(table, 1e-9)
    assert rows.shape == (3, 5)
    np.testing.assert_allclose(table @ rows.T, 0, atol=1e-12)
    basis = spanned(rows, 5)
    np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-12)


@pytest.mark.parametrize(
    ("row", "integers"),
    [((0.5, -1, 0), (1, -2, 0)), ((1 / 3, 0.25), (4, 3)), ((1, np.pi), None)],
)
def test_rows_of_integers_are_found_up_to_a_factor(row, integers):
    assert small_integers(np.array(row)) == integers
