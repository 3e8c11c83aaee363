"""Affine velocities of Gaussians against quadrature and the equations in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
from numpy.polynomial.hermite_e import hermegauss

import meanformer as mf
from gaussian_reference import (
    COVARIANCE,
    KEY,
    KINDS,
    MEAN,
    QUERY,
    SCORE,
    VALUE,
    attention,
    conditional_covariance,
    gaussian,
    integrated,
    perceptron,
    root_of,
    slope_and_constant,
)
from meanformer.errors import InvalidInput, Unsupported
from meanformer.gaussian import affine_velocity, closure_residual
from meanformer.measures import entropic_factor

BETA = 0.9
POINTS = np.array([[0.4, -1.2], [1.5, 0.3], [-0.7, 0.8], [0.0, 0.0], [-1.1, -0.6]])
COLUMN = np.array([0.6, -1.1])
SINGULAR = np.outer(COLUMN, COLUMN)
RANK_ONE = np.outer([1.0, -0.5], [0.4, 0.7])


def nodes_of(mean, spread, order):
    """Points and weights of a product rule, through the symmetric root."""
    places, masses = hermegauss(order)
    grid = np.stack(np.meshgrid(places, places, indexing="ij"), axis=-1)
    weights = np.outer(masses, masses).ravel() / masses.sum() ** 2
    return mean + grid.reshape(-1, 2) @ root_of(spread), weights


def by_quadrature(kind, matrices, mean, spread, order=60):
    """The velocity at the test points, from its integral over the tokens."""
    query, key, value = matrices
    tokens, weights = nodes_of(mean, spread, order)
    scores = BETA * POINTS @ (key.T @ query).T @ tokens.T
    if kind == "linear":
        return scores * weights @ tokens @ value.T
    if kind == "l2":
        gaps = POINTS @ query.T, tokens @ key.T
        scores = -BETA * np.sum((gaps[0][:, None] - gaps[1]) ** 2, axis=2)
    masses = weights * np.exp(scores - scores.max(axis=1, keepdims=True))
    return masses @ tokens @ value.T / masses.sum(axis=1, keepdims=True)


def by_sinkhorn(matrices, mean, spread, order=16, rounds=60):
    """The velocity of doubly stochastic attention, by alternate normalisation."""
    query, key, value = matrices
    tokens, weights = nodes_of(mean, spread, order)
    form = 2 * BETA * key.T @ query
    scores, logs = tokens @ form.T @ tokens.T, np.log(weights)
    potential = np.zeros(len(tokens))
    for _ in range(rounds):
        rows = -scipy.special.logsumexp(scores + (logs + potential)[None], axis=1)
        potential = -scipy.special.logsumexp(scores + (logs + rows)[:, None], axis=0)
    seen = POINTS @ form.T @ tokens.T + (logs + potential)[None]
    shares = np.exp(seen - scipy.special.logsumexp(seen, axis=1, keepdims=True))
    return shares @ tokens @ value.T


def at_points(slope, constant):
    return POINTS @ np.asarray(slope).T + np.asarray(constant)


@pytest.mark.parametrize("kind", ["softmax", "l2", "linear"])
@pytest.mark.parametrize("spread", [COVARIANCE, SINGULAR], ids=["regular", "singular"])
@pytest.mark.parametrize("key", [KEY, RANK_ONE], ids=["full", "rank one"])
def test_the_affine_velocity_is_the_integral_over_the_gaussian(kind, spread, key):
    matrices = (QUERY, key, VALUE)
    gamma = attention(kind, BETA, matrices)
    slope, constant = affine_velocity(gamma, gaussian(MEAN, spread))
    expected = by_quadrature(kind, matrices, MEAN, spread)
    np.testing.assert_allclose(at_points(slope, constant), expected, atol=1e-12)


@pytest.mark.parametrize("spread", [COVARIANCE, SINGULAR], ids=["regular", "singular"])
def test_the_affine_velocity_of_sinkhorn_is_that_of_normalised_matrices(spread):
    matrices = (QUERY, KEY, VALUE)
    slope, constant = affine_velocity(
        attention("sinkhorn", BETA), gaussian(MEAN, spread)
    )
    expected = by_sinkhorn(matrices, MEAN, spread)
    np.testing.assert_allclose(at_points(slope, constant), expected, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [3, 1])
def test_the_affine_velocity_is_that_of_the_table(kind, rank):
    random = np.random.default_rng(rank)
    matrices, mean = random.standard_normal((3, 3, 3)), random.standard_normal(3)
    factor = random.standard_normal((3, rank))
    found = affine_velocity(
        attention(kind, 0.7, matrices), mf.Gaussian(mean, factor=factor)
    )
    expected = slope_and_constant(kind, matrices, 0.7, mean, factor @ factor.T)
    for number, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(number, other, atol=1e-11)


def test_heads_and_a_perceptron_add_their_velocities():
    outputs = [np.array([[1.0, 0.2], [0.0, -0.5]]), np.array([[0.3, 0.0], [0.7, 1.0]])]
    matrix, shift = np.array([[0.1, -0.6], [0.4, 0.2]]), np.array([0.3, -0.2])
    heads = mf.MultiHead([attention("softmax"), attention("l2")], outputs)
    slope, constant = affine_velocity(
        mf.Sum([heads, perceptron(matrix, shift)]), gaussian()
    )
    for kind, output in zip(("softmax", "l2"), outputs, strict=True):
        matrices = (QUERY, KEY, output @ VALUE)
        found = slope_and_constant(kind, matrices, 1.0, MEAN, COVARIANCE)
        matrix, shift = matrix + found[0], shift + found[1]
    np.testing.assert_allclose(slope, matrix, atol=1e-13)
    np.testing.assert_allclose(constant, shift, atol=1e-13)


def test_jit_and_single_precision_agree_with_the_plain_call():
    plain = affine_velocity(attention("sinkhorn"), gaussian())
    jitted = jax.jit(affine_velocity)(attention("sinkhorn"), gaussian())
    short = affine_velocity(
        attention("sinkhorn", dtype=np.float32), gaussian(dtype=np.float32)
    )
    for one, two, three in zip(plain, jitted, short, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-14)
        np.testing.assert_allclose(three, one, atol=1e-6)
        assert three.dtype == jnp.float32


@pytest.mark.parametrize("spread", [COVARIANCE, SINGULAR], ids=["regular", "singular"])
@pytest.mark.parametrize("form", [2 * BETA * SCORE, RANK_ONE], ids=["full", "rank one"])
def test_the_conditional_covariance_solves_its_equation(spread, form):
    root = jnp.asarray(root_of(spread))
    factor = np.asarray(entropic_factor(root, jnp.asarray(form)))
    found = factor @ factor.T
    back = found + found @ form @ spread @ form.T @ found
    np.testing.assert_allclose(back, spread, atol=1e-14)
    expected = conditional_covariance(form, spread)
    np.testing.assert_allclose(found, expected, atol=1e-14)


def test_sharp_sinkhorn_transports_the_gaussian_onto_itself():
    form = np.array([[0.5, -0.3], [0.8, 0.6]])
    limits = []
    for scale in (1e4, 1e6):
        gamma = mf.Sinkhorn(form, np.eye(2), np.eye(2), beta=scale / 2)
        limits.append(np.asarray(affine_velocity(gamma, gaussian())[0]))
    found = limits[1]
    np.testing.assert_allclose(found @ COVARIANCE @ found.T, COVARIANCE, atol=1e-5)
    root = root_of(COVARIANCE)
    inner = root @ form @ COVARIANCE @ form.T @ root
    expected = root @ np.linalg.inv(root_of(inner)) @ root @ form
    np.testing.assert_allclose(found, expected, atol=1e-5)
    product = form.T @ found
    np.testing.assert_allclose(product, product.T, atol=1e-5)
    assert np.linalg.eigvalsh(product).min() > 0
    errors = [np.abs(limit - expected).max() for limit in limits]
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.05)


def test_sharp_sinkhorn_with_a_positive_form_does_not_move_points():
    gamma = mf.Sinkhorn(COVARIANCE, np.eye(2), np.eye(2), beta=5e7)
    slope = affine_velocity(gamma, gaussian())[0]
    np.testing.assert_allclose(slope, np.eye(2), atol=1e-7)


SINGULAR_FORM = np.diag([1.0, 0.0])


def sharp_sinkhorn(form, value, scale):
    """Sinkhorn attention for the score y^T B x with B the form times a scale."""
    return mf.Sinkhorn(form, np.eye(2), value, beta=scale / 2)


def test_sharp_sinkhorn_with_a_singular_form_does_not_keep_the_gaussian():
    limit = np.array([[1.0, 0.0], [COVARIANCE[0, 1] / COVARIANCE[0, 0], 0.0]])
    for scale in (1e2, 1e4, 1e6):
        gamma = sharp_sinkhorn(SINGULAR_FORM, np.eye(2), scale)
        found = np.asarray(affine_velocity(gamma, gaussian())[0])
        # Here M + M B S B^T M = S is a quadratic equation for M11, and S11 = 1.
        share = (np.sqrt(1 + 4 * scale**2) - 1) / (2 * scale)
        np.testing.assert_allclose(found, share * limit, atol=1e-10)
    np.testing.assert_allclose(found, limit, atol=1e-6)
    kept = found @ COVARIANCE @ found.T
    np.testing.assert_allclose(kept, [[1.0, 0.3], [0.3, 0.09]], atol=2e-6)
    assert np.abs(kept - COVARIANCE).max() > 0.5


@pytest.mark.slow
def test_under_sharp_sinkhorn_with_a_singular_form_the_seen_part_grows_exponentially():
    gamma = sharp_sinkhorn(SINGULAR_FORM, np.eye(2), 1e6)
    path = mf.solve(mf.Flow(gamma), gaussian(np.zeros(2)), 2.0, save=3, rtol=1e-9)
    for spread, depth in zip(path.covariances, path.depths, strict=True):
        growth = np.exp(2 * float(depth))
        # dS = 2 [[S11, S12], [S12, S12^2 / S11]].
        corner = 0.6 + (growth - 1) * 0.3**2
        expected = [[growth, 0.3 * growth], [0.3 * growth, corner]]
        np.testing.assert_allclose(spread, expected, rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sharp_sinkhorn_grows_and_decays_exponentially(sign):
    form, value = np.array([[0.5, -0.3], [0.8, 0.6]]), sign * VALUE
    gamma = sharp_sinkhorn(form, value, 1e8)
    path = mf.solve(mf.Flow(gamma), gaussian(np.zeros(2)), 2.0, save=3, rtol=1e-10)

    def transport(_, mean, spread):
        root = root_of(spread)
        inner = root @ form @ spread @ form.T @ root
        slope = value @ root @ np.linalg.inv(root_of(inner)) @ root @ form
        return slope, np.zeros(2)

    expected = integrated(transport, np.zeros(2), COVARIANCE, path.depths)
    for found, (_, spread, _) in zip(path.covariances, expected, strict=True):
        np.testing.assert_allclose(found, spread, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_sharp_sinkhorn_with_a_positive_form_and_values_minus_i_decays_exponentially():
    gamma = sharp_sinkhorn(COVARIANCE, -np.eye(2), 1e10)
    path = mf.solve(mf.Flow(gamma), gaussian(np.zeros(2)), 4.0, save=3, rtol=1e-10)
    expected = np.exp(-2 * np.asarray(path.depths))[:, None, None] * COVARIANCE
    np.testing.assert_allclose(path.covariances, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_affine_kinds_have_no_residual(kind):
    mu, gamma = gaussian(), attention(kind, BETA)
    found = closure_residual(gamma, mu, order=8)
    expected = slope_and_constant(kind, (QUERY, KEY, VALUE), BETA, MEAN, COVARIANCE)
    assert float(found.absolute) < 1e-13
    assert float(found.relative) < 1e-12
    np.testing.assert_allclose(found.slope, expected[0], atol=1e-12)
    np.testing.assert_allclose(found.constant, expected[1], atol=1e-12)


def test_a_constant_velocity_has_no_residual():
    found = closure_residual(mf.Softmax(np.zeros((2, 2)), KEY, VALUE), gaussian())
    assert float(found.absolute) < 1e-14
    assert float(found.relative) == 0
    np.testing.assert_allclose(found.constant, VALUE @ MEAN, atol=1e-13)


SIGMOID = mf.Sigmoid(np.eye(1), np.eye(1), np.eye(1))
LINE = mf.Gaussian(np.zeros(1), np.eye(1))


def test_sigmoid_attention_on_a_gaussian_has_the_tabulated_values():
    nodes = mf.quadrature(LINE, 200)
    values = SIGMOID(nodes, jnp.array([[1.0], [2.0], [3.0]]))[:, 0]
    np.testing.assert_allclose(
        values, [0.2066209641, 0.3028527548, 0.3445137143], atol=1e-9
    )


def normal_mean(function):
    """The mean of a function under the standard normal law, by SciPy."""
    return scipy.integrate.quad(
        lambda z: function(z) * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi), -12, 12
    )[0]


def test_the_residual_of_sigmoid_attention_is_that_of_a_regression():
    found = closure_residual(SIGMOID, LINE, order=200)

    def velocity(x):
        return normal_mean(lambda y: y * scipy.special.expit(x * y))

    slope = normal_mean(lambda x: x * velocity(x))
    left = normal_mean(lambda x: (velocity(x) - slope * x) ** 2)
    whole = normal_mean(lambda x: velocity(x) ** 2)
    assert float(found.slope[0, 0]) == pytest.approx(slope, abs=1e-8)
    assert float(found.constant[0]) == pytest.approx(0, abs=1e-12)
    assert float(found.absolute) == pytest.approx(np.sqrt(left), rel=1e-6)
    assert float(found.relative) == pytest.approx(np.sqrt(left / whole), rel=1e-6)
    assert float(found.relative) > 0.1


def test_a_fit_on_a_singular_gaussian_is_that_on_its_range():
    mu = gaussian(MEAN, SINGULAR)
    found = closure_residual(attention("l2"), mu, order=12)
    expected = slope_and_constant("l2", (QUERY, KEY, VALUE), 1.0, MEAN, SINGULAR)[0]
    np.testing.assert_allclose(found.slope @ COLUMN, expected @ COLUMN, atol=1e-11)
    assert float(found.absolute) < 1e-12


def test_half_of_two_gaussians_is_seen_through_a_velocity_that_bends():
    parts = [mf.Gaussian([0.0], [[1.0]]), mf.Gaussian([1.0], [[0.25]])]
    context = mf.Mixture([0.5, 0.5], parts)
    gamma = mf.Softmax(np.eye(1), np.eye(1), np.eye(1))
    values = gamma(context, jnp.arange(-2.0, 4.0)[:, None])[:, 0]
    expected = [
        -1.9267194231,
        -0.646826861,
        0.5,
        1.1628387162,
        1.6887703344,
        2.4908332499,
    ]
    np.testing.assert_allclose(values, expected, atol=1e-9)
    assert np.abs(np.diff(values, 2)).max() > 0.1


def test_unnormalised_attention_on_a_gaussian_has_the_tabulated_value():
    gamma = mf.Unnormalised([[0.6]], [[1.0]], [[0.7]], beta=1.1)
    value = gamma(mf.Gaussian([0.3], [[0.5]]), jnp.array([[0.8]]))
    assert float(value[0, 0]) == pytest.approx(0.4959500954, abs=1e-9)


@pytest.mark.parametrize(
    ("gamma", "reason"),
    [
        (mf.Sigmoid(QUERY, KEY, VALUE), "Sigmoid is not affine"),
        (mf.Unnormalised(QUERY, KEY, VALUE), "Unnormalised is not affine"),
        (mf.Masked(attention("l2"), mf.Causal()), "Masked is not affine"),
        (mf.Hardmax(QUERY, KEY, VALUE), "Hardmax is not affine"),
    ],
    ids=["sigmoid", "unnormalised", "masked", "hardmax"],
)
def test_maps_that_bend_gaussians_are_refused_with_advice(gamma, reason):
    with pytest.raises(Unsupported, match=f"{reason}.*closure_residual"):
        affine_velocity(gamma, gaussian())


def test_tokens_are_refused(untyped):
    tokens = mf.TokenCloud(POINTS)
    for function in (affine_velocity, closure_residual):
        with pytest.raises(InvalidInput, match="mu is a TokenCloud; it must be a Gaus"):
            function(attention("softmax"), tokens)
