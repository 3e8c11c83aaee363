import dataclasses

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from meanformer import training
from meanformer.errors import ConflictingTargets, InvalidInput
from training_problems import dependent_contexts

QUERIES = jnp.tile(jnp.array([1.0, 0.5]), (3, 1))


def run_on(contexts, offsets, time):
    model = training.MeanFieldTransformer.draw(1, 16, 2, key=jr.key(0))
    data = training.Dataset(contexts, QUERIES)
    ends = training.outputs(model, data)[:, 0]
    data = data.with_targets(ends + offsets)
    rule = training.GradientDescent(0.25)
    return training.train(model, data, time, solver=rule, save=5), data


@pytest.fixture(scope="module")
def independent():
    first, second, third = dependent_contexts()
    third = third + np.array([[0, 0], [0, 0], [0, 0], [0.5, 0]])
    offsets = 1e-3 * jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])
    return run_on([first, second, third], offsets, 40.0)


def test_independent_data_close_to_their_targets_are_certified(independent):
    run, data = independent
    found = training.certificate(run, data)
    assert found.verdict == "certified"
    assert found.smallest.min() > 0
    rates = found.smallest.min() / len(data)
    np.testing.assert_allclose(
        found.bound, np.sqrt(2 * run.risks[0] / rates), rtol=1e-12
    )
    assert found.distances[-1] <= run.lengths[-1] <= found.bound
    assert "certified: the inequality holds in a ball" in str(found)


def test_a_large_lipschitz_constant_only_observes(independent):
    found = training.certificate(*independent, lipschitz=1e9)
    assert found.verdict == "observed"


def test_dependent_data_fail_and_the_contexts_are_named():
    null = jnp.outer(jnp.array([-1.0, -1.0, 1.0]), jnp.array([0.05, 0.0]))
    run, data = run_on(dependent_contexts(), null, 40.0)
    found = training.certificate(run, data)
    assert found.verdict == "failed"
    np.testing.assert_allclose(found.residual, 1, rtol=1e-9)
    assert sorted(found.culprits) == [0, 1, 2]
    assert "no head moves anything" in str(found)
    assert not np.isfinite(found.bound)


@pytest.mark.slow
def test_too_few_numbers_in_the_heads_are_told():
    model = training.MeanFieldTransformer.draw(1, 1, 2, key=jr.key(1))
    contexts, queries = jr.normal(jr.key(2), (8, 3, 2)), jr.normal(jr.key(3), (8, 2))
    data = training.Dataset(contexts, queries, queries)
    rule = training.GradientDescent(0.1)
    run = training.train(model, data, 0.2, solver=rule, save=2)
    found = training.certificate(run, data)
    assert found.is_short
    assert "fewer numbers in the heads than outputs" in str(found)


def test_a_run_that_rises_or_stands_is_not_certified(independent):
    run, data = independent
    lazy = training.train(
        run.start,
        data,
        10.0,
        solver=training.GradientDescent(0.25),
        save=5,
        speeds=(0.0, 0.0),
    )
    assert training.certificate(lazy, data).verdict == "observed"
    shorter = run.risks.at[-1].set(2 * run.risks[0])
    with pytest.raises(InvalidInput, match="a certificate is for the data"):
        training.certificate(dataclasses.replace(run, risks=shorter), data)
    risen = dataclasses.replace(run, risks=run.risks.at[0].set(run.risks[1] / 2))
    assert training.certificate(risen, data).verdict == "failed"


def test_conflicting_targets_fail_before_the_flow_stands():
    points = jr.normal(jr.key(4), (3, 2))
    targets = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    data = training.Dataset([points, points[::-1]], QUERIES[:2], targets)
    model = training.MeanFieldTransformer.draw(1, 16, 2, key=jr.key(0))
    rule = training.GradientDescent(0.25)
    with pytest.warns(ConflictingTargets):
        run = training.train(model, data, 20.0, solver=rule, save=2)
    found = training.certificate(run, data)
    assert found.verdict == "failed"
    assert sorted(found.culprits) == [0, 1]


def test_harmless_offsets_of_dependent_data_do_not_fail():
    beside = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    run, data = run_on(dependent_contexts(), 0.05 * beside, 800.0)
    assert run.risks[-1] < 1e-12
    found = training.certificate(run, data)
    assert found.verdict == "observed"


@pytest.mark.slow
def test_wiggles_of_a_flow_at_its_tolerance_are_no_failure(independent):
    _, data = independent
    model = training.MeanFieldTransformer.draw(1, 16, 2, key=jr.key(0))
    run = training.train(model, data, 4000.0, save=9)
    assert training.certificate(run, data).verdict == "certified"


@pytest.mark.slow
def test_other_steps_than_those_of_the_flow_are_not_certified(independent):
    run, data = independent
    rule = training.GradientDescent(0.25, optimiser=optax.sign_sgd(1e-3))
    moved = training.train(run.start, data, 5.0, solver=rule, save=11)
    assert training.certificate(moved, data).verdict != "certified"


def test_a_short_run_far_from_its_targets_is_not_certified(independent):
    run, data = independent
    far = data.with_targets(data.targets + jnp.eye(3, 2)[:, None])
    short = training.train(run.start, far, 1e-3, save=2)
    assert training.certificate(short, far).verdict == "observed"
