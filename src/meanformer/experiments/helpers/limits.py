"""Findings about limits of rescaled tokens that several experiments share."""

from collections.abc import Sequence

import numpy as np

from meanformer.experiments.framework.claims import Claim, Finding, other_method, theory
from meanformer.experiments.helpers.dense import dense_rescaled_flow


def dense_tokens(report, depth: float, method: str = "DOP853") -> np.ndarray:
    """The rescaled tokens of a limit at a depth, by a dense program of SciPy.

    Args:
        report: the limit, of `find_limit`.
        depth: where they are wanted.
        method: a method of SciPy.
    """
    path = report.trajectory
    attention, start = path.flow.velocity.attention, path.cloud(0)
    return dense_rescaled_flow(attention, start, depth, method=method)


def dense_finding(
    claim: Claim, report, depth: float, tolerance: float, method: str = "DOP853"
) -> Finding:
    """The closed form behind the hand-over against a dense program of SciPy.

    Args:
        claim: what is claimed.
        report: the limit, of `find_limit`.
        depth: where both are compared.
        tolerance: how far apart they may be.
        method: a method of SciPy.
    """
    dense = dense_tokens(report, depth, method)
    source = other_method(f"SciPy's {method} on the rescaled flow")
    found = report.detection.phase.at(depth)
    return claim.close_to(found, dense, tolerance=tolerance, source=source)


def agreement_finding(claim: Claim, reports: Sequence, *, share: float) -> Finding:
    """The share of limits that are the predicted ones; a share of one is all."""
    agreeing = np.mean([report.agrees is True for report in reports])
    if share == 1:
        return claim.close_to(agreeing, 1, tolerance=0, source=theory("all of them"))
    source = theory("all; those close to a tie may be left undecided")
    return claim.at_least(agreeing, share, source=source)
