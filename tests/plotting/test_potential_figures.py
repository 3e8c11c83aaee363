"""Potentials with atoms, and basins."""

import numpy as np
import pytest

from meanformer.attention import identity_attention
from meanformer.errors import InvalidInput
from meanformer.flows import Flow
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.observables import perceptron_flow
from meanformer.plotting import canvas, draw_basins, draw_potential


def test_atoms_lie_on_the_curve_of_the_potential():
    flow = perceptron_flow(None, np.eye(2), [4.0, 2.0])
    figure, axes = canvas()
    draw_potential(flow, axes, atoms=[TokenCloud(np.eye(2))], labels=["two"])
    (curve,) = axes.lines
    angles, heights = curve.get_data()
    # Phi is half of c times the squared positive part of the cosine.
    exact = 2 * np.maximum(np.cos(angles), 0) ** 2
    exact = exact + np.maximum(np.sin(angles), 0) ** 2
    np.testing.assert_allclose(heights, exact, atol=1e-12)
    offsets = axes.collections[0].get_offsets()
    np.testing.assert_allclose(offsets, [[0.0, 2.0], [np.pi / 2, 1.0]], atol=1e-12)


def test_the_turn_may_begin_at_another_quarter():
    flow = perceptron_flow(None, np.eye(2), [4.0, 2.0])
    figure, axes = canvas()
    draw_potential(flow, axes, atoms=[TokenCloud(-np.eye(2))], first_quarter=-1)
    np.testing.assert_allclose(axes.get_xlim(), [-np.pi / 2, 3 * np.pi / 2])
    names = [text.get_text() for text in axes.get_xticklabels()]
    assert names == [r"$-\pi/2$", "0", r"$\pi/2$", r"$\pi$", r"$3\pi/2$"]
    offsets = axes.collections[0].get_offsets()
    np.testing.assert_allclose(offsets[:, 0], [np.pi, -np.pi / 2])
    with pytest.raises(InvalidInput, match="first_quarter is 1"):
        draw_potential(flow, axes, first_quarter=1)


def test_basins_are_coloured_by_their_labels():
    figure, axes = canvas()
    labels = np.array([[0, 1], [1, -1]])
    draw_basins(labels, axes, names=("left", "right"))
    np.testing.assert_array_equal(axes.images[0].get_array(), labels.T)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["left", "right"]


def test_what_cannot_be_drawn_is_refused():
    figure, axes = canvas()
    plain = Flow(identity_attention("unnormalised", 2, 1.0), space=Sphere())
    with pytest.raises(InvalidInput, match="with a perceptron"):
        draw_potential(plain, axes)
    with pytest.raises(InvalidInput, match="in dimension 2"):
        draw_potential(perceptron_flow(None, np.eye(3), 1.0), axes)
    with pytest.raises(InvalidInput, match="labels has .* must be square"):
        draw_basins(np.zeros((2, 3), int), axes, names=("one",))
    with pytest.raises(InvalidInput, match="there must be one for each"):
        draw_basins(np.full((2, 2), 3), axes, names=("one",))
