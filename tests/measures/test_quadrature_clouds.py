"""Quadrature clouds against the closed forms of the measures they stand for."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.special import logsumexp

from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import UniformBox, UniformSphere
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.box import TruncatedNormalBox
from meanformer.measures.cloud import TokenCloud
from meanformer.measures.fourier_density import FourierDensity
from meanformer.measures.gaussian import Gaussian
from meanformer.measures.mixture import Mixture
from meanformer.measures.quadrature import quadrature, quadratures_within
from meanformer.numerics.special import quadrature as rules

COVARIANCE = jnp.array([[1.0, 0.3], [0.3, 0.6]])
GAUSSIAN = Gaussian(jnp.array([0.3, -0.4]), COVARIANCE)
SINGULAR = Gaussian(jnp.array([1.0, 2.0]), jnp.array([[1.0, 2.0], [2.0, 4.0]]) / 4)
BOX = UniformBox([-1.0, 0.0], [1.0, 3.0])
BELL = TruncatedNormalBox([-1.0, 0.5], [1.0, 3.0], [2.0, -1.0])

MEASURES_AND_ORDERS = {
    "gaussian": (GAUSSIAN, 30),
    "singular gaussian": (SINGULAR, 40),
    "box": (BOX, 20),
    "truncated normal": (BELL, 24),
    "two points": (UniformSphere(1), 1),
    "circle": (UniformSphere(2, radius=1.5), 40),
    "sphere": (UniformSphere(3), 16),
    "sphere in 4 dimensions": (UniformSphere(4), 14),
    "sphere in 5 dimensions": (UniformSphere(5), 10),
    "mixture": (Mixture([0.3, 0.7], [GAUSSIAN, BOX]), 30),
}


@pytest.fixture(params=MEASURES_AND_ORDERS.values(), ids=MEASURES_AND_ORDERS.keys())
def measure_and_cloud(request):
    measure, order = request.param
    return measure, quadrature(measure, order)


def dense_transform(cloud, u):
    """Log-Laplace transform and tilted mean of a cloud, by plain numpy."""
    points, weights = np.asarray(cloud.points), np.asarray(cloud.weights)
    scores = np.asarray(u) @ points.T
    log_mass = logsumexp(scores, b=weights[None, :], axis=1)
    shares = weights * np.exp(scores - log_mass[:, None])
    return log_mass, shares @ points


def test_log_laplace_transform_agrees_with_the_closed_form(key, measure_and_cloud):
    measure, cloud = measure_and_cloud
    u = 1.5 * jr.normal(key, (8, measure.dimension))
    log_mass, mean = dense_transform(cloud, u)
    np.testing.assert_allclose(log_mass, measure.log_laplace(u), rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(mean, measure.tilted_mean(u), rtol=1e-10, atol=1e-11)


def test_moments_agree_with_the_closed_form(measure_and_cloud):
    measure, cloud = measure_and_cloud
    points, weights = np.asarray(cloud.points), np.asarray(cloud.weights)
    mean = weights @ points
    second = (weights[:, None] * points).T @ points
    np.testing.assert_allclose(mean, measure.mean(), atol=1e-13)
    np.testing.assert_allclose(second, measure.second_moment(), atol=1e-13)


def test_weights_are_probabilities(measure_and_cloud):
    weights = np.asarray(measure_and_cloud[1].weights)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_gaussian_rule_is_exact_up_to_degree_twice_its_order_minus_one(order):
    cloud = quadrature(GAUSSIAN, order)
    assert cloud.count == order**2
    direction = np.array([0.7, -1.1])
    centred = (np.asarray(cloud.points) - np.asarray(GAUSSIAN.mean())) @ direction
    variance = direction @ np.asarray(COVARIANCE) @ direction
    for degree in range(2 * order):
        moment = 0 if degree % 2 else np.prod(np.arange(degree - 1, 0, -2))
        expected = moment * variance ** (degree / 2)
        average = np.asarray(cloud.weights) @ centred**degree
        assert average == pytest.approx(expected, abs=1e-12)


def test_directions_without_variance_get_no_nodes():
    assert quadrature(SINGULAR, 7).count == 7
    dirac = quadrature(Gaussian(jnp.ones(3), jnp.zeros((3, 3))), 5)
    np.testing.assert_array_equal(dirac.points, np.ones((1, 3)))


def test_traced_singular_covariance_gives_the_same_integrals():
    def covariance(spread):
        return quadrature(Gaussian(jnp.zeros(2), spread), 3).covariance()

    spread = SINGULAR.covariance()
    np.testing.assert_allclose(jax.jit(covariance)(spread), spread, atol=1e-14)


def test_mixture_is_the_union_of_its_components_clouds():
    mixture = Mixture([0.25, 0.75], [GAUSSIAN, UniformSphere(2)])
    cloud = quadrature(mixture, 4)
    assert cloud.count == 16 + 4
    assert float(cloud.weights[:16].sum()) == pytest.approx(0.25)


def test_of_two_quadratures_for_an_error_the_coarser_is_the_finest_of_half_the_nodes():
    fine, coarse = quadratures_within(Gaussian([0.0], [[1.0]]), 30)
    # Of orders 12, 14, 16, 20, 24 and 28.
    assert (fine.count, coarse.count) == (28, 14)


def test_nodes_of_a_density_on_the_circle_are_the_midpoints_of_equal_arcs():
    cloud = quadrature(FourierDensity(np.zeros((2, 2))), 4)
    turns = np.arctan2(cloud.points[:, 1], cloud.points[:, 0]) / np.pi
    np.testing.assert_allclose(turns % 2, [0.25, 0.75, 1.25, 1.75], atol=1e-12)
    np.testing.assert_allclose(cloud.weights, 0.25)


def test_where_a_series_falls_below_zero_by_rounding_a_node_has_no_mass():
    barely = FourierDensity([[0.5 * (1 + 1e-9), 0.0]])
    # The node in the middle of three is at the angle pi.
    assert float(barely.density(jnp.array([np.pi]))[0]) < 0
    assert float(quadrature(barely, 3).weights[1]) == 0


def test_a_cloud_is_its_own_quadrature():
    cloud = TokenCloud(jnp.eye(2))
    assert quadrature(cloud, 3) is cloud


def test_a_tilted_cloud_becomes_a_cloud_with_the_same_masses():
    cloud = TokenCloud(jnp.array([[0.0, 1.0], [2.0, 0.0]]))
    _, tilted = cloud.quadratic_tilt(jnp.eye(2))
    masses = np.exp([-0.5, -2.0])
    expected = masses / masses.sum()
    np.testing.assert_allclose(quadrature(tilted, 1).weights, expected, rtol=1e-14)


def test_convergence_is_faster_than_geometric_in_the_order():
    u = jnp.array([[1.0, -2.0]])
    errors = [
        abs(float(dense_transform(quadrature(BOX, n), u)[0][0] - BOX.log_laplace(u)[0]))
        for n in (2, 3, 4, 5)
    ]
    ratios = np.array(errors[1:]) / np.array(errors[:-1])
    assert (ratios < 0.1).all()
    assert (np.diff(ratios) < 0).all()


def test_quadrature_is_differentiable_in_the_parameters():
    def second_moment(spread):
        cloud = quadrature(Gaussian(jnp.zeros(2), spread), 4)
        return cloud.weights @ (cloud.points[:, 0] * cloud.points[:, 1])

    gradient = jax.grad(second_moment)(COVARIANCE)
    np.testing.assert_allclose(gradient + gradient.T, [[0, 1], [1, 0]], atol=1e-13)


@pytest.mark.parametrize(
    "measure",
    [
        Gaussian(jnp.zeros(2, jnp.float32), jnp.eye(2, dtype=jnp.float32)),
        UniformBox(np.zeros(2, np.float32), np.ones(2, np.float32)),
        UniformSphere(3, radius=np.float32(1)),
    ],
)
def test_single_precision_measures_give_single_precision_clouds(measure):
    cloud = quadrature(measure, 5)
    assert cloud.points.dtype == cloud.weights.dtype == jnp.float32
    np.testing.assert_allclose(cloud.covariance(), measure.covariance(), atol=1e-6)


@pytest.mark.parametrize(
    ("measure", "order", "message"),
    [
        (GAUSSIAN, 0, "order is 0; it must be 1 or more"),
        (Gaussian(jnp.zeros(12), jnp.eye(12)), 10, "1e12.0 nodes; at most 5e"),
        (UniformSphere(512), 3, "lower the order"),
    ],
)
def test_bad_orders_and_absurd_sizes_are_refused(measure, order, message):
    with pytest.raises(InvalidInput, match=message):
        quadrature(measure, order)


def test_the_size_of_a_mixture_counts_all_its_components(monkeypatch):
    monkeypatch.setattr(rules, "LARGEST_RULE", 30)
    with pytest.raises(InvalidInput, match="50 nodes in all; at most 3e"):
        quadrature(Mixture([0.5, 0.5], [BOX, BOX]), 5)


def test_an_order_that_is_no_integer_is_refused_in_one_sentence(untyped):
    with pytest.raises(InvalidInput, match=r"order is 2.5; it must be an integer"):
        quadrature(GAUSSIAN, 2.5)


def test_measures_without_a_rule_are_refused_with_advice():
    class Unknown(AbstractMeasure):
        dimension = 1

        def mean(self):
            return jnp.zeros(1)

        covariance = tilted_mass_and_mean = sample = mean

    with pytest.raises(Unsupported, match=r"Unknown has no quadrature rule; use Token"):
        quadrature(Unknown(), 3)
