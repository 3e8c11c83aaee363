"""Tasks that are solved in context."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer import training
from meanformer.experiments.helpers.regression import gradient_descent, ridge
from meanformer.training import tasks

COVARIANCE = jnp.diag(jnp.array([2.0, 1.0, 0.3]))
ENGINES = [
    training.Automatic(),
    training.Checkpointed(),
    training.Reversible(),
]


@pytest.fixture(scope="module")
def noisy():
    """Contexts with noise and a covariance, and what is known of them."""
    return tasks.linear_regression(
        40, 12, 3, key=jr.key(7), noise=0.5, covariance=COVARIANCE
    )


def regressions(count, examples, dimension, noise, covariance):
    """Draw what one step predicts from and what it is to predict, in NumPy."""
    random = np.random.default_rng(3)
    slopes = random.standard_normal((count, dimension))
    points = random.standard_normal((count, examples, dimension)) @ np.sqrt(covariance)
    labels = np.einsum("knd,kd->kn", points, slopes)
    labels += noise * random.standard_normal(labels.shape)
    return slopes, np.einsum("kn,knd->kd", labels, points) / examples


@pytest.mark.parametrize(
    ("examples", "step", "risk"),
    [(10, 0.625, 1.875), (20, 10 / 13, 15 / 13), (40, 20 / 23, 15 / 23)],
)
def test_the_best_step_and_its_risk_have_the_closed_form(examples, step, risk):
    task = tasks.LinearRegression(examples, jnp.eye(5), 0.0)
    np.testing.assert_allclose(task.optimal_step, step, rtol=1e-13)
    np.testing.assert_allclose(task.optimal_risk, risk, rtol=1e-13)
    np.testing.assert_allclose(task.preconditioner, step * np.eye(5), atol=1e-13)
    np.testing.assert_allclose(task.risk(np.zeros((5, 5))), 5)


def test_noise_raises_the_best_risk_as_the_formula_says():
    task = tasks.LinearRegression(20, jnp.eye(5), 0.7)
    np.testing.assert_allclose(task.optimal_step, 20 / 26.49, rtol=1e-13)
    np.testing.assert_allclose(task.optimal_risk, 5 * 6.49 / 26.49, rtol=1e-13)


def test_the_preconditioner_of_a_covariance_is_that_of_the_reference(noisy):
    diagonal = np.diag(noisy[1].preconditioner)
    np.testing.assert_allclose(diagonal, [0.4061, 0.7251, 1.6107], atol=5e-5)


def test_the_preconditioner_is_what_regression_on_many_draws_finds(noisy):
    slopes, moments = regressions(100_000, 12, 3, 0.5, np.asarray(COVARIANCE))
    found = np.linalg.lstsq(moments, slopes, rcond=None)[0].T
    np.testing.assert_allclose(found, noisy[1].preconditioner, atol=0.02)


def test_the_risk_of_any_matrix_is_what_many_draws_find(noisy):
    slopes, moments = regressions(100_000, 12, 3, 0.5, np.asarray(COVARIANCE))
    matrix = np.array([[0.3, 0.2, 0.0], [-0.1, 0.5, 0.1], [0.0, 0.4, 1.0]])
    errors = moments @ matrix.T - slopes
    risk = np.einsum("kd,de,ke->k", errors, COVARIANCE, errors).mean()
    np.testing.assert_allclose(noisy[1].risk(matrix), risk, rtol=0.02)


def test_the_risk_is_least_at_the_preconditioner(noisy):
    best = noisy[1].preconditioner
    np.testing.assert_allclose(jax.grad(noisy[1].risk)(best), 0, atol=1e-13)


def test_the_best_multiple_of_the_identity_is_a_minimum(noisy):
    slope = jax.grad(lambda step: noisy[1].risk(step * jnp.eye(3)))
    np.testing.assert_allclose(slope(noisy[1].optimal_step), 0, atol=1e-13)


def test_contexts_have_labels_and_queries_have_none(noisy):
    data, _ = noisy
    assert data.tokens.shape == (40, 12, 4)
    assert data.queries.shape == (40, 1, 4)
    np.testing.assert_array_equal(data.queries[:, 0, 3], 0)


def test_labels_without_noise_are_linear_in_the_points():
    data, _ = tasks.linear_regression(6, 8, 3, key=jr.key(1))
    for tokens, query, target in zip(
        data.tokens, data.queries, data.targets, strict=True
    ):
        slope = np.linalg.lstsq(tokens[:, :3], tokens[:, 3], rcond=None)[0]
        np.testing.assert_allclose(slope @ query[0, :3], target, atol=1e-12)


def by_hand(data, matrix, steps):
    """Gradient descent on each context, in NumPy."""
    found = []
    for tokens, query in zip(data.tokens, data.queries, strict=True):
        slope = np.zeros(3)
        for _ in range(steps):
            errors = tokens[:, :3] @ slope - tokens[:, 3]
            slope = slope - matrix @ (errors @ tokens[:, :3]) / len(tokens)
        found.append(slope @ query[0, :3])
    return np.array(found)


@pytest.mark.parametrize("steps", [1, 3])
def test_layers_of_linear_attention_are_steps_of_gradient_descent(noisy, steps):
    data, _ = noisy
    matrix = np.array([[0.2, 0.1, 0.0], [0.0, 0.3, 0.0], [0.1, 0.0, 0.4]])
    model = tasks.regression_layers(matrix, steps=steps)
    expected = by_hand(data, matrix, steps)
    np.testing.assert_allclose(
        gradient_descent(data, matrix, steps=steps), expected, atol=1e-12
    )
    np.testing.assert_allclose(
        training.risk(model, data, loss=tasks.prediction_error),
        np.mean((expected - np.asarray(data.targets)) ** 2),
        rtol=1e-12,
    )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda one: type(one).__name__)
def test_gradients_of_linear_attention_agree(noisy, engine):
    data, _ = noisy
    model = tasks.regression_layers(0.1 * np.eye(3), steps=3)
    given = dict(loss=tasks.prediction_error)
    expected = training.gradient(model, data, **given).parameters.heads
    found = training.gradient(model, data, engine=engine, **given).parameters.heads
    for one, other in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-11)


def test_a_layer_of_softmax_attention_is_kernel_smoothing(noisy):
    data, beta = noisy[0], 1.7
    model = tasks.regression_layers(np.eye(3), kind=mf.Softmax, beta=beta)
    points, labels = data.tokens[:, :, :3], data.tokens[:, :, 3]
    kernel = np.exp(beta * np.einsum("knd,kd->kn", points, data.queries[:, 0, :3]))
    smoothed = (kernel * labels).sum(1) / kernel.sum(1)
    ends = [
        model(context, query)[0, 3]
        for context, query in zip(data.contexts[:3], data.queries[:3], strict=True)
    ]
    np.testing.assert_allclose(-np.array(ends), smoothed[:3], atol=1e-12)


def test_the_matrix_of_a_layer_is_found_again():
    matrix = jr.normal(jr.key(4), (3, 3))
    found = tasks.effective_matrix(tasks.regression_layers(matrix))
    np.testing.assert_allclose(found, matrix, atol=1e-14)


def test_the_matrix_of_any_layer_is_its_part_that_is_odd_in_the_labels(noisy):
    data, _ = noisy
    model = training.MeanFieldTransformer.draw(
        1, 2, 4, key=jr.key(5), kind=mf.Linear, beta=0.8
    )
    tokens, query = data.tokens[0], data.queries[0]
    flipped = tokens.at[:, 3].multiply(-1)
    ends = [model(mf.TokenCloud(one), query)[0, 3] for one in (tokens, flipped)]
    moment = tokens[:, 3] @ tokens[:, :3] / 12
    predicted = query[0, :3] @ tasks.effective_matrix(model) @ moment
    np.testing.assert_allclose((ends[1] - ends[0]) / 2, predicted, atol=1e-12)


def test_ridge_regression_solves_the_normal_equations(noisy):
    data, _ = noisy
    points, labels = np.asarray(data.tokens[..., :3]), np.asarray(data.tokens[..., 3])
    normal = points.mT @ points + 0.25 * np.eye(3)
    slopes = np.linalg.solve(normal, points.mT @ labels[..., None])[..., 0]
    expected = np.sum(slopes * data.queries[:, 0, :3], axis=1)
    np.testing.assert_allclose(ridge(data, 0.25), expected, atol=1e-12)


def test_least_squares_is_exact_without_noise_and_of_least_norm_with_few_examples():
    data, _ = tasks.linear_regression(9, 8, 3, key=jr.key(2))
    np.testing.assert_allclose(ridge(data), data.targets, atol=1e-12)
    few, _ = tasks.linear_regression(9, 2, 3, key=jr.key(2))
    inverse = np.linalg.pinv(few.tokens[..., :3])
    slopes = np.einsum("kdn,kn->kd", inverse, few.tokens[..., 3])
    expected = np.sum(slopes * few.queries[:, 0, :3], axis=1)
    np.testing.assert_allclose(ridge(few), expected, atol=1e-12)


def test_a_teacher_has_no_risk(key):
    keys = jr.split(key, 3)
    teacher = training.MeanFieldTransformer.draw(2, 3, 4, key=keys[0])
    contexts, queries = jr.normal(keys[1], (3, 5, 4)), jr.normal(keys[2], (3, 4))
    data = tasks.teacher_student(teacher, contexts, queries)
    assert training.risk(teacher, data) < 1e-28


def test_a_head_of_zeros_asks_for_the_mean(key):
    zeros, one = jnp.zeros((2, 3, 4, 4)), jnp.tile(jnp.eye(4), (2, 3, 1, 1))
    one = one.at[1].set(0) * 2
    teacher = training.MeanFieldTransformer(zeros, zeros, one)
    contexts = jr.normal(key, (3, 5, 4))
    data = tasks.teacher_student(teacher, contexts, jnp.zeros((3, 4)))
    np.testing.assert_allclose(data.targets[:, 0], contexts.mean(1), atol=1e-13)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda **k: tasks.linear_regression(0, 5, 3, **k), "count is 0"),
        (lambda **k: tasks.linear_regression(4, 5, 3, noise=-1.0, **k), "noise is -1"),
        (
            lambda **k: tasks.linear_regression(
                4, 5, 2, covariance=[[1, 2], [2, 1]], **k
            ),
            "covariance is not positive definite",
        ),
        (lambda **k: tasks.regression_layers(np.eye(3)[:2]), "matrix has shape"),
        (
            lambda **k: tasks.effective_matrix(
                tasks.regression_layers(np.eye(3), steps=2)
            ),
            "model has 2 layers",
        ),
    ],
)
def test_bad_input_is_told(call, message):
    with pytest.raises(mf.errors.InvalidInput, match=message):
        call(key=jr.key(0))


def test_a_sequence_goes_on_by_its_own_matrix(key):
    data, _ = tasks.next_token(6, 5, 3, key=key)
    tokens, queries, targets = data.tokens, data.queries[:, 0], data.targets[:, 0]
    steps = [np.linalg.lstsq(one[:, :3], one[:, 3:])[0] for one in tokens]
    for step, query, target in zip(steps, queries, targets, strict=True):
        np.testing.assert_allclose(step @ step.T, np.eye(3), atol=1e-10)
        np.testing.assert_allclose(query[:3] @ step, target, atol=1e-10)
        np.testing.assert_allclose(query[3:], 0)


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_the_least_risk_of_a_next_token_is_that_of_least_squares(key, examples):
    data, least = tasks.next_token(4000, examples, 3, key=key)
    assert least == 3 - examples
    tokens, queries = np.asarray(data.tokens), np.asarray(data.queries[:, 0, :3])
    steps = np.linalg.pinv(tokens[:, :, :3], rcond=1e-10) @ tokens[:, :, 3:]
    found = np.einsum("kd,kde->ke", queries, steps) - np.asarray(data.targets[:, 0])
    losses = np.sum(found**2, axis=1)
    spread = losses.std() / np.sqrt(len(losses))
    assert abs(losses.mean() - least) <= 4 * spread + 1e-9


def test_many_layers_of_linear_attention_continue_a_sequence(key):
    data, _ = tasks.next_token(8, 4, 2, key=key)
    layers = tasks.regression_layers(0.2 * np.eye(2), steps=400, labels=2)
    found = -training.outputs(layers, data)[:, 0, 2:]
    expected = np.asarray(data.targets[:, 0])
    gaps = np.linalg.norm(found - expected, axis=1)
    assert np.median(gaps) < 1e-3
