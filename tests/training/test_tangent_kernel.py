import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.linalg

import meanformer as mf
from meanformer import training
from meanformer.experiments.training.global_convergence import lazy_risks
from meanformer.training import kernels as room
from training_problems import contexts_of_sizes, first_reference, random_problem


@pytest.fixture(scope="module")
def reference():
    model, data = first_reference()
    cloud = data.contexts[0]
    shifted = mf.TokenCloud(cloud.points + jnp.array([[1.0, 0.0]]), cloud.weights)
    pair = training.Dataset([cloud, shifted], [[0.5, -1.0], [1.0, 0.5]])
    first = jax.tree.map(lambda leaf: leaf[:1], model.parameters.heads)
    return training.MeanFieldTransformer(*first[:3], beta=1.5), pair


def heads_of(model):
    return jax.tree.map(lambda leaf: leaf[0], model.parameters.heads)


def test_the_reference_kernel_has_its_eigenvalues(reference):
    kernel = training.tangent_kernel(*reference)
    values = [0.770041085056, 1.212106879769, 3.516537864523, 3.621425521983]
    np.testing.assert_allclose(np.linalg.eigvalsh(kernel), values, atol=1e-11)
    np.testing.assert_allclose(kernel[0, 0], 1.207322114188, atol=1e-11)
    np.testing.assert_allclose(kernel[0, 2], 0.08248294710116, atol=1e-13)


@pytest.mark.parametrize("block", ["all", "scores", "values"])
def test_the_closed_form_is_the_product_of_jacobians(reference, block):
    model, data = reference
    found = training.head_kernel(heads_of(model), data, beta=1.5, block=block)
    expected = training.tangent_kernel(model, data, block=block)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.slow
def test_a_value_bias_adds_the_identity(key):
    model, data = random_problem(key, layers=1, value_bias=True)
    found = training.head_kernel(heads_of(model), data)
    expected = training.tangent_kernel(model, data)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_standard_errors_are_the_spread_of_independent_batches(reference, key):
    _, data = reference
    batches, size = 100, 20
    drawn = training.MeanFieldTransformer.draw(batches, size, 2, key=key)
    heads = drawn.parameters.heads
    found, errors = (
        np.asarray(jax.lax.map(functools.partial(function, data=data), heads))
        for function in (training.head_kernel, training.head_kernel_error)
    )
    spread = found.std(axis=0, ddof=1)
    expected = np.sqrt(np.mean(errors**2, axis=0))
    np.testing.assert_allclose(spread, expected, rtol=0.3)


@pytest.mark.parametrize("options", [{}, {"neurons": 3, "value_bias": True}], ids=str)
def test_the_gradient_is_the_kernel_at_the_residuals(key, options):
    model, data = random_problem(key, **options)
    residual = (training.outputs(model, data) - data.targets).ravel()
    kernel = training.tangent_kernel(model, data)
    expected = residual @ kernel @ residual / len(data) ** 2
    found = training.gradient(model, data).squared_norm
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_products_and_extreme_eigenvalues_need_no_matrix(key, monkeypatch):
    model, data = random_problem(key, sizes=(3, 3, 3, 3))
    kernel = training.tangent_kernel(model, data)
    vector = jr.normal(key, (8,))
    product = training.kernel_product(model, data)
    np.testing.assert_allclose(product(vector), kernel @ vector, atol=1e-12)
    dense = training.spectrum(model, data)
    monkeypatch.setattr(room, "MOST_OUTPUTS", 1)
    np.testing.assert_allclose(training.spectrum(model, data), dense, atol=1e-9)
    values = np.linalg.eigvalsh(kernel)
    np.testing.assert_allclose(dense, (values[0], values[-1]), atol=1e-12)


def test_two_translates_have_a_kernel_but_not_in_the_scores(key):
    cloud = contexts_of_sizes((4,), 2, key)[0]
    moved = mf.TokenCloud(cloud.points + jnp.array([[0.7, -0.3]]), cloud.weights)
    data = training.Dataset([cloud, moved], [[1.0, 0.5], [1.0, 0.5]])
    model = training.MeanFieldTransformer.draw(1, 64, 2, key=key)
    whole, scores = (
        training.head_kernel(heads_of(model), data, block=block)
        for block in ("all", "scores")
    )
    assert np.linalg.eigvalsh(whole)[0] > 1e-2
    assert abs(np.linalg.eigvalsh(scores)[0]) < 1e-13


def test_the_linearised_flow_decays_by_the_exponential():
    kernel = np.array([[2.0, 0.5], [0.5, 1.0]])
    residual, times = np.array([1.0, -2.0]), np.array([0.0, 1.5])
    moved = scipy.linalg.expm(-kernel * 1.5 / 2) @ residual
    expected = [residual @ residual / 4, moved @ moved / 4]
    found = lazy_risks(kernel, residual, times, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_mistakes_are_told(reference):
    model, data = reference
    with pytest.raises(
        mf.InvalidInput, match="block is \"queries\"|block is 'queries'"
    ):
        training.tangent_kernel(model, data, block="queries")
    one = jax.tree.map(lambda leaf: leaf[:1], heads_of(model))
    with pytest.raises(mf.InvalidInput, match="heads has one head"):
        training.head_kernel_error(one, data)
    tokens = training.Dataset(data.contexts, targets=data.tokens)
    with pytest.raises(mf.InvalidInput, match="data has no queries"):
        training.tangent_kernel(model, tokens)


def test_the_kernel_between_two_data_sets_is_a_part_of_that_of_both(key):
    model, data = random_problem(key, layers=2)
    whole = training.tangent_kernel(model, data)
    first, last = data.some([0]), data.some(slice(1, None))
    found = training.tangent_kernel(model, first, last)
    size = first.queries.size
    np.testing.assert_allclose(found, whole[:size, size:], atol=1e-13)
