"""The growth of dwell times holds at every temperature that a user may set."""

import pytest

from meanformer.experiments.metastability.dwell_times import growth_findings


@pytest.mark.parametrize("largest", [100.0, 4000.0])
def test_dwell_times_grow_as_claimed_at_both_ends_of_the_range(largest):
    for finding in growth_findings(largest):
        assert finding.holds
