"""Derivatives of solves and layers, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.experiments import reference_cloud

PRECISE = {"rtol": 1e-9, "atol": 1e-11, "save": 2}


def weighted(array):
    """A number that depends on every entry."""
    return jnp.sum(
        array * jnp.cos(jnp.arange(array.size, dtype=array.dtype)).reshape(array.shape)
    )


def tokens(beta, points, weights, depth, **options):
    flow = mf.Flow(mf.identity_attention("softmax", 2, beta))
    cloud = mf.TokenCloud(points, weights, normalize=True)
    path = mf.solve(flow, cloud, depth, **PRECISE | options)
    return weighted(path.points[-1])


def start():
    cloud = reference_cloud()
    return jnp.array(1.3), cloud.points, cloud.weights, jnp.array(0.8)


def direction(inputs):
    """The same for every test: another number for every entry."""
    numbers = (jnp.sin(1 + jnp.arange(x.size, dtype=x.dtype)) for x in inputs)
    return tuple(n.reshape(x.shape) for n, x in zip(numbers, inputs, strict=True))


def difference(function, inputs, along, step=1e-4):
    """A central difference of the fourth order."""

    def at(share):
        return function(
            *[x + share * step * v for x, v in zip(inputs, along, strict=True)]
        )

    return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)


def check_both_modes(function, inputs, rtol=1e-7):
    """Forward against differences, backward against forward."""
    function, along = jax.jit(function), direction(inputs)
    value, change = jax.jvp(function, inputs, along)
    np.testing.assert_allclose(value, function(*inputs), rtol=1e-12)
    np.testing.assert_allclose(change, difference(function, inputs, along), rtol=rtol)
    gradient = jax.grad(function, range(len(inputs)))(*inputs)
    total = sum(jnp.sum(g * v) for g, v in zip(gradient, along, strict=True))
    np.testing.assert_allclose(total, change, rtol=1e-10)


@pytest.mark.slow
def test_a_solve_has_forward_and_backward_derivatives_in_all_its_numbers():
    check_both_modes(tokens, start())


def test_layers_have_derivatives_of_both_kinds_and_second_ones():
    def layers(beta, points, step):
        flow = mf.Flow(mf.identity_attention("softmax", 2, beta), space=mf.Sphere())
        return weighted(mf.run_layers(flow, mf.TokenCloud(points), 3, step=step).points)

    points = reference_cloud().points
    points /= jnp.linalg.norm(points, axis=1, keepdims=True)
    inputs = jnp.array(1.3), points, jnp.array(0.4)
    check_both_modes(layers, inputs)
    bent = jax.hessian(layers)(*inputs)
    slope = jax.jit(jax.grad(layers))
    np.testing.assert_allclose(
        bent,
        difference(lambda beta: slope(beta, *inputs[1:]), inputs[:1], [1.0]),
        rtol=1e-7,
    )


@pytest.mark.slow
def test_a_gaussian_has_forward_and_backward_derivatives():
    def last(beta, mean, factor, depth):
        flow = mf.Flow(mf.identity_attention("softmax", 2, beta))
        path = mf.solve(flow, mf.Gaussian(mean, factor=factor), depth, **PRECISE)
        return weighted(path.means[-1]) + weighted(path.covariances[-1])

    factor = jnp.array([[0.5, 0.1], [0.0, 0.4]])
    check_both_modes(
        last, (jnp.array(0.3), jnp.array([0.2, 0.5]), factor, jnp.array(0.6))
    )


@pytest.mark.slow
def test_a_density_has_forward_and_backward_derivatives():
    def last(beta, moments, depth):
        flow = mf.Flow(mf.identity_attention("softmax", 2, beta), space=mf.Sphere())
        # Modes to spare: where they do not suffice, a solve ends early.
        density = mf.FourierDensity(jnp.pad(moments, ((0, 22), (0, 0))))
        path = mf.solve(flow, density, depth, **PRECISE)
        return weighted(path.moments[-1])

    moments = jnp.array([[0.1, 0.0], [0.05, 0.02]])
    check_both_modes(last, (jnp.array(1.3), moments, jnp.array(0.3)), rtol=1e-6)


@pytest.mark.slow
def test_what_a_function_of_depth_encloses_has_derivatives_too():
    def last(rate, scale):
        def gamma(depth):
            return mf.identity_attention("softmax", 2, jnp.exp(rate * depth)) + pull

        pull = mf.PointMap(lambda x: scale * jnp.tanh(x))
        return weighted(
            mf.solve(mf.Flow(gamma), reference_cloud(), 0.8, **PRECISE).points
        )

    check_both_modes(last, (jnp.array(0.4), jnp.array(-0.3)))


@pytest.mark.slow
def test_forward_derivatives_are_batched_over_problems_and_directions():
    beta, points, weights, depth = start()

    def last(beta, points):
        return tokens(beta, points, weights, depth)

    betas = jnp.array([0.7, 1.3])
    whole = jax.vmap(jax.jacfwd(last, 1), (0, None))(betas, points)
    single = jax.jit(jax.grad(last, 1))
    for row, one in zip(whole, betas, strict=True):
        np.testing.assert_allclose(row, single(one, points), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_gradient_of_a_batch_is_the_sum_of_gradients():
    _, points, weights, depth = start()

    def total(betas):
        return jax.vmap(lambda beta: tokens(beta, points, weights, depth))(betas).sum()

    betas = jnp.array([0.7, 1.3])
    single = jax.jit(jax.grad(lambda beta: tokens(beta, points, weights, depth)))
    expected = [single(beta) for beta in betas]
    np.testing.assert_allclose(jax.grad(total)(betas), expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_are_those_of_the_first(outer, inner):
    _, points, weights, depth = start()

    def last(beta):
        return tokens(beta, points, weights, depth)

    slope = jax.jit(jax.grad(last))
    expected = difference(slope, [jnp.array(1.3)], [1.0])
    found = jax.jit(outer(inner(last)))(jnp.array(1.3))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver",
    [mf.Stiff(), mf.flows.Switching(), mf.FixedStep(0.1), mf.flows.Splitting(0.1)],
    ids=lambda solver: type(solver).__name__,
)
def test_every_solver_has_both_derivatives(solver):
    def last(beta, points):
        gamma = mf.identity_attention("softmax", 2, beta) + mf.PointMap(jnp.tanh)
        path = mf.solve(
            mf.Flow(gamma), mf.TokenCloud(points), 0.8, solver=solver, **PRECISE
        )
        return weighted(path.points[-1])

    # A step of another size at the other side of a difference is another function.
    check_both_modes(last, start()[:2], rtol=1e-5)


@pytest.mark.slow
def test_noise_has_both_derivatives_also_in_depth(key):
    def last(beta, noise, points, depth):
        gamma = mf.identity_attention("softmax", 2, beta)
        path = mf.solve(
            mf.Flow(gamma, noise=noise),
            mf.TokenCloud(points),
            depth,
            solver=mf.FixedStep(0.1),
            key=key,
            save=3,
        )
        return weighted(path.points[-1])

    # Halfway between two numbers of steps.
    inputs = (jnp.array(1.3), jnp.array(0.2), start()[1], jnp.array(0.7))
    check_both_modes(last, inputs)


@pytest.mark.parametrize(
    "differentiate", [pytest.param(jax.grad, marks=pytest.mark.slow), jax.jacfwd]
)
def test_a_solve_that_merges_says_that_it_has_no_derivative(differentiate):
    _, points, weights, depth = start()
    with pytest.raises(mf.Unsupported, match="leave merge out"):
        differentiate(lambda beta: tokens(beta, points, weights, depth, merge=1e-3))(
            1.3
        )


@pytest.mark.parametrize(
    "differentiate", [pytest.param(jax.grad, marks=pytest.mark.slow), jax.jacfwd]
)
def test_long_depth_says_that_it_has_no_derivative(differentiate):
    def last(beta):
        flow = mf.Flow(mf.identity_attention("softmax", 2, beta))
        mu = mf.Gaussian(jnp.zeros(2), 0.1 * jnp.eye(2))
        return mf.solve(flow, mu, 1.0, solver=mf.LongDepth()).means.sum()

    with pytest.raises(mf.Unsupported, match="use Adaptive"):
        differentiate(last)(1.3)
