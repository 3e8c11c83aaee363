"""Sinkhorn attention: what it says when its limit is far away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference as ref
from map_zoo import cast
from meanformer.attention import Sinkhorn, attention_matrix
from meanformer.errors import InvalidInput, StoppedEarly
from meanformer.measures import Gaussian, TokenCloud
from meanformer.numerics.sinkhorn.algorithm import default_tolerance
from reference import reference_attention, reference_cloud


@pytest.mark.slow
def test_sinkhorn_that_has_not_converged_warns_with_its_error():
    attention, cloud = reference_attention(Sinkhorn, max_steps=2), reference_cloud()
    error = f"{float(attention.potentials(cloud).marginal_error):.2g}"
    message = rf"off by {error}, with tolerance 1e-10 and max_steps 2; lower beta"
    with pytest.warns(StoppedEarly, match=message) as caught:
        attention(cloud, cloud.points)
    assert len(caught) == 1
    with pytest.warns(StoppedEarly, match=message):
        attention_matrix(attention, cloud)


@pytest.mark.slow
def test_sinkhorn_that_single_precision_stops_warns():
    random = np.random.default_rng(0)
    points, *matrices = (random.normal(size=(size, 3)) for size in (50, 3, 3, 3))
    problem = Sinkhorn(*matrices, beta=100.0), TokenCloud(points)
    attention, cloud = cast(problem, jnp.float32)
    with pytest.warns(StoppedEarly, match="use 64-bit numbers"):
        attention(cloud, cloud.points)


@pytest.mark.parametrize(
    ("dtype", "said"),
    [(jnp.float64, "1e-10 in double"), (jnp.float32, "5e-6 in single")],
)
def test_the_default_tolerance_is_the_documented_one_and_is_reached(dtype, said):
    tolerance = default_tolerance(jnp.dtype(dtype))
    assert said in " ".join(Sinkhorn.__doc__.split())
    np.testing.assert_allclose(tolerance, float(said.split()[0]), rtol=0.05)
    attention, cloud = cast((reference_attention(Sinkhorn), reference_cloud()), dtype)
    assert attention.potentials(cloud).marginal_error <= tolerance


def test_sinkhorn_stopped_on_purpose_does_not_warn():
    cloud = reference_cloud()
    reference_attention(Sinkhorn, half_steps=3)(cloud, cloud.points)


@pytest.mark.slow
def test_the_ratio_of_a_round_predicts_the_half_steps():
    attention, cloud = reference_attention(Sinkhorn), reference_cloud()
    ratio = attention.round_ratio(cloud)
    assert 0.090 <= ratio <= 0.102
    steps = attention.predicted_half_steps(cloud, 1.755e-11)
    np.testing.assert_allclose(steps, 2 * np.log(1.755e-11) / np.log(ratio))
    # The error is that small after 21.
    assert 19 <= steps <= 23
    # The guaranteed ratio of two half-steps is never better than the one observed.
    assert ratio <= attention.contraction_ratio(cloud) ** 2
    alone = TokenCloud(ref.POINTS[:1])
    assert attention.round_ratio(alone) == 0
    assert attention.contraction_ratio(alone) == 0


@pytest.mark.slow
def test_sinkhorn_settled_on_a_cloud_is_the_same_there_without_a_solver():
    attention, cloud = reference_attention(Sinkhorn), reference_cloud()
    settled = attention.settled(cloud)

    def values(gamma):
        return lambda points: gamma(cloud.moved(points), points)

    points = cloud.points
    move = jnp.array([[0.3, -0.2], [0.1, 0.4], [-0.5, 0.2], [0.0, 0.7]])
    (there, change), (expected, slope) = (
        jax.jvp(values(gamma), (points,), (move,)) for gamma in (settled, attention)
    )
    np.testing.assert_allclose(there, expected, atol=1e-10)
    np.testing.assert_allclose(change, slope, atol=1e-9)
    assert "while" in str(jax.make_jaxpr(values(attention))(points))
    assert "while" not in str(jax.make_jaxpr(values(settled))(points))
    stepwise = reference_attention(Sinkhorn, half_steps=3)
    assert stepwise.settled(cloud) is stepwise


@pytest.mark.parametrize("half_steps", [None, 4])
def test_the_potentials_balance_the_plan_of_a_cloud_that_lies_anywhere(half_steps):
    end = "row" if half_steps is None else "column"
    attention = reference_attention(Sinkhorn, half_steps=half_steps, end_on=end)
    cloud = reference_cloud()
    cloud = cloud.moved(cloud.points + jnp.array([[0.7, -0.4]]))
    found = attention.potentials(cloud)
    points, weights = np.asarray(cloud.points), np.asarray(cloud.weights)
    f, g, previous = map(np.asarray, (found.f, found.g, found.previous))
    rows = points @ np.asarray(attention.form).T @ points.T + f[:, None]
    # The rows by the potential before the last half-step, the columns by the last.
    np.testing.assert_allclose(np.exp(rows + previous) @ weights, 1, rtol=1e-9)
    np.testing.assert_allclose(weights @ np.exp(rows + g), 1, rtol=1e-9)


def test_potentials_in_half_precision_are_computed_in_single():
    half = cast((reference_attention(Sinkhorn), reference_cloud()), jnp.bfloat16)
    found = half[0].potentials(half[1])
    assert found.g.dtype == jnp.bfloat16
    assert found.converged


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("question", ["oscillation", "potentials", "round_ratio"])
def test_what_only_a_cloud_has_is_not_asked_of_a_gaussian(question):
    ask = getattr(reference_attention(Sinkhorn), question)
    with pytest.raises(InvalidInput, match="mu is a Gaussian; it must be a TokenCloud"):
        ask(Gaussian(jnp.zeros(2), jnp.eye(2)))
