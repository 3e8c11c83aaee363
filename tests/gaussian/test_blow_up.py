"""Depths of blow-up: closed forms, bounds, and integrations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from gaussian_reference import (
    COVARIANCE,
    KEY,
    QUERY,
    VALUE,
    attention,
    gaussian,
    perceptron,
)
from meanformer.errors import InvalidInput, Unsupported
from meanformer.gaussian import affine_velocity, blowup_time, explicit_solution
from meanformer.gaussian.blow_up import proved

IDENTITY = np.eye(2)
CENTRED = gaussian(np.zeros(2))
# The range of K does not see the direction in which Q pulls.
UNSEEN = mf.L2([[0.0, 1.0]], [[1.0, 0.0]], np.diag([0.0, 1.0]))


def norm(matrix):
    return np.linalg.norm(matrix, 2)


def test_values_in_proportion_to_the_identity_have_an_exact_blow_up():
    gamma = mf.Softmax([[1.0, 0.3], [0.0, -0.5]], IDENTITY, IDENTITY)
    found = blowup_time(gamma, CENTRED)
    assert found.certainty == "exact"
    assert found.depth == pytest.approx(0.47846889952153115, rel=1e-14)
    assert found.lower <= found.depth == found.upper
    traces = [
        float(np.trace(explicit_solution(gamma, CENTRED, depth).covariance()))
        for depth in ((1 - 1e-3) * found.depth, (1 - 1e-4) * found.depth)
    ]
    np.testing.assert_allclose(traces, [1090.41, 10900.41], atol=5e-3)


def test_a_blow_up_is_the_number_of_its_depth():
    gamma = mf.Softmax([[1.0, 0.3], [0.0, -0.5]], IDENTITY, IDENTITY)
    assert float(blowup_time(gamma, CENTRED)) == blowup_time(gamma, CENTRED).depth
    never = blowup_time(mf.Sinkhorn(QUERY, KEY, VALUE), CENTRED)
    assert float(never) == np.inf
    with pytest.raises(InvalidInput, match="not known .*no theorem decides it"):
        float(proved(mf.Softmax(QUERY, KEY, VALUE), CENTRED))


def test_on_the_line_the_blow_up_is_the_lower_bound():
    gamma = mf.Softmax([[0.9]], [[1.0]], [[0.7]], beta=1.3)
    found = blowup_time(gamma, mf.Gaussian([0.2], [[0.5]]))
    assert found.depth == pytest.approx(1.221001221001, abs=1e-12)
    assert found.lower == pytest.approx(found.depth, rel=1e-14)


def test_a_blow_up_scales_with_temperature_and_values():
    score = [[1.0, 0.3], [0.0, -0.5]]
    first = blowup_time(mf.Softmax(score, IDENTITY, IDENTITY), CENTRED)
    second = blowup_time(mf.Softmax(score, IDENTITY, 3 * IDENTITY, beta=0.7), CENTRED)
    assert second.depth == pytest.approx(first.depth / 2.1, rel=1e-14)


@pytest.mark.parametrize("beta", [1.0, -1.0])
def test_the_sign_of_the_temperature_decides(beta):
    gamma = mf.Softmax(
        IDENTITY, IDENTITY, IDENTITY, beta=beta, allow_negative_beta=True
    )
    found = blowup_time(gamma, CENTRED)
    expected = 1 / (2 * np.linalg.eigvalsh(COVARIANCE)[-1])
    if beta > 0:
        assert found.depth == pytest.approx(expected, rel=1e-14)
    else:
        assert found.certainty == "never"
        turned = mf.Softmax(
            -IDENTITY, IDENTITY, IDENTITY, beta=beta, allow_negative_beta=True
        )
        assert blowup_time(turned, CENTRED).depth == pytest.approx(expected, rel=1e-14)


def test_linear_attention_blows_up_with_its_second_moment():
    gamma = mf.Linear([[0.8]], [[1.0]], [[1.1]])
    mean, spread = 0.7, 0.4
    found = blowup_time(gamma, mf.Gaussian([mean], [[spread]]))
    assert found.certainty == "exact"
    assert found.depth == pytest.approx(1 / (2 * 0.88 * (spread + mean**2)), rel=1e-13)


@pytest.mark.slow
def test_positive_values_and_scores_blow_up_between_the_bounds():
    value = np.array([[2.0, 0.5], [0.5, 1.0]])
    gamma = mf.Softmax([[1.0, 0.4], [-0.6, 0.5]], IDENTITY, value)
    found = blowup_time(gamma, CENTRED, horizon=10.0)
    assert found.certainty == "numerical"
    assert found.depth == pytest.approx(0.23568050, abs=5e-9)
    assert found.lower == pytest.approx(0.16674594, abs=5e-9)
    assert found.upper == pytest.approx(3.0475, abs=5e-5)


@pytest.mark.parametrize("seed", range(5))
def test_bounds_hold_for_random_positive_matrices(seed):
    random = np.random.default_rng(seed)
    root, inner, twist, factor = random.standard_normal((4, 2, 2))
    value = root @ root.T + 0.2 * IDENTITY
    score = inner @ inner.T + 0.2 * IDENTITY + twist - twist.T
    spread, beta = factor @ factor.T + 0.1 * IDENTITY, 0.5 + seed
    gamma = mf.Softmax(score, IDENTITY, value, beta=beta)
    found = blowup_time(gamma, gaussian(np.zeros(2), spread), horizon=1e4)
    symmetric = (score + score.T) / 2
    lowest = np.linalg.eigvalsh(symmetric)[0], np.linalg.eigvalsh(value)[0]
    weighted = np.trace(np.linalg.solve(value, spread))
    upper = 2 / (2 * beta * lowest[0] * lowest[1] ** 2 * weighted)
    lower = 1 / (2 * beta * norm(value) * norm(score) * norm(spread))
    assert found.lower == pytest.approx(lower, rel=1e-12)
    assert found.upper == pytest.approx(upper, rel=1e-12)
    assert lower <= found.depth <= upper


@pytest.mark.slow
def test_where_the_key_sees_too_little_l2_blows_up():
    found = blowup_time(UNSEEN, CENTRED, horizon=100.0)
    assert found.certainty == "numerical"
    assert found.depth == pytest.approx(5, rel=1e-9)
    assert 0 < found.lower < 5
    path = mf.solve(
        mf.Flow(UNSEEN), CENTRED, 4.5, save=np.array([0.0, 2.5, 4.5]), rtol=1e-11
    )
    expected = [[[1, 0.6], [0.6, 2.4]], [[1, 3], [3, 60]]]
    np.testing.assert_allclose(path.covariances[1:], expected, rtol=1e-8)


NEVER = {
    "sinkhorn": (attention("sinkhorn"), "Sinkhorn"),
    "l2, key of full rank": (attention("l2"), "full column rank"),
    "l2, query in proportion": (
        mf.L2([[2.0, 4.0]], [[1.0, 2.0]], VALUE),
        "Q is a multiple of K",
    ),
    "softmax, definite": (
        mf.Softmax(-COVARIANCE, IDENTITY, [[2.0, 0.5], [0.5, 1.0]]),
        "negative semi-definite",
    ),
    "softmax, negative values": (
        mf.Softmax(COVARIANCE, IDENTITY, -IDENTITY),
        "V is negative definite, A_s positive semi-definite",
    ),
    "softmax, no values": (mf.Softmax(QUERY, KEY, np.zeros((2, 2))), "zero"),
    "softmax, no temperature": (
        mf.Softmax(IDENTITY, IDENTITY, COVARIANCE, beta=0.0),
        "negative semi-definite",
    ),
    "perceptron": (perceptron(VALUE, np.zeros(2)), "linear"),
    "heads": (
        mf.MultiHead([attention("l2"), attention("sinkhorn")]),
        "full column rank; Sinkhorn",
    ),
}


@pytest.mark.parametrize("name", NEVER)
def test_global_flows_are_known_to_be_global(name):
    gamma, reason = NEVER[name]
    found = blowup_time(gamma, CENTRED)
    assert found.certainty == "never"
    assert found.depth is found.lower is found.upper is None
    assert reason in found.reason


def test_a_perceptron_with_an_activation_is_refused_not_linearised():
    bent = mf.Perceptron(IDENTITY, np.zeros(2), IDENTITY)
    with pytest.raises(Unsupported, match="not affine on a Gaussian"):
        blowup_time(mf.Sum([attention("sinkhorn"), bent]), CENTRED)


def test_a_range_that_the_score_does_not_expand_never_blows_up():
    gamma = mf.Softmax(np.diag([1.0, -1.0]), IDENTITY, IDENTITY)
    found = blowup_time(gamma, gaussian(np.zeros(2), np.diag([0.0, 2.0])))
    assert found.certainty == "never"
    assert "on the range of S" in found.reason


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sinkhorn", "l2"])
@pytest.mark.parametrize("seed", range(4))
def test_traces_of_global_flows_stay_below_their_exponentials(kind, seed):
    random = np.random.default_rng(seed)
    query, key, value = random.standard_normal((3, 2, 2))
    rate = norm(value)
    if kind == "l2":
        smallest = np.linalg.svd(key, compute_uv=False)[-1]
        rate *= norm(key.T @ query) / smallest**2
    depth = 3 / rate
    flow = mf.Flow(attention(kind, 1.0, (query, key, value)))
    path = mf.solve(flow, CENTRED, depth, save=11, rtol=1e-8)
    bound = np.exp(2 * rate * np.asarray(path.depths)) * np.trace(COVARIANCE)
    assert np.all(np.asarray(path.statistics["trace"]) <= bound * (1 + 1e-9))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_traces_under_a_query_in_proportion_to_the_key_stay_below_their_exponential(
    seed,
):
    random = np.random.default_rng(seed)
    key, value = random.standard_normal((1, 3)), random.standard_normal((3, 3))
    multiple = random.choice([-1, 1]) * random.uniform(0.5, 2)
    factor = random.standard_normal((3, 3))
    gamma, mu = (
        mf.L2(multiple * key, key, value),
        mf.Gaussian(np.zeros(3), factor=factor),
    )
    # The key sees one direction of three, so that full column rank does not help.
    assert "Q is a multiple of K" in blowup_time(gamma, mu).reason
    rate = norm(value) * abs(multiple)
    path = mf.solve(mf.Flow(gamma), mu, 3 / rate, save=11, rtol=1e-8)
    traces = np.asarray(path.statistics["trace"])
    bound = np.exp(2 * rate * np.asarray(path.depths)) * np.sum(factor**2)
    assert np.all(traces <= bound * (1 + 1e-9))
    assert float(path.depths[-1]) == pytest.approx(3 / rate)


@pytest.mark.slow
def test_the_trace_under_sinkhorn_grows_no_faster_than_the_values_allow():
    random = np.random.default_rng(3)
    draws = random.standard_normal((4, 2000, 3, 3))
    betas = 10 ** random.uniform(-2, 2, 2000)

    def slope_of(query, key, value, factor, beta):
        mu = mf.Gaussian(jnp.zeros(3), factor=factor)
        return affine_velocity(mf.Sinkhorn(query, key, value, beta=beta), mu)[0]

    slopes = np.asarray(jax.vmap(slope_of)(*map(jnp.asarray, (*draws, betas))))
    values, factors = draws[2:]
    spreads = factors @ factors.swapaxes(1, 2)
    sizes = np.trace(spreads, axis1=1, axis2=2)
    rates = np.trace(slopes @ spreads, axis1=1, axis2=2) / sizes
    largest = np.linalg.norm(values, 2, axis=(1, 2))
    assert np.all(np.abs(rates) < largest)
    assert np.max(np.abs(rates) / largest) > 0.5
    # The variance of E[y|x] is at most that of y, in every direction.
    maps = np.linalg.solve(values, slopes)
    left = spreads - maps @ spreads @ maps.swapaxes(1, 2)
    assert np.all(np.linalg.eigvalsh(left)[:, 0] > -1e-9 * sizes)


@pytest.mark.slow
def test_two_hundred_flows_under_sinkhorn_stay_below_their_exponentials():
    random = np.random.default_rng(4)
    queries, keys, values, factors = random.standard_normal((4, 200, 2, 2))
    values /= np.linalg.norm(values, 2, axis=(1, 2), keepdims=True)

    def traces_of(query, key, value, factor):
        mu = mf.Gaussian(jnp.zeros(2), factor=factor)
        flow = mf.Flow(mf.Sinkhorn(query, key, value))
        path = mf.solve(flow, mu, 3.0, save=4, rtol=1e-7)
        return path.depths, path.statistics["trace"]

    draws = map(jnp.asarray, (queries, keys, values, factors))
    depths, traces = map(np.asarray, jax.jit(jax.vmap(traces_of))(*draws))
    np.testing.assert_array_equal(depths, np.tile(np.arange(4.0), (200, 1)))
    bound = np.exp(2 * depths) * np.sum(factors**2, axis=(1, 2))[:, None]
    assert np.all(traces <= bound * (1 + 1e-9))
    assert np.max(traces[:, -1] / bound[:, -1]) > 0.3


@pytest.mark.slow
def test_values_that_grow_with_depth_bound_the_trace_by_their_integral():
    def gamma(depth):
        return mf.Sinkhorn(QUERY, KEY, (1 + depth) * VALUE)

    path = mf.solve(mf.Flow(gamma), CENTRED, 3.0, save=7, rtol=1e-8)
    depths = np.asarray(path.depths)
    integral = (depths + depths**2 / 2) * norm(VALUE)
    bound = np.exp(2 * integral) * np.trace(COVARIANCE)
    assert np.all(np.asarray(path.statistics["trace"]) <= bound * (1 + 1e-9))


@pytest.mark.parametrize("seed", range(4))
def test_the_trace_over_definite_values_changes_by_the_score_of_the_square(seed):
    random = np.random.default_rng(seed)
    root, score, factor = random.standard_normal((3, 3, 3))
    value, beta = root @ root.T + 0.2 * np.eye(3), 0.5 + seed
    spread = factor @ factor.T
    gamma = mf.Softmax(score, np.eye(3), value, beta=beta)
    mu = mf.Gaussian(np.zeros(3), factor=factor)
    moved = np.asarray(affine_velocity(gamma, mu)[0]) @ spread
    rate = np.trace(np.linalg.solve(value, moved + moved.T))
    expected = 2 * beta * np.trace(spread @ (score + score.T) / 2 @ spread)
    assert rate == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_along_a_flow_the_trace_over_definite_values_is_the_integral_of_that():
    value = np.array([[2.0, 0.5], [0.5, 1.0]])
    score = np.array([[1.0, 0.4], [-0.6, 0.5]])
    nodes, weights = np.polynomial.legendre.leggauss(16)
    depths = np.concatenate([[0.0], 0.1 * (nodes + 1), [0.2]])
    path = mf.solve(
        mf.Flow(mf.Softmax(score, IDENTITY, value)),
        CENTRED,
        0.2,
        save=depths,
        rtol=1e-12,
        atol=1e-14,
    )
    spreads = np.asarray(path.covariances)
    weighted = np.trace(np.linalg.solve(value, spreads), axis1=1, axis2=2)
    rates = 2 * np.trace(spreads @ (score + score.T) / 2 @ spreads, axis1=1, axis2=2)
    risen = 0.1 * weights @ rates[1:-1]
    assert weighted[-1] - weighted[0] == pytest.approx(risen, rel=1e-9)


@pytest.mark.slow
def test_a_perceptron_beside_softmax_brings_the_blow_up_forward_within_its_bound():
    score, matrix = np.array([[1.0, 0.3], [0.0, -0.5]]), 0.6 * IDENTITY
    gamma = mf.Sum(
        [mf.Softmax(score, IDENTITY, IDENTITY), perceptron(matrix, np.zeros(2))]
    )
    found = blowup_time(gamma, CENTRED, horizon=10.0)
    # A common rate u only changes the clock: dS = 2 S A_s S + 2 u S.
    exact = np.log1p(2 * 0.6 * 0.47846889952153115) / (2 * 0.6)
    lower = np.log1p(0.6 / (norm(score) * norm(COVARIANCE))) / (2 * 0.6)
    assert found.depth == pytest.approx(exact, rel=1e-8)
    assert found.lower == pytest.approx(lower, rel=1e-12)
    assert found.lower < found.depth


@pytest.mark.slow
def test_a_bias_of_linear_attention_leaves_no_lower_bound():
    gamma = mf.Linear([[1.0]], [[1.0]], [[1.0]], query_bias=[50.0])
    found = blowup_time(gamma, mf.Gaussian([0.2], [[0.5]]), horizon=10.0)
    assert found.certainty == "numerical"
    assert found.lower is None


@pytest.mark.slow
def test_an_integration_without_blow_up_says_how_far_it_came():
    gamma = mf.Softmax(IDENTITY, IDENTITY, [[0.0, -1.0], [1.0, 0.0]])
    found = blowup_time(gamma, CENTRED, horizon=20.0)
    assert found.certainty == "not seen"
    assert found.depth is None
    assert "followed to depth 20" in found.reason


def test_a_horizon_must_be_positive_and_the_measure_a_gaussian(untyped):
    with pytest.raises(InvalidInput, match="horizon is -1"):
        blowup_time(attention("softmax"), CENTRED, horizon=-1.0)
    with pytest.raises(InvalidInput, match="it must be a Gaussian"):
        blowup_time(attention("softmax"), mf.TokenCloud(np.zeros((2, 2))))
