"""Tokens appended to a causal sequence, against running the whole sequence."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer.errors import InvalidInput
from meanformer.experiments import reference_attention

LAYERS = 6


def sequence(count, key):
    return mf.in_order(mf.TokenCloud(jr.normal(key, (7, 2))[:count]))


def masked(*kinds):
    heads = [reference_attention(kind, beta=0.8) for kind in kinds]
    return mf.Masked(heads[0] if len(heads) == 1 else mf.MultiHead(heads))


VELOCITIES = {
    "softmax": masked(mf.Softmax),
    "heads": masked(mf.L2, mf.Softmax),
    "strict": mf.Masked(reference_attention(), mf.attention.StrictCausal()),
    "schedule": mf.Schedule([masked(mf.Softmax), masked(mf.L2)]),
    "perceptron": mf.Sum(
        (masked(mf.Softmax), mf.Perceptron(0.3 * jnp.eye(2), jnp.zeros(2), jnp.eye(2)))
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        "strict",
        *(pytest.param(name, marks=pytest.mark.slow) for name in list(VELOCITIES)[3:]),
        "heads",
    ],
)
def test_appending_is_running_the_longer_sequence(name, key):
    flow = mf.Flow(VELOCITIES[name])
    short, whole = sequence(4, key), sequence(7, key)
    path = mf.run_layers(flow, short, LAYERS)
    longer = mf.flows.append_tokens(flow, path, whole)
    expected = mf.run_layers(flow, whole, LAYERS)
    for part in ("depths", "points", "velocities", "weights", "positions"):
        np.testing.assert_allclose(
            getattr(longer, part), getattr(expected, part), rtol=0, atol=1e-12
        )


@pytest.mark.slow
def test_tokens_appended_on_the_sphere_stay_on_it(key):
    flow = mf.Flow(VELOCITIES["softmax"], space=mf.Sphere())
    points = jr.normal(key, (3, 2))
    points /= jnp.linalg.norm(points, axis=1, keepdims=True)
    known, longer = (mf.in_order(mf.TokenCloud(points[:n])) for n in (2, 3))
    path = mf.flows.append_tokens(flow, mf.run_layers(flow, known, 2), longer)
    expected = mf.run_layers(flow, longer, 2)
    np.testing.assert_allclose(path.points, expected.points, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_tokens_can_be_appended_one_by_one_on_the_sphere(key):
    flow = mf.Flow(VELOCITIES["softmax"], space=mf.Sphere())
    points = jr.normal(key, (5, 2))
    points /= jnp.linalg.norm(points, axis=1, keepdims=True)
    clouds = [mf.in_order(mf.TokenCloud(points[:n])) for n in range(1, 6)]
    path = mf.run_layers(flow, clouds[0], LAYERS)
    for cloud in clouds[1:]:
        path = mf.flows.append_tokens(flow, path, cloud)
    expected = mf.run_layers(flow, clouds[-1], LAYERS)
    np.testing.assert_allclose(path.points, expected.points, rtol=0, atol=1e-12)


def test_appending_works_under_jit(key):
    flow = mf.Flow(VELOCITIES["softmax"])
    path = mf.run_layers(flow, sequence(4, key), LAYERS)
    whole = sequence(7, key)
    plain = mf.flows.append_tokens(flow, path, whole).points
    jitted = jax.jit(lambda mu: mf.flows.append_tokens(flow, path, mu).points)(whole)
    np.testing.assert_allclose(jitted, plain, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "velocity",
    [reference_attention(), mf.Masked(reference_attention(mf.Linear))],
    ids=["no mask", "not normalised"],
)
def test_maps_that_let_earlier_tokens_notice_are_refused(velocity, key):
    flow = mf.Flow(velocity)
    path = mf.run_layers(flow, sequence(4, key), LAYERS)
    with pytest.raises(InvalidInput, match="change the velocity of an earlier one"):
        mf.flows.append_tokens(flow, path, sequence(7, key))


def test_the_longer_sequence_must_begin_with_the_known_one(key):
    flow = mf.Flow(VELOCITIES["softmax"])
    path = mf.run_layers(flow, sequence(4, key), LAYERS)
    with pytest.raises(InvalidInput, match="nothing to append"):
        mf.flows.append_tokens(flow, path, sequence(4, key))
    with pytest.raises(InvalidInput, match="not those the path starts from"):
        mf.flows.append_tokens(flow, path, sequence(7, jr.key(1)))
    with pytest.raises(InvalidInput, match="needs positions"):
        mf.flows.append_tokens(flow, path, mf.TokenCloud(sequence(7, key).points))


@pytest.mark.slow
def test_the_path_of_a_solve_is_refused(key):
    flow = mf.Flow(VELOCITIES["softmax"])
    path = mf.solve(flow, sequence(4, key), 1.0)
    with pytest.raises(InvalidInput, match="not from solve"):
        mf.flows.append_tokens(flow, path, sequence(7, key))
