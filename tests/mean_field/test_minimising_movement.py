"""Implicit steps in Wasserstein space: order, energy, clusters, refusals."""

import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.mean_field import circle_nodes, minimising_movement

EYE = jnp.eye(2)
LAYER = mf.Unnormalised(EYE, EYE, EYE, beta=5.0, shift=5.0)
CIRCLE = mf.Flow(LAYER, space=mf.Sphere())
LINE = mf.Flow(mf.Unnormalised(jnp.eye(1), jnp.eye(1), -jnp.eye(1), beta=1.0))


def start(count=24):
    return circle_nodes(
        lambda angles: 1 + 0.3 * jnp.cos(3 * angles) + 0.1 * jnp.sin(angles), count
    )


def line(count=9):
    return mf.TokenCloud(jnp.linspace(-1, 1.2, count)[:, None])


@pytest.mark.slow
@pytest.mark.parametrize(("flow", "cloud"), [(CIRCLE, start()), (LINE, line())])
def test_steps_tend_to_the_flow_with_order_one(flow, cloud):
    depth = 2.0
    exact = mf.solve(flow, cloud, depth, save=2, rtol=1e-10, atol=1e-12).points[-1]

    def error(count):
        path = minimising_movement(flow, cloud, depth / count, count)
        return float(jnp.max(jnp.abs(path.points[-1] - exact)))

    coarse, fine = error(10), error(20)
    assert 1.8 < coarse / fine < 2.2


@pytest.mark.parametrize("step", [0.5, 5.0])
def test_the_energy_rises_by_the_distance_at_every_step(step):
    path = minimising_movement(CIRCLE, start(), step, 12)
    rise = jnp.diff(path.energies) - path.distances**2 / (2 * step)
    assert float(rise.min()) > 0
    ends = [mf.observables.energy(LAYER, path.cloud(k)) for k in (0, 12)]
    np.testing.assert_allclose(path.energies[jnp.array([0, 12])], ends, rtol=1e-12)
    assert str(path).startswith(f"12 steps to depth {12 * step:g}: energy")


def test_large_steps_go_on_where_the_density_has_become_three_clusters():
    path = minimising_movement(CIRCLE, start(), 10.0, 20)
    clusters = mf.observables.count_clusters(
        path.cloud(20), space=mf.Sphere(), beta=5.0
    )
    assert clusters.count == 3
    # Three points of equal mass have a third of the energy of one.
    np.testing.assert_allclose(path.energies[-1], 1 / 30, rtol=5e-2)
    assert int(path.newton_steps.max()) < 30


@pytest.mark.slow
def test_each_step_solves_its_implicit_equation():
    path = minimising_movement(LINE, line(), 0.3, 2)
    cloud = path.cloud(2)
    velocity = LINE.field(jnp.zeros(()), cloud, cloud.points)
    np.testing.assert_allclose(
        path.points[2] - path.points[1], 0.3 * velocity, atol=1e-13
    )
    moved = mf.wasserstein(path.cloud(1), cloud)
    np.testing.assert_allclose(path.distances[1], moved, rtol=1e-9)


@pytest.mark.slow
def test_tokens_in_any_order_or_absent_make_the_same_steps():
    cloud = start(12)
    order = jnp.array([5, 0, 7, 11, 1, 2, 3, 4, 6, 8, 9, 10])
    path = minimising_movement(CIRCLE, cloud, 0.5, 3)
    mixed = mf.TokenCloud(cloud.points[order], cloud.weights[order])
    other = minimising_movement(CIRCLE, mixed, 0.5, 3)
    np.testing.assert_allclose(other.points[-1], path.points[-1][order], atol=1e-11)
    padded = mf.TokenCloud(
        jnp.concatenate([cloud.points, jnp.array([[1.0, 0.0]])]),
        jnp.append(cloud.weights, 0.0),
    )
    more = minimising_movement(CIRCLE, padded, 0.5, 3)
    np.testing.assert_allclose(more.points[-1, :-1], path.points[-1], atol=1e-11)
    np.testing.assert_allclose(more.points[-1, -1], [1.0, 0.0], atol=1e-15)


def test_what_is_no_wasserstein_gradient_in_one_dimension_is_refused():
    softmax = mf.Flow(mf.identity_attention("softmax", 2), space=mf.Sphere())
    with pytest.raises(mf.InvalidInput, match="not a Wasserstein gradient"):
        minimising_movement(softmax, start(), 0.1, 1)
    sphere = mf.Flow(mf.identity_attention("unnormalised", 3), space=mf.Sphere())
    with pytest.raises(mf.InvalidInput, match="the circle"):
        minimising_movement(sphere, mf.TokenCloud(jnp.eye(3)), 0.1, 1)
    noisy = mf.Flow(LAYER, space=mf.Sphere(), noise=0.1)
    with pytest.raises(mf.Unsupported, match="without noise"):
        minimising_movement(noisy, start(), 0.1, 1)
    with pytest.raises(mf.InvalidInput, match="must be positive"):
        minimising_movement(CIRCLE, start(), 0.0, 1)
    with pytest.raises(mf.InvalidInput, match="1 or more"):
        minimising_movement(CIRCLE, start(), 0.1, 0)
