"""Flows of the reference tokens against values computed elsewhere."""

import diffrax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate

import meanformer as mf
from meanformer.experiments import reference_attention, reference_cloud
from meanformer.flows import RK4

SOFTMAX_AT_ONE = [
    [1.2922142220033845, 0.4481235192184228],
    [0.1921977700122656, 1.5562493472250079],
    [-0.7982486195433466, 0.9248317816519872],
    [0.8523686893693033, -0.7620408849613299],
]
L2_AT_ONE = [
    [1.358799888760258, 0.45780359243403657],
    [0.13642005918535002, 1.6744000603469242],
    [-0.8406773355638423, 0.9597681469974957],
    [0.9832242723119926, -0.9067464817702642],
]
TEN_LAYERS = [
    [1.2789773388506227, 0.41637095727010637],
    [0.17970007736442073, 1.5241728672113717],
    [-0.8108316943727764, 0.8939876363807836],
    [0.8377977582794055, -0.7900599710983437],
]
PRECISE = {"rtol": 1e-11, "atol": 1e-13}


def softmax_flow():
    return mf.Flow(reference_attention())


@pytest.mark.parametrize(
    ("kind", "expected"), [(mf.Softmax, SOFTMAX_AT_ONE), (mf.L2, L2_AT_ONE)]
)
def test_the_reference_tokens_end_where_an_independent_solver_puts_them(kind, expected):
    flow = mf.Flow(reference_attention(kind))
    path = mf.solve(flow, reference_cloud(), 1.0, save=2, **PRECISE)
    np.testing.assert_allclose(path.points[-1], expected, atol=1e-10)


@pytest.mark.slow
def test_the_radius_at_depth_one_stays_below_its_bound():
    path = mf.solve(softmax_flow(), reference_cloud(), 1.0, **PRECISE)
    radius = path.statistics["radius"]
    bound = np.exp(np.linalg.norm(reference_attention().value, 2)) * radius[0]
    assert float(radius[-1]) == pytest.approx(1.5681, abs=5e-5)
    assert float(bound) == pytest.approx(2.5517, abs=5e-5)


def test_ten_residual_layers_have_the_tabulated_output():
    path = mf.run_layers(softmax_flow(), reference_cloud(), 10)
    np.testing.assert_allclose(path.points[-1], TEN_LAYERS, atol=1e-10)
    assert path.points.shape == (11, 4, 2)
    np.testing.assert_allclose(path.depths, np.linspace(0, 1, 11), atol=1e-15)


def test_layers_converge_to_the_flow_at_first_order():
    errors = [
        np.abs(
            mf.run_layers(softmax_flow(), reference_cloud(), count).points[-1]
            - np.array(SOFTMAX_AT_ONE)
        ).max()
        for count in (10, 20, 40, 80)
    ]
    np.testing.assert_allclose(errors, [0.03208, 0.01666, 0.00849, 0.00429], atol=6e-6)


def test_layers_are_composed_residual_maps():
    layer = mf.Residual(reference_attention(), 0.5)
    network, cloud = mf.compose(layer, layer), reference_cloud()
    path = mf.run_layers(softmax_flow(), cloud, 2)
    np.testing.assert_allclose(
        path.points[-1], mf.push_forward(network, cloud).points, atol=1e-14
    )


def measured_order(solver_of, flow, cloud, steps, exact):
    errors = [
        np.abs(
            mf.solve(flow, cloud, 1.0, save=2, solver=solver_of(step)).points[-1]
            - exact
        ).max()
        for step in steps
    ]
    return np.polyfit(np.log(steps), np.log(errors), 1)[0]


@pytest.mark.parametrize(
    ("method", "order"),
    [(diffrax.Euler(), 1), (diffrax.Heun(), 2), (RK4(), 4), (diffrax.Tsit5(), 5)],
)
def test_fixed_steps_have_the_order_of_their_method(method, order):
    flow = mf.Flow(reference_attention(beta=3.0))
    exact = mf.solve(flow, reference_cloud(), 1.0, save=2, rtol=1e-13, atol=1e-14)
    steps = np.array([1 / 8, 1 / 16, 1 / 32])
    slope = measured_order(
        lambda h: mf.FixedStep(float(h), method=method),
        flow,
        reference_cloud(),
        steps,
        np.asarray(exact.points[-1]),
    )
    assert slope == pytest.approx(order, abs=0.3)


@pytest.mark.parametrize("order", [1, 2])
def test_splitting_attention_and_perceptron_has_its_order(order):
    perceptron = mf.Perceptron(
        jnp.array([[0.7, -0.4], [0.2, 1.1], [-0.8, 0.5]]),
        jnp.array([0.1, -0.3, 0.2]),
        jnp.array([[0.6, -0.2, 0.3], [0.1, 0.5, -0.7]]),
        activation=jnp.tanh,
    )
    flow = mf.Flow(reference_attention() + perceptron)
    exact = mf.solve(flow, reference_cloud(), 1.0, save=2, rtol=1e-12, atol=1e-13)
    slope = measured_order(
        lambda h: mf.flows.Splitting(float(h), order=order),
        flow,
        reference_cloud(),
        np.array([1 / 8, 1 / 16, 1 / 32]),
        np.asarray(exact.points[-1]),
    )
    assert slope == pytest.approx(order, abs=0.15)


@pytest.mark.slow
def test_the_stiff_solver_agrees_with_the_explicit_one():
    flow, cloud = softmax_flow(), reference_cloud()
    path = mf.solve(flow, cloud, 1.0, save=2, solver=mf.Stiff(), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(path.points[-1], SOFTMAX_AT_ONE, atol=1e-7)


@pytest.mark.slow
def test_the_stiff_solver_needs_fewer_steps_on_a_stiff_flow():
    # A fast contraction towards the origin, followed long after it is over.
    flow = mf.Flow(reference_attention() + mf.PointMap(lambda x: -300 * x))
    cloud, options = reference_cloud(), {"save": 2, "rtol": 1e-5, "atol": 1e-7}
    explicit = mf.solve(flow, cloud, 5.0, **options)
    implicit = mf.solve(flow, cloud, 5.0, solver=mf.Stiff(), **options)
    np.testing.assert_allclose(implicit.points[-1], explicit.points[-1], atol=1e-4)
    assert int(implicit.accepted_steps[-1]) < int(explicit.accepted_steps[-1]) / 3


def test_going_back_returns_to_the_start():
    there = mf.solve(softmax_flow(), reference_cloud(), 1.0, save=2, **PRECISE)
    back = mf.solve(softmax_flow(), there.cloud(-1), (1.0, 0.0), save=2, **PRECISE)
    np.testing.assert_allclose(back.points[-1], reference_cloud().points, atol=1e-10)


def test_a_single_token_follows_the_exponential_of_the_value_matrix():
    value = np.array(reference_attention().value)
    path = mf.solve(softmax_flow(), mf.TokenCloud([[0.3, -0.7]]), 1.0, **PRECISE)
    exact = scipy.linalg.expm(value) @ np.array([0.3, -0.7])
    np.testing.assert_allclose(path.points[-1, 0], exact, atol=1e-10)


@pytest.mark.slow
def test_sinkhorn_flow_moves_the_mean_by_the_exponential_of_the_value_matrix():
    flow = mf.Flow(reference_attention(mf.Sinkhorn))
    path = mf.solve(flow, reference_cloud(), 1.0, save=2, rtol=1e-9, atol=1e-11)
    value = np.array(reference_attention().value)
    expected = scipy.linalg.expm(value) @ np.array([0.25, 0.3])
    np.testing.assert_allclose(path.statistics["mean"][-1], expected, atol=1e-8)


def test_linear_attention_obeys_the_closed_equation_of_its_second_moment():
    gamma = reference_attention(mf.Linear)
    value, score = np.array(gamma.value), np.array(gamma.score)

    def moment_velocity(_, flat):
        moment = flat.reshape(2, 2)
        half = value @ moment @ score @ moment
        return (half + half.T).ravel()

    cloud = reference_cloud()
    start = np.asarray(cloud.second_moment()).ravel()
    exact = scipy.integrate.solve_ivp(
        moment_velocity, (0, 1), start, method="DOP853", rtol=1e-12, atol=1e-13
    ).y[:, -1]
    path = mf.solve(mf.Flow(gamma), cloud, 1.0, save=2, **PRECISE)
    moment = path.cloud(-1).second_moment()
    np.testing.assert_allclose(np.asarray(moment).ravel(), exact, atol=1e-10)


@pytest.mark.slow
def test_masked_flow_leaves_the_past_alone_when_the_future_is_dropped():
    masked = mf.Flow(mf.Masked(reference_attention()))
    positions = jnp.array([0.25, 0.5, 0.75, 1.0])
    whole = reference_cloud(positions=positions)
    part = mf.TokenCloud(
        whole.points[:3], whole.weights[:3] / 0.9, positions=positions[:3]
    )
    options = {"save": 3, "solver": mf.FixedStep(0.05)}
    long, short = (mf.solve(masked, cloud, 1.0, **options) for cloud in (whole, part))
    np.testing.assert_allclose(long.points[:, :3], short.points, atol=1e-12)
    alone = scipy.linalg.expm(np.array(reference_attention().value)) @ np.array([1, 0])
    np.testing.assert_allclose(long.points[-1, 0], alone, atol=1e-7)
