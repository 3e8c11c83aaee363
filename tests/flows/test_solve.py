"""What a solve promises: space, probes, saving, stopping, transformations."""

import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer.errors import InvalidInput
from meanformer.experiments import reference_attention, reference_cloud


def softmax_flow(**options):
    return mf.Flow(reference_attention(**options))


def on_the_sphere():
    cloud = reference_cloud()
    norms = jnp.linalg.norm(cloud.points, axis=1, keepdims=True)
    return mf.TokenCloud(cloud.points / norms, cloud.weights)


def test_the_sphere_velocity_is_tabulated_and_tangent():
    flow = mf.Flow(reference_attention(), space=mf.Sphere())
    cloud = on_the_sphere()
    field = flow.field(jnp.zeros(()), cloud, cloud.points)
    expected = [
        [0, 0.2566260299005478],
        [0.132005661155077, 0],
        [0.12324238377817141, 0.24648476755634283],
        [0.24575183288721092, 0.12287591644360546],
    ]
    np.testing.assert_allclose(field, expected, atol=1e-10)
    np.testing.assert_allclose(jnp.sum(field * cloud.points, axis=1), 0, atol=1e-15)


@pytest.mark.parametrize(
    "solver",
    [None, mf.FixedStep(0.1), pytest.param(mf.Stiff(), marks=pytest.mark.slow)],
    ids=["adaptive", "fixed", "stiff"],
)
def test_tokens_stay_on_the_sphere(solver):
    flow = mf.Flow(reference_attention(), space=mf.Sphere())
    path = mf.solve(flow, on_the_sphere(), 5.0, save=4, solver=solver)
    norms = np.linalg.norm(path.points, axis=2)
    np.testing.assert_allclose(norms, 1, atol=1e-12)


def test_the_sphere_flow_agrees_with_angles_on_the_circle():
    # On the circle the projected softmax flow is an equation for the angles alone.
    import scipy.integrate

    angles = np.array([0.1, 1.0, 2.5, 4.0])
    beta = 2.0

    def velocity(_, theta):
        difference = theta[None, :] - theta[:, None]
        masses = np.exp(beta * np.cos(difference))
        return (masses * np.sin(difference)).sum(1) / masses.sum(1)

    exact = scipy.integrate.solve_ivp(
        velocity, (0, 3), angles, method="DOP853", rtol=1e-12, atol=1e-12
    ).y[:, -1]
    points = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    flow = mf.Flow(mf.identity_attention("softmax", 2, beta), space=mf.Sphere())
    path = mf.solve(flow, mf.TokenCloud(points), 3.0, save=2, rtol=1e-10, atol=1e-12)
    expected = np.stack([np.cos(exact), np.sin(exact)], axis=1)
    np.testing.assert_allclose(path.points[-1], expected, atol=1e-8)


@pytest.mark.slow
def test_a_probe_on_a_token_moves_with_it_and_changes_nothing():
    cloud = reference_cloud()
    alone = mf.solve(softmax_flow(), cloud, 1.0, save=3, solver=mf.FixedStep(0.1))
    watched = mf.solve(
        softmax_flow(),
        cloud,
        1.0,
        save=3,
        solver=mf.FixedStep(0.1),
        probes=cloud.points[1:3],
    )
    np.testing.assert_allclose(watched.points, alone.points, atol=1e-14)
    np.testing.assert_allclose(watched.probes, alone.points[:, 1:3], atol=1e-13)


def test_probes_of_a_masked_flow_see_up_to_their_place():
    positions = jnp.array([0.25, 0.5, 0.75, 1.0])
    cloud = reference_cloud(positions=positions)
    probes = mf.TokenCloud(cloud.points, positions=positions)
    path = mf.solve(
        mf.Flow(mf.Masked(reference_attention())), cloud, 1.0, save=2, probes=probes
    )
    np.testing.assert_allclose(path.probes[-1], path.points[-1], atol=1e-13)


@pytest.mark.slow
def test_padding_changes_no_token_of_an_adaptive_solve():
    cloud = reference_cloud()
    far = jnp.concatenate([cloud.points, jnp.array([[50.0, -80.0]])])
    padded = mf.TokenCloud(far, jnp.append(cloud.weights, 0.0))
    short = mf.solve(softmax_flow(), cloud, 1.0, save=3)
    long = mf.solve(softmax_flow(), padded, 1.0, save=3)
    np.testing.assert_allclose(long.points[:, :4], short.points, atol=1e-13)


def test_saved_depths_can_be_listed_and_are_hit_exactly():
    depths = jnp.array([0.0, 0.1, 0.5, 1.0])
    path = mf.solve(softmax_flow(), reference_cloud(), 1.0, save=depths)
    np.testing.assert_array_equal(path.depths, depths)


@pytest.mark.slow
def test_between_saved_depths_the_trajectory_is_interpolated_to_fourth_order():
    errors = []
    for save in (5, 9):
        path = mf.solve(
            softmax_flow(), reference_cloud(), 1.0, save=save, rtol=1e-11, atol=1e-13
        )
        middle = 0.5 * (path.depths[1] + path.depths[2])
        exact = mf.solve(
            softmax_flow(),
            reference_cloud(),
            float(middle),
            save=2,
            rtol=1e-11,
            atol=1e-13,
        )
        errors.append(np.abs(path.at(middle).points - exact.points[-1]).max())
    assert errors[1] < errors[0] / 10
    path = mf.solve(softmax_flow(), reference_cloud(), 1.0, save=3)
    np.testing.assert_array_equal(path.at(0.5).points, path.points[1])
    with pytest.raises(mf.InvalidInput, match=r"covers \[0.0, 1.0\]"):
        path.at(2.0)


@pytest.mark.parametrize("kind", [mf.Linear, mf.Unnormalised])
def test_a_blow_up_ends_with_a_status_and_finite_tokens(kind):
    growing = kind(jnp.eye(2), jnp.eye(2), 10 * jnp.eye(2))
    with pytest.warns(mf.errors.StoppedEarly, match="blow-up"):
        path = mf.solve(mf.Flow(growing), reference_cloud(), 10.0)
    assert bool(path.status == mf.Status.blow_up_suspected)
    assert np.isfinite(path.points).all()
    assert np.isfinite(path.velocities).all()
    assert 0 < float(path.depths[-1]) < 10


def test_the_blow_up_of_a_single_token_is_found_at_its_depth():
    # Under Q = K = V = I the token follows R(t) = (1 - 2t)^(-1/2).
    with pytest.warns(mf.errors.StoppedEarly):
        path = mf.solve(
            mf.Flow(mf.identity_attention("linear", 2)),
            mf.TokenCloud([[1.0, 0.0]]),
            1.0,
        )
    assert float(path.depths[-1]) == pytest.approx(0.5, abs=1e-5)


def test_tokens_that_leave_the_escape_radius_stop_the_solve():
    with pytest.warns(mf.errors.StoppedEarly, match="escape radius"):
        path = mf.solve(
            softmax_flow(), reference_cloud(), 5.0, stop=mf.flows.EscapeRadius(3.0)
        )
    assert bool(path.status == mf.Status.escaped)
    assert float(path.statistics["radius"][-1]) > 3.0


@pytest.mark.slow
def test_a_steady_state_stops_the_solve_without_a_warning():
    path = mf.solve(
        softmax_flow(),
        mf.TokenCloud([[0.0, 0.0]]),
        5.0,
        stop=mf.flows.SteadyState(1e-6),
    )
    assert bool(path.status == mf.Status.steady)
    assert float(path.depths[-1]) < 5.0


@pytest.mark.slow
def test_a_condition_of_the_callers_own_stops_the_solve():
    path = mf.solve(
        softmax_flow(),
        reference_cloud(),
        5.0,
        stop=mf.StopWhen(lambda depth, cloud: cloud.mean()[0] > 0.5),
    )
    assert bool(path.status == mf.Status.condition_met)
    assert float(path.statistics["mean"][-1, 0]) > 0.5


def test_a_used_up_step_budget_is_reported_with_advice():
    with pytest.warns(mf.errors.StoppedEarly, match="StepBudget"):
        path = mf.solve(
            softmax_flow(), reference_cloud(), 5.0, save=2, stop=mf.flows.StepBudget(3)
        )
    assert bool(path.status == mf.Status.step_budget)
    assert 0 < float(path.depths[-1]) < 5.0


def test_exploding_layers_keep_the_last_finite_state():
    growing = mf.Linear(jnp.eye(2), jnp.eye(2), 1e3 * jnp.eye(2))
    with pytest.warns(mf.errors.StoppedEarly, match="not finite"):
        path = mf.run_layers(mf.Flow(growing), reference_cloud(), 60, step=1.0)
    assert bool(path.status == mf.Status.not_finite)
    assert np.isfinite(path.points).all()


def test_solve_works_under_jit_and_vmap():
    cloud = reference_cloud()

    def final(beta):
        return mf.solve(softmax_flow(beta=beta), cloud, 1.0, save=3).points[-1]

    betas = jnp.array([0.5, 2.0])
    plain = jnp.stack([final(beta) for beta in betas])
    np.testing.assert_allclose(jax.jit(final)(betas[1]), plain[1], atol=1e-12)
    np.testing.assert_allclose(jax.vmap(final)(betas), plain, atol=1e-7)


@pytest.mark.slow
def test_a_vmapped_solve_reports_the_status_of_each_member():
    growing = mf.identity_attention("linear", 2)

    def ending(scale):
        cloud = mf.TokenCloud(scale * jnp.array([[1.0, 0.0]]))
        path = mf.solve(mf.Flow(growing), cloud, 1.2, save=3)
        return path.status == mf.Status.reached, path.depths, path.points

    reached, depths, points = jax.vmap(ending)(jnp.array([0.1, 1.0]))
    np.testing.assert_array_equal(reached, [True, False])
    np.testing.assert_allclose(depths[1], [0, 0.5, 0.5], atol=1e-5)
    assert np.isfinite(points).all()


@pytest.mark.slow
def test_noise_on_a_contracting_flow_reaches_the_stationary_variance(key):
    # dx = -x dt + s dB has stationary variance s^2 / 2; beta = 0 and one token each
    # would couple them, so the contraction is a perceptron that ignores the context.
    pull = mf.PointMap(lambda x: -x)
    count, strength = 4000, 0.7
    flow = mf.Flow(pull, noise=strength)
    start = mf.TokenCloud(jnp.zeros((count, 1)))
    path = mf.solve(flow, start, 4.0, save=2, solver=mf.FixedStep(0.05), key=key)
    variance = float(jnp.var(path.points[-1]))
    expected = strength**2 / 2 * (1 - np.exp(-8.0))
    assert variance == pytest.approx(expected, rel=5 * np.sqrt(2 / count) + 0.01)


@pytest.mark.slow
def test_noise_on_the_sphere_stays_there_and_depends_on_the_key():
    flow = mf.Flow(reference_attention(), space=mf.Sphere(), noise=0.5)
    first, again, other = (
        mf.solve(
            flow, on_the_sphere(), 1.0, solver=mf.FixedStep(0.05), key=jr.key(seed)
        )
        for seed in (0, 0, 1)
    )
    np.testing.assert_allclose(np.linalg.norm(first.points, axis=2), 1, atol=1e-12)
    np.testing.assert_array_equal(first.points, again.points)
    assert np.abs(first.points[-1] - other.points[-1]).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0.0}, "must not be zero"),
        ({"depth": jnp.nan}, "finite"),
        ({"save": 1}, "2 or more"),
        ({"save": jnp.array([0.0, 1.5])}, "must lie between"),
        ({"save": jnp.array([0.0, 0.7, 0.5, 1.0])}, "in order"),
        ({"rtol": -1.0}, "positive"),
        ({"key": jr.key(0)}, "no noise"),
        ({"probes": jnp.ones((2, 3))}, "probes has shape"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    depth = change.pop("depth", 1.0)
    with pytest.raises(mf.InvalidInput, match=message):
        mf.solve(softmax_flow(), reference_cloud(), depth, **change)


def test_what_is_no_measure_is_refused_with_advice(untyped):
    with pytest.raises(mf.Unsupported, match="quadrature"):
        mf.solve(softmax_flow(), jnp.ones((3, 2)), 1.0)


@pytest.mark.slow
def test_a_measure_without_tokens_flows_as_nodes_and_tells_the_error(monkeypatch):
    monkeypatch.setattr(sys.modules["meanformer.flows.solve"], "NODES", 12)
    flow = mf.Flow(mf.identity_attention("softmax", 1, 1.0))
    start, options = mf.Gaussian([0.5], [[0.4]]), dict(save=3, solver=mf.FixedStep(0.1))
    exact = mf.solve(flow, start, 0.3, **options)
    message = "a Mixture flows as 12 tokens.* flow of 6 nodes is up to"
    with pytest.warns(mf.errors.QuadratureWarning, match=message) as warned:
        path = mf.solve(flow, mf.Mixture([1.0], [start]), 0.3, **options)
    assert len(warned) == 1
    told = np.asarray(path.statistics["quadrature_error"])
    cloud, gaussian = path.cloud(-1), exact.gaussian(-1)
    moments = mf.Gaussian(cloud.mean(), cloud.covariance())
    error = float(mf.wasserstein(moments, gaussian))
    assert 1e-9 < error < told[-1] < 0.1
    assert f"up to {told.max():.2g} away" in str(warned[0].message)


def test_tokens_off_the_sphere_are_refused():
    flow = mf.Flow(reference_attention(), space=mf.Sphere())
    with pytest.raises(mf.InvalidInput, match="norm 1"):
        mf.solve(flow, reference_cloud(), 1.0)


def test_probes_off_the_sphere_are_refused():
    flow = mf.Flow(mf.identity_attention("softmax", 2), space=mf.Sphere())
    with pytest.raises(mf.InvalidInput, match="probe 1 has norm 5"):
        mf.solve(flow, mf.TokenCloud(np.eye(2)), 1.0, probes=[[1.0, 0.0], [0.0, 5.0]])


@pytest.mark.slow
def test_noise_ends_where_a_condition_says():
    flow, cloud = (
        mf.Flow(mf.identity_attention("softmax", 2), noise=0.1),
        on_the_sphere(),
    )
    options = {"save": 3, "solver": mf.FixedStep(0.25), "key": jr.key(0)}
    with pytest.warns(mf.errors.StoppedEarly, match="escape radius"):
        path = mf.solve(flow, cloud, 2.0, stop=mf.flows.EscapeRadius(1.2), **options)
    assert path.depths[-1] < 2


def test_noise_is_not_run_backward():
    flow = mf.Flow(reference_attention(), noise=0.1)
    options = {"solver": mf.FixedStep(0.25), "key": jr.key(0)}
    with pytest.raises(InvalidInput, match="no way back"):
        mf.solve(flow, reference_cloud(), -1.0, **options)


def test_noise_without_a_key_or_fixed_steps_is_refused():
    noisy = mf.Flow(reference_attention(), noise=0.1)
    with pytest.raises(mf.InvalidInput, match="needs key"):
        mf.solve(noisy, reference_cloud(), 1.0)
    with pytest.raises(mf.InvalidInput, match="fixed steps"):
        mf.solve(noisy, reference_cloud(), 1.0, key=jr.key(0))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("run", [mf.solve, mf.run_layers])
def test_a_velocity_of_another_dimension_is_refused(rows, run):
    layer = mf.Softmax(np.eye(2), np.eye(2), np.ones((rows, 2)))
    for velocity in (layer, mf.Schedule([layer]), lambda depth: layer):
        with pytest.raises(InvalidInput, match=f"dimension {rows}; a velocity must"):
            run(mf.Flow(velocity), reference_cloud(), 1)


def test_equal_steps_are_counted_right_in_single_precision():
    single = np.eye(2, dtype=np.float32)
    flow = mf.Flow(mf.Softmax(single, single, single))
    path = mf.solve(flow, mf.TokenCloud(single), 1.0, solver=mf.FixedStep(0.1))
    np.testing.assert_array_equal(path.accepted_steps, np.arange(11))


def test_a_stop_without_progress_repeats_no_depth():
    stop = mf.flows.EscapeRadius(0.5)
    with pytest.warns(mf.errors.StoppedEarly):
        path = mf.solve(
            mf.Flow(reference_attention()), reference_cloud(), 1.0, stop=stop
        )
    assert len(np.unique(path.depths)) == len(path)
    assert bool(path.status == mf.Status.escaped)


@pytest.mark.parametrize(("start", "depth"), [(1.0, 1.0), (100.0, 0.1)])
def test_a_blow_up_at_or_near_a_saved_depth_is_called_one(start, depth):
    flow = mf.Flow(mf.identity_attention("linear", 1))
    with pytest.warns(mf.errors.StoppedEarly, match="blow-up"):
        path = mf.solve(flow, mf.TokenCloud([[start]]), depth)
    assert bool(path.status == mf.Status.blow_up_suspected)
    np.testing.assert_allclose(path.depths[-1], 1 / (2 * start**2), rtol=1e-5)


def test_a_trajectory_from_compiled_code_tells_how_it_ended():
    path = jax.jit(lambda cloud: mf.solve(softmax_flow(), cloud, 1.0, save=2))(
        reference_cloud()
    )
    assert path.message == "At depth 1 the depth asked for was reached."


def test_a_space_a_kind_and_a_condition_are_told_from_their_look_alikes(untyped):
    with pytest.raises(mf.InvalidInput, match="such as Sphere"):
        mf.Flow(reference_attention(), space=mf.Sphere)
    with pytest.raises(mf.InvalidInput, match="velocity is"):
        mf.Flow(mf.Softmax)
    with pytest.raises(mf.InvalidInput, match="condition is 3"):
        mf.StopWhen(3)


@pytest.mark.parametrize("save", [101, 97])
def test_a_last_step_that_makes_up_for_rounding_is_no_blow_up(save):
    """Sums of steps may miss a saved depth by a rounding, as from 0.06 to 0.07."""
    cloud = mf.TokenCloud(jnp.array([[1.0], [2.0]]))
    decay = mf.Linear(jnp.eye(1), jnp.eye(1), -jnp.eye(1))
    path = mf.solve(mf.Flow(decay), cloud, 1.0, save=save)
    assert bool(path.status == mf.Status.reached)
    assert len(path) == save
