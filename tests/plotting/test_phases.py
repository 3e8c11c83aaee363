"""Phase diagrams show their numbers, and the curve beside them."""

import numpy as np
import pytest

from meanformer.errors import InvalidInput
from meanformer.observables import PhaseDiagram, phase_curve
from meanformer.plotting import canvas, draw_phase_diagram


def diagram(quantity="pairs", top=1.0):
    betas, depths = np.array([1.0, 2.0, 4.0]), np.array([0.0, 1.0, 2.0, 3.0])
    mean = top * np.linspace(0, 1, 12).reshape(3, 4)
    return PhaseDiagram(
        betas=betas,
        depths=depths,
        mean=mean,
        standard_error=np.zeros((3, 4)),
        median=mean,
        quantity=quantity,
        kind="softmax",
        dimension=8,
        count=32,
        starts=16,
        level=0.99,
        tolerance=1e-4,
        steps=np.ones(3),
        rejected=np.zeros(3),
    )


@pytest.fixture
def axes():
    return canvas()[1]


def test_cells_have_the_values_of_the_diagram_around_its_points(axes):
    (mesh,) = draw_phase_diagram(diagram(), axes).collections
    np.testing.assert_allclose(mesh.get_array(), diagram().mean)
    corners = np.asarray(mesh.get_coordinates())
    np.testing.assert_allclose(corners[0, :, 0], [-0.5, 0.5, 1.5, 2.5, 3.5])
    np.testing.assert_allclose(corners[:, 0, 1], [0.5, 1.5, 3.0, 5.0])
    assert axes.get_xlim() == (0.0, 3.0)
    assert axes.get_ylim() == (1.0, 4.0)


def test_the_bar_names_the_quantity_and_its_level(axes):
    draw_phase_diagram(diagram(), axes)
    label = axes.figure.axes[1].get_ylabel()
    assert "> 0.99$" in label
    bare = canvas()[1]
    draw_phase_diagram(diagram(), bare, bar=False)
    assert len(bare.figure.axes) == 1


def test_colours_of_fractions_end_at_zero_and_one_and_logarithms_at_one_pair(axes):
    (mesh,) = draw_phase_diagram(diagram(), axes).collections
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0, 1)
    other = canvas()[1]
    (mesh,) = draw_phase_diagram(diagram(), other, colours="log").collections
    assert mesh.norm.vmin == pytest.approx(1 / (16 * 32 * 31 / 2))


def test_colours_of_counts_begin_at_one_and_end_at_the_largest(axes):
    (mesh,) = draw_phase_diagram(diagram("rank", 8.0), axes).collections
    assert (mesh.norm.vmin, mesh.norm.vmax) == (1, 8)
    assert axes.figure.axes[1].get_ylabel() == "dimension of the span"


def test_a_curve_is_drawn_from_the_theory_or_from_arrays(axes):
    curve = phase_curve(32, [6.0, 10.0])
    draw_phase_diagram(diagram(), axes, curve=curve)
    np.testing.assert_allclose(axes.lines[-1].get_xdata(), [6.0, 10.0])
    np.testing.assert_allclose(axes.lines[-1].get_ydata(), curve.betas)
    other = canvas()[1]
    draw_phase_diagram(diagram(), other, curve=([1.0, 2.0], [3.0, 4.0]))
    np.testing.assert_allclose(other.lines[-1].get_ydata(), [3.0, 4.0])


def test_other_values_of_the_same_shape_can_be_shown(axes):
    values = np.arange(12.0).reshape(3, 4) / 12
    (mesh,) = draw_phase_diagram(diagram(), axes, values=values).collections
    np.testing.assert_allclose(mesh.get_array(), values)
    with pytest.raises(InvalidInput, match=r"values has shape \(2, 2\)"):
        draw_phase_diagram(diagram(), axes, values=np.ones((2, 2)))


def test_unknown_colours_are_refused(axes):
    with pytest.raises(InvalidInput, match="colours is 'loud'"):
        draw_phase_diagram(diagram(), axes, colours="loud")
