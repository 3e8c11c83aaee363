"""The graph of saddles: nodes, arrows and labels."""

from types import SimpleNamespace

from matplotlib.collections import PathCollection

from meanformer.plotting import draw_saddles, style


def step(count, energy, index, *, level=None):
    """What `saddles` reports, as far as a drawing looks at it."""
    is_critical = index is not None
    return SimpleNamespace(
        plateau=SimpleNamespace(count=count, energy=energy, level=level),
        point=object() if is_critical else None,
        index=index,
        energy=energy if is_critical else None,
        distance=0.125 if is_critical else None,
    )


def drawn(steps):
    figure, axes = style.canvas()
    assert draw_saddles(steps, axes) is axes
    figure.canvas.draw()
    return axes


def test_plateaus_are_nodes_at_their_energies_with_arrows_between():
    axes = drawn([step(3, 0.3, 2), step(2, 0.5, None), step(1, 1.0, 0)])
    nodes = [c for c in axes.collections if isinstance(c, PathCollection)]
    places = [tuple(node.get_offsets()[0]) for node in nodes]
    assert places == [(0, 0.3), (1, 0.5), (2, 1.0)]
    arrows = [t for t in axes.texts if t.get_text() == ""]
    assert len(arrows) == 2
    labels = [t.get_text() for t in axes.texts if t.get_text()]
    assert labels == ["index 2\n0.12 away", "no saddle", "maximum"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["3", "2", "1"]


def test_only_nodes_with_a_critical_point_are_filled():
    axes = drawn([step(3, 0.3, 2), step(2, 0.5, None)])
    filled, hollow = (c for c in axes.collections if isinstance(c, PathCollection))
    assert len(filled.get_facecolor()) == 1
    assert len(hollow.get_facecolor()) == 0


def test_a_plateau_without_energy_stands_at_its_level():
    axes = drawn([step(2, None, None, level=0.52), step(None, None, None)])
    heights = [float(c.get_offsets()[0][1]) for c in axes.collections]
    assert heights == [0.52, 0.0]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["2", "?"]
