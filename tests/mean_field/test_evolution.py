"""From a density to tokens, through the forming of clusters."""

import jax
import numpy as np
import pytest

import meanformer as mf
from meanformer.errors import InvalidInput, PrecisionWarning, Unsupported
from meanformer.mean_field import evolve, panels
from meanformer.measures import FourierDensity, circle_moments


def flow_of(**options):
    return mf.Flow(
        mf.identity_attention("softmax", 2, 5.0), space=mf.Sphere(), **options
    )


def start():
    moments = np.zeros((64, 2))
    moments[2, 0], moments[0, 1] = 0.05, 0.005
    return FourierDensity(moments)


@pytest.fixture(scope="module")
def evolution():
    return evolve(flow_of(), start(), 6.0, save=7, most_modes=64, rtol=1e-8, atol=1e-10)


def test_tokens_take_over_where_modes_lack(evolution):
    depths = np.asarray(evolution.depths)
    assert (np.diff(depths) > 0).all()
    assert depths[0] == 0
    assert depths[-1] == 6
    assert float(evolution.hand_over) in depths
    assert isinstance(evolution.measure(0), FourierDensity)
    assert isinstance(evolution.measure(-1), mf.TokenCloud)
    assert isinstance(evolution.at(1.0), FourierDensity)
    assert isinstance(evolution.at(5.5), mf.TokenCloud)


def test_it_tells_where_tokens_took_over(evolution):
    depth = f"{float(evolution.hand_over):.6g}"
    assert f"64 modes until {depth}, then" in str(evolution)


@pytest.mark.slow
def test_in_single_precision_steps_are_no_finer_than_rounding():
    """With its default tolerances it would end without a step to go."""
    flow, density = jax.tree.map(
        lambda leaf: leaf.astype(np.float32), (flow_of(), start())
    )
    single = evolve(flow, density, 7.0, save=2, most_modes=64)
    assert single.densities.moments.dtype == np.float32
    assert float(single.depths[-1]) == 7
    assert single.tokens is not None


def test_moments_go_on_through_the_hand_over(evolution):
    at_hand_over = evolution.densities.density(-1)
    tokens = evolution.tokens.cloud(0)
    np.testing.assert_allclose(
        circle_moments(tokens, 8), at_hand_over.moments[:8], atol=1e-10
    )
    assert evolution.moments(4).shape == (8, 4, 2)


@pytest.mark.slow
def test_later_moments_agree_with_many_tokens_from_the_start(evolution):
    """Up to the mass of a node at the points where tokens part."""
    many = mf.solve(flow_of(), mf.quadrature(start(), 800), 6.0, save=2)
    np.testing.assert_allclose(
        evolution.moments(6)[-1], circle_moments(many.cloud(-1), 6), atol=0.02
    )


@pytest.fixture(scope="module")
def late_density():
    """The density at depth six, for which eight times the modes suffice."""
    spectral = mf.flows.Spectral(most_modes=512)
    return mf.solve(flow_of(), start(), 6.0, save=2, solver=spectral).density(-1)


def test_tokens_are_as_accurate_as_a_density_with_more_modes(evolution, late_density):
    assert float(evolution.hand_over) < 4
    found = circle_moments(evolution.at(6.0), 12)
    assert evolution.error < 1e-5
    np.testing.assert_allclose(found, late_density.moments[:12], atol=1e-6)


@pytest.mark.slow
def test_tokens_too_few_for_what_was_asked_are_told(late_density):
    with pytest.warns(PrecisionWarning, match=r"estimated error of .* more nodes"):
        coarse = evolve(flow_of(), start(), 6.0, save=2, most_modes=64, nodes=128)
    found = circle_moments(coarse.measure(-1), 3)
    off = float(np.abs(found - late_density.moments[:3]).max())
    assert 1e-5 < off < coarse.error < 1000 * off


def test_a_density_that_stays_smooth_needs_no_tokens():
    short = evolve(flow_of(), start(), 1.0, save=3, most_modes=64)
    assert short.tokens is None
    assert short.hand_over is None
    assert len(short.depths) == 3


def test_a_density_too_sharp_only_at_the_last_depth_needs_no_tokens(evolution):
    """The step that ends there is cut to it, and no depth is left for tokens."""
    # All but the last step before the hand-over, which then ends a little earlier.
    end = float(evolution.hand_over) - 0.01
    cut = evolve(flow_of(), start(), end, save=2, most_modes=64, rtol=1e-8, atol=1e-10)
    assert cut.tokens is None
    assert float(cut.depths[-1]) == end


@pytest.mark.slow
def test_tokens_take_over_on_the_way_back_too(evolution):
    """Repulsion backward is attraction forward."""
    eye = np.eye(2)
    repulsion = mf.Flow(mf.Softmax(eye, eye, -eye, beta=5.0), space=mf.Sphere())
    options = {"most_modes": 64, "rtol": 1e-8, "atol": 1e-10}
    back = evolve(repulsion, start(), -6.0, save=7, **options)
    np.testing.assert_allclose(back.depths, -evolution.depths, rtol=1e-9)
    np.testing.assert_allclose(back.moments(4), evolution.moments(4), atol=1e-7)
    assert isinstance(back.at(-1.0), FourierDensity)
    assert isinstance(back.at(-5.5), mf.TokenCloud)


def test_what_is_no_density_and_depths_out_of_range_are_refused(untyped, evolution):
    with pytest.raises(InvalidInput, match="it must be a FourierDensity"):
        evolve(flow_of(), mf.quadrature(start(), 10), 1.0)
    with pytest.raises(InvalidInput, match=r"covers \[0.0, 6.0\]"):
        evolution.at(9.0)


@pytest.mark.slow
def test_noise_needs_modes_enough():
    with pytest.raises(Unsupported, match="larger most_modes"):
        evolve(flow_of(noise=0.05), start(), 20.0, save=2, most_modes=16)


def test_panels_have_the_moments_of_the_density_and_no_negative_mass():
    flow = mf.Flow(mf.identity_attention("softmax", 2, 0.0), space=mf.Sphere())
    moments = np.zeros((3, 2))
    # A little below zero at its lowest.
    moments[2] = 0.5 * (1 + 1e-9), 0.0
    density = FourierDensity(moments)
    tolerances = {"rtol": 1e-9, "atol": 1e-11}
    mesh = panels.refined(flow, density, 48, (0.0, 0.0), step=1.0, **tolerances)
    assert len(mesh.starts) == 4
    assert mesh.masses.min() >= 0
    # A rule of this order is exact to rounding for so few modes.
    assert mesh.losses.max() < 1e-9
    found = circle_moments(mesh.cloud(float), 3)
    np.testing.assert_allclose(found, moments, atol=1e-8)
    # Halved panels are the same arcs, with places by a series of the old ones.
    halved = panels._halved(density, mesh, -1.0, 8)
    assert len(halved.starts) == 2 * len(mesh.starts)
    again = panels._begun(density, halved.starts, halved.widths)
    np.testing.assert_allclose(halved.places, again.places, atol=1e-9)
    np.testing.assert_allclose(
        circle_moments(again.cloud(float), 3), moments, atol=1e-8
    )


class Rough(panels.Panels):
    """Panels whose error is 1.5e-5 at the second depth, else none."""

    def errors(self, places):
        return np.where(np.arange(len(places)) == 1, 0.75e-5, 0.0)[:, None] * [1, 1]


def test_the_largest_error_along_depth_is_told_above_a_thousand_tolerances(monkeypatch):
    def roughly(flow, density, *arguments, **options):
        starts, width = np.arange(4) * np.pi / 2, np.full(4, np.pi / 2)
        return Rough(*panels._begun(density, starts, width))

    monkeypatch.setattr("meanformer.mean_field.evolution.refined", roughly)
    with pytest.warns(PrecisionWarning, match="estimated error of 1.5e-05"):
        rough = evolve(
            flow_of(), start(), 6.0, save=7, most_modes=64, rtol=1e-8, atol=1e-10
        )
    assert rough.error == pytest.approx(1.5e-5)
