"""Many clouds at once: the same as one after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from map_zoo import MASSES, TOKENS
from meanformer.experiments import reference_attention

FLOW = mf.Flow(reference_attention())
OPTIONS = {"save": 3, "rtol": 1e-8, "atol": 1e-10}


def clouds():
    """Clouds of five and of three tokens."""
    return [
        mf.TokenCloud(scale * TOKENS[:count], MASSES[:count], normalize=True)
        for scale, count in ((1.0, 5), (2.0, 3))
    ]


@pytest.mark.slow
def test_a_cloud_flows_as_it_does_alone_whatever_its_size():
    large, small = mf.solve_many(FLOW, clouds(), 1.0, **OPTIONS)
    alone = mf.solve(FLOW, clouds()[1], 1.0, **OPTIONS)
    assert large.points.shape == (3, 5, 2)
    np.testing.assert_allclose(small.points, alone.points, atol=1e-13)
    np.testing.assert_allclose(small.velocities, alone.velocities, atol=1e-13)
    np.testing.assert_array_equal(small.weights, alone.weights)
    np.testing.assert_array_equal(small.accepted_steps, alone.accepted_steps)
    assert not np.array_equal(small.accepted_steps, large.accepted_steps)


@pytest.mark.slow
def test_the_clusters_of_a_batch_are_counted_cloud_by_cloud():
    angles = [[0.0, 0.1, 2.0], [0.0, 0.05, 0.1, 3.0], [1.0, 1.1]]
    flow = mf.Flow(mf.identity_attention("softmax", 2, 40.0), space=mf.Sphere())
    circle = [
        mf.TokenCloud(np.stack([np.cos(a), np.sin(a)], axis=1))
        for a in map(np.array, angles)
    ]
    paths = mf.solve_many(flow, circle, 5.0, save=2)
    counts = [
        mf.observables.count_clusters(path.cloud(-1), space=flow.space, beta=40.0).count
        for path in paths
    ]
    assert counts == [2, 2, 1]


def test_one_that_stops_early_does_not_end_the_others():
    flow = mf.Flow(mf.identity_attention("linear", 2, 1.0))
    small, large = (mf.TokenCloud(scale * TOKENS) for scale in (0.1, 3.0))
    with pytest.warns(mf.errors.StoppedEarly):
        first, second = mf.solve_many(flow, [large, small], 2.0, save=3)
    assert first.depths[-1] < 2.0
    assert first.status != second.status
    np.testing.assert_allclose(second.depths, [0.0, 1.0, 2.0])


@pytest.mark.slow
def test_places_in_the_sequence_are_kept():
    flow = mf.Flow(mf.Masked(reference_attention()))
    ordered = [mf.in_order(cloud) for cloud in clouds()]
    for cloud, path in zip(
        ordered, mf.solve_many(flow, ordered, 1.0, **OPTIONS), strict=True
    ):
        alone = mf.solve(flow, cloud, 1.0, **OPTIONS)
        np.testing.assert_allclose(path.points, alone.points, atol=1e-13)
        np.testing.assert_array_equal(path.positions, cloud.positions)


@pytest.mark.slow
def test_tokens_that_meet_are_joined_in_each_cloud():
    flow = mf.Flow(mf.identity_attention("softmax", 1, 1.0), space=mf.Euclidean())
    lines = [
        mf.TokenCloud(np.array(p)[:, None]) for p in ([0.0, 1e-3, 5.0], [0.0, 1.0])
    ]
    first, second = mf.solve_many(flow, lines, 0.1, save=2, merge=1e-2)
    assert len(first.merges) == 1
    assert len(second.merges) == 0
    assert first.atoms.leaders.shape == (2, 3)
    assert second.atoms.leaders.shape == (2, 2)


@pytest.mark.slow
def test_every_cloud_has_noise_of_its_own():
    flow, still = mf.Flow(mf.PointMap(jnp.zeros_like), noise=0.1), clouds()[0]
    first, second = mf.solve_many(
        flow, [still] * 2, 0.5, save=2, solver=mf.FixedStep(0.25), key=jax.random.key(0)
    )
    assert float(jnp.abs(first.points[-1] - second.points[-1]).min()) > 0


@pytest.mark.slow
def test_the_gradient_is_that_of_the_clouds_one_by_one():
    def loss(value, solver):
        attention = mf.Softmax(jnp.eye(2), jnp.eye(2), value)
        paths = solver(mf.Flow(attention))
        return sum(jnp.sum(path.points[-1] ** 3) for path in paths)

    steps = {"save": 2, "solver": mf.FixedStep(0.25)}

    def together(flow):
        return mf.solve_many(flow, clouds(), 0.5, **steps)

    def alone(flow):
        return [mf.solve(flow, cloud, 0.5, **steps) for cloud in clouds()]

    found, expected = (
        jax.grad(loss)(jnp.eye(2), solver) for solver in (together, alone)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (mf.TokenCloud(TOKENS), "must be a list of token clouds"),
        ([], "clouds is empty"),
        ([TOKENS], "must be a TokenCloud"),
        ([mf.TokenCloud(TOKENS), mf.in_order(mf.TokenCloud(TOKENS))], "differ in"),
    ],
)
def test_what_is_no_list_of_alike_clouds_is_told(untyped, given, message):
    with pytest.raises(mf.InvalidInput, match=message):
        mf.solve_many(FLOW, given, 1.0)
