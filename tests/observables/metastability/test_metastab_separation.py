"""Separated groups: the working definition, its invariances, and the gradient there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.observables import energy_gradient, separation

GROUPS = [-0.05, 0.0, 0.06, 1.23, 1.29]


def on_circle(angles, weights=None):
    angles = np.asarray(angles)
    return mf.TokenCloud(np.stack([np.cos(angles), np.sin(angles)], 1), weights)


def test_separated_groups_are_measured_by_hand():
    report = separation(on_circle(GROUPS), 40.0)
    epsilon = 0.5 / np.sqrt(40)
    apart = 1.26 - np.angle(np.mean(np.exp(1j * np.array(GROUPS[:3]))))
    assert report.holds
    assert report.verdict == "separated: 2 groups"
    np.testing.assert_allclose(report.epsilon, epsilon)
    np.testing.assert_allclose(report.separation, apart, rtol=1e-12)
    np.testing.assert_allclose(report.radius, 0.06 - (1.26 - apart), rtol=1e-9)
    value = 40 * (1 - np.cos(apart - 2 * epsilon))
    np.testing.assert_allclose(report.value, value, rtol=1e-12)
    np.testing.assert_allclose(report.needed, np.log(5) + 5, rtol=1e-14)


def test_groups_too_close_or_too_wide_are_not_separated():
    close = separation(on_circle(GROUPS), 10.0)
    assert not close.holds
    assert "beta (1 - cos) is" in close.verdict
    wide = separation(on_circle(GROUPS), 40.0, epsilon=0.03)
    assert not wide.holds
    assert "the radius" in wide.verdict


def test_a_larger_margin_asks_for_more():
    assert separation(on_circle(GROUPS), 30.0, margin=5.0).holds
    assert not separation(on_circle(GROUPS), 30.0, margin=20.0).holds


def test_a_lone_group_has_nothing_to_be_separated_from():
    report = separation(on_circle([0.0, 0.01]), 20.0)
    assert report.holds
    assert report.verdict == "one group, with nothing to be separated from"
    assert report.separation is None
    assert report.value is None


@pytest.mark.parametrize("weights", [[0.2] * 5, [0.01, 0.3, 0.3, 0.19, 0.2]])
def test_separated_tokens_pay_little_attention_to_other_groups(weights):
    cloud = on_circle(GROUPS, np.array(weights))
    assert separation(cloud, 40.0).holds
    paid = np.asarray(cloud.weights) * np.exp(40 * cloud.points @ cloud.points.T)
    paid = paid / paid.sum(axis=1, keepdims=True)
    abroad = np.append(paid[:3, 3:].sum(axis=1), paid[3:, :3].sum(axis=1))
    assert (abroad <= np.exp(-5) / (5 * np.asarray(weights))).all()


def test_the_gradient_is_of_the_size_of_the_radius_and_then_exponentially_small():
    cloud, beta = on_circle(GROUPS), 12.0
    report = separation(cloud, beta)
    layer = mf.identity_attention("unnormalised", 2, beta)
    gradient = energy_gradient(layer, cloud)
    size = np.sqrt(np.sum(np.asarray(cloud.weights)[:, None] * gradient**2))
    np.testing.assert_allclose(report.log_gradient, np.log(size) - beta, rtol=1e-12)
    assert np.log(0.01) < report.log_gradient < np.log(0.06)
    # Two points: masses 0.6 and 0.4 pull each other by e^(beta cos) sin.
    pull = beta * (np.cos(report.separation) - 1) + np.log(np.sin(report.separation))
    length = 0.5 * np.log(0.6 * 0.4**2 + 0.4 * 0.6**2)
    np.testing.assert_allclose(report.log_group_gradient, pull + length, rtol=1e-12)


def test_a_gradient_below_all_numbers_has_a_logarithm():
    report = separation(on_circle([0.0, 3.0]), 2000.0)
    assert report.log_group_gradient < -3900
    assert separation(on_circle([0.5]), 2000.0).log_gradient is None


def test_order_padding_and_splitting_change_nothing():
    whole = separation(on_circle(GROUPS), 30.0)
    split = separation(
        on_circle([*GROUPS[::-1], 1.23, 2.0], [0.2, 0.1, 0.2, 0.2, 0.2, 0.1, 0.0]), 30.0
    )
    for name in ("radius", "separation", "value", "needed", "log_group_gradient"):
        np.testing.assert_allclose(
            getattr(split, name), getattr(whole, name), rtol=1e-9, err_msg=name
        )


def test_groups_on_the_sphere_are_measured_in_angles():
    points = np.array([[1.0, 0, 0], [0, 1.0, 0], [0, 0.6, 0.8]])
    report = separation(mf.TokenCloud(points), 60.0)
    np.testing.assert_allclose(report.separation, np.arccos(0.6), rtol=1e-12)
    assert len(report.clusters.masses) == 3


def test_what_cannot_be_is_refused():
    cloud = on_circle(GROUPS)
    with pytest.raises(mf.InvalidInput, match=r"beta is -1\.0"):
        separation(cloud, -1.0)
    with pytest.raises(mf.InvalidInput, match="margin is nan"):
        separation(cloud, 1.0, margin=np.nan)
    with pytest.raises(mf.InvalidInput, match="epsilon is"):
        separation(cloud, 1.0, epsilon=-0.1)
    with pytest.raises(mf.InvalidInput, match="norm"):
        separation(mf.TokenCloud(jnp.ones((2, 2))), 1.0)
    with pytest.raises(mf.InvalidInput, match="jit"):
        jax.jit(lambda points: separation(mf.TokenCloud(points), 1.0).radius)(
            cloud.points
        )


def test_it_runs_in_single_precision():
    cloud = mf.TokenCloud(on_circle(GROUPS).points.astype(jnp.float32))
    report = separation(cloud, 40.0)
    assert report.holds
    assert report.clusters.centres.dtype == jnp.float32
