"""Weighted tokens that stand for a density: digits of the mean field, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.mean_field import circle_nodes, density_nodes, ring_nodes

CIRCLE = mf.Flow(mf.identity_attention("softmax", 2, 5.0), space=mf.Sphere())


def wave(angles):
    return 1 + 0.1 * jnp.cos(3 * angles)


def moments(count, depth=3.0, density=wave, flow=CIRCLE):
    # Padded with absent tokens, so that one program serves all.
    start = mf.pad(circle_nodes(density, count), 96)
    path = mf.solve(flow, start, depth, save=2, rtol=1e-12, atol=1e-13)
    angles = jnp.arctan2(path.points[-1, :, 1], path.points[-1, :, 0])
    return [float(start.weights @ jnp.cos(k * angles)) for k in (1, 3, 6)]


@pytest.mark.parametrize(("count", "error"), [(24, 1.4e-3), (48, 3.3e-6)])
def test_few_nodes_have_the_tabulated_errors_on_the_circle(count, error):
    _, third, _ = moments(count)
    np.testing.assert_allclose(abs(third - 0.3660580605), error, rtol=0.05)


def test_a_hundred_nodes_have_the_tabulated_mean_field_on_the_circle():
    _, third, sixth = moments(96)
    assert abs(third - 0.3660580605) < 1.1e-10
    assert abs(sixth - 0.0978164714) < 2e-9


@pytest.mark.slow
def test_kuramoto_order_grows_by_its_closed_law():
    def poisson(angles):
        return (1 - 0.3**2) / (1 - 0.6 * jnp.cos(angles) + 0.3**2)

    flow = mf.Flow(mf.identity_attention("unnormalised", 2, 0.0), space=mf.Sphere())
    order = moments(64, 2.0, poisson, flow)[0]
    exact = np.sqrt(0.09 * np.exp(2) / (1 + 0.09 * (np.exp(2) - 1)))
    np.testing.assert_allclose(exact, 0.6497905376, atol=1e-10)
    np.testing.assert_allclose(order, exact, atol=1e-9)


def spread(reference, density, count):
    flow = mf.Flow(mf.Softmax(jnp.eye(1), jnp.eye(1), -jnp.eye(1), beta=1.0))
    start = density_nodes(density, reference, count, normalize=True)
    end = mf.solve(flow, start, 1.0, save=2, rtol=1e-11, atol=1e-13).points[-1, :, 0]
    return float(start.weights @ end**2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "reference",
    [mf.UniformBox([-1.0], [1.0]), mf.Gaussian(jnp.zeros(1), 0.5 * jnp.eye(1))],
    ids=["interval", "line"],
)
def test_nodes_on_the_line_converge_spectrally(reference):
    def density(points):
        return jnp.exp(0.5 * jnp.sin(2 * points[:, 0]))

    exact = spread(reference, density, 60)
    errors = [abs(spread(reference, density, n) - exact) for n in (5, 20, 40)]
    assert errors[1] < 1e-3 * errors[0]
    assert errors[2] < 1e-9


@pytest.mark.slow
def test_a_gaussian_flows_by_its_nodes_as_by_its_closed_equations():
    gaussian = mf.Gaussian(jnp.array([0.3]), jnp.array([[0.5]]))
    flow = mf.Flow(mf.identity_attention("softmax", 1, 0.5))
    start = density_nodes(lambda points: jnp.ones(len(points)), gaussian, 40)
    end = mf.solve(flow, start, 0.5, save=2, rtol=1e-11, atol=1e-13).cloud(-1)
    exact = mf.solve(flow, gaussian, 0.5, save=2, rtol=1e-11, atol=1e-13).gaussian(-1)
    np.testing.assert_allclose(end.mean(), exact.mean(), rtol=1e-8)
    np.testing.assert_allclose(end.covariance(), exact.covariance(), rtol=1e-7)


def test_a_constant_density_gives_the_reference_itself():
    reference = mf.UniformSphere(3)
    cloud = density_nodes(lambda points: jnp.ones(len(points)), reference, 6)
    rule = mf.quadrature(reference, 6)
    np.testing.assert_array_equal(cloud.points, rule.points)
    np.testing.assert_allclose(cloud.weights, rule.weights, rtol=1e-14)


def test_parameters_of_a_density_have_derivatives():
    def mean(size):
        cloud = circle_nodes(lambda angles: 1 + size * jnp.cos(angles), 16)
        return cloud.mean()[0]

    np.testing.assert_allclose(jax.grad(mean)(0.2), 0.5, rtol=1e-12)


@pytest.mark.parametrize(
    ("density", "message"),
    [
        (lambda angles: 2 + 0 * angles, "mass is 2"),
        (lambda angles: 1 + 3 * jnp.cos(angles), "must not be negative"),
        (lambda angles: jnp.ones(3), r"shape \(3,\)"),
        (lambda angles: angles * jnp.nan, "finite"),
        (1.0, "must be a function"),
    ],
    ids=["mass", "sign", "shape", "nan", "number"],
)
def test_what_is_no_density_is_refused(untyped, density, message):
    for nodes in (
        lambda: circle_nodes(density, 8),
        lambda: (
            ring_nodes(density, 8, dimension=2)
            if message != "must not be negative"
            else ring_nodes(lambda z: 1 + 3 * z, 8, dimension=3)
        ),
    ):
        with pytest.raises(mf.InvalidInput, match=message):
            nodes()


def test_a_density_without_mass_cannot_be_normalised():
    with pytest.raises(mf.InvalidInput, match="no mass to divide by"):
        circle_nodes(jnp.zeros_like, 8, normalize=True)


def test_a_mass_other_than_one_is_divided_out_on_request():
    cloud = circle_nodes(lambda angles: 2 + 0 * angles, 8, normalize=True)
    np.testing.assert_allclose(cloud.weights, 1 / 8, rtol=1e-14)
    with pytest.raises(mf.InvalidInput, match="1 or more"):
        circle_nodes(jnp.ones_like, 0)
