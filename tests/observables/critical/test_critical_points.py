"""Critical points: Newton, the search, extremes over measures, localisation."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.optimize import brentq, root
from scipy.special import iv

from meanformer.attention import Unnormalised, identity_attention
from meanformer.errors import InvalidInput, Overflow, Unsupported
from meanformer.flows import Flow
from meanformer.geometry import Euclidean, Sphere
from meanformer.measures import TokenCloud, pad
from meanformer.observables import (
    energy_maximiser,
    energy_minimiser,
    find_critical_points,
    first_variation,
    localisation,
    matrix_energy_flow,
    newton_critical_point,
    optimal_circle_density,
    perceptron_flow,
)
from meanformer.observables.critical.landscape import circle_minimum, simplex_minimum

UNITS = (0.0, 2 * np.pi / 3)
SINGLE = np.exp(2) / 4 + 2


def on_circle(angles, weights=None):
    angles = np.asarray(angles)
    return TokenCloud(np.stack([np.cos(angles), np.sin(angles)], axis=1), weights)


def angles_of(cloud):
    points = np.asarray(cloud.points)
    return np.arctan2(points[:, 1], points[:, 0])


def block_flow(beta, strength=4.0, units=UNITS, **options):
    attention = identity_attention("unnormalised", 2, beta)
    return perceptron_flow(attention, on_circle(units).points, strength, **options)


def test_the_two_atom_state_has_the_tabulated_angles_rates_and_energy():
    found = newton_critical_point(block_flow(2.0), on_circle([0.1, 2.0]))
    assert found.is_converged
    assert found.kind == "maximum"
    np.testing.assert_allclose(
        angles_of(found.cloud), [0.0502172808, 2.0441778216], rtol=0, atol=1e-10
    )
    np.testing.assert_allclose(
        found.eigenvalues, [-3.0678405218, -3.9798427505], rtol=0, atol=5e-10
    )
    # The closed form in the angles, which the digits above miss by 2.5e-10.
    first, gap = 0.0502172808, 2.0441778216 - 0.0502172808
    link = np.exp(2 * np.cos(gap)) * (np.cos(gap) - 2 * np.sin(gap) ** 2)
    bend = -4 * np.cos(2 * first)
    np.testing.assert_allclose(found.eigenvalues, [bend - link, bend], atol=1e-9)
    np.testing.assert_allclose(found.energy, 2.9735753953, rtol=0, atol=1e-10)
    assert found.holds_together
    assert found.is_stable
    assert str(found) == "maximum: 2 atoms, energy 2.973575395"


def test_unequal_masses_move_the_angles_to_the_tabulated_ones():
    found = newton_critical_point(block_flow(2.0), on_circle([0.1, 2.0], [0.7, 0.3]))
    np.testing.assert_allclose(
        angles_of(found.cloud), [0.0301052062, 2.0239593240], rtol=0, atol=1e-10
    )
    np.testing.assert_allclose(found.energy, 3.1133672934, rtol=0, atol=1e-10)
    np.testing.assert_array_equal(found.cloud.weights, [0.7, 0.3])


@pytest.mark.parametrize(
    ("beta", "angle"),
    [
        (0.0, 0.1212819370),
        (1.0, 0.0828600340),
        (3.0, 0.0290768808),
        (4.0, 0.0167890756),
    ],
)
def test_the_first_angle_is_the_tabulated_one_at_other_temperatures(beta, angle):
    found = newton_critical_point(block_flow(beta), on_circle([0.1, 2.0]))
    np.testing.assert_allclose(angles_of(found.cloud)[0], angle, rtol=0, atol=1e-10)
    assert found.index == 0
    assert (found.energy is None) == (beta == 0)


@pytest.mark.parametrize("place", [0, 1])
def test_single_atoms_rest_at_the_peaks_of_the_potential(place):
    start = on_circle([UNITS[place] + 0.2])
    found = newton_critical_point(block_flow(2.0), start)
    assert found.kind == "maximum"
    np.testing.assert_allclose(angles_of(found.cloud), [UNITS[place]], atol=1e-12)
    np.testing.assert_allclose(found.energy, SINGLE, rtol=1e-14)
    np.testing.assert_allclose(found.energy, 3.8472640247, rtol=0, atol=1e-10)
    # Alone it is held by the potential, c = 4; its halves by each other as well.
    np.testing.assert_allclose(found.eigenvalues, [-4.0], rtol=1e-12)
    np.testing.assert_allclose(found.splitting, [-4 - np.exp(2)], rtol=1e-12)
    np.testing.assert_allclose(found.distance, 0.2, rtol=1e-9)


def test_close_atoms_that_see_both_units_rest_on_the_explicit_branch():
    # Between the units each atom at the distance phi / 2 from the valley feels
    # c sin(phi) / 2 of them, and exp(beta cos phi) sin(phi) / 2 of the other atom.
    gap = 0.8
    strength = np.exp(2 * np.cos(gap))
    start = on_circle(np.pi / 3 + np.array([-gap / 2, gap / 2]))
    found = newton_critical_point(block_flow(2.0, strength), start)
    assert found.distance < 1e-12
    # They part at the rate beta c sin(phi)^2, and leave the valley at the other one.
    rates = [2 * strength * np.sin(gap) ** 2, strength * np.cos(gap)]
    np.testing.assert_allclose(found.eigenvalues, rates, rtol=1e-12)


def test_saddles_agree_with_a_root_finder_for_the_angles():
    def slopes(angles):
        first, second = angles
        pull = 0.5 * np.exp(2 * np.cos(second - first)) * np.sin(second - first)
        return [lift(first) + pull, lift(second) - pull]

    def lift(angle):
        rise = [max(np.cos(angle - u), 0) * np.sin(u - angle) for u in UNITS]
        return 4 * sum(rise)

    start = [0.7, 1.7]
    expected = root(slopes, start, tol=1e-13).x
    found = newton_critical_point(block_flow(2.0), on_circle(start))
    np.testing.assert_allclose(angles_of(found.cloud), expected, rtol=0, atol=1e-10)
    assert found.index > 0


def test_the_triangle_is_found_however_weak_the_pulls(key):
    # At beta = 300 the pulls are exp(-450) of that on oneself.
    flow = Flow(identity_attention("softmax", 2, 300.0), space=Sphere())
    found = newton_critical_point(flow, on_circle([0.0, 2.05, 4.2]))
    assert found.is_converged
    assert found.kind == "minimum"
    assert (found.index, found.nullity, found.rotations) == (2, 1, 1)
    gaps = np.diff(np.sort(angles_of(found.cloud)))
    np.testing.assert_allclose(gaps, 2 * np.pi / 3, atol=1e-12)
    rates = np.asarray(found.eigenvalues) * np.exp(found.log_unit + 450)
    # In angles the rate is 3 exp(-3 beta / 2)(3 beta / 4 + 1 / 2).
    expected = 3 * (0.75 * 300 + 0.5)
    np.testing.assert_allclose(rates[:2], expected, rtol=1e-9)


def test_newton_works_in_space():
    flow = perceptron_flow(None, np.eye(2), [-1.0, -2.0], activation="tanh")
    flow = Flow(flow.velocity, space=Euclidean())
    found = newton_critical_point(flow, TokenCloud([[0.3, -0.2]]))
    assert found.kind == "maximum"
    np.testing.assert_allclose(found.cloud.points, [[0.0, 0.0]], atol=1e-12)
    np.testing.assert_allclose(found.eigenvalues, [-1.0, -2.0], rtol=1e-9)


def test_absent_tokens_take_no_part():
    start = on_circle([0.1, 2.0])
    found = newton_critical_point(block_flow(2.0), pad(start, 5))
    assert found.cloud.count == 2
    np.testing.assert_allclose(found.energy, 2.9735753953, rtol=0, atol=1e-10)


def test_a_search_that_does_not_end_says_so():
    found = newton_critical_point(block_flow(2.0), on_circle([0.4, 2.0]), most_steps=1)
    assert not found.is_converged
    assert found.kind == "not critical"
    assert "not converged after 1 steps" in found.reason
    assert found.index is None


def test_softmax_with_a_perceptron_has_critical_points_without_energy():
    attention = identity_attention("softmax", 2, 2.0)
    flow = perceptron_flow(attention, on_circle(UNITS).points, 4.0)
    found = newton_critical_point(flow, on_circle([0.1, 2.0]))
    assert found.kind == "stable"
    assert found.energy is None
    field = flow.field(jnp.zeros(()), found.cloud, found.cloud.points)
    np.testing.assert_allclose(field, 0, atol=1e-12)


def single_flow(beta, units=UNITS):
    eye = jnp.eye(2, dtype=jnp.float32)
    attention = Unnormalised(eye, eye, eye, beta=jnp.float32(beta))
    directions = jnp.asarray(on_circle(units).points, jnp.float32)
    return perceptron_flow(attention, directions, jnp.float32(4.0))


def single_cloud(angles):
    return TokenCloud(jnp.asarray(on_circle(angles).points, jnp.float32))


def test_rates_in_single_precision_stay_in_its_range():
    # The pull of halves on each other, exp(100) / 2, has no place there.
    found = newton_critical_point(single_flow(100.0), single_cloud([0.1, 2.0]))
    assert found.kind == "maximum"
    assert np.isfinite(found.eigenvalues).all()
    assert np.isfinite(found.splitting).all()
    assert found.holds_together


@pytest.mark.slow
def test_a_kink_is_noticed_in_single_precision():
    flow = single_flow(2.0, (0.7,))
    found = newton_critical_point(flow, single_cloud([0.7 + np.pi / 2]))
    assert found.kinks == ((0, 0),)


def test_images_under_a_symmetry_are_one_in_single_precision(key):
    masses = np.ones(1, np.float32)
    found = find_critical_points(
        single_flow(2.0), masses, key=key, starts=6, depth=0, deflations=0
    )
    assert found.symmetries == 2
    assert found.failures == 0
    assert [point.kind for point in found].count("maximum") == 1


@pytest.mark.parametrize(("strength", "indices"), [(4.0, (0, 1)), (-4.0, (0, 0))])
def test_a_kink_has_one_sided_hessians(strength, indices):
    flow = block_flow(2.0, strength, (0.0,))
    found = newton_critical_point(flow, on_circle([np.pi / 2]))
    assert found.kinks == ((0, 0),)
    assert found.index_range == indices
    assert found.kind == "degenerate"


def test_repulsive_units_push_atoms_to_their_back():
    # With c < 0 the peaks of the potential are valleys: an atom rests behind them.
    flow = block_flow(2.0, -4.0, (0.0,))
    top = newton_critical_point(flow, on_circle([0.05]))
    assert top.kind == "minimum"
    np.testing.assert_allclose(angles_of(top.cloud), [0.0], atol=1e-12)
    np.testing.assert_allclose(top.eigenvalues, [4.0], rtol=1e-12)


@pytest.mark.slow
def test_the_search_finds_both_stable_states_and_the_flat_region(key):
    found = find_critical_points(
        block_flow(2.0), [0.5, 0.5], key=key, starts=8, deflations=4
    )
    assert found.symmetries == 2
    energies = [point.energy for point in found.stable]
    np.testing.assert_allclose(energies, [SINGLE, 2.9735753953], atol=1e-9)
    assert found.reached.sum() <= 8
    for point in found:
        field = block_flow(2.0).field(jnp.zeros(()), point.cloud, point.cloud.points)
        np.testing.assert_allclose(field, 0, rtol=0, atol=1e-10)
    for other in range(1, len(found)):
        assert found[other].energy <= found[other - 1].energy + 1e-9
    assert "maximum" in str(found)


def test_a_flat_region_is_reported_with_its_dimension(key):
    flow = perceptron_flow(
        identity_attention("unnormalised", 2, 1.0), [[1.0, 0.0]], 1.0
    )
    found = find_critical_points(flow, [1.0], key=key, starts=6, depth=0, deflations=0)
    flat = [
        size
        for point, size in zip(found, found.continua, strict=True)
        if point.kind == "degenerate" and not point.kinks
    ]
    assert flat == [1]
    assert "continuum of dimension 1" in str(found)


def test_images_under_symmetries_are_one_critical_point(key):
    flow = matrix_energy_flow(np.diag([2.0, 1.0]))
    found = find_critical_points(flow, [0.5, 0.5], key=key, starts=8, depth=0)
    singles = [p for p in found if p.cloud.count == 1]
    # One at each axis, however often and on whichever side they were found.
    assert len(singles) <= 2
    assert found.visits.sum() + found.failures == 16


@pytest.mark.parametrize(
    ("first", "kind"), [(1.1, "saddle of index 1"), (1.4, "maximum")]
)
def test_pairs_of_opposite_atoms_turn_stable_at_the_derived_threshold(first, kind):
    assert (first * np.tanh(first) > 1) == (kind == "maximum")
    flow = matrix_energy_flow(np.diag([first, 1.0]))
    found = newton_critical_point(flow, on_circle([0.02, np.pi - 0.01]))
    assert found.kind == kind
    np.testing.assert_allclose(found.energy, np.cosh(first) / 2, rtol=1e-12)


def test_four_descending_atoms_rest_where_the_closed_form_says():
    entry = 0.5
    share = brentq(lambda u: np.tanh(u) - entry * np.tanh(entry * (1 - u)), 0.0, 1.0)
    flow = matrix_energy_flow(np.diag([1.0, entry]), ascending=False)
    start = on_circle(np.pi / 4 + np.pi / 2 * np.arange(4) + [0.02, 0.0, -0.01, 0.03])
    found = newton_critical_point(flow, start)
    assert found.kind == "minimum"
    np.testing.assert_allclose(found.cloud.points[:, 0] ** 2, share, atol=1e-11)


def test_the_maximiser_is_one_atom_at_a_peak_with_a_proof():
    best = energy_maximiser(block_flow(2.0))
    assert best.is_certified
    assert best.cloud.count == 1
    np.testing.assert_allclose(best.energy, 3.8472640247, atol=1e-9)
    assert best.gap < 1e-9
    angle = angles_of(best.cloud)[0]
    assert min(abs(angle - unit) for unit in UNITS) < 1e-4


def test_the_maximiser_is_found_wherever_the_peak_is():
    best = energy_maximiser(block_flow(2.0, 4.0, (0.3,)))
    np.testing.assert_allclose(best.energy, SINGLE, rtol=1e-14)
    np.testing.assert_allclose(angles_of(best.cloud), [0.3], atol=1e-7)


def test_a_certificate_counts_rounding():
    best = energy_maximiser(single_flow(2.0, (0.3,)))
    assert best.is_certified
    assert best.cloud.points.dtype == jnp.float32
    assert abs(best.energy - SINGLE) <= best.gap < 1e-3


def test_the_first_variation_is_no_certificate_of_a_maximum():
    flow = block_flow(2.0)
    state = newton_critical_point(flow, on_circle([0.1, 2.0]))
    turn = 2 * np.pi * np.arange(4096) / 4096
    layer = flow.velocity.gamma
    heights = first_variation(layer, state.cloud, on_circle(turn).points)
    atoms = first_variation(layer, state.cloud, state.cloud.points)
    gap = float(jnp.max(heights) - jnp.dot(state.cloud.weights, atoms))
    assert gap < 1e-6
    below = energy_maximiser(flow).energy - state.energy
    assert below == pytest.approx(SINGLE - 2.9735753953, abs=1e-6)


def test_the_minimiser_of_the_identity_is_as_low_as_the_uniform_law():
    flow = Flow(identity_attention("unnormalised", 2, 2.0), space=Sphere())
    low = energy_minimiser(flow)
    assert low.is_certified
    exact = iv(0, 2.0) / 4
    assert -1e-14 <= low.energy - exact <= low.gap
    assert low.gap < 2e-6


def test_the_minimiser_agrees_with_the_optimal_density():
    form = np.diag([1.0, 1.3])
    low = energy_minimiser(matrix_energy_flow(form, ascending=False))
    density = optimal_circle_density(form, count=200, tolerance=1e-7)
    allowed = 2 * low.gap + float(density.gap) + 1e-6
    assert abs(2 * low.energy - float(density.energy)) <= allowed


def test_a_potential_draws_the_minimiser_away_from_its_peaks():
    low = energy_minimiser(block_flow(2.0))
    layer = block_flow(2.0).velocity.gamma
    turn = on_circle(2 * np.pi * np.arange(4000) / 4000).points
    heights = np.asarray(first_variation(layer, low.cloud, turn))
    atoms = np.asarray(first_variation(layer, low.cloud, low.cloud.points))
    mean = float(np.asarray(low.cloud.weights) @ atoms)
    assert mean - heights.min() <= low.gap + 1e-9
    assert low.gap < 1e-5


def test_masses_on_a_grid_lie_above_the_minimiser_by_no_more_than_their_certificate():
    # Exponentiated gradients, whose gap is known; between nodes at the distance h the
    # first variation falls by at most (3e^2 + 16) h^2 / 8.
    turn = 2 * np.pi * np.arange(360) / 360
    kernel = np.exp(2 * np.cos(turn[:, None] - turn[None, :])) / 2
    heights = sum(2 * np.maximum(np.cos(turn - unit), 0) ** 2 for unit in UNITS)
    masses = np.full(360, 1 / 360)
    for _ in range(3000):
        slopes = kernel @ masses + heights
        masses = masses * np.exp(-0.5 * (slopes - slopes.min()))
        masses = masses / masses.sum()
    slopes = kernel @ masses + heights
    between = (3 * np.exp(2) + 16) * turn[1] ** 2 / 8
    allowed = masses @ slopes - slopes.min() + between
    on_nodes = masses @ kernel @ masses / 2 + masses @ heights
    assert -1e-6 <= on_nodes - energy_minimiser(block_flow(2.0)).energy <= allowed


def test_concave_energies_exchange_their_extremes():
    flow = perceptron_flow(
        identity_attention("unnormalised", 2, 1.0), [[1.0, 0.0]], 1.0
    )
    repelling = perceptron_flow(
        matrix_energy_flow(np.eye(2), ascending=False).velocity.gamma,
        [[1.0, 0.0]],
        -1.0,
    )
    high, low = energy_maximiser(flow), energy_minimiser(repelling)
    np.testing.assert_allclose(low.energy, -high.energy, rtol=1e-9)
    spread = energy_maximiser(repelling, tolerance=1e-4)
    assert spread.verdict == "conditional gradients"


@pytest.mark.slow
def test_extremes_on_the_sphere_are_those_of_the_closed_forms(key):
    high = energy_maximiser(matrix_energy_flow(np.diag([1.5, 1.0, 0.5])), key=key)
    np.testing.assert_allclose(2 * high.energy, np.exp(1.5), rtol=1e-12)
    assert not high.is_certified
    low = energy_minimiser(matrix_energy_flow(np.eye(3)), key=key, tolerance=1e-3)
    assert 0 <= 2 * low.energy - np.sinh(1) <= 2 * low.gap
    with pytest.raises(InvalidInput, match="give a key"):
        energy_minimiser(matrix_energy_flow(np.eye(3)))


def test_extremes_are_refused_where_nothing_is_known():
    with pytest.raises(Unsupported, match="neither convex nor concave"):
        energy_maximiser(matrix_energy_flow(np.diag([1.0, -1.0])))
    with pytest.raises(InvalidInput, match="not a gradient flow"):
        energy_maximiser(
            perceptron_flow(identity_attention("softmax", 2, 1.0), np.eye(2), 1.0)
        )
    with pytest.raises(Unsupported, match="is not known to be convex"):
        energy_maximiser(Flow(identity_attention("sigmoid", 2), space=Sphere()))
    with pytest.raises(InvalidInput, match="dimension 1; it must be 2 or more"):
        energy_maximiser(matrix_energy_flow(np.eye(1)))
    with pytest.raises(Overflow, match="lower beta"):
        energy_maximiser(block_flow(1000.0))
    with pytest.raises(Overflow, match="lower beta"):
        energy_minimiser(block_flow(1000.0))


def test_atoms_of_the_two_atom_state_are_localised_at_the_peaks():
    flow = block_flow(2.0)
    state = newton_critical_point(flow, on_circle([0.1, 2.0]))
    found = localisation(flow, state.cloud)
    np.testing.assert_allclose(angles_of(TokenCloud(found.peaks)), UNITS, atol=1e-7)
    np.testing.assert_allclose(found.radius, 0.0502172808, atol=1e-7)
    np.testing.assert_array_equal(found.labels, [0, 1])
    plain = Flow(identity_attention("unnormalised", 2, 2.0), space=Sphere())
    with pytest.raises(Unsupported, match="with a perceptron"):
        localisation(plain, state.cloud)


def test_absent_atoms_are_not_localised_and_valleys_are_no_peaks():
    flow = block_flow(2.0)
    padded = on_circle([0.1, 2.0, np.pi / 3], [0.5, 0.5, 0.0])
    found = localisation(flow, padded)
    np.testing.assert_allclose(found.radius, 0.1, rtol=1e-9)
    # The atom in the valley is taken to a peak, a third of a half turn away.
    np.testing.assert_allclose(found.distances[2], np.pi / 3, atol=1e-7)
    assert len(found.peaks) == 2
    # In the flat region it stays where it is.
    flat = localisation(flow, on_circle([4.2]))
    np.testing.assert_array_equal(flat.distances, [0.0])


def test_bisection_finds_the_lowest_of_many_valleys():
    def wave(angles):
        return np.cos(9 * angles) + 0.1 * np.cos(angles - 1)

    found = circle_minimum(wave, 81.1, tolerance=1e-10)
    fine = wave(np.linspace(0, 2 * np.pi, 2_000_001)).min()
    assert found.bound <= fine <= found.value + 1e-10
    assert found.value - found.bound < 2e-10
    assert circle_minimum(wave, None, tolerance=1e-6).bound is None


def test_the_best_masses_satisfy_the_conditions_of_optimality(key):
    factors = np.asarray(jr.normal(key, (6, 9)))
    kernel, heights = factors.T @ factors, np.linspace(-1.0, 1.0, 9)
    masses = simplex_minimum(kernel, heights, np.eye(9)[0])
    slopes = kernel @ masses + heights
    np.testing.assert_allclose(masses.sum(), 1, rtol=1e-12)
    assert masses.min() >= 0
    np.testing.assert_allclose(slopes[masses > 0], masses @ slopes, rtol=1e-8)
    assert slopes.min() >= masses @ slopes - 1e-9


def test_the_best_masses_do_not_depend_on_the_unit_of_the_energy():
    atoms = on_circle([0.0, 2.0, 4.0]).points
    kernel = np.exp(20 * np.asarray(atoms @ atoms.T))
    heights = np.array([0.0, 1e8, 3e8])
    small = simplex_minimum(kernel, heights, np.eye(3)[0])
    large = simplex_minimum(1e120 * kernel, 1e120 * heights, np.eye(3)[0])
    np.testing.assert_allclose(large, small, rtol=1e-12)
    np.testing.assert_allclose(large.sum(), 1, rtol=1e-12)


def test_wrong_options_are_refused(key):
    with pytest.raises(InvalidInput, match="tolerance is -1"):
        newton_critical_point(block_flow(2.0), on_circle([0.0]), tolerance=-1)
    with pytest.raises(InvalidInput, match="largest_step is 0"):
        newton_critical_point(block_flow(2.0), on_circle([0.0]), largest_step=0)
    plain = Flow(identity_attention("unnormalised", 2, 2.0))
    with pytest.raises(InvalidInput, match="needs a flow on Sphere"):
        find_critical_points(plain, [1.0], key=key)
    with pytest.raises(InvalidInput, match="depth is -1"):
        find_critical_points(block_flow(2.0), [1.0], key=key, depth=-1.0)
    with pytest.raises(InvalidInput, match="it must be a list of masses"):
        find_critical_points(block_flow(2.0), 1.0, key=key)
    with pytest.raises(InvalidInput, match="masses sum to 10; .* divide them by"):
        find_critical_points(block_flow(2.0), [5.0, 3.0, 2.0], key=key)
    with pytest.raises(InvalidInput, match="masses holds -0.5; none may be below 0"):
        find_critical_points(block_flow(2.0), [1.5, -0.5], key=key)
    with pytest.raises(InvalidInput, match="dimension 3, and attention is of dimens"):
        perceptron_flow(identity_attention("unnormalised", 2, 1.0), np.eye(3), 1.0)
    with pytest.raises(InvalidInput, match="dimension 1; it must be 2 or more"):
        find_critical_points(matrix_energy_flow(np.eye(1)), [1.0], key=key)
    with pytest.raises(InvalidInput, match="the cloud of dimension 3"):
        newton_critical_point(block_flow(2.0), TokenCloud(np.eye(3)))
    with pytest.raises(InvalidInput, match="the cloud of dimension 3"):
        localisation(block_flow(2.0), TokenCloud(np.eye(3)))
    with pytest.raises(InvalidInput, match="must have norm 1"):
        localisation(block_flow(2.0), TokenCloud(2 * np.eye(2)))
