"""Closed forms against tabulated values and an independent solver."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import meanformer as mf
from gaussian_reference import (
    COVARIANCE,
    KEY,
    MEAN,
    PRECISE,
    QUERY,
    SCORE,
    VALUE,
    attention,
    gaussian,
    integrated,
    perceptron,
    slope_and_constant,
)
from meanformer.errors import InvalidInput, Overflow, Unsupported
from meanformer.gaussian import explicit_solution
from meanformer.gaussian.explicit import distance_growth, sinkhorn_variance

ON_A_LINE = {
    "softmax": (0.596281419889, 1.450116009281),
    "l2": (0.337845491507, 0.951200358045),
    "sinkhorn": (0.350134500059, 1.159091483621),
    "linear": (0.369873480524, 1.710079894933),
}
SYMMETRIC = np.array([[-0.4, 0.3], [0.3, 0.2]])


def line(query=0.9, key=1.0, value=0.7):
    return [np.array([[number]]) for number in (query, key, value)]


def bent_perceptron():
    return mf.Perceptron(np.eye(2), np.zeros(2), np.eye(2))


def by_scipy(kind, matrices, beta, mean, spread, depth):
    def closure(_, mean, spread):
        return slope_and_constant(kind, matrices, beta, mean, spread)

    return integrated(closure, mean, spread, [0.0, depth])[-1][:2]


@pytest.mark.parametrize("kind", ON_A_LINE)
def test_solutions_on_the_line_have_the_tabulated_values(kind):
    gamma = attention(kind, 1.3, line())
    found = explicit_solution(gamma, mf.Gaussian([0.2], [[0.5]]), 0.8)
    mean, variance = ON_A_LINE[kind]
    assert float(found.mean()[0]) == pytest.approx(mean, abs=1e-12)
    assert float(found.covariance()[0, 0]) == pytest.approx(variance, abs=1e-12)


@pytest.mark.parametrize("kind", ON_A_LINE)
@pytest.mark.parametrize("value", [0.7, -0.7])
@pytest.mark.parametrize("depth", [0.5, -0.5, 1.1])
def test_solutions_on_the_line_solve_the_equations(kind, value, depth):
    matrices = line(-0.8, 1.2, value)
    mean, spread = np.array([0.2]), np.array([[0.3]])
    found = explicit_solution(
        attention(kind, 1.1, matrices), mf.Gaussian(mean, spread), depth
    )
    expected = by_scipy(kind, matrices, 1.1, mean, spread, depth)
    np.testing.assert_allclose(found.mean(), expected[0], rtol=1e-9)
    np.testing.assert_allclose(found.covariance(), expected[1], rtol=1e-9)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_symmetric_scores_have_a_solution_with_its_mean(kind):
    matrices = (SYMMETRIC, np.eye(2), 0.8 * np.eye(2))
    found = explicit_solution(attention(kind, 1.2, matrices), gaussian(), 0.6)
    expected = by_scipy(kind, matrices, 1.2, MEAN, COVARIANCE, 0.6)
    np.testing.assert_allclose(found.mean(), expected[0], atol=1e-10)
    np.testing.assert_allclose(found.covariance(), expected[1], atol=1e-10)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_any_score_has_a_solution_of_mean_zero(kind):
    matrices = (QUERY, KEY, -1.4 * np.eye(2))
    mu = gaussian(np.zeros(2))
    found = explicit_solution(attention(kind, 1.2, matrices), mu, 2.0)
    inverse = np.linalg.inv(COVARIANCE) + 1.4 * 2.0 * 1.2 * (SCORE + SCORE.T)
    np.testing.assert_allclose(found.covariance(), np.linalg.inv(inverse), atol=1e-12)
    assert not np.any(found.mean())


@pytest.mark.slow
def test_the_flow_follows_the_solution():
    matrices = (SYMMETRIC, np.eye(2), 0.8 * np.eye(2))
    gamma = attention("softmax", 1.2, matrices)
    path = mf.solve(mf.Flow(gamma), gaussian(), 1.0, save=3, **PRECISE)
    for index, depth in enumerate(path.depths):
        found = explicit_solution(gamma, gaussian(), depth)
        np.testing.assert_allclose(path.means[index], found.mean(), atol=1e-10)
        spread = found.covariance()
        np.testing.assert_allclose(path.covariances[index], spread, atol=1e-10)


def test_a_singular_covariance_keeps_its_factor():
    column = np.array([[0.6], [-1.1]])
    matrices = (SYMMETRIC, np.eye(2), np.eye(2))
    mu = mf.Gaussian(np.zeros(2), factor=column)
    found = explicit_solution(attention("softmax", 1.0, matrices), mu, 0.7)
    share = 1 - 2 * 0.7 * (column.T @ SYMMETRIC @ column).item()
    assert found.root().shape == (2, 1)
    np.testing.assert_allclose(found.covariance(), column @ column.T / share)


def test_the_long_run_is_the_inverse_on_the_kernel():
    direction = np.array([[1.0, 2.0]]) / np.sqrt(5)
    gamma = mf.Softmax(direction, -direction, np.eye(2))
    found = explicit_solution(gamma, gaussian(np.zeros(2)), 1e9).covariance()
    expected = [[0.44347826, -0.22173913], [-0.22173913, 0.11086957]]
    np.testing.assert_allclose(found, expected, atol=1e-8)
    projector = np.eye(2) - direction.T @ direction
    narrow = np.linalg.pinv(projector @ np.linalg.inv(COVARIANCE) @ projector)
    np.testing.assert_allclose(found, narrow, atol=1e-8)


@pytest.mark.parametrize(
    ("kind", "factor"), [("softmax", 2), ("l2", 4), ("sinkhorn", 4)]
)
def test_variances_decay_like_one_over_depth_for_ever(kind, factor):
    gamma = attention(kind, 1.3, line(value=-0.7))
    found = explicit_solution(gamma, mf.Gaussian([0.2], [[0.5]]), 1e9)
    scaled = factor * 1.3 * 0.63 * 1e9 * float(found.covariance()[0, 0])
    assert scaled == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("depth", [-3.0, 0.8, 1.0])
def test_the_second_moment_under_linear_attention_is_a_variance_under_softmax(depth):
    found = explicit_solution(
        attention("linear", 1.3, line()), mf.Gaussian([0.2], [[0.5]]), depth
    )
    second = float(found.covariance()[0, 0] + found.mean()[0] ** 2)
    expected = 0.54 / (1 - 2 * 1.3 * 0.63 * 0.54 * depth)
    assert second == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(("kind", "rate"), [("l2", 1.26), ("sinkhorn", 1.4)])
def test_variances_grow_exponentially_at_the_rate_of_the_values(kind, rate):
    gamma, mu = attention(kind, 1.3, line()), mf.Gaussian([0.2], [[0.5]])
    logs = [
        np.log(float(explicit_solution(gamma, mu, depth).covariance()[0, 0]))
        for depth in (60.0, 61.0)
    ]
    assert logs[1] - logs[0] == pytest.approx(rate, abs=1e-6)


@pytest.mark.parametrize("kind", ["l2", "sinkhorn"])
def test_a_solution_beyond_all_numbers_says_so(kind):
    with pytest.raises(Overflow, match="depth 2000 is too large"):
        explicit_solution(
            attention(kind, 1.3, line()), mf.Gaussian([0.2], [[0.5]]), 2000.0
        )


@pytest.mark.parametrize("kind", ["l2", "sinkhorn"])
@pytest.mark.parametrize(
    ("matrices", "spread"),
    [(line(query=0.0), 0.5), (line(value=0.0), 0.5), (line(), 0.0)],
    ids=["no score", "no value", "point mass"],
)
def test_a_variance_that_rests_leaves_an_exponential_mean(kind, matrices, spread):
    mean, spread = np.array([0.2]), np.array([[spread]])
    found = explicit_solution(
        attention(kind, 1.3, matrices), mf.Gaussian(mean, spread), 1.5
    )
    expected = by_scipy(kind, matrices, 1.3, mean, spread, 1.5)
    np.testing.assert_allclose(found.mean(), expected[0], rtol=1e-9)
    np.testing.assert_allclose(found.covariance(), spread, atol=1e-15)


@pytest.mark.parametrize("growth", [-1e8, -3.0, 0.0, 2.0, 40.0])
def test_variances_satisfy_their_implicit_equations(growth):
    spread, curvature = 0.7, 1.9
    found = spread * np.exp(distance_growth(spread, curvature, growth))
    change = 1 / spread - 1 / found + curvature * np.log(found / spread)
    assert change == pytest.approx(growth, rel=1e-9, abs=1e-12)
    narrow = sinkhorn_variance(spread, curvature, growth)
    levels = [
        u - 1 / np.tanh(u / 2)
        for u in np.arcsinh(2 * curvature * np.r_[spread, narrow])
    ]
    assert levels[1] - levels[0] == pytest.approx(growth, rel=1e-9, abs=1e-12)


def test_the_distance_growth_is_that_of_lambert():
    spread, curvature, growth = 0.7, 1.9, 0.8
    level = -1 / spread + curvature * np.log(spread) + growth
    lambert = scipy.special.lambertw(np.exp(-level / curvature) / curvature).real
    found = spread * np.exp(distance_growth(spread, curvature, growth))
    assert found == pytest.approx(1 / (curvature * lambert), rel=1e-13)


def test_without_curvature_the_distance_growth_blows_up():
    assert distance_growth(0.5, 0.0, 1.0) == pytest.approx(np.log(2))
    with pytest.raises(InvalidInput, match="blows up"):
        distance_growth(0.5, 0.0, 2.0)


@pytest.mark.parametrize("query", [1e-3, 1e-6, 1e-9])
def test_a_weak_score_leaves_the_mean_accurate(query):
    layer = mf.L2([[query]], [[1.0]], [[0.7]])
    found = explicit_solution(layer, mf.Gaussian([0.2], [[1e-8]]), 0.8)
    # Of such a score and variance nothing is left but the values.
    assert float(found.mean()[0]) == pytest.approx(0.2 * np.exp(0.56), rel=1e-7)


def test_a_solution_after_its_blow_up_is_refused():
    gamma = mf.Softmax([[1.0, 0.3], [0.0, -0.5]], np.eye(2), np.eye(2))
    mu = gaussian(np.zeros(2))
    assert np.isfinite(explicit_solution(gamma, mu, 0.478).covariance()).all()
    with pytest.raises(InvalidInput, match=r"blows up before depth 0\.479; blowup_ti"):
        explicit_solution(gamma, mu, 0.479)


@pytest.mark.parametrize("kind", ON_A_LINE)
def test_single_precision_is_kept(kind):
    gamma = attention(kind, 1.3, line(), dtype=np.float32)
    mu = mf.Gaussian(np.float32([0.2]), np.float32([[0.5]]))
    found = explicit_solution(gamma, mu, 0.8)
    assert found.mean().dtype == found.covariance().dtype == jnp.float32
    assert float(found.covariance()[0, 0]) == pytest.approx(ON_A_LINE[kind][1], 1e-6)


REFUSED = {
    "values": (attention("softmax"), "for values V = vI only"),
    "dimension": (attention("l2"), "in one dimension only; this is dimension 2"),
    "sinkhorn": (attention("sinkhorn"), "in one dimension only"),
    "mean": (mf.Softmax(QUERY, KEY, np.eye(2)), "for symmetric A only"),
    "bias": (
        mf.Softmax(QUERY, KEY, np.eye(2), value_bias=[1.0, 0.0]),
        "value_bias is set",
    ),
    "half steps": (
        mf.Sinkhorn(QUERY, KEY, VALUE, half_steps=3),
        "half_steps is 3",
    ),
    "normalised": (
        mf.Linear(QUERY, KEY, np.eye(2), normalized=True),
        "derivative changes with the query",
    ),
    "activation": (
        mf.Sum([attention("softmax"), bent_perceptron()]),
        "its derivative changes with the query",
    ),
    "two heads": (
        mf.MultiHead([attention("softmax"), attention("softmax")]),
        "a single attention layer only",
    ),
    "perceptron": (
        mf.Sum([attention("softmax"), perceptron(np.eye(2), np.zeros(2))]),
        "a single attention layer only",
    ),
    "sigmoid": (
        mf.Sigmoid(QUERY, KEY, VALUE),
        "Sigmoid is not affine on a Gaussian",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_closed_form_is_refused_with_what_is_missing(name):
    gamma, message = REFUSED[name]
    with pytest.raises(Unsupported, match=message):
        explicit_solution(gamma, gaussian(), 0.5)


def test_a_repulsive_kernel_is_refused():
    gamma = mf.L2(*line(), beta=-0.2, allow_negative_beta=True)
    with pytest.raises(Unsupported, match="repulsive"):
        explicit_solution(gamma, mf.Gaussian([0.2], [[0.5]]), 0.5)
