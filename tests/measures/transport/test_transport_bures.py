"""Transport between Gaussians: Bures distance and optimal map."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import (
    Gaussian,
    TokenCloud,
    pairwise_wasserstein,
    transport_map,
    wasserstein,
)

S1 = jnp.array([[1.0, 0.3], [0.3, 0.6]])
S2 = jnp.array([[0.5, -0.1], [-0.1, 2.0]])
ZERO = jnp.zeros(2)


def random_gaussian(key, dimension, rank=None):
    key_m, key_s = jr.split(key)
    factor = jr.normal(key_s, (dimension, rank or dimension))
    spread = factor @ factor.T
    return Gaussian(jr.normal(key_m, (dimension,)), (spread + spread.T) / 2)


def test_reference_distance_and_map():
    mu, nu = Gaussian(ZERO, S1), Gaussian(ZERO, S2)
    np.testing.assert_allclose(wasserstein(mu, nu) ** 2, 0.600785051541, atol=1e-11)
    expected = [[0.7635750732, -0.2960540208], [-0.2960540208, 1.9394413559]]
    np.testing.assert_allclose(transport_map(mu, nu).matrix, expected, atol=1e-10)


def test_gaussians_on_the_line_differ_by_means_and_deviations():
    mu = Gaussian(jnp.array([1.0]), jnp.array([[4.0]]))
    nu = Gaussian(jnp.array([4.0]), jnp.array([[0.25]]))
    np.testing.assert_allclose(wasserstein(mu, nu), np.hypot(3, 1.5), rtol=1e-14)


def test_a_translation_costs_its_length():
    mu, nu = Gaussian(ZERO, S1), Gaussian(jnp.array([3.0, -4.0]), S1)
    np.testing.assert_allclose(wasserstein(mu, nu), 5.0, rtol=1e-14)


@pytest.mark.parametrize("ranks", [(4, 4), (4, 2), (1, 1), (2, 3)])
def test_the_distance_is_that_of_the_definition_also_for_singular_spreads(key, ranks):
    mu, nu = (
        random_gaussian(k, 4, r) for k, r in zip(jr.split(key), ranks, strict=True)
    )
    eigenvalues = np.linalg.eigvals(np.asarray(mu.spread @ nu.spread))
    fidelity = np.sqrt(np.maximum(eigenvalues.real, 0)).sum()
    trace = jnp.trace(mu.spread) + jnp.trace(nu.spread) - 2 * fidelity
    squared = trace + ((mu.location - nu.location) ** 2).sum()
    # The eigenvalues of the definition lose half their digits when they vanish.
    np.testing.assert_allclose(wasserstein(mu, nu) ** 2, squared, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_equal_gaussians_have_distance_zero_and_a_finite_gradient(key, rank):
    mu = random_gaussian(key, 4, rank)

    def distance(location, spread):
        return wasserstein(Gaussian(location, spread), mu)

    value, gradients = jax.value_and_grad(distance, (0, 1))(mu.location, mu.spread)
    assert value == 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_close_gaussians_keep_their_digits():
    scaled = Gaussian(ZERO, (1 + 1e-9) ** 2 * S1)
    expected = 1e-9 * jnp.sqrt(jnp.trace(S1))
    np.testing.assert_allclose(
        wasserstein(Gaussian(ZERO, S1), scaled), expected, rtol=1e-5
    )


def test_the_distance_is_a_metric(key):
    gaussians = [
        random_gaussian(k, 3, r)
        for k, r in zip(jr.split(key, 3), (3, 1, 2), strict=True)
    ]
    table = pairwise_wasserstein(gaussians)
    np.testing.assert_allclose(table[1, 0], wasserstein(gaussians[1], gaussians[0]))
    for middle in range(3):
        assert (
            table <= table[:, middle][:, None] + table[middle][None, :] + 1e-12
        ).all()


def test_the_gradient_in_the_spread_is_the_identity_minus_the_map():
    nu = Gaussian(ZERO, S2)
    gradient = jax.grad(lambda spread: wasserstein(Gaussian(ZERO, spread), nu) ** 2)(S1)
    expected = jnp.eye(2) - transport_map(Gaussian(ZERO, S1), nu).matrix
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_the_gradient_agrees_with_finite_differences(key):
    mu, nu = (random_gaussian(k, 3) for k in jr.split(key))
    direction = jr.normal(key, (3, 3))
    direction = direction + direction.T

    def distance(spread):
        return wasserstein(Gaussian(mu.location, spread), nu)

    slope = jnp.vdot(jax.grad(distance)(mu.spread), direction)
    ahead, behind = (distance(mu.spread + s * 1e-6 * direction) for s in (1, -1))
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-6)


@pytest.mark.parametrize("ranks", [(3, 3), (3, 1)])
def test_the_map_pushes_one_gaussian_to_the_other_at_the_cost_of_the_distance(
    key, ranks
):
    mu, nu = (
        random_gaussian(k, 3, r) for k, r in zip(jr.split(key), ranks, strict=True)
    )
    optimal = transport_map(mu, nu)
    pushed = optimal.matrix @ mu.spread @ optimal.matrix.T
    np.testing.assert_allclose(pushed, nu.spread, atol=1e-9)
    np.testing.assert_allclose(optimal(mu.location[None, :])[0], nu.location, atol=1e-9)
    eigenvalues = jnp.linalg.eigvalsh((optimal.matrix + optimal.matrix.T) / 2)
    assert eigenvalues[0] > -1e-9
    gap = optimal.matrix - jnp.eye(3)
    cost = jnp.trace(gap @ mu.spread @ gap.T) + ((mu.location - nu.location) ** 2).sum()
    np.testing.assert_allclose(cost, wasserstein(mu, nu) ** 2, rtol=1e-7)


def test_a_singular_gaussian_is_mapped_within_its_range():
    mu = Gaussian(ZERO, jnp.diag(jnp.array([4.0, 0.0])))
    nu = Gaussian(ZERO, jnp.diag(jnp.array([1.0, 0.0])))
    expected = np.diag([0.5, 0.0])
    np.testing.assert_allclose(transport_map(mu, nu).matrix, expected, atol=1e-12)
    with pytest.raises(Unsupported, match="nu leaves its range"):
        transport_map(mu, Gaussian(ZERO, jnp.eye(2)))


@pytest.mark.slow
def test_the_map_is_differentiable():
    nu = Gaussian(ZERO, S2)
    jacobian = jax.jacfwd(
        lambda s: transport_map(Gaussian(ZERO, s * jnp.eye(2)), nu).matrix
    )
    expected = -0.5 * transport_map(Gaussian(ZERO, jnp.eye(2)), nu).matrix
    np.testing.assert_allclose(jacobian(jnp.array(1.0)), expected, atol=1e-10)


def test_compiled_and_batched_distances_agree_with_plain_ones(key):
    nu = Gaussian(ZERO, S2)
    factors = jr.normal(key, (3, 2, 2))

    def distance(factor):
        return wasserstein(Gaussian(ZERO, factor @ factor.T), nu)

    expected = jnp.stack([distance(factor) for factor in factors])
    batched = jax.jit(jax.vmap(distance))(factors)
    np.testing.assert_allclose(batched, expected, rtol=1e-12)


def test_single_precision_is_kept():
    single = [
        Gaussian(ZERO.astype(jnp.float32), spread.astype(jnp.float32))
        for spread in (S1, S2)
    ]
    distance = wasserstein(*single)
    assert distance.dtype == jnp.float32
    np.testing.assert_allclose(distance**2, 0.600785051541, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"order": 1}, {"method": "sinkhorn"}, {"method": "sliced", "key": jr.key(0)}],
)
def test_other_orders_and_methods_are_refused(options):
    mu = Gaussian(ZERO, S1)
    with pytest.raises(Unsupported, match="only order 2 with method"):
        wasserstein(mu, mu, **options)


def test_a_map_between_clouds_is_refused_in_favour_of_a_plan():
    cloud = TokenCloud(jnp.eye(2))
    with pytest.raises(Unsupported, match="transport_plan for token clouds"):
        transport_map(cloud, cloud)


def test_a_spread_that_is_not_positive_is_refused():
    with pytest.raises(InvalidInput, match="positive semi-definite"):
        wasserstein(Gaussian(ZERO, -S1), Gaussian(ZERO, S2))
