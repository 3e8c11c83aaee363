"""Where noise and attraction balance: thresholds, and the bend of the branch there."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import meanformer as mf
from meanformer.errors import InvalidInput, Overflow, Unsupported
from meanformer.mean_field import (
    branch_curvature,
    critical_kappa,
    critical_noise,
    growth_rates,
    noise_of_kappa,
    tricritical_beta,
)

KINDS = "softmax", "unnormalised"


def identity(kind, dimension, beta):
    return mf.identity_attention(kind, dimension, beta)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(1e-8, 2.0), (1.0, 1.7694132377), (5.0, 0.2054599575)],
)
def test_the_critical_kappa_of_the_circle_is_that_of_the_specification(beta, expected):
    found = critical_kappa(identity("unnormalised", 2, beta))
    np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize(
    ("dimension", "expected"),
    [(2, 2.4469183113), (3, 1.8161545254), (4, 1.5752571501), (8, 1.2665530245)],
)
def test_the_tricritical_beta_is_that_of_the_specification(dimension, expected):
    np.testing.assert_allclose(tricritical_beta(dimension), expected, atol=1e-9)


@pytest.mark.parametrize("dimension", [2, 3, 60])
def test_the_tricritical_beta_is_a_root_in_bessel_functions_of_scipy(dimension):
    beta = tricritical_beta(dimension)
    order = dimension / 2
    ratio = scipy.special.ive(order + 1, beta) / scipy.special.ive(order, beta)
    np.testing.assert_allclose(dimension * ratio, 1, rtol=1e-13)


def test_the_tricritical_beta_falls_to_one_in_high_dimension():
    dimension = 10**4
    found = (tricritical_beta(dimension) - 1) * dimension
    np.testing.assert_allclose(found, 2, rtol=2 / dimension + 1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimension", [2, 8])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_degree_neither_grows_nor_decays_at_its_critical_kappa(
    kind, dimension, degree
):
    attention = identity(kind, dimension, 4.0)
    kappa = critical_kappa(attention, degree=degree)
    noise = noise_of_kappa(kappa)
    rate = growth_rates(attention, [degree], noise=noise)
    free = growth_rates(attention, [degree])
    np.testing.assert_allclose(rate / free, 0, atol=1e-13)


def test_the_first_degree_is_the_first_to_grow():
    attention = identity("softmax", 3, 25.0)
    kappas = [critical_kappa(attention, degree=degree) for degree in range(1, 9)]
    assert (np.diff(kappas) > 0).all()


def test_values_and_scores_may_be_multiples_of_the_identity():
    plain = critical_kappa(identity("unnormalised", 3, 4.0))
    eye = jnp.eye(3)
    scaled = mf.Unnormalised(2 * eye, eye, 5 * eye, beta=2.0)
    np.testing.assert_allclose(5 * critical_kappa(scaled), plain, rtol=1e-14)


def test_a_shift_multiplies_the_critical_kappa():
    eye = jnp.eye(2)
    shifted = mf.Unnormalised(eye, eye, eye, beta=5.0, shift=5.0)
    plain = critical_kappa(identity("unnormalised", 2, 5.0))
    np.testing.assert_allclose(critical_kappa(shifted), np.exp(5) * plain, rtol=1e-14)


def test_a_shift_keeps_large_beta_finite():
    eye = jnp.eye(2)
    shifted = mf.Unnormalised(eye, eye, eye, beta=4000.0, shift=4000.0)
    expected = 4000 / scipy.special.ive(1, 4000.0)
    np.testing.assert_allclose(critical_kappa(shifted), expected, rtol=1e-12)
    with pytest.raises(Overflow, match="shift=beta"):
        critical_kappa(identity("unnormalised", 2, 4000.0))


def test_the_critical_noise_is_the_strength_in_the_flow():
    attention = identity("unnormalised", 3, 2.0)
    kappa = critical_kappa(attention)
    np.testing.assert_allclose(critical_noise(attention) ** 2, 2 / kappa, rtol=1e-15)


@pytest.mark.parametrize("dimension", [2, 3, 8])
def test_unnormalised_branches_bend_back_from_the_tricritical_beta_on(dimension):
    root = tricritical_beta(dimension)
    below = branch_curvature(identity("unnormalised", dimension, root * (1 - 1e-6)))
    above = branch_curvature(identity("unnormalised", dimension, root * (1 + 1e-6)))
    assert below > 0 > above


@pytest.mark.parametrize("dimension", [2, 3, 60])
def test_softmax_branches_never_bend_back(dimension):
    for beta in np.geomspace(1e-2, 300, 25):
        attention = identity("softmax", dimension, float(beta))
        assert branch_curvature(attention) > 0


@pytest.mark.parametrize("beta", [0.5, 3.0, 40.0])
@pytest.mark.parametrize("dimension", [2, 3])
def test_the_bend_of_softmax_has_the_sign_of_a_decreasing_ratio(dimension, beta):
    """Another form of it, in the mean resultant length and its derivative."""
    order = dimension / 2
    first, second = (
        scipy.special.ive(order + i, beta) / scipy.special.ive(order - 1, beta)
        for i in (0, 1)
    )
    slope = 1 - first**2 - (dimension - 1) * first / beta
    bracket = dimension * (first * (1 + first) / beta - slope) / (first - second)
    expected = dimension * (1 - first) * bracket / (dimension + 2)
    found = branch_curvature(identity("softmax", dimension, beta))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_bad_input_is_refused_with_advice():
    attention = identity("unnormalised", 3, 2.0)
    with pytest.raises(InvalidInput, match="dimension is 1; it must be 2 or more"):
        tricritical_beta(1)
    with pytest.raises(InvalidInput, match="degree is 0"):
        critical_kappa(attention, degree=0)
    with pytest.raises(InvalidInput, match="2 / noise"):
        noise_of_kappa(-1.0)
    with pytest.raises(Unsupported, match="on the circle for all degrees"):
        branch_curvature(attention, degree=2)
    with pytest.raises(Unsupported, match="positive multiple"):
        critical_kappa(mf.Softmax(jnp.eye(2), jnp.eye(2), -jnp.eye(2)))
    with pytest.raises(InvalidInput, match="lost in rounding"):
        branch_curvature(identity("softmax", 2, 1e12))
    with pytest.raises(InvalidInput, match="beyond all numbers"):
        critical_kappa(identity("softmax", 2, 1e-3), degree=200)


@pytest.mark.usefixtures("untyped")
def test_other_attention_is_refused():
    with pytest.raises(Unsupported, match="Softmax and Unnormalised"):
        critical_kappa(identity("linear", 2, 1.0))
