"""The GPT-like network of the documentation against plain NumPy and SciPy."""

import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import scipy.integrate
import scipy.special

import meanformer as mf

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "gpt_block.py"


@cache
def example():
    return runpy.run_path(str(EXAMPLE))


def normalised(x):
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)


def attention(weights, x):
    """Causal attention of several heads, as in a network: rows of a matrix."""
    x, total = normalised(x), np.zeros_like(x)
    for head, output in zip(weights.heads, weights.outputs, strict=True):
        query, key, value, output = map(
            np.asarray, (head.query, head.key, head.value, output)
        )
        scores = (x @ query.T) @ (x @ key.T).T / np.sqrt(len(query))
        scores[np.triu_indices(len(x), 1)] = -np.inf
        total += scipy.special.softmax(scores, axis=1) @ x @ value.T @ output.T
    return total


def perceptron(weights, x):
    inner, bias, outer = map(
        np.asarray, (weights.weights_in, weights.bias_in, weights.weights_out)
    )
    hidden = normalised(x) @ inner.T + bias
    cubed = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
    return (hidden * (1 + np.tanh(cubed)) / 2) @ outer.T


def parts(layer):
    """Return the weights of a layer: those behind the mask, and the perceptron's."""
    first, second = layer
    return first.layers[-1].attention, second.layers[-1]


@pytest.mark.slow
def test_the_sequential_network_is_the_one_of_numpy():
    names = example()
    x = np.asarray(names["tokens"])
    for index, layer in enumerate(names["layers"]):
        heads, wide = parts(layer)
        x = x + attention(heads, x)
        x = x + perceptron(wide, x)
        found = names["sequential"].points[2 * (index + 1)]
        np.testing.assert_allclose(found, x, atol=1e-11)


@pytest.mark.slow
def test_the_parallel_network_is_the_one_of_numpy():
    names = example()
    x = np.asarray(names["tokens"])
    for layer in names["layers"]:
        heads, wide = parts(layer)
        x = x + attention(heads, x) + perceptron(wide, x)
    np.testing.assert_allclose(names["parallel"].points[-1], x, atol=1e-11)


@pytest.mark.slow
def test_a_later_token_changes_nothing_before_it():
    names = example()
    changed = names["tokens"].at[-1].add(1.0)
    cloud = mf.in_order(mf.TokenCloud(changed))
    moved = mf.push_forward(names["block"], cloud).points
    np.testing.assert_allclose(
        moved[:-1], names["sequential"].points[2][:-1], atol=1e-12
    )


@pytest.mark.slow
def test_its_flow_is_the_one_of_another_integrator():
    names = example()
    x = np.asarray(names["tokens"])
    for layer in names["layers"]:
        heads, wide = parts(layer)

        def velocity(t, y, heads=heads, wide=wide):
            points = y.reshape(names["tokens"].shape)
            return (attention(heads, points) + perceptron(wide, points)).ravel()

        found = scipy.integrate.solve_ivp(
            velocity, (0, 1), x.ravel(), rtol=1e-9, atol=1e-11, method="DOP853"
        )
        x = found.y[:, -1].reshape(x.shape)
    np.testing.assert_allclose(names["trajectory"].points[-1], x, atol=2e-5)


@pytest.mark.slow
def test_both_networks_tend_to_the_flow_as_their_steps_shrink():
    names = example()
    layers, cloud, end = names["layers"], names["cloud"], names["trajectory"].points[-1]

    def distances(times):
        """Return how far the networks with so many steps for each layer are away."""
        count = times * len(layers)
        step = 1 / times
        sums = mf.Flow(names["blocks"])
        parallel = mf.run_layers(sums, cloud, count, step=step).points[-1]
        halves = [half for layer in layers for half in list(layer) * times]
        schedule = mf.Schedule(halves, step * np.arange(2 * count))
        sequential = mf.run_layers(mf.Flow(schedule), cloud, 2 * count, step=step)
        return [
            float(np.abs(points - end).max())
            for points in (parallel, sequential.points[-1])
        ]

    coarse, fine = np.array(distances(16)), np.array(distances(32))
    np.testing.assert_allclose(coarse / fine, 2, atol=0.3)
