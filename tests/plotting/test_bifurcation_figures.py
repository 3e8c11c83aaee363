"""Bifurcation diagrams show what is stable."""

import numpy as np
import pytest

import meanformer as mf
from meanformer.mean_field import stationary_branch
from meanformer.plotting import canvas, draw_branch, draw_uniform, style


@pytest.fixture(scope="module")
def branch():
    return stationary_branch(mf.identity_attention("unnormalised", 2, 5.0))


def test_a_branch_is_dashed_up_to_its_fold_and_solid_beyond(branch):
    _, axes = canvas()
    draw_branch(branch, axes, label="name", unit=branch.critical)
    dashed, solid, fold, maxwell = axes.lines
    assert dashed.get_linestyle() == "--"
    assert solid.get_linestyle() == "-"
    assert dashed.get_xdata()[0] == 1
    assert dashed.get_ydata()[-1] == solid.get_ydata()[0]
    assert solid.get_ydata()[-1] == branch.orders[-1]
    drawn = np.concatenate([dashed.get_ydata()[:-1], solid.get_ydata()])
    assert (np.diff(drawn) > 0).all()
    assert set(branch.orders) <= set(drawn)
    np.testing.assert_allclose(
        fold.get_xdata(), branch.folds[0].kappa / branch.critical
    )
    np.testing.assert_allclose(maxwell.get_ydata(), branch.maxwell.order)
    assert axes.get_legend_handles_labels()[1] == ["name"]


def test_axes_get_labels_unless_they_have_them(branch):
    _, axes = canvas()
    axes.set_ylabel("mine")
    draw_branch(branch, axes)
    assert "noise" in axes.get_xlabel()
    assert axes.get_ylabel() == "mine"


def test_marks_can_be_left_out(branch):
    _, axes = canvas()
    draw_branch(branch, axes, marks=False)
    assert len(axes.lines) == 2


def test_the_uniform_state_is_dashed_beyond_the_critical_value():
    figure, axes = canvas()
    draw_uniform(2.0, 1.0, 3.0, axes)
    styles = [line.get_linestyle() for line in axes.lines]
    assert styles == ["-", "--"]
    assert style.to_png(figure)
