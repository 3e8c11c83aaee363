"""Stationary densities with noise, their branches, folds and stability."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special

import meanformer as mf
from meanformer.errors import InvalidInput
from meanformer.mean_field import (
    branch_curvature,
    critical_kappa,
    growth_rates,
    noise_of_kappa,
    stationary_branch,
    stationary_state,
)
from meanformer.mean_field.balance import (
    Balance,
    NoConvergence,
    ring_kernel,
    zonal_basis,
)
from meanformer.mean_field.noise import attraction

KINDS = "softmax", "unnormalised"
FOLD, MAXWELL = 0.184300682956, 0.187975826581  # circle, beta = 5


def identity(kind, dimension, beta):
    return mf.identity_attention(kind, dimension, beta)


@pytest.fixture(scope="module")
def steep():
    return stationary_branch(identity("unnormalised", 2, 5.0))


@pytest.fixture(scope="module")
def smooth():
    return stationary_branch(identity("unnormalised", 2, 2.3))


def circle_cloud(state, count=256):
    """The state as equispaced weighted tokens, and the density there."""
    angles = 2 * np.pi * np.arange(count) / count
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    density = state.density(points[:, 0])
    return mf.TokenCloud(points, density / density.sum()), angles, density


@pytest.mark.parametrize("kind", KINDS)
def test_noise_balances_the_velocity_of_attention_in_a_stationary_state(kind):
    """The flux of the Fokker-Planck equation vanishes, on other nodes."""
    attention = identity(kind, 2, 3.0)
    kappa = 1.5 * critical_kappa(attention)
    cloud, angles, density = circle_cloud(stationary_state(attention, kappa))
    velocity = np.asarray(attention(cloud, cloud.points))
    tangents = np.stack([-np.sin(angles), np.cos(angles)], axis=1)
    speed = (velocity * tangents).sum(axis=1)
    waves = 1j * np.fft.fftfreq(len(angles), 1 / len(angles))
    slope = np.fft.ifft(waves * np.fft.fft(density)).real
    scale = np.abs(density * speed).max()
    np.testing.assert_allclose(slope / kappa, density * speed, atol=1e-10 * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stationary_state_on_the_sphere_is_the_power_or_exponential_it_should_be(
    kind,
):
    """Against a direct double integral over the sphere."""
    attention = identity(kind, 3, 2.0)
    kappa = 1.7 * critical_kappa(attention)
    state = stationary_state(attention, kappa)

    def seen(height):
        def ring(other):
            radius = np.sqrt((1 - height**2) * (1 - other**2))
            mean = scipy.special.i0(2.0 * radius)
            return np.exp(2.0 * height * other) * mean * state.density([other])[0] / 2

        return scipy.integrate.quad(ring, -1, 1, epsabs=1e-12)[0]

    mass = np.array([seen(height) for height in (-0.9, 0.2, 1.0)])
    logs = np.log(mass) if kind == "softmax" else mass
    found = np.log(state.density([-0.9, 0.2, 1.0]))
    np.testing.assert_allclose(np.diff(found), kappa / 2 * np.diff(logs), rtol=1e-9)


def test_the_fold_and_the_maxwell_point_of_the_circle(steep):
    (fold,) = steep.folds
    np.testing.assert_allclose(fold.kappa, FOLD, atol=1e-11)
    np.testing.assert_allclose(steep.maxwell.kappa, MAXWELL, atol=1e-11)
    np.testing.assert_allclose(steep.maxwell.free_energy, 0, atol=1e-12)
    np.testing.assert_allclose(fold.growth * fold.kappa, 0, atol=1e-8)
    assert fold.kappa < steep.maxwell.kappa < steep.critical


def test_a_branch_tells_its_fold_and_its_maxwell_point(steep):
    first, fold, maxwell = str(steep).split("\n")
    assert "from kappa 0.2054599575" in first
    assert fold.startswith("fold at kappa 0.184300683: order 0.61419")
    assert maxwell.startswith("Maxwell point at kappa 0.1879758266")
    assert maxwell.endswith("stable")


def test_the_transition_is_continuous_at_2_3_and_jumps_at_5(smooth, steep):
    assert not smooth.folds
    assert smooth.maxwell is None
    assert (np.diff(smooth.kappas) > 0).all()
    assert smooth.is_stable[1:].all()
    assert (smooth.free_energies[1:] < 0).all()
    assert steep.kappas.min() == steep.folds[0].kappa < 0.9 * steep.critical
    assert not steep.is_stable[1]
    assert steep.is_stable[-1]


def test_states_are_stable_exactly_beyond_the_fold(steep):
    (fold,) = steep.folds
    np.testing.assert_array_equal(steep.is_stable, steep.orders > fold.order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dimension", "degree"), [(2, 1), (2, 2), (3, 1)])
def test_branches_leave_the_uniform_state_as_the_expansion_says(
    kind, dimension, degree
):
    attention = identity(kind, dimension, 2.0)
    critical = critical_kappa(attention, degree=degree)
    branch = stationary_branch(
        attention, degree=degree, until=1.02 * critical, spacing=0.02
    )
    squares = branch.orders[1:4] ** 2
    bends = (branch.kappas[1:4] / critical - 1) / squares
    found = np.polyfit(squares, bends, 2)[-1]
    expected = branch_curvature(attention, degree=degree)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_softmax_branches_have_no_fold():
    branch = stationary_branch(identity("softmax", 3, 20.0))
    assert (np.diff(branch.kappas) > 0).all()
    assert branch.is_stable[1:].all()
    assert branch.free_energies is None
    assert branch.maxwell is None


def test_several_clusters_are_unstable_the_slower_the_less_noise():
    branch = stationary_branch(identity("unnormalised", 2, 5.0), degree=2)
    assert not branch.is_stable.any()
    late = branch.growths[len(branch.growths) // 2 :]
    assert (np.diff(late) < 0).all()
    first = np.abs([row @ (branch.masses * branch.heights) for row in branch.densities])
    assert first.max() < 1e-12


def test_even_degrees_on_the_sphere_leave_to_both_sides():
    attention = identity("unnormalised", 3, 5.0)
    up = stationary_branch(attention, degree=2)
    down = stationary_branch(attention, degree=2, sign=-1)
    assert up.kappas[1] < up.critical < down.kappas[1]
    assert up.orders[1] > 0 > down.orders[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waves", [0, 1, 2])
def test_the_spectrum_at_the_uniform_state_is_that_of_the_growth_rates(kind, waves):
    attention = identity(kind, 3, 5.0)
    kappa = 1.3 * critical_kappa(attention)
    model = attraction(attention)
    balance = Balance(model, 64)
    found = balance.spectrum(np.ones(64), kappa / model.unit, waves) / kappa
    degrees = np.arange(max(waves, 1), 20)
    exact = growth_rates(attention, degrees, noise=noise_of_kappa(kappa))
    largest = np.sort(np.asarray(exact))[::-1][:4]
    np.testing.assert_allclose(np.sort(found.real)[::-1][:4], largest, atol=1e-10)


def order_in_time(beta, kappa, start, times):
    """The order of an even density on the circle, its moments solved by SciPy."""
    modes = np.arange(1, 33)
    bessel = scipy.special.iv(modes, beta)

    def velocity(_, moments):
        padded = np.concatenate([moments[::-1], [1.0], moments, np.zeros(32)])
        places = 32 + modes[:, None] - modes[None, :]
        inner = padded[places] - padded[places + 2 * modes[None, :]]
        drift = modes * (inner @ (modes * bessel * moments)) / beta
        return drift - modes**2 / kappa * moments

    span, tight = (times[0], times[-1]), {"rtol": 1e-11, "atol": 1e-13}
    path = scipy.integrate.solve_ivp(velocity, span, start, "LSODA", times, **tight)
    return path.y[0]


@pytest.mark.parametrize(("beta", "factor"), [(2.3, 1.3), (5.0, 1.2)])
def test_in_time_a_density_comes_to_the_state_at_the_rate_of_its_spectrum(beta, factor):
    attention = identity("unnormalised", 2, beta)
    kappa = factor * critical_kappa(attention)
    state = stationary_state(attention, kappa)
    times = np.linspace(0, 30 / -state.growth, 61)
    orders = order_in_time(beta, kappa, np.exp(-(np.arange(1, 33) ** 2) / 8.0), times)
    np.testing.assert_allclose(orders[-1], state.order, atol=1e-7)
    # Between six and twelve decay times only the slowest mode is left.
    gaps = np.log(np.abs(orders[12:25] - orders[-1]))
    rate = np.polyfit(times[12:25], gaps, 1)[0]
    np.testing.assert_allclose(rate, state.growth, rtol=1e-3)


@pytest.mark.slow
def test_a_solve_with_noise_comes_to_the_stationary_state():
    attention = identity("unnormalised", 2, 2.3)
    kappa = 1.3 * critical_kappa(attention)
    state = stationary_state(attention, kappa)
    flow = mf.Flow(attention, space=mf.Sphere(), noise=np.sqrt(2 / kappa))
    density = mf.FourierDensity.from_function(
        lambda angle: jnp.exp(jnp.cos(angle)), 32, normalize=True
    )
    # Saved often: the budget of steps is for each stretch.
    options = {"save": 9, "rtol": 1e-9, "atol": 1e-11}
    path = mf.solve(flow, density, 20 / -state.growth, **options)
    np.testing.assert_allclose(path.moments[-1, 0, 0], state.order, atol=1e-7)


def test_a_perturbed_state_relaxes_at_the_rate_of_its_spectrum():
    state = stationary_state(identity("unnormalised", 2, 5.0), 0.19)
    times = np.linspace(0, 24, 49)
    start = [state.moment(mode) * (1 + 0.01 / mode) for mode in range(1, 33)]
    moments = order_in_time(5.0, 0.19, start, times)
    np.testing.assert_allclose(moments[-1], state.order, atol=1e-9)
    gaps = np.log(np.abs(moments[8:17] - state.order))
    rate = np.polyfit(times[8:17], gaps, 1)[0]
    np.testing.assert_allclose(rate, state.growth, rtol=1e-3)
    np.testing.assert_allclose(state.growth, -1.0894647939, rtol=1e-8)


def test_rotations_of_a_state_neither_grow_nor_decay():
    attention = identity("softmax", 3, 6.0)
    kappa = 1.4 * critical_kappa(attention)
    state, model = stationary_state(attention, kappa), attraction(attention)
    balance = Balance(model, len(state.heights))
    found = balance.spectrum(state.densities, kappa / model.unit, 1)
    assert np.abs(found).min() < 1e-9
    assert np.sort(found.real)[-2] < -0.1


def test_a_start_decides_between_states_that_coexist():
    attention = identity("unnormalised", 2, 5.0)
    ordered = stationary_state(attention, 0.19, start=0.9)
    uniform = stationary_state(attention, 0.19, start=0.1)
    np.testing.assert_allclose(ordered.order, 0.7753210663629517, rtol=1e-10)
    np.testing.assert_allclose(uniform.densities, 1, rtol=1e-12)
    assert ordered.is_stable
    assert uniform.is_stable
    assert ordered.free_energy < 0


def test_states_and_branches_agree(steep):
    state = stationary_state(identity("unnormalised", 2, 5.0), float(steep.kappas[-1]))
    np.testing.assert_allclose(state.order, steep.orders[-1], rtol=1e-11)
    np.testing.assert_allclose(state.free_energy, steep.free_energies[-1], rtol=1e-9)
    both = steep.orders_at(0.19)
    assert len(both) == 2
    np.testing.assert_allclose(both.max(), 0.77532, atol=2e-3)


def test_a_shift_only_changes_the_unit_of_noise():
    eye = jnp.eye(2)
    shifted = mf.Unnormalised(eye, eye, eye, beta=5.0, shift=5.0)
    found = stationary_state(shifted, 0.25 * np.exp(5))
    expected = stationary_state(identity("unnormalised", 2, 5.0), 0.25)
    np.testing.assert_allclose(found.densities, expected.densities, rtol=1e-9)


def test_the_kernel_of_rings_has_the_harmonics_of_funk_and_hecke():
    model = attraction(identity("unnormalised", 4, 6.0))
    basis = zonal_basis(4, 48)
    kernel, _ = ring_kernel(model, basis.heights, basis.heights)
    images = (kernel * basis.masses) @ basis.polynomials[:12].T
    expected = model.ratios(12)[:, None] * basis.polynomials[:12]
    np.testing.assert_allclose(images.T, expected, atol=1e-12)


@pytest.mark.parametrize("waves", [0, 1, 3])
def test_harmonics_of_a_sector_are_orthonormal(waves):
    basis = zonal_basis(5, 40)
    values, _ = basis.sector(waves, 12)
    gram = (values * basis.masses) @ values.T
    np.testing.assert_allclose(gram, np.eye(12), atol=1e-12)


def test_moments_of_a_state_are_means_of_cosines():
    state = stationary_state(identity("unnormalised", 2, 2.0), 2.0)
    cloud, angles, _ = circle_cloud(state)
    weights = np.asarray(cloud.weights)
    for degree in (0, 1, 3):
        expected = weights @ np.cos(degree * angles)
        np.testing.assert_allclose(state.moment(degree), expected, atol=1e-12)


def test_the_precision_of_jax_does_not_matter():
    wide = stationary_state(identity("softmax", 2, 4.0), 9.0)
    with jax.enable_x64(False):
        narrow = stationary_state(identity("softmax", 2, 4.0), 9.0)
    assert narrow.order == wide.order


def test_states_are_modules():
    state = stationary_state(identity("softmax", 2, 4.0), 9.0)
    doubled = eqx.tree_at(lambda s: s.densities, state, 2 * state.densities)
    np.testing.assert_array_equal(doubled.densities, 2 * state.densities)


def test_bad_requests_are_refused_with_advice(untyped):
    attention = identity("unnormalised", 2, 5.0)
    with pytest.raises(InvalidInput, match="the branch begins at kappa 0.20546"):
        stationary_branch(attention, until=0.1)
    with pytest.raises(InvalidInput, match="sign is 0; it must be 1 or -1"):
        stationary_branch(attention, sign=0)
    with pytest.raises(InvalidInput, match="spacing is -1.0"):
        stationary_branch(attention, spacing=-1.0)
    with pytest.raises(InvalidInput, match="start is 1.5"):
        stationary_state(attention, 1.0, start=1.5)
    with pytest.raises(InvalidInput, match="kappa is 0.0; it must be positive"):
        stationary_state(attention, 0.0)
    with pytest.raises(InvalidInput, match="heights must lie between"):
        stationary_state(attention, 0.25).density([1.5])
    with pytest.raises(InvalidInput, match="degree is 999"):
        stationary_state(attention, 0.25).moment(999)
    with pytest.raises(InvalidInput, match=r"degree is 1\.5; it must be an integer"):
        stationary_state(attention, 0.25).moment(1.5)


def test_states_in_high_dimension_are_found_with_more_nodes():
    """Gauss nodes of the uniform law crowd about the equator there."""
    attention = identity("unnormalised", 64, 1.2)
    kappa = 1.2 * critical_kappa(attention)
    state = stationary_state(attention, kappa)
    assert len(state.heights) > 96
    assert state.is_stable
    # The balance at the nodes, with the transform of rings by SciPy.
    order = 63 / 2 - 1

    def seen(height):
        radii = np.sqrt((1 - height**2) * (1 - state.heights**2))
        rings = (
            scipy.special.gammaln(order + 1)
            + order * np.log(2 / (1.2 * radii))
            + np.log(scipy.special.ive(order, 1.2 * radii))
            + 1.2 * radii
        )
        kernel = np.exp(1.2 * height * state.heights + rings)
        return kernel @ (state.masses * state.densities)

    # Far from the equator, where there are no nodes, as well.
    far = np.array([0.8, 0.9, 0.99])
    steps = kappa / 1.2 * np.diff([seen(height) for height in far])
    np.testing.assert_allclose(np.diff(np.log(state.density(far))), steps, rtol=1e-9)
    kept = (state.heights > 0.3) & (state.heights < 0.9)
    expected = kappa / 1.2 * np.array([seen(height) for height in state.heights[kept]])
    found = np.log(state.densities[kept])
    np.testing.assert_allclose(np.diff(found), np.diff(expected), atol=1e-10)


@pytest.mark.parametrize(
    ("dimension", "beta", "fold", "maxwell"),
    [
        (3, 3.0, 1.2084475288, 1.2337443946),
        (3, 5.0, 0.2932153434, 0.3118460453),
        pytest.param(8, 3.0, 3.3132302988, 3.6165504556, marks=pytest.mark.slow),
    ],
)
def test_folds_and_maxwell_points_of_spheres_are_those_of_the_table(
    dimension, beta, fold, maxwell
):
    attention = identity("unnormalised", dimension, beta)
    branch = stationary_branch(attention, until=1.01 * critical_kappa(attention))
    np.testing.assert_allclose(branch.folds[0].kappa, fold, atol=1e-10)
    np.testing.assert_allclose(branch.maxwell.kappa, maxwell, atol=1e-10)


@pytest.mark.slow
def test_a_state_too_narrow_for_the_nodes_is_refused():
    with pytest.raises(NoConvergence, match="too concentrated for 768 nodes"):
        stationary_state(identity("unnormalised", 2, 5.0), 1e6)
