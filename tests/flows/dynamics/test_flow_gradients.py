"""Gradients through depth, against finite differences, for every kind."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer.experiments import reference_attention, reference_cloud

POSITIONS = jnp.array([0.25, 0.5, 0.75, 1.0])
TARGET = jr.normal(jr.key(5), (4, 2))

DIFFERENTIABLE = {
    "softmax": lambda: reference_attention(mf.Softmax),
    "l2": lambda: reference_attention(mf.L2),
    "sinkhorn": lambda: reference_attention(mf.Sinkhorn, tolerance=1e-12),
    "sinkhorn, three half-steps": lambda: reference_attention(
        mf.Sinkhorn, half_steps=3
    ),
    "linear": lambda: reference_attention(mf.Linear),
    "unnormalised": lambda: reference_attention(mf.Unnormalised),
    "sigmoid": lambda: reference_attention(mf.Sigmoid),
    "masked": lambda: mf.Masked(reference_attention()),
    "two heads": lambda: mf.MultiHead(
        [reference_attention(), reference_attention(mf.L2)]
    ),
    "with a perceptron": lambda: (
        reference_attention()
        + mf.Perceptron(jnp.eye(2), jnp.zeros(2), 0.3 * jnp.eye(2))
    ),
}


# The others are alike in all that a gradient through a solve can get wrong.
IN_THE_FAST_RUN = ("softmax",)


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_THE_FAST_RUN else pytest.param(name, marks=pytest.mark.slow)
        for name in DIFFERENTIABLE
    ],
)
def test_gradient_of_a_loss_on_the_final_tokens_agrees_with_finite_differences(name):
    cloud, flow = reference_cloud(positions=POSITIONS), mf.Flow(DIFFERENTIABLE[name]())

    @jax.jit
    def loss(points):
        path = mf.solve(
            flow, cloud.moved(points), 0.5, save=2, rtol=1e-9, atol=1e-11,
            solver=mf.FixedStep(0.1),
        )  # fmt: skip
        return jnp.sum((path.points[-1] - TARGET) ** 2)

    gradient = jax.jit(jax.grad(loss))(cloud.points)
    direction = jr.normal(jr.key(1), (4, 2))
    step = 1e-5
    slope = (
        loss(cloud.points + step * direction) - loss(cloud.points - step * direction)
    ) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(gradient, direction), slope, rtol=1e-6)


@pytest.mark.slow
def test_gradient_through_adaptive_steps_agrees_with_finite_differences():
    cloud = reference_cloud()

    @jax.jit
    def loss(beta):
        flow = mf.Flow(reference_attention(beta=beta))
        path = mf.solve(flow, cloud, 1.0, save=3, rtol=1e-10, atol=1e-12)
        return jnp.sum(path.points[-1] ** 2)

    beta, step = jnp.array(1.0), 1e-4
    slope = (loss(beta + step) - loss(beta - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(loss)(beta), slope, rtol=1e-6)


def test_gradient_with_respect_to_the_weights_and_the_layers_parameters():
    cloud = reference_cloud()

    @jax.jit
    def loss(parameters):
        weights, value = parameters
        attention = mf.Softmax(
            reference_attention().query, reference_attention().key, value
        )
        tokens = mf.TokenCloud(cloud.points, weights / weights.sum())
        path = mf.run_layers(mf.Flow(attention), tokens, 5)
        return jnp.sum(path.points[-1] ** 2)

    start = (cloud.weights, reference_attention().value)
    gradient = jax.grad(loss)(start)
    direction = (jr.normal(jr.key(2), (4,)), jr.normal(jr.key(3), (2, 2)))
    step = 1e-6

    def moved(sign):
        return jax.tree.map(lambda x, v: x + sign * step * v, start, direction)

    slope = (loss(moved(1)) - loss(moved(-1))) / (2 * step)
    products = jax.tree.map(jnp.vdot, gradient, direction)
    np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol=1e-6)


@pytest.mark.slow
def test_padded_tokens_get_no_gradient_and_give_none():
    cloud = reference_cloud()
    padded = mf.pad(cloud, 6)

    def loss(points, tokens):
        path = mf.run_layers(mf.Flow(reference_attention()), tokens.moved(points), 3)
        return jnp.sum(path.points[-1, :4] ** 2)

    gradient = jax.grad(loss)(padded.points, padded)
    np.testing.assert_array_equal(gradient[4:], 0)
    np.testing.assert_allclose(
        gradient[:4], jax.grad(loss)(cloud.points, cloud), atol=1e-13
    )
