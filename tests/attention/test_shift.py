"""A factor taken out of the scores of unnormalised attention, and out of time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanformer.attention import (
    Causal,
    Masked,
    Softmax,
    Unnormalised,
    attention_matrix,
    in_order,
    lipschitz_bounds,
)
from meanformer.errors import InvalidInput, Overflow
from meanformer.flows import Flow, LongDepth, solve
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.observables import (
    dissipation,
    energy,
    energy_profile,
    greedy_staircase,
    is_gradient_flow,
)
from meanformer.storage.config import build
from meanformer.storage.fingerprint import short_hash
from reference import KEY, POINTS, QUERY, VALUE, WEIGHTS

CLOUD = TokenCloud(POINTS, WEIGHTS)
PLAIN = Unnormalised(QUERY, KEY, VALUE, beta=1.5)
SHIFTED = Unnormalised(QUERY, KEY, VALUE, beta=1.5, shift=0.7)
TOKENS = TokenCloud([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.6, 0.8, 0]])


def on_sphere(beta, **options):
    layer = Unnormalised(np.eye(3), np.eye(3), np.eye(3), beta=beta, **options)
    return Flow(layer, space=Sphere())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_shift_is_a_factor_of_the_output(dtype):
    matrices = [matrix.astype(dtype) for matrix in (QUERY, KEY, VALUE)]
    cloud = TokenCloud(POINTS.astype(dtype), WEIGHTS.astype(dtype))
    plain, shifted = (Unnormalised(*matrices, shift=shift) for shift in (None, 0.7))
    output = shifted(cloud, cloud.points)
    assert output.dtype == dtype
    tolerance = 20 * np.finfo(dtype).eps
    expected = np.exp(-0.7) * np.asarray(plain(cloud, cloud.points))
    np.testing.assert_allclose(output, expected, rtol=tolerance, atol=tolerance)


def test_the_shift_is_a_factor_of_the_attention_matrix_and_of_bounds():
    factor = np.exp(-0.7)
    np.testing.assert_allclose(
        attention_matrix(SHIFTED, CLOUD),
        factor * attention_matrix(PLAIN, CLOUD),
        rtol=1e-13,
    )
    plain, shifted = (lipschitz_bounds(layer, 1.2, 4) for layer in (PLAIN, SHIFTED))
    for name in ("in_query", "in_measure"):
        np.testing.assert_allclose(
            getattr(shifted, name), factor * getattr(plain, name), rtol=1e-12
        )


def test_a_mask_keeps_the_shift():
    cloud = in_order(CLOUD)
    plain, shifted = (Masked(layer, Causal()) for layer in (PLAIN, SHIFTED))
    np.testing.assert_allclose(
        shifted(cloud, cloud.points, positions=cloud.positions),
        np.exp(-0.7) * plain(cloud, cloud.points, positions=cloud.positions),
        rtol=1e-13,
    )


def test_a_shift_of_zero_changes_nothing_and_neither_does_none():
    zero = Unnormalised(QUERY, KEY, VALUE, beta=1.5, shift=0.0)
    at = CLOUD.points
    np.testing.assert_array_equal(zero(CLOUD, at), PLAIN(CLOUD, at))


def test_runs_from_before_there_was_a_shift_keep_their_fingerprint():
    @dataclasses.dataclass
    class Old:
        query: object
        key: object
        value: object
        beta: object

    old = Old(PLAIN.query, PLAIN.key, PLAIN.value, PLAIN.beta)
    Old.__module__, Old.__qualname__ = "meanformer", "Unnormalised"
    assert short_hash(PLAIN) == short_hash(old)
    assert short_hash(SHIFTED) != short_hash(PLAIN)


def test_the_energy_with_its_rate_has_the_same_factor():
    plain, shifted = on_sphere(2.0), on_sphere(2.0, shift=2.0)
    layers = plain.velocity.gamma, shifted.velocity.gamma
    np.testing.assert_allclose(
        energy(layers[1], TOKENS), np.exp(-2) * energy(layers[0], TOKENS), rtol=1e-14
    )
    assert is_gradient_flow(layers[1])
    assert float(is_gradient_flow(layers[1]).factor) == 1.0
    np.testing.assert_allclose(
        dissipation(shifted, TOKENS),
        np.exp(-4) * dissipation(plain, TOKENS),
        rtol=1e-13,
    )


def test_the_velocity_is_the_gradient_of_the_shifted_energy():
    layer = Unnormalised(np.eye(3), np.eye(3), np.eye(3), beta=3.0, shift=1.3)
    slopes = jax.grad(lambda x: energy(layer, TOKENS.moved(x)))(TOKENS.points)
    np.testing.assert_allclose(4 * slopes, layer(TOKENS, TOKENS.points), rtol=1e-12)


@pytest.mark.slow
def test_depth_is_measured_in_another_unit():
    plain = solve(on_sphere(2.0), TOKENS, 0.5, save=2, rtol=1e-11, atol=1e-13)
    slow = solve(
        on_sphere(2.0, shift=2.0),
        TOKENS,
        0.5 * np.exp(2),
        save=2,
        rtol=1e-11,
        atol=1e-13,
    )
    np.testing.assert_allclose(slow.points[-1], plain.points[-1], atol=1e-10)


@pytest.mark.slow
def test_a_large_beta_overflows_without_a_shift_and_runs_with_it():
    with pytest.raises(Overflow, match="shift=beta"):
        on_sphere(1000.0).velocity.gamma(TOKENS, TOKENS.points)
    flow = on_sphere(1000.0, shift=1000.0)
    path = solve(flow, TOKENS, 5.0, save=5)
    assert np.isfinite(path.points).all()
    profile = energy_profile(flow, path)
    assert float(profile.worst_violation) < 1e-18
    # Four tokens that do not see each other: a quarter of the energy of one cluster.
    np.testing.assert_allclose(profile.energies[0], 0.25 / 2000, rtol=1e-12)


@pytest.mark.slow
def test_a_long_walk_runs_on_the_shifted_clock():
    angles = jnp.array([0.0, 0.4])
    cloud = TokenCloud(jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1))
    depths = {}
    for shift in (None, 20.0):
        layer = Unnormalised(np.eye(2), np.eye(2), np.eye(2), beta=20.0, shift=shift)
        last = 1.0 if shift is None else np.exp(20.0)
        flow = Flow(layer, space=Sphere())
        path = solve(flow, cloud, last, save=2, solver=LongDepth(), merge=0.01)
        assert path.merges is not None
        depths[shift] = float(path.merges.depths[0])
    np.testing.assert_allclose(depths[20.0], np.exp(20.0) * depths[None], rtol=1e-6)


def test_the_greedy_rule_does_not_see_the_shift():
    plain, shifted = (
        greedy_staircase(on_sphere(9.0, shift=s).velocity.gamma, TOKENS)
        for s in (None, 9.0)
    )
    np.testing.assert_array_equal(plain.arc_lengths, shifted.arc_lengths)


def test_the_derivative_in_the_shift_is_minus_the_output():
    def output(shift):
        return Unnormalised(QUERY, KEY, VALUE, shift=shift)(CLOUD, CLOUD.points)

    at = jnp.asarray(0.3)
    np.testing.assert_allclose(jax.jacfwd(output)(at), -output(at), rtol=1e-13)


def test_only_unnormalised_attention_has_a_shift():
    with pytest.raises(TypeError, match="shift"):
        Softmax(QUERY, KEY, VALUE, shift=1.0)


@pytest.mark.parametrize("shift", [np.ones(2), np.nan])
def test_a_wrong_shift_is_refused(shift):
    with pytest.raises(InvalidInput, match="shift"):
        Unnormalised(QUERY, KEY, VALUE, shift=shift)


def test_a_configuration_file_may_give_a_shift(tmp_path):
    tokens = {"points": np.asarray(TOKENS.points).tolist()}
    attention = {"kind": "unnormalised", "beta": 2.0, "shift": 2.0}
    config = {"tokens": tokens, "attention": attention, "solve": {"depth": 1.0}}
    flow = build(config, tmp_path).flow
    assert float(flow.velocity.gamma.shift) == 2.0
