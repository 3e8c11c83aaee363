import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import meanformer as mf
from meanformer import flows, storage, training
from meanformer.flows import FixedStep, Status
from meanformer.training import GradientDescent
from training_problems import dependent_contexts, random_problem

STEPS = 8


@pytest.fixture(scope="module")
def problem():
    return random_problem(jr.key(5), layers=2, sizes=(3, 3), beta=0.5)


@pytest.fixture(scope="module")
def flowed(problem):
    return training.train(*problem, 2.0, save=3, rtol=1e-8, atol=1e-10)


@pytest.fixture(scope="module")
def descents(problem):
    return {
        step: training.train(*problem, 0.8, solver=GradientDescent(step), save=2)
        for step in (0.1, 0.05, 0.025, 0.0125)
    }


def test_the_risk_falls_by_what_is_dissipated(flowed):
    assert float(flowed.risks[-1]) < 0.6 * float(flowed.risks[0])
    assert jnp.abs(flowed.energy_defects).max() < 1e-7 * flowed.risks[0]
    assert flowed.status == mf.Status.reached


def test_the_exact_flow_keeps_the_balance_of_queries_and_keys(flowed):
    assert flowed.gauge_drifts.max() < 1e-7


def test_the_defect_of_descent_is_of_first_order(descents):
    defects = [abs(float(run.energy_defects[-1])) for run in descents.values()]
    np.testing.assert_allclose(-np.diff(np.log2(defects))[1:], 1, atol=0.15)


def test_the_drift_of_the_balance_under_descent_is_of_first_order(descents):
    drifts = [float(run.gauge_drifts[-1]) for run in descents.values()]
    np.testing.assert_allclose(-np.diff(np.log2(drifts)), 1, atol=0.15)


def test_descent_is_the_loop_that_one_writes_by_hand(problem, descents):
    model, data = problem
    for _ in range(STEPS):
        found = training.gradient(model, data).parameters
        moved = jax.tree.map(lambda a, g: a - 0.1 * g, model.parameters, found)
        model = model.with_parameters(moved)
    last = descents[0.1].particles(-1)
    for a, b in zip(
        jax.tree.leaves(last), jax.tree.leaves(model.parameters), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-14)
    np.testing.assert_allclose(
        descents[0.1].risks[-1], training.risk(model, data), rtol=1e-13
    )


def test_duplicated_heads_train_alike(problem, descents):
    model, data = problem
    twice = jax.tree.map(lambda a: jnp.concatenate([a, a], 1), model.parameters)
    run = training.train(
        model.with_parameters(twice), data, 0.8, solver=GradientDescent(0.1), save=2
    )
    np.testing.assert_allclose(run.risks, descents[0.1].risks, rtol=1e-12)


@pytest.mark.slow
def test_too_large_a_step_ends_with_the_heads_before_the_rises(problem):
    model, data = problem
    with pytest.warns(mf.errors.StoppedEarly, match="the risk rose from step to step"):
        run = training.train(model, data, 6000.0, solver=GradientDescent(60.0), save=2)
    assert run.status == mf.Status.diverging
    assert jnp.isfinite(run.risks).all()
    assert run.depths[-1] < 6000
    with pytest.warns(mf.errors.StoppedEarly):
        often = training.train(
            model, data, 6000.0, solver=GradientDescent(60.0), save=101
        )
    assert often.risks[-1] <= often.risks[0]


def test_an_optimiser_may_rise_on_its_way(problem):
    rule = GradientDescent(0.1, optimiser=optax.adam(0.1))
    with jax.numpy_dtype_promotion("standard"):
        run = training.train(*problem, 20.0, solver=rule, save=11)
    assert run.status == mf.Status.reached


@pytest.mark.slow
def test_separate_speeds_keep_the_energy_identity(problem):
    run = training.train(
        *problem, 1.0, save=2, speeds=(0.0, 2.0), rtol=1e-8, atol=1e-10
    )
    first, last = run.particles(0), run.particles(-1)
    np.testing.assert_array_equal(first.heads.query, last.heads.query)
    assert jnp.abs(run.energy_defects[-1]) < 1e-8


def test_a_stop_condition_sees_the_norm_of_the_gradient(problem):
    speed = 0.5 * float(jnp.sqrt(training.gradient(*problem).squared_norm))
    run = training.train(
        *problem, 200.0, solver=GradientDescent(0.1), stop=flows.SteadyState(speed)
    )
    assert run.status == mf.Status.steady
    assert 0.8 * speed < jnp.sqrt(run.squared_norms[-1]) < speed


@pytest.mark.slow
def test_batches_are_drawn_by_the_key_and_the_number_of_the_step(problem):
    rule = GradientDescent(0.1, batch=1)
    one, other = (
        training.train(*problem, 0.8, solver=rule, save=save, key=jr.key(1))
        for save in (2, 5)
    )
    np.testing.assert_allclose(one.risks[-1], other.risks[-1], rtol=1e-13)
    third = training.train(*problem, 0.8, solver=rule, save=2, key=jr.key(2))
    assert abs(one.risks[-1] / third.risks[-1] - 1) > 1e-6


def stopped_after(path, count):
    """A store that fails as if the process were killed, after so many times."""

    class Killed(storage.RunStore):
        def append(self, index, row):
            if index == count:
                raise KeyboardInterrupt
            super().append(index, row)

    return Killed(path)


def same(one, other):
    leaves = zip(
        jax.tree.leaves((one.parameters, one.risks, one.lengths, one.notes)),
        jax.tree.leaves((other.parameters, other.risks, other.lengths, other.notes)),
        strict=True,
    )
    for a, b in leaves:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["descent", "adam in batches"])
@jax.numpy_dtype_promotion("standard")
def test_a_killed_training_resumes_to_identical_parameters(problem, tmp_path, kind):
    rule, key = GradientDescent(0.1), None
    if kind != "descent":
        rule = GradientDescent(0.1, batch=1, optimiser=optax.adam(1e-2))
        key = jr.key(3)
    options = {"solver": rule, "save": 5, "key": key}
    whole = training.train(
        *problem, 0.8, **options, store=storage.RunStore(tmp_path / "whole")
    )
    with pytest.raises(KeyboardInterrupt):
        training.train(
            *problem, 0.8, **options, store=stopped_after(tmp_path / "killed", 3)
        )
    store = storage.RunStore(tmp_path / "killed")
    resumed = training.train(*problem, 0.8, **options, store=store)
    same(whole, resumed)
    opened = mf.open_run(tmp_path / "killed", kind=training.TrainingRun)
    same(whole, opened)
    with pytest.raises(mf.InvalidInput, match="does not know its transformer"):
        opened.at(-1)


@pytest.mark.slow
def test_a_killed_flow_resumes_to_identical_parameters(problem, tmp_path):
    whole = training.train(
        *problem, 2.0, save=3, store=storage.RunStore(tmp_path / "whole")
    )
    with pytest.raises(KeyboardInterrupt):
        training.train(*problem, 2.0, save=3, store=stopped_after(tmp_path / "a", 2))
    resumed = training.train(
        *problem, 2.0, save=3, store=storage.RunStore(tmp_path / "a")
    )
    same(whole, resumed)


def test_a_store_of_another_training_is_refused(problem, tmp_path):
    model, data = problem
    options = {"solver": GradientDescent(0.1), "save": 2}
    store = storage.RunStore(tmp_path)
    training.train(model, data, 0.1, **options, store=store)
    with pytest.raises(mf.InvalidInput, match=r"as kind, such as training\.Train"):
        mf.open_run(tmp_path)
    with pytest.raises(mf.InvalidInput, match="differs in decay"):
        training.train(model, data, 0.1, **options, decay=0.1, store=store)


def test_dependent_data_do_not_move(key):
    data = training.Dataset(
        dependent_contexts(), jnp.tile(jnp.array([1.0, 0.5]), (3, 1))
    )
    model = training.MeanFieldTransformer.draw(1, 16, 2, key=key)
    ends = training.outputs(model, data)[:, 0]
    null = jnp.outer(jnp.array([-1.0, -1.0, 1.0]) / jnp.sqrt(3.0), jnp.array([0.1, 0]))
    found = training.gradient(model, data.with_targets(ends + null))
    np.testing.assert_allclose(found.risk, 1 / 600, rtol=1e-12)
    assert found.squared_norm < 1e-28


def test_mistakes_of_training_are_told(problem, untyped):
    for options, message in (
        ({"solver": GradientDescent(0.3), "save": 2}, "of the step, such as 0.9"),
        ({"solver": GradientDescent(7.0), "save": 2}, "of the step, such as 7"),
        ({"solver": "adam"}, "solver is 'adam'; it must be Adaptive"),
        ({"solver": optax.adam(0.1)}, "which takes an optimiser of optax"),
        ({"key": jr.key(0)}, "key is for batches"),
        ({"solver": GradientDescent(0.1, batch=2)}, "batches need key"),
        ({"rtol": -1.0}, "both must be positive"),
        ({"speeds": (1.0,)}, "speeds is .*; it must be two numbers"),
        ({"engine": "stored"}, "engine is 'stored'"),
        (
            {"solver": GradientDescent(0.1, batch=7), "key": jr.key(0)},
            "there are 2 con",
        ),
    ):
        with pytest.raises(mf.InvalidInput, match=message):
            training.train(*problem, 1.0, **options)
    with pytest.raises(mf.InvalidInput, match="time is -1.0; it must be a positive"):
        training.train(*problem, -1.0)
    with pytest.raises(mf.InvalidInput, match="step is 0; it must be positive"):
        GradientDescent(0)
    with pytest.raises(mf.InvalidInput, match="optimiser is 3; it must be"):
        GradientDescent(0.1, optimiser=3)


def test_equal_contexts_with_unequal_targets_are_told_before_training(key):
    points = jr.normal(key, (3, 2))
    targets = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    contexts = [points, points[::-1], points + 1]
    data = training.Dataset(contexts, jnp.ones((3, 2)), targets)
    model = training.MeanFieldTransformer.draw(1, 2, 2, key=key)
    np.testing.assert_allclose(data.conflict_floor(), 1 / 6, rtol=1e-12)
    report = training.injectivity_report(data)
    np.testing.assert_allclose(report.floor, 1 / 6, rtol=1e-9)
    rule = GradientDescent(0.1)
    with pytest.warns(mf.errors.ConflictingTargets, match="below 0.166667"):
        training.train(model, data, 0.1, solver=rule, save=2)


@pytest.mark.parametrize("optimiser", [optax.sgd(60.0), optax.sgd(10.0, 0.9)])
def test_an_optimiser_that_blows_up_ends_with_good_heads(problem, optimiser):
    model, data = problem
    rule = GradientDescent(1.0, optimiser=optimiser)
    with pytest.warns(mf.errors.StoppedEarly, match="take a smaller step"):
        run = training.train(model, data, 60.0, solver=rule, save=4)
    assert run.status == Status.diverging
    assert run.risks[-1] <= run.risks[0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.parameters))


@pytest.mark.slow
def test_a_flow_of_too_long_steps_ends_with_good_heads(problem):
    model, data = problem
    with pytest.warns(mf.errors.StoppedEarly):
        run = training.train(model, data, 1e4, solver=FixedStep(50.0), save=3)
    assert run.risks[-1] <= run.risks[0]


def test_a_loss_that_is_no_number_is_told(problem):
    model, data = problem
    with (
        pytest.warns(mf.errors.StoppedEarly, match="look at the loss"),
        pytest.raises(mf.errors.Overflow, match="the loss is not"),
    ):
        training.train(
            model,
            data,
            1.0,
            solver=GradientDescent(0.5),
            loss=lambda end, target: jnp.log(-jnp.abs(end.queries[0, 0])),
        )


def test_the_words_of_a_run_are_those_of_time(problem):
    model, data = problem
    run = training.train(model, data, 0.1, solver=GradientDescent(0.1), save=2)
    assert run.message == "At time 0.1 the time asked for was reached."
    first, last = (f"{float(run.risks[index]):.4g}" for index in (0, -1))
    assert str(run).endswith(f"The risk was {first} at the start, {last} at the end.")
    with pytest.raises(mf.InvalidInput, match="index is 7; there are 2 saved times"):
        run.at(7)


def test_split_tokens_and_signs_of_zero_hide_no_conflict(key):
    points = jnp.array([[0.0, 1.0], [2.0, -1.0]])
    split = mf.TokenCloud(
        jnp.array([[2.0, -1.0], [-0.0, 1.0], [2.0, -1.0]]), jnp.array([0.25, 0.5, 0.25])
    )
    queries, targets = jnp.ones((2, 1, 2)), jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    data = training.Dataset([mf.TokenCloud(points), split], queries, targets)
    np.testing.assert_allclose(data.conflict_floor(), 1 / 4, rtol=1e-12)
    twice = training.Dataset([points], jnp.ones((1, 2, 2)), targets.reshape(1, 2, 2))
    np.testing.assert_allclose(twice.conflict_floor(), 1 / 2, rtol=1e-12)
