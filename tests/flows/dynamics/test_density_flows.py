"""Flows of densities on the circle: closed forms, tokens, noise, modes, refusals."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.errors import InvalidInput, StoppedEarly, Unsupported
from meanformer.flows import Spectral, Status
from meanformer.flows.methods import Lawson
from meanformer.measures import FourierDensity, circle_moments

TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def flow_of(kind="softmax", beta=5.0, **options):
    return mf.Flow(mf.identity_attention(kind, 2, beta), space=mf.Sphere(), **options)


def ripple(size=0.1, degree=3, modes=64):
    moments = np.zeros((modes, 2))
    moments[degree - 1, 0] = size / 2
    return FourierDensity(moments)


def skew(modes=64):
    """A density without symmetry."""
    moments = np.zeros((modes, 2))
    moments[:2] = [[0.15, 0.0], [0.0, 0.05]]
    return FourierDensity(moments)


@pytest.fixture(scope="module")
def path():
    """The nonlinear reference run."""
    return mf.solve(flow_of(), ripple(), 3.0, solver=Spectral(most_modes=128), **TIGHT)


def test_the_nonlinear_reference_values(path):
    """The third and sixth cosine moments at depth 3, tabulated."""
    np.testing.assert_allclose(
        path.moments[-1, jnp.array([2, 5]), 0], [0.3660580605, 0.0978164714], atol=1e-10
    )
    assert bool(path.status == Status.reached)


def test_mass_is_one_and_the_density_positive(path):
    statistics = path.statistics
    np.testing.assert_allclose(statistics["mass"], 1, rtol=0, atol=1e-12)
    assert float(statistics["smallest"].min()) > 0
    assert float(statistics["tail"].max()) < 1e-12


def test_symmetry_of_the_start_is_kept(path):
    moments = np.array(path.moments[-1])
    np.testing.assert_allclose(moments[:, 1], 0, atol=1e-14)
    moments[2::3] = 0
    np.testing.assert_allclose(moments, 0, atol=1e-13)


def test_kuramoto_keeps_a_poisson_kernel():
    """At beta = 0 the order parameter has a closed form."""
    powers = 0.3 ** np.arange(1, 129)
    start = FourierDensity(np.stack([powers, 0 * powers], axis=1))
    path = mf.solve(
        flow_of("unnormalised", 0.0),
        start,
        2.0,
        save=5,
        solver=Spectral(most_modes=128),
        **TIGHT,
    )
    grown = 0.09 * np.exp(np.asarray(path.depths))
    radius = np.sqrt(grown / (1 + grown - 0.09))
    np.testing.assert_allclose(path.moments[:, 0, 0], radius, atol=1e-13)
    np.testing.assert_allclose(
        path.moments[-1, :, 0], radius[-1] ** np.arange(1, 129), atol=1e-12
    )
    assert radius[-1] == pytest.approx(0.6497905376, abs=1e-10)


RATES = {
    "softmax": [0.1786766274, 0.5141173961, 0.6826783336, 0.6000891395, 0.3961058557],
    "unnormalised": [
        4.8671284285,
        14.0044919733,
        18.5960703045,
        16.3463512437,
        10.7898727366,
    ],
}


@pytest.mark.parametrize("kind", RATES)
def test_small_modes_grow_at_the_tabulated_rates(kind):
    depth = 0.5 if kind == "softmax" else 0.02
    for degree, rate in enumerate(RATES[kind], start=1):
        path = mf.solve(
            flow_of(kind),
            ripple(1e-6, degree),
            depth,
            save=2,
            solver=Spectral(most_modes=64),
            rtol=1e-12,
            atol=1e-15,
        )
        start, end = np.asarray(path.moments[:, degree - 1, 0])
        assert np.log(end / start) / depth == pytest.approx(rate, rel=1e-8)


@pytest.mark.parametrize("name", ["round", "skew"])
def test_any_map_moves_densities_as_it_moves_their_nodes(name):
    identity = mf.identity_attention("unnormalised", 2, 2.0)
    skew_softmax = mf.Softmax(
        np.array([[1.0, 0.4], [-0.2, 0.7]]),
        np.eye(2),
        np.array([[1.0, 0.2], [0.0, 0.8]]),
        beta=2.0,
    )
    units = np.array([[1.0, 0.0], [-0.5, np.sqrt(3) / 2]])
    perceptron = mf.Perceptron(units, np.zeros(2), 2 * units.T, activation=jnp.tanh)
    heads = {
        "round": identity,
        "skew": mf.MultiHead([skew_softmax, identity]),
    }
    gamma = mf.Sum([heads[name], perceptron])
    flow = mf.Flow(gamma, space=mf.Sphere())
    options = {"save": 2, "rtol": 1e-10, "atol": 1e-12}
    path = mf.solve(flow, skew(), 0.2, solver=Spectral(most_modes=64), **options)
    tokens = mf.solve(flow, mf.quadrature(skew(), 160), 0.2, **options)
    expected = circle_moments(tokens.cloud(-1), 6)
    np.testing.assert_allclose(path.moments[-1, :6], expected, atol=1e-10)


@pytest.mark.slow
def test_a_rotated_score_takes_the_fast_way_and_agrees():
    turn = np.array([[0.8, -0.6], [0.6, 0.8]])
    flow = mf.Flow(mf.Softmax(turn, np.eye(2), np.eye(2), beta=2.0), space=mf.Sphere())
    options = {"save": 2, "rtol": 1e-10, "atol": 1e-12}
    path = mf.solve(flow, skew(), 1.0, solver=Spectral(most_modes=64), **options)
    tokens = mf.solve(flow, mf.quadrature(skew(), 160), 1.0, **options)
    np.testing.assert_allclose(
        path.moments[-1, :6], circle_moments(tokens.cloud(-1), 6), atol=1e-10
    )


def test_backward_undoes_forward(path):
    back = mf.solve(
        flow_of(),
        path.density(-1),
        (3.0, 0.0),
        save=2,
        solver=Spectral(most_modes=128),
        **TIGHT,
    )
    np.testing.assert_allclose(back.moments[-1], path.moments[0], atol=1e-9)


def test_between_saved_depths_the_path_is_interpolated(path):
    exact = mf.solve(
        flow_of(), ripple(), 1.63, save=2, solver=Spectral(most_modes=128), **TIGHT
    )
    np.testing.assert_allclose(path.at(1.63).moments[:64], exact.moments[-1], atol=1e-4)
    np.testing.assert_array_equal(path.at(3.0).moments, path.moments[-1])


def test_noise_alone_lets_moments_decay():
    strength, depth = 4.5, 0.3
    still = mf.Flow(
        mf.Perceptron(np.zeros((1, 2)), np.zeros(1), np.zeros((2, 1))),
        space=mf.Sphere(),
        noise=3.0,
    )
    path = mf.solve(still, skew(), depth, save=2, solver=Spectral(most_modes=64))
    decay = np.exp(-strength * depth * np.arange(1, 65) ** 2)
    expected = np.asarray(skew().moments) * decay[:, None]
    np.testing.assert_allclose(path.moments[-1], expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("integrator", "error"),
    [
        pytest.param(mf.Stiff(), 1e-7, marks=pytest.mark.slow),
        (mf.FixedStep(1e-3), 1e-9),
    ],
    ids=["implicit", "fixed"],
)
def test_noise_agrees_between_explicit_and_other_steps(integrator, error):
    flow, start = flow_of("unnormalised", 2.0, noise=0.7), skew(24)
    options = {"save": 2, "rtol": 1e-9, "atol": 1e-11}

    def end(integrator):
        solver = Spectral(most_modes=24, integrator=integrator)
        return mf.solve(flow, start, 0.5, solver=solver, **options).moments[-1]

    np.testing.assert_allclose(end(integrator), end(None), atol=error)


def test_fokker_planck_conserves_mass_and_comes_to_rest():
    flow = flow_of("unnormalised", 2.0, noise=1.5)
    path = mf.solve(
        flow,
        skew(),
        200.0,
        save=3,
        stop=mf.flows.SteadyState(1e-10),
        rtol=1e-9,
        atol=1e-11,
    )
    assert bool(path.status == Status.steady)
    np.testing.assert_allclose(path.statistics["mass"], 1, rtol=0, atol=1e-12)


def test_modes_are_added_where_they_are_needed():
    path = mf.solve(flow_of(), ripple(modes=4), 3.0, save=2, **TIGHT)
    assert path.moments.shape[1] > 64
    assert path.moments[-1, 2, 0] == pytest.approx(0.3660580605, abs=1e-10)


def test_a_density_that_turns_into_atoms_stops_the_solve():
    with pytest.warns(StoppedEarly, match="turning into atoms"):
        path = mf.solve(
            flow_of(), ripple(), 20.0, save=5, solver=Spectral(most_modes=64)
        )
    assert bool(path.status == Status.unresolved)
    assert 2 < float(path.depths[-1]) < 20
    assert float(path.statistics["tail"][-1]) > 1e-6


@pytest.mark.slow
def test_the_error_falls_exponentially_with_the_modes(path):
    errors = []
    for modes in (12, 20):
        coarse = mf.solve(
            flow_of(),
            ripple(modes=modes),
            3.0,
            save=2,
            solver=Spectral(most_modes=modes, tail=1.0),
            **TIGHT,
        )
        errors.append(abs(float(coarse.moments[-1, 2, 0] - path.moments[-1, 2, 0])))
    assert errors[0] > 100 * errors[1] > 0


@pytest.mark.slow
def test_a_solve_can_be_compiled_and_differentiated():
    @jax.jit
    @jax.value_and_grad
    def moment(size):
        start = FourierDensity(size * ripple(modes=24).moments)
        path = mf.solve(flow_of(), start, 0.5, save=2, rtol=1e-9, atol=1e-12)
        return path.moments[-1, 2, 0]

    step = 1e-4
    (below, _), (_, slope), (above, _) = (moment(1.0 + k * step) for k in (-1, 0, 1))
    difference = (above - below) / (2 * step)
    assert float(slope) == pytest.approx(float(difference), rel=1e-6)


def test_a_trajectory_of_densities_can_be_saved(path, tmp_path):
    path.save(tmp_path / "run")
    import xarray

    stored = xarray.open_zarr(tmp_path / "run")
    np.testing.assert_array_equal(stored.moments, path.moments)
    assert list(stored.part.values) == ["cos", "sin"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge": 1e-3}, "no tokens that meet"),
        ({"probes": [[1.0, 0.0]]}, "gamma\\(density, points\\)"),
        ({"key": jax.random.key(0)}, "as diffusion"),
        ({"solver": mf.LongDepth()}, "is for tokens"),
        ({"solver": mf.flows.Splitting(0.1)}, "is for tokens"),
    ],
)
def test_options_for_tokens_are_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        mf.solve(flow_of(), ripple(), 1.0, **options)


@pytest.mark.slow
def test_single_precision_takes_as_few_steps_as_it_has_digits():
    """Steps are not judged more finely than moments are rounded."""
    start = FourierDensity(np.asarray(ripple().moments, np.float32))
    eye = jnp.eye(2, dtype=jnp.float32)
    layer = mf.Softmax(eye, eye, eye, beta=jnp.float32(5))
    flow = mf.Flow(layer, space=mf.Sphere())
    path = mf.solve(flow, start, 3.0, save=2, solver=Spectral(most_modes=128))
    assert path.moments.dtype == jnp.float32
    assert int(path.accepted_steps[-1]) < 60
    np.testing.assert_allclose(path.moments[-1, 2, 0], 0.3660580605, atol=2e-6)


def test_flows_elsewhere_are_refused():
    attention = mf.identity_attention("softmax", 2)
    with pytest.raises(Unsupported, match="lives on the circle"):
        mf.solve(mf.Flow(attention), ripple(), 1.0)
    in_space = mf.Flow(mf.identity_attention("softmax", 3), space=mf.Sphere())
    with pytest.raises(InvalidInput, match="dimension 3"):
        mf.solve(in_space, ripple(), 1.0)
    with pytest.raises(InvalidInput, match="cannot run backward"):
        mf.solve(flow_of(noise=0.1), ripple(), -1.0)


def test_spectral_refuses_what_makes_no_sense(untyped):
    with pytest.raises(InvalidInput, match="most_modes is 0"):
        Spectral(most_modes=0)
    with pytest.raises(InvalidInput, match="most_modes is 2.5"):
        Spectral(most_modes=2.5)
    with pytest.raises(InvalidInput, match="tail is -1"):
        Spectral(tail=-1.0)


def test_a_density_with_too_few_modes_to_be_positive_is_refused():
    sharp = FourierDensity.from_function(
        lambda t: jnp.exp(50 * (jnp.cos(t) - 1)), 64, normalize=True
    )
    with pytest.raises(InvalidInput, match="belong to no density"):
        mf.solve(flow_of(), sharp.resized(5), 1.0)


@pytest.mark.parametrize(
    ("method", "order"), [(diffrax.Heun(), 2), (diffrax.Tsit5(), 5)]
)
def test_taking_a_decay_out_keeps_the_order_of_the_method(method, order):
    """A decay of rate 50 with a forcing: errors of equal steps, two sizes."""
    decay = jnp.array([50.0, 1.0])

    def field(t, y, args):
        return jnp.stack([jnp.cos(t), jnp.sin(t) + 0.1 * y[0]])

    def whole(t, y, args):
        return field(t, y, args) - decay * y

    def end(term, solver, step):
        controller = diffrax.ConstantStepSize()
        options = {"stepsize_controller": controller, "max_steps": 100_000}
        start = jnp.array([0.3, -0.2])
        return diffrax.diffeqsolve(term, solver, 0.0, 1.0, step, start, **options).ys[0]

    exact = end(diffrax.ODETerm(whole), diffrax.Dopri8(), 1e-4)
    lawson = Lawson(method, decay)
    errors = [
        float(jnp.abs(end(diffrax.ODETerm(field), lawson, step) - exact).max())
        for step in (1 / 40, 1 / 80)
    ]
    assert np.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.6)
