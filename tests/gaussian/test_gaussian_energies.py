"""Energies of flows of Gaussians, their gradients and their dissipation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import meanformer as mf
import meanformer.observables as tokens
from gaussian_reference import (
    COVARIANCE,
    KEY,
    QUERY,
    SCORE,
    VALUE,
    attention,
    conditional_covariance,
    gaussian,
    slope_and_constant,
)
from meanformer.errors import InvalidInput
from meanformer.gaussian import (
    affine_velocity,
    blowup_time,
    dissipation,
    energy,
    energy_profile,
    entropic_reward,
    gradient_structure,
)

IDENTITY = np.eye(2)
EVEN = np.array([[0.8, 0.3], [0.3, -0.4]])
ODD = np.array([[0.0, 0.9], [-0.9, 0.0]])
POSITIVE = np.array([[1.5, 0.4], [0.4, 0.7]])
CENTRED = gaussian(np.zeros(2))
GRAM = KEY.T @ KEY

STRUCTURED = {
    "softmax, even": ("softmax", (EVEN, IDENTITY, 0.7 * EVEN)),
    "softmax, odd": ("softmax", (ODD, IDENTITY, -1.2 * ODD)),
    "linear, even": ("linear", (EVEN, IDENTITY, -0.6 * EVEN)),
    "l2": ("l2", (-0.8 * KEY, KEY, 1.3 * GRAM)),
    "sinkhorn": ("sinkhorn", (EVEN, IDENTITY, 0.9 * EVEN)),
}
TWISTED = {
    "softmax": ("softmax", (EVEN, IDENTITY, POSITIVE @ EVEN)),
    "l2": ("l2", (1.4 * KEY, KEY, -POSITIVE @ GRAM)),
    "sinkhorn": ("sinkhorn", (EVEN, IDENTITY, POSITIVE @ EVEN)),
}


def gradient_of(function, spread):
    """The symmetric gradient of a function of the covariance, by differences."""
    found, step = np.zeros_like(spread), 1e-5
    for row, column in np.ndindex(spread.shape):
        moved = np.zeros_like(spread)
        moved[row, column] += step / 2
        moved[column, row] += step / 2
        rise = float(function(spread + moved)) - float(function(spread - moved))
        found[row, column] = rise / (2 * step)
    return found


def climbed_at(gamma):
    """What the flow climbs: the energy times the factor that the values set."""
    factor = gradient_structure(gamma).factor
    return lambda spread: factor * energy(gamma, gaussian(np.zeros(2), spread))


@pytest.mark.parametrize("name", STRUCTURED)
def test_the_slope_is_twice_the_gradient_of_the_climbed_energy(name):
    kind, matrices = STRUCTURED[name]
    gamma = attention(kind, 1.1, matrices)
    structure = gradient_structure(gamma)
    assert structure
    assert structure.metric == "Bures-Wasserstein"
    assert structure.mobility is None
    slope = slope_and_constant(kind, matrices, 1.1, np.zeros(2), COVARIANCE)[0]
    found = gradient_of(climbed_at(gamma), COVARIANCE)
    np.testing.assert_allclose(found, slope / 2, atol=1e-9)


def test_automatic_gradients_of_the_energy_are_the_same():
    kind, matrices = STRUCTURED["sinkhorn"]
    gamma = attention(kind, 1.1, matrices)
    found = np.asarray(
        jax.grad(lambda s: energy(gamma, mf.Gaussian(jnp.zeros(2), s)))(
            jnp.asarray(COVARIANCE)
        )
    )
    found = gradient_structure(gamma).factor * (found + found.T) / 2
    slope = slope_and_constant(kind, matrices, 1.1, np.zeros(2), COVARIANCE)[0]
    np.testing.assert_allclose(found, slope / 2, atol=1e-12)


@pytest.mark.parametrize("name", TWISTED)
def test_a_mobility_turns_the_gradient_into_the_slope(name):
    kind, matrices = TWISTED[name]
    gamma = attention(kind, 1.1, matrices)
    structure = gradient_structure(gamma)
    assert structure
    mobility = np.asarray(structure.mobility)
    assert np.linalg.eigvalsh(mobility)[0] > 0
    slope = slope_and_constant(kind, matrices, 1.1, np.zeros(2), COVARIANCE)[0]
    found = gradient_of(climbed_at(gamma), COVARIANCE)
    np.testing.assert_allclose(2 * mobility @ found, slope, atol=1e-9)
    assert abs(structure.factor) == (0.5 if kind == "sinkhorn" else 1.0)


def test_with_values_i_softmax_climbs_in_the_metric_of_fisher_and_rao():
    gamma = mf.Softmax(QUERY, KEY, -0.6 * IDENTITY, beta=1.1)
    structure = gradient_structure(gamma)
    assert structure.metric == "Fisher-Rao"
    slope = -0.6 * 1.1 * COVARIANCE @ SCORE
    change = slope @ COVARIANCE + COVARIANCE @ slope.T
    found = gradient_of(climbed_at(gamma), COVARIANCE)
    np.testing.assert_allclose(2 * COVARIANCE @ found @ COVARIANCE, change, atol=1e-9)
    rate = np.trace(found @ change)
    climbed = -0.6 * float(dissipation(gamma, CENTRED))
    assert climbed == pytest.approx(rate, rel=1e-8)
    inner = np.linalg.solve(COVARIANCE, change)
    assert rate == pytest.approx(np.trace(inner @ inner) / 2, rel=1e-8)


@pytest.mark.parametrize("table", [STRUCTURED, TWISTED], ids=["plain", "twisted"])
def test_the_dissipation_is_the_rate_of_the_energy(table):
    for kind, matrices in table.values():
        gamma = attention(kind, 1.1, matrices)
        slope = slope_and_constant(kind, matrices, 1.1, np.zeros(2), COVARIANCE)[0]
        change = slope @ COVARIANCE + COVARIANCE @ slope.T
        rate = np.sum(gradient_of(climbed_at(gamma), COVARIANCE) * change)
        found = gradient_structure(gamma).factor * float(dissipation(gamma, CENTRED))
        assert found == pytest.approx(rate, rel=1e-7)
        assert found > 0


def test_the_entropic_reward_has_the_tabulated_value():
    assert float(entropic_reward(CENTRED, jnp.asarray(EVEN))) == pytest.approx(
        0.375126721371, abs=1e-12
    )
    found = conditional_covariance(EVEN, COVARIANCE)
    expected = [[0.63649533, 0.16567721], [0.16567721, 0.52790969]]
    np.testing.assert_allclose(found, expected, atol=5e-9)
    gamma = mf.Sinkhorn(EVEN, IDENTITY, IDENTITY, beta=0.5)
    slope = affine_velocity(gamma, CENTRED)[0]
    np.testing.assert_allclose(slope @ np.linalg.inv(EVEN), expected, atol=1e-8)


def test_a_mean_adds_its_own_score_to_the_reward():
    mean = np.array([0.3, -0.4])
    shifted = entropic_reward(gaussian(mean), jnp.asarray(SCORE))
    centred = entropic_reward(CENTRED, jnp.asarray(SCORE))
    assert float(shifted - centred) == pytest.approx(mean @ SCORE @ mean, abs=1e-14)


def test_the_gradient_in_the_mean_is_its_velocity():
    kind, matrices = STRUCTURED["sinkhorn"]
    gamma, mean, step = attention(kind, 1.1, matrices), np.array([0.3, -0.4]), 1e-5
    # The energy is c/2 times the reward, and V = cB with B = 2 beta A.
    multiple = 0.9 / 2.2
    rises = [
        entropic_reward(gaussian(mean + moved), gamma.form)
        - entropic_reward(gaussian(mean - moved), gamma.form)
        for moved in step * IDENTITY
    ]
    gradient = multiple / 2 * np.asarray(rises) / (2 * step)
    slope, constant = map(np.asarray, affine_velocity(gamma, gaussian(mean)))
    np.testing.assert_allclose(gradient, slope @ mean + constant, atol=1e-9)
    np.testing.assert_allclose(gradient, matrices[2] @ mean, atol=1e-9)


@pytest.mark.slow
def test_values_in_proportion_to_the_form_move_the_mean_alone():
    kind, matrices = STRUCTURED["sinkhorn"]
    mean = np.array([0.3, -0.4])
    path = mf.solve(
        mf.Flow(attention(kind, 1.1, matrices)), gaussian(mean), 1.0, save=3, rtol=1e-11
    )
    expected = [scipy.linalg.expm(t * matrices[2]) @ mean for t in path.depths]
    np.testing.assert_allclose(path.means, expected, atol=1e-10)


def test_the_reward_is_the_score_of_the_best_plan_less_its_information():
    # The plan is Gaussian, with cross covariance S B^T M and marginals S.
    form = np.array([[0.8, -0.2], [0.5, 0.4]])
    narrow = conditional_covariance(form, COVARIANCE)
    cross = COVARIANCE @ form.T @ narrow
    joint = np.block([[COVARIANCE, cross], [cross.T, COVARIANCE]])
    information = (
        2 * np.linalg.slogdet(COVARIANCE)[1] - np.linalg.slogdet(joint)[1]
    ) / 2
    expected = np.trace(form @ cross) - information
    found = entropic_reward(CENTRED, jnp.asarray(form))
    assert float(found) == pytest.approx(expected, abs=1e-13)


def test_the_gradient_of_the_reward_of_any_form():
    form = np.array([[0.8, -0.2], [0.5, 0.4]])
    found = gradient_of(
        lambda spread: entropic_reward(
            gaussian(np.zeros(2), spread), jnp.asarray(form)
        ),
        COVARIANCE,
    )
    straight = form.T @ conditional_covariance(form, COVARIANCE) @ form
    turned = form @ conditional_covariance(form.T, COVARIANCE) @ form.T
    np.testing.assert_allclose(found, (straight + turned) / 2, atol=1e-9)


def test_without_temperature_the_energy_of_l2_is_zero():
    gamma = mf.L2(KEY, KEY, GRAM, beta=0.0)
    assert float(energy(gamma, CENTRED)) == 0
    small = energy(mf.L2(KEY, KEY, GRAM, beta=1e-6), CENTRED)
    assert abs(float(small)) < 1e-6


def lobatto(count):
    """Nodes and weights on [0, 1] of the rule of Gauss and Lobatto."""
    inner = np.polynomial.legendre.Legendre.basis(count - 1).deriv().roots()
    nodes = np.concatenate([[-1.0], inner, [1.0]])
    weights = 2 / (
        count
        * (count - 1)
        * np.polynomial.legendre.Legendre.basis(count - 1)(nodes) ** 2
    )
    return (nodes + 1) / 2, weights / 2


ALONG_FLOWS = {
    **STRUCTURED,
    # Half the values: the softmax flow blows up later.
    **{
        f"{name}, twisted": (kind, (query, key, value / 2))
        for name, (kind, (query, key, value)) in TWISTED.items()
    },
    "softmax, Fisher-Rao": ("softmax", (QUERY, KEY, 0.6 * IDENTITY)),
}


@pytest.mark.parametrize(
    "name",
    [
        "softmax, even",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ALONG_FLOWS
            if name != "softmax, even"
        ),
    ],
)
def test_along_a_flow_the_energy_grows_by_its_dissipation(name):
    kind, matrices = ALONG_FLOWS[name]
    gamma = attention(kind, 1.0, matrices)
    nodes, weights = lobatto(12)
    depths = 0.4 * nodes
    depths[0] = 0.0
    path = mf.solve(mf.Flow(gamma), CENTRED, 0.4, save=depths, rtol=1e-12, atol=1e-14)
    profile = energy_profile(gamma, path)
    risen = float(profile.energies[-1] - profile.energies[0])
    assert risen == pytest.approx(0.4 * weights @ np.asarray(profile.rates), rel=1e-8)
    assert gradient_structure(gamma).factor * risen > 1e-3
    assert float(profile.worst_violation) == 0
    np.testing.assert_array_equal(profile.depths, path.depths)
    for index in (0, 7):
        mu = gaussian(np.zeros(2), path.covariances[index])
        assert float(profile.energies[index]) == pytest.approx(float(energy(gamma, mu)))


def test_an_energy_that_goes_the_wrong_way_is_reported():
    # Under values of the other sign; and backwards, where that is right.
    up, down = (mf.Linear(EVEN, IDENTITY, sign * EVEN) for sign in (1, -1))
    for gamma, other in ((up, down), (down, up)):
        alien = mf.run_layers(mf.Flow(other), CENTRED, 4, step=0.05)
        profile = energy_profile(gamma, alien)
        steps = np.abs(np.diff(profile.energies))
        assert float(profile.worst_violation) == pytest.approx(steps.max(), rel=1e-12)
        back = mf.run_layers(mf.Flow(gamma), CENTRED, 4, step=-0.05)
        assert float(energy_profile(gamma, back).worst_violation) == 0


@pytest.mark.slow
def test_energies_of_a_gaussian_and_of_its_quadrature_are_one():
    small = gaussian(np.zeros(2), 0.3 * COVARIANCE)
    cloud = mf.quadrature(small, 14)
    for gamma in (
        mf.Linear(EVEN, IDENTITY, -0.6 * EVEN, beta=1.1),
        mf.Linear(ODD, IDENTITY, 2.0 * ODD, beta=0.7),
        mf.Sinkhorn(EVEN, IDENTITY, 0.9 * EVEN, kernel="dot", tolerance=1e-12),
        mf.Sinkhorn(EVEN, IDENTITY, -0.3 * EVEN, beta=0.4, tolerance=1e-12),
    ):
        here, there = gradient_structure(gamma), tokens.is_gradient_flow(gamma)
        assert here.factor == pytest.approx(float(there.factor), rel=1e-12)
        found = float(energy(gamma, small))
        assert found == pytest.approx(float(tokens.energy(gamma, cloud)), rel=1e-8)
        rate = float(dissipation(gamma, small))
        assert rate == pytest.approx(float(tokens.dissipation(gamma, cloud)), rel=1e-7)
    # Softmax moves a centred Gaussian as linear attention does, and has its energy.
    softmax = mf.Softmax(EVEN, IDENTITY, EVEN, beta=1.1)
    linear = mf.Linear(EVEN, IDENTITY, EVEN, beta=1.1)
    assert float(energy(softmax, small)) == float(energy(linear, small))


REFUSED = {
    "score": (mf.Softmax(QUERY, KEY, VALUE), "neither symmetric nor antisymmetric"),
    "values": (mf.Softmax(EVEN, IDENTITY, [[1.0, 2.0], [0.0, 1.0]]), "V is not c A"),
    "query": (mf.L2(QUERY, KEY, GRAM), "Q is not a multiple of K"),
    "form": (mf.Sinkhorn(QUERY, KEY, VALUE), "B is not symmetric"),
    "half steps": (
        mf.Sinkhorn(EVEN, IDENTITY, EVEN, half_steps=3),
        "half_steps is set",
    ),
    "bias": (
        mf.Softmax(EVEN, IDENTITY, EVEN, value_bias=[1.0, 0.0]),
        "value_bias is set",
    ),
    "linear": (mf.Linear(EVEN, IDENTITY, EVEN, normalized=True), "normalised"),
    "sigmoid": (mf.Sigmoid(EVEN, IDENTITY, EVEN), "no energy is known for Sigmoid"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_flows_have_no_energy_and_say_why(name):
    gamma, reason = REFUSED[name]
    structure = gradient_structure(gamma)
    assert not structure
    assert reason in structure.failure
    for function in (energy, dissipation):
        with pytest.raises(InvalidInput, match="not a gradient flow"):
            function(gamma, CENTRED)


def slopes_at(gamma, spreads):
    return [
        np.asarray(affine_velocity(gamma, gaussian(np.zeros(2), spread))[0])
        for spread in spreads
    ]


def test_a_score_of_rank_one_may_have_symmetric_slopes_that_are_no_gradient():
    column, row, other = np.array([[1.0, -0.5], [0.4, 0.7], [0.9, 0.2]])
    gamma = mf.Softmax(np.outer(column, row), IDENTITY, np.outer(row, other))
    spreads = (COVARIANCE, POSITIVE)
    first, second = slopes_at(gamma, spreads)
    np.testing.assert_allclose(first, first.T, atol=1e-15)
    np.testing.assert_allclose(first, other @ COVARIANCE @ column * np.outer(row, row))
    # The derivative of the slope is the slope, for it is linear: is it self-adjoint?
    assert abs(np.sum(first * spreads[1]) - np.sum(second * spreads[0])) > 0.01
    assert not gradient_structure(gamma)


@pytest.mark.parametrize("score", [EVEN, ODD, SCORE], ids=["even", "odd", "neither"])
def test_slopes_are_self_adjoint_where_the_score_is_even_or_odd(score):
    # With values A^T the slope is symmetric for every score.
    gamma = mf.Softmax(score, IDENTITY, score.T)
    spreads = (COVARIANCE, POSITIVE)
    first, second = slopes_at(gamma, spreads)
    np.testing.assert_allclose(first, first.T, atol=1e-15)
    gap = abs(np.sum(first * spreads[1]) - np.sum(second * spreads[0]))
    is_gradient = bool(gradient_structure(gamma))
    assert is_gradient == (score is not SCORE)
    assert (gap < 1e-15) == is_gradient


@pytest.mark.slow
def test_the_sign_of_the_values_decides_between_growth_and_contraction():
    for kind in ("softmax", "sinkhorn"):
        for sign in (1.0, -1.0):
            gamma = attention(kind, 1.0, (POSITIVE, IDENTITY, sign * POSITIVE))
            path = mf.solve(mf.Flow(gamma), CENTRED, 0.1, save=5, rtol=1e-8)
            assert np.all(sign * np.diff(path.statistics["trace"]) > 0)
            assert gradient_structure(gamma).factor * sign > 0
            found = blowup_time(gamma, CENTRED, horizon=100.0)
            blows_up = kind == "softmax" and sign > 0
            assert (found.depth is not None) == blows_up


@pytest.mark.parametrize("score", [QUERY, np.array([[1.0, 0.2], [-0.2, 0.5]])])
def test_a_flow_without_structure_has_a_slope_that_is_no_gradient(score):
    # Derivatives of a gradient commute; those of this slope do not.
    gamma = mf.Softmax(score, IDENTITY, VALUE)
    assert not gradient_structure(gamma)
    slope = np.asarray(affine_velocity(gamma, CENTRED)[0])
    assert np.abs(slope - slope.T).max() > 1e-3


def test_a_mean_is_refused():
    with pytest.raises(InvalidInput, match="mean zero; this one has mean"):
        energy(mf.Softmax(EVEN, IDENTITY, EVEN), gaussian())
