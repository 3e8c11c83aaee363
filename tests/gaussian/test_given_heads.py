"""Ensembles of given matrices; closed forms along depth; energies with a mean."""

import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from gaussian_reference import COVARIANCE, KEY, QUERY, VALUE
from meanformer.errors import InvalidInput, Unsupported
from meanformer.gaussian import Ensemble, GivenHeads, explicit_solution
from meanformer.gaussian.velocity import terms_of

IDENTITY = np.eye(2)
SCORE = np.array([[-0.4, 0.3], [0.1, 0.2]])


def test_given_heads_are_taken_in_turn_with_new_covariances():
    ensemble = GivenHeads([(QUERY, KEY, VALUE), (KEY, VALUE, QUERY)], seed=3)
    first, second, third = (ensemble.draw(index) for index in range(3))
    np.testing.assert_array_equal(first.heads[0][0], QUERY)
    np.testing.assert_array_equal(second.heads[0][2], QUERY)
    np.testing.assert_array_equal(third.heads[0], first.heads[0])
    assert np.abs(third.covariance - first.covariance).max() > 0.1
    assert ensemble.dimension == 2


def test_settings_tell_ensembles_apart():
    one, other = (GivenHeads([(matrix, KEY, VALUE)]) for matrix in (QUERY, VALUE))
    assert one.settings() == GivenHeads([(QUERY, KEY, VALUE)]).settings()
    assert one.settings() != other.settings()
    assert one.settings()["ensemble"] != Ensemble().settings()["ensemble"]


def test_no_heads_and_unknown_kinds_are_refused():
    with pytest.raises(InvalidInput, match="heads is empty"):
        GivenHeads([])
    with pytest.raises(InvalidInput, match="kind is 'sigmoid'"):
        GivenHeads([(QUERY, KEY, VALUE)], kind="sigmoid")


def growing(depth):
    return mf.Softmax(SCORE, IDENTITY, (1 + depth) * IDENTITY)


@pytest.mark.slow
def test_a_function_of_depth_has_the_closed_form_of_its_integral():
    found = explicit_solution(growing, mf.Gaussian(np.zeros(2), COVARIANCE), 0.3)
    pull = (0.3 + 0.3**2 / 2) * (SCORE + SCORE.T)
    expected = np.linalg.inv(np.linalg.inv(COVARIANCE) - pull)
    np.testing.assert_allclose(found.covariance(), expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("depths", "end", "share"),
    [
        pytest.param([0.0, 0.2], 0.5, 0.2 - 3 * 0.3, id="forwards"),
        pytest.param(
            [-1.0, -0.4, -0.2],
            -0.5,
            -2 * 0.2 + 3 * 0.2 - 0.1,
            id="backwards",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_held_layers_add_up_exactly(depths, end, share):
    layers = [mf.Softmax(SCORE, IDENTITY, rate * IDENTITY) for rate in (1, -3.0, 2)]
    schedule = mf.Schedule(layers[: len(depths)], depths)
    found = explicit_solution(schedule, mf.Gaussian(np.zeros(2), COVARIANCE), end)
    pull = share * (SCORE + SCORE.T)
    expected = np.linalg.inv(np.linalg.inv(COVARIANCE) - pull)
    np.testing.assert_allclose(found.covariance(), expected, rtol=1e-13)


@pytest.mark.slow
def test_beyond_its_blow_up_a_schedule_has_no_solution():
    # s = s_0 / (1 - 2 s_0 (t + t^2/2)) on the line: it is infinite at t = sqrt(3) - 1.
    def line(depth):
        return mf.Softmax([[1.0]], [[1.0]], [[1.0 + depth]])

    with pytest.raises(InvalidInput, match=r"before depth 0\.8, about 0\.75"):
        explicit_solution(line, mf.Gaussian([0.0], [[0.5]]), 0.8)


def test_schedules_without_a_closed_form_are_refused():
    start = mf.Gaussian(np.zeros(2), COVARIANCE)
    with pytest.raises(InvalidInput, match="blows up before depth 20"):
        explicit_solution(growing, start, 20.0)
    with pytest.raises(Unsupported, match="no closed form under a schedule"):
        explicit_solution(growing, mf.Gaussian(np.ones(2), COVARIANCE), 0.1)
    distances = mf.Schedule([mf.L2(SCORE, IDENTITY, IDENTITY)])
    with pytest.raises(Unsupported, match="softmax only"):
        explicit_solution(distances, start, 0.1)


def test_the_energy_of_sinkhorn_climbs_at_its_dissipation_with_a_mean_too():
    score = np.array([[0.8, 0.3], [0.3, -0.4]]) / 2
    gamma = mf.Sinkhorn(score, IDENTITY, 0.7 * score)
    mean, step = jnp.array([0.4, -0.3]), 1e-4
    start = mf.Gaussian(mean, COVARIANCE)
    slope, drift = mf.gaussian.affine_velocity(gamma, start)
    velocity = drift + slope @ mean
    np.testing.assert_allclose(velocity, gamma.value @ mean, rtol=1e-12)

    def energy(time):
        layer = IDENTITY + time * slope
        spread = layer @ COVARIANCE @ layer.T
        moved = mf.Gaussian(mean + time * velocity, spread)
        return float(mf.gaussian.energy(gamma, moved))

    rate = (energy(step) - energy(-step)) / (2 * step)
    found = float(mf.gaussian.dissipation(gamma, start))
    assert found == pytest.approx(rate, rel=1e-6)


@pytest.mark.slow
def test_a_huge_transient_is_no_blow_up():
    # The trace grows to 5e10 within 1e-9 of depth, and turns round.
    case = Ensemble("normal", 3).draw(14)
    outcome = mf.gaussian.classify(case.gamma(), case.gaussian(), depth=1e5)
    assert outcome.kind in ("undecided", "converges")


@pytest.mark.parametrize("kind", ["Softmax", "L2", "Sinkhorn", "Linear"])
def test_heads_taken_apart_add_up_to_the_whole(kind):
    def head(bias):
        return getattr(mf, kind)(QUERY, KEY, VALUE, beta=0.7, value_bias=bias)

    outputs = np.stack([[[0.3, -1.0], [0.8, 0.2]], [[1.5, 0.4], [-0.6, 0.9]]])
    heads = mf.MultiHead([head([0.5, -0.2]), head(None)], outputs=outputs)
    perceptron = mf.Perceptron(QUERY, [0.1, 0.2], VALUE, activation=lambda x: x)
    whole, mu = mf.Sum([heads, perceptron]), mf.Gaussian([0.3, -0.4], COVARIANCE)
    points = jnp.asarray([[0.0, 0.0], [1.0, -2.0], [0.4, 0.7]])
    parts = sum(term(mu, points) for term in terms_of(whole))
    np.testing.assert_allclose(parts, whole(mu, points), rtol=1e-12)


def test_a_constant_beside_attention_leaves_no_closed_form():
    zero = np.zeros((2, 2))
    drift = mf.Perceptron(zero, np.zeros(2), zero, [1.0, 0.0], activation=lambda x: x)
    gamma = mf.Sum([mf.Softmax(SCORE, IDENTITY, IDENTITY), drift])
    with pytest.raises(Unsupported, match="single attention layer only"):
        explicit_solution(gamma, mf.Gaussian(np.zeros(2), COVARIANCE), 0.1)
