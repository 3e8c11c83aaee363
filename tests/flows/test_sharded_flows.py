"""Flows of clouds that are shared among four devices."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer.errors import InvalidInput

FLOW = mf.Flow(mf.identity_attention("softmax", dimension=3, beta=4.0))


def on_four_devices(points):
    """Lay out a cloud over the devices."""
    sums = mf.Sharded(jax.make_mesh((4,), ("tokens",)))
    return sums.place(mf.TokenCloud(points, sums=sums))


def sphere_points(count=24):
    return mf.UniformSphere(3).sample(count, key=jr.key(3))


def test_layers_on_four_devices_are_layers_on_one():
    points = sphere_points()
    ours = mf.run_layers(FLOW, on_four_devices(points), 3, step=0.1).points
    expected = mf.run_layers(FLOW, mf.TokenCloud(points), 3, step=0.1).points
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_solve_on_four_devices_is_a_solve_on_one_and_stays_laid_out():
    points = sphere_points()
    flow = mf.Flow(FLOW.velocity, space=mf.Sphere())
    cloud = on_four_devices(points)
    ours = mf.solve(flow, cloud, depth=2.0).at(2.0).points
    expected = mf.solve(flow, mf.TokenCloud(points), depth=2.0).at(2.0).points
    np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-12)
    assert ours.sharding.is_equivalent_to(cloud.points.sharding, 2)


@pytest.mark.slow
def test_a_solve_on_four_devices_gathers_no_tokens():
    @jax.jit
    def points(cloud):
        return mf.solve(FLOW, cloud, depth=1.0, save=3).points

    program = points.lower(on_four_devices(sphere_points())).compile().as_text()
    assert "collective-permute" in program
    assert "all-gather" not in program
    assert "all-to-all" not in program


@pytest.mark.slow
def test_the_gradient_through_a_solve_on_four_devices_is_that_on_one():
    target = sphere_points()[::-1]

    @jax.jit
    @jax.grad
    def gradient(points, cloud):
        path = mf.solve(
            FLOW, cloud.moved(points), 0.5, save=2, solver=mf.FixedStep(0.1)
        )
        return jnp.sum((path.points[-1] - target) ** 2)

    points = sphere_points()
    ours = gradient(points, on_four_devices(points))
    expected = gradient(points, mf.TokenCloud(points))
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_sums_that_are_none_are_refused_with_what_is_allowed(untyped):
    with pytest.raises(InvalidInput, match=r"sums is 'ring'; .* Sharded"):
        mf.TokenCloud(sphere_points(4), sums="ring")
