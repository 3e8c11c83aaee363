"""The implicit derivative of the limit against unrolling and finite differences."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from sinkhorn_cases import FORM, POINTS, WEIGHTS, transport

from meanformer.numerics.pair_sums.sums import Blocked
from meanformer.numerics.sinkhorn.algorithm import alternate, balance, entropic_energy
from meanformer.numerics.sinkhorn.self_transport import SelfTransport

PROBES = np.array([[0.3, 0.2], [-0.6, 0.9], [2.0, 1.0]])
SYMMETRIC = np.array([[0.8, 0.3], [0.3, -0.4]])
POSITIVE = np.array([[0.9, 0.2], [0.2, 0.5]])
FORMS = [FORM, SYMMETRIC, POSITIVE]
MORE_FORMS = [FORM, pytest.param(SYMMETRIC, marks=pytest.mark.slow), POSITIVE]


def outputs(points, weights, form, *, solve):
    """Evaluate attention on the tokens and at queries off the support."""
    problem = SelfTransport(points, weights, form, Blocked())
    g = solve(problem).g
    queries = jnp.concatenate([points, PROBES])
    scores = queries @ form.T @ points.T + g[None, :]
    top = jax.lax.stop_gradient(scores.max(axis=1, keepdims=True))
    masses = weights[None, :] * jnp.exp(scores - top)
    return masses @ points / masses.sum(axis=1, keepdims=True)


def unrolled(problem):
    return alternate(problem, jnp.zeros(len(problem.weights)), half_steps=401)


def precise(problem):
    return balance(problem, tolerance=1e-13)


@eqx.filter_jit
def gradient(arrays, cotangent, solve):
    def loss(arrays):
        return jnp.sum(cotangent * outputs(*arrays, solve=solve))

    return jax.grad(loss)(arrays)


@eqx.filter_jit
def tangent(arrays, directions, solve):
    return jax.jvp(lambda *a: outputs(*a, solve=solve), arrays, directions)[1]


def reference(form):
    return jnp.asarray(POINTS), jnp.asarray(WEIGHTS), jnp.asarray(form)


def normal_like(key, arrays):
    keys = jr.split(key, len(arrays))
    return tuple(
        jr.normal(k, a.shape, a.dtype) for k, a in zip(keys, arrays, strict=True)
    )


@pytest.mark.parametrize("form", MORE_FORMS)
def test_implicit_and_unrolled_gradients_agree(key, form):
    arrays, cotangent = reference(form), jr.normal(key, (7, 2))
    implicit = gradient(arrays, cotangent, precise)
    for found, expected in zip(
        implicit, gradient(arrays, cotangent, unrolled), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("form", MORE_FORMS)
def test_tangents_agree_with_finite_differences(key, form):
    arrays = reference(form)
    directions = normal_like(key, arrays)
    step = 1e-5

    def moved(sign):
        shifted = [a + sign * step * v for a, v in zip(arrays, directions, strict=True)]
        return outputs(*shifted, solve=precise)

    expected = (moved(1) - moved(-1)) / (2 * step)
    found = tangent(arrays, directions, precise)
    np.testing.assert_allclose(found, expected, atol=1e-8)


@pytest.mark.parametrize("form", MORE_FORMS)
def test_forward_and_reverse_derivatives_are_transposes(key, form):
    arrays = reference(form)
    key_in, key_out = jr.split(key)
    directions, cotangent = normal_like(key_in, arrays), jr.normal(key_out, (7, 2))
    forward = jnp.vdot(cotangent, tangent(arrays, directions, precise))
    backward = gradient(arrays, cotangent, precise)
    pairing = sum(jnp.vdot(a, b) for a, b in zip(directions, backward, strict=True))
    np.testing.assert_allclose(forward, pairing, rtol=1e-11)


def padded(form):
    points = jnp.concatenate([jnp.asarray(POINTS), jnp.array([[0.7, 1.3]])])
    return points, jnp.append(jnp.asarray(WEIGHTS), 0.0), jnp.asarray(form)


@pytest.mark.parametrize("form", [FORM, POSITIVE])
def test_a_padded_token_changes_no_gradient(key, form):
    cotangent = jr.normal(key, (7, 2))
    with_padding = jnp.insert(cotangent, 4, jnp.zeros(2), axis=0)
    whole = gradient(reference(form), cotangent, precise)
    points, weights, forms = gradient(padded(form), with_padding, precise)
    np.testing.assert_array_equal(points[4], np.zeros(2))
    np.testing.assert_allclose(points[:4], whole[0], atol=1e-12)
    np.testing.assert_allclose(weights[:4], whole[1], atol=1e-12)
    np.testing.assert_allclose(forms, whole[2], atol=1e-12)
    assert np.isfinite(weights[4])


@pytest.mark.parametrize("form", [FORM, POSITIVE])
def test_the_potential_of_an_absent_token_follows_its_place(form):
    points, weights, form = padded(form)

    @jax.jit
    def potential(place):
        moved = points.at[4].set(place)
        return precise(SelfTransport(moved, weights, form, Blocked())).g[4]

    step = 1e-5 * jnp.eye(2)
    expected = [
        (potential(points[4] + e) - potential(points[4] - e)) / 2e-5 for e in step
    ]
    np.testing.assert_allclose(jax.grad(potential)(points[4]), expected, atol=1e-9)


@pytest.mark.parametrize("form", [FORM, POSITIVE])
def test_the_derivative_in_the_weight_of_an_absent_token_is_one_sided(form):
    points, weights, form = padded(form)
    direction = jnp.array([0.0, -0.4, 0.0, -0.6, 1.0])
    still = (jnp.zeros_like(points), direction, jnp.zeros_like(form))
    found = tangent((points, weights, form), still, precise)

    def moved(size):
        return outputs(points, weights + size * direction, form, solve=precise)

    step = 1e-4
    expected = (4 * moved(step) - 3 * moved(0.0) - moved(2 * step)) / (2 * step)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("form", [SYMMETRIC, POSITIVE])
def test_the_gradient_of_the_energy_is_attention(form):
    def energy(points):
        problem = transport(form=form)
        problem = eqx.tree_at(lambda p: p.points, problem, points)
        return entropic_energy(problem.weights, balance(problem))

    velocity = jax.grad(energy)(jnp.asarray(POINTS)) / (2 * WEIGHTS[:, None])
    attention = transport(form=form).row_average(
        balance(transport(form=form)).g, jnp.asarray(POINTS)
    )
    np.testing.assert_allclose(velocity, attention @ form.T, atol=1e-10)


def test_without_symmetry_the_gradient_of_the_energy_is_two_averages():
    problem = transport()
    potentials = balance(problem)

    def energy(points):
        moved = eqx.tree_at(lambda p: p.points, problem, points)
        return entropic_energy(moved.weights, balance(moved))

    found = jax.grad(energy)(problem.points) / WEIGHTS[:, None]
    rows = problem.row_average(potentials.g, problem.points)
    columns = problem.column_average(potentials.f, problem.points)
    np.testing.assert_allclose(found, rows @ FORM + columns @ FORM.T, atol=1e-10)


@pytest.mark.slow
def test_the_derivative_is_right_off_the_support_of_a_plan_close_to_the_identity():
    """With $g = -x^T B x / 2 - log(w) / 2$ in closed form."""
    form = 400 * np.eye(2)

    def potential(points, weights):
        return balance(SelfTransport(points, weights, jnp.asarray(form), Blocked())).g

    arrays = jnp.asarray(POINTS), jnp.asarray(WEIGHTS)
    in_points, in_weights = jax.jacrev(potential, (0, 1))(*arrays)
    expected = -np.einsum("ij,ik->ijk", np.eye(4), POINTS @ form)
    np.testing.assert_allclose(in_points, expected, atol=1e-10)
    np.testing.assert_allclose(in_weights, np.diag(-1 / (2 * WEIGHTS)), atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("form", [FORM, POSITIVE])
def test_second_derivatives_agree_with_finite_differences(key, form):
    direction = jr.normal(key, POINTS.shape)

    @jax.jit
    def slope(points):
        def energy(points):
            problem = SelfTransport(
                points, jnp.asarray(WEIGHTS), jnp.asarray(form), Blocked()
            )
            return jnp.sum(precise(problem).g ** 2)

        return jax.grad(energy)(points)

    points, step = jnp.asarray(POINTS), 1e-5
    found = jax.jvp(slope, (points,), (direction,))[1]
    moved = slope(points + step * direction) - slope(points - step * direction)
    np.testing.assert_allclose(found, moved / (2 * step), atol=1e-7)


@pytest.mark.slow
def test_the_gradient_works_under_vmap_with_mixed_forms(key):
    cotangent = jr.normal(key, (7, 2))
    forms = jnp.stack([jnp.asarray(form) for form in FORMS])

    def one(form):
        arrays = jnp.asarray(POINTS), jnp.asarray(WEIGHTS), form
        return gradient(arrays, cotangent, precise)[2]

    together = jax.vmap(one)(forms)
    for form, found in zip(FORMS, together, strict=True):
        np.testing.assert_allclose(found, one(jnp.asarray(form)), atol=1e-9)


@pytest.mark.slow
def test_the_gradient_of_many_tokens_agrees_with_finite_differences(key):
    key_x, key_v = jr.split(key)
    points, direction = jr.normal(key_x, (300, 2)), jr.normal(key_v, (300, 2))
    weights = jnp.full(300, 1 / 300)

    @jax.jit
    def loss(points):
        problem = SelfTransport(points, weights, jnp.asarray(FORM), Blocked())
        return jnp.sum(jnp.sin(precise(problem).g))

    found = jnp.vdot(jax.grad(loss)(points), direction)
    step = 1e-5
    moved = loss(points + step * direction) - loss(points - step * direction)
    np.testing.assert_allclose(found, moved / (2 * step), rtol=1e-7)


@pytest.mark.parametrize("half_steps", [1, 4])
def test_unrolled_gradients_agree_with_finite_differences(key, half_steps):
    direction = jr.normal(key, POINTS.shape)
    end_on = "row" if half_steps % 2 else "column"

    def loss(points):
        problem = eqx.tree_at(lambda p: p.points, transport(), points)
        start = -jnp.sum(points**2, axis=1)
        found = alternate(problem, start, half_steps=half_steps, end_on=end_on)
        return jnp.sum(jnp.sin(found.f) + found.g**2)

    points, step = jnp.asarray(POINTS), 1e-6
    found = jnp.vdot(jax.grad(loss)(points), direction)
    moved = loss(points + step * direction) - loss(points - step * direction)
    np.testing.assert_allclose(found, moved / (2 * step), rtol=1e-8)


@pytest.mark.parametrize("beta", [1e2, 1e5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_at_huge_scores_are_finite(key, beta, dtype):
    arrays = tuple(a.astype(dtype) for a in reference(beta * FORM))

    def total(points, weights, form):
        problem = SelfTransport(points, weights, form, Blocked())
        return problem.row_average(balance(problem).g, points).sum()

    for slope in jax.grad(total, (0, 1, 2))(*arrays):
        assert np.isfinite(slope).all()
        assert slope.dtype == dtype
