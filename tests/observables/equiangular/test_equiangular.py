"""Tokens at equal angles: tabulated values, closed forms, the full flow."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special

import meanformer as mf
from meanformer.flows import CustomScheme
from meanformer.observables import (
    Equiangular,
    critical_beta,
    phase_curve,
)

TIMES = [
    (2, 1, 4.2710676803, 1.7444601011),
    (2, 9, 466.7106529100, 0.1147243584),
    (32, 0.1, 5.1920631182, 4.8607226982),
    (32, 1, 5.2702839076, 2.8970486230),
    (32, 5, 9.5443292035, 0.9746065980),
    (32, 9, 178.7309295190, 0.6859876689),
    (128, 1, 5.9090203968, 3.5578591959),
    (128, 9, 82.5933575020, 1.2125342032),
]
SCHEMES = {
    "post": (mf.flows.PostNorm(), 0.9987033043, 0.07384015),
    "pre": (mf.flows.PreNorm(), 0.4219170507, 0.07384015),
    "peri": (mf.flows.PeriNorm(), 0.5602673761, 0.09872135),
    "ngpt": (mf.flows.NGPT(), 0.9997645242, 0.09872135),
    "mix": (mf.flows.MixNorm(2.0), 0.9169127290, 0.07384015),
    "sqrt": (mf.flows.SqrtScaling(), 0.7861427632, 0.07384015),
}
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def eight(name, **options):
    return Equiangular(8, 3.0, scheme=SCHEMES[name][0], **options)


def time_in_exponential_integrals(count, beta, start, level):
    """Softmax time on the sphere, by partial fractions in the gap."""
    ratio = count / (count - 1)
    low, high = 1 - level, 1 - start
    ei, e1 = scipy.special.expi, scipy.special.exp1
    near = ei(beta * high) - ei(beta * low) + (count - 1) * np.log(high / low)
    far = np.exp(beta * ratio) * (e1(beta * (ratio - high)) - e1(beta * (ratio - low)))
    far += (count - 1) * np.log((ratio - low) / (ratio - high))
    return (near + far) / (2 * count)


@pytest.mark.parametrize(("count", "beta", "softmax", "unnormalised"), TIMES)
def test_clustering_times_are_tabulated(count, beta, softmax, unnormalised):
    assert Equiangular(count, beta).time_to(0.999) == pytest.approx(softmax, rel=1e-9)
    model = Equiangular(count, beta, kind="unnormalised")
    assert model.time_to(0.999) == pytest.approx(unnormalised, rel=1e-9)


@pytest.mark.parametrize(
    ("count", "expected"), [(2, 3.8002011672502), (32, 5.1862609811202)]
)
def test_at_beta_zero_the_time_is_a_logarithm(count, expected):
    exact = 0.5 * np.log(((count - 1) * 0.999 + 1) / (1 - 0.999))
    for kind in ("softmax", "unnormalised"):
        time = Equiangular(count, 0, kind=kind).time_to(0.999)
        np.testing.assert_allclose(time, exact, rtol=1e-14)
        np.testing.assert_allclose(time, expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("count", "beta", "start", "level"),
    [
        (2, 3.0, 0.0, 0.999),
        (7, 20.0, -0.1, 0.5),
        (1000, 0.3, 0.2, 0.20001),
        (50, 300.0, 0.0, 0.9),
        (10**6, 2.0, 0.0, 1 - 1e-10),
    ],
)
def test_softmax_times_are_exponential_integrals(count, beta, start, level):
    time = Equiangular(count, beta, start=start).time_to(level)
    exact = time_in_exponential_integrals(count, beta, start, level)
    # The difference of the integrals loses digits where the way is short.
    np.testing.assert_allclose(time, exact, rtol=1e-11 if level > 0.3 else 1e-8)


def test_low_temperatures_do_not_overflow():
    # T ~ e^beta / (2 beta) up to 1 + O(1/beta), with the next terms from the series.
    model = Equiangular(2, 700)
    np.testing.assert_allclose(model.log_time_to(), 700 - np.log(2 * 700), atol=3e-5)
    assert np.isfinite(model.time_to())
    deep = Equiangular(2, 7000)
    np.testing.assert_allclose(deep.log_time_to(), 7000 - np.log(14000), atol=1e-6)
    with pytest.raises(mf.Overflow, match="log_time_to"):
        deep.time_to()
    assert Equiangular(2, 7000, kind="unnormalised").time_to() < 1e-3


@pytest.mark.parametrize("alpha", [1.0, 2.5])
def test_the_times_of_other_schemes_are_integrals_too(alpha):
    count, beta, level = 8, 3.0, 0.99

    def slowness(rho, by_length):
        other = 1 / (np.exp(beta * (1 - rho)) + count - 1)
        own = np.exp(beta * (1 - rho)) * other
        square = own**2 + 2 * own * (count - 1) * other * rho
        square += other**2 * (count - 1) * (1 + (count - 2) * rho)
        speed = 2 * other * (1 - rho) * ((count - 1) * rho + 1)
        return (np.sqrt(square) if by_length else 1) / speed

    options = {"epsrel": 1e-13, "epsabs": 0, "limit": 200}
    sphere, length = (
        scipy.integrate.quad(slowness, 0, level, args=(flag,), **options)[0]
        for flag in (False, True)
    )
    model = Equiangular(count, beta, scheme=mf.flows.NGPT(alpha))
    np.testing.assert_allclose(model.time_to(level), length / alpha, rtol=1e-11)
    model = Equiangular(count, beta, scheme=mf.flows.SqrtScaling())
    np.testing.assert_allclose(
        model.time_to(level), (1 + sphere / 2) ** 2 - 1, rtol=1e-11
    )


@every_scheme
def test_inner_products_at_depth_six_and_slopes_are_tabulated(name):
    _, inner, slope = SCHEMES[name]
    model = eight(name)
    found = model.solve([0.0, 6.0])
    np.testing.assert_allclose(found, [0.0, inner], atol=2e-10)
    np.testing.assert_allclose(model.velocity(0.0), slope, atol=5e-9)
    # The time is the inverse of the path.
    np.testing.assert_allclose(model.time_to(float(found[1])), 6.0, rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "gap", "slope"),
    [
        ("pre", 1.691e-4, -2.03),
        ("peri", 1.658e-4, -2.005),
        ("mix", 9.758e-6, -2.015),
    ],
)
def test_radii_make_the_gap_a_power_of_depth(name, gap, slope):
    gaps = eight(name).gap([200.0, 400.0])
    np.testing.assert_allclose(gaps[1], gap, rtol=5e-4)
    np.testing.assert_allclose(np.diff(np.log2(gaps)), slope, atol=6e-3)
    law = eight(name).law
    assert (law.form, law.exponent) == ("power", 2.0)


def test_without_radii_the_gap_falls_exponentially_and_stays_accurate():
    depths = jnp.array([100.0, 101.0])
    for name, rate in (("post", 2.0), ("ngpt", 2.0)):
        gaps = eight(name).gap(depths)
        np.testing.assert_allclose(gaps[0] / gaps[1], np.exp(rate), rtol=1e-8)
        assert 0 < gaps[0] < 1e-80
        assert eight(name).law == ("exponential", rate)
    gaps = eight("sqrt").gap(depths)
    expected = 4 * (np.sqrt(102) - np.sqrt(101))
    np.testing.assert_allclose(np.log(gaps[0] / gaps[1]), expected, rtol=1e-8)
    assert eight("sqrt").law == ("stretched", 4.0)
    fast = Equiangular(8, 1.0, kind="unnormalised")
    np.testing.assert_allclose(fast.law.exponent, 2 * np.e)
    gaps = fast.gap([20.0, 21.0])
    np.testing.assert_allclose(np.log(gaps[0] / gaps[1]), 2 * np.e, rtol=1e-8)


@pytest.mark.parametrize(
    ("kind", "depth", "expected"),
    [("softmax", 2.0, 0.28521078858), ("unnormalised", 0.3, 0.24567613772)],
)
def test_the_full_flow_of_four_orthonormal_tokens_is_the_reduced_one(
    kind, depth, expected
):
    reduced = Equiangular(4, 3.0, kind=kind).solve([depth])[0]
    np.testing.assert_allclose(reduced, expected, atol=1e-11)
    flow = mf.Flow(mf.identity_attention(kind, 4, 3.0), space=mf.Sphere())
    path = mf.solve(
        flow, mf.TokenCloud(jnp.eye(4)), depth, save=2, rtol=1e-11, atol=1e-13
    )
    gram = path.points[-1] @ path.points[-1].T
    np.testing.assert_allclose(gram[jnp.triu_indices(4, 1)], expected, atol=1e-11)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_the_velocity_is_the_formula_and_vanishes_at_both_ends(kind):
    model = Equiangular(5, 2.0, kind=kind)
    rho = np.array([-0.25, -0.1, 0.3, 1.0])
    rise = 2 * np.exp(2 * rho) * (1 - rho) * (4 * rho + 1)
    mass = 5.0 if kind == "unnormalised" else np.exp(2) + 4 * np.exp(2 * rho)
    np.testing.assert_allclose(model.velocity(rho), rise / mass, atol=1e-15)
    slope = jax.grad(lambda rho: model.velocity(rho))(0.3)
    ends = model.velocity(np.array([0.3 - 1e-5, 0.3 + 1e-5]))
    np.testing.assert_allclose(slope, np.diff(ends)[0] / 2e-5, rtol=1e-8)


@pytest.mark.parametrize(
    "name",
    ["post", *[pytest.param(n, marks=pytest.mark.slow) for n in list(SCHEMES)[1:]]],
)
def test_a_simplex_and_a_cluster_rest(name):
    for start in (-1 / 7, 1.0):
        model = eight(name, start=start)
        np.testing.assert_allclose(model.solve([0.0, 3.0]), start, atol=1e-15)
    with pytest.raises(mf.InvalidInput, match=r"level|nothing moves"):
        eight(name, start=-1 / 7).time_to(0.999)
    assert eight(name, start=1.0).time_to(0.999) == 0
    # A cluster pulls at its own direction with force one.
    grows = name in ("pre", "peri")
    radius = eight(name, start=1.0).radius([3.0])[0]
    expected = 4.0 if grows else (2.0 if name == "mix" else 1.0)
    np.testing.assert_allclose(radius, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("count", "betas"),
    [
        (32, (5.1099043, 6.3447397, 6.9064586)),
        (128, (5.9123957, 7.2198280, 7.7848773)),
    ],
)
def test_the_phase_curve_is_tabulated(count, betas):
    curve = phase_curve(count, [10, 20, 30])
    np.testing.assert_allclose(curve.betas, betas, atol=6e-8)
    np.testing.assert_array_equal(curve.depths, [10, 20, 30])
    assert critical_beta(count, 20) == pytest.approx(betas[1], abs=6e-8)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
@pytest.mark.parametrize("start", [0.0, 0.4])
def test_the_phase_curve_inverts_the_time(kind, start):
    depths = np.geomspace(0.3, 50, 12)
    curve = phase_curve(16, depths, level=0.9, start=start, kind=kind)
    assert 3 < len(curve.betas) < 12
    times = [
        Equiangular(16, beta, kind=kind, start=start).time_to(0.9)
        for beta in curve.betas
    ]
    np.testing.assert_allclose(times, curve.depths, rtol=1e-12)
    monotone = np.diff(curve.betas) * (1 if kind == "softmax" else -1)
    assert (monotone > 0).all()


def test_there_is_no_curve_before_or_after_the_time_of_beta_zero():
    at_zero = 5.1862609811202
    assert critical_beta(32, 0.99 * at_zero) is None
    assert (critical_beta(32, 1.01 * at_zero) or 0) > 0
    assert critical_beta(32, 1.01 * at_zero, kind="unnormalised") is None
    assert (critical_beta(32, 0.99 * at_zero, kind="unnormalised") or 0) > 0
    assert len(phase_curve(32, [1.0, 2.0]).betas) == 0


def test_an_obtuse_start_has_a_softmax_curve_and_no_unnormalised_one():
    beta = critical_beta(5, 20.0, start=-0.1)
    assert Equiangular(5, beta, start=-0.1).time_to() == pytest.approx(20.0, rel=1e-12)
    with pytest.raises(mf.Unsupported, match="not monotone"):
        critical_beta(5, 1.0, start=-0.1, kind="unnormalised")
    times = [
        Equiangular(5, beta, start=-0.24, kind="unnormalised").time_to()
        for beta in (0.0, 3.0, 30.0)
    ]
    assert times[1] < times[0] < times[2]


def test_times_grow_with_the_number_of_tokens_at_high_temperature_only():
    warm = [Equiangular(count, 1.0).time_to() for count in (2, 32, 128)]
    cold = [Equiangular(count, 9.0).time_to() for count in (2, 32, 128)]
    assert warm == sorted(warm)
    assert cold == sorted(cold, reverse=True)


@pytest.mark.slow
def test_a_scheme_of_your_own_is_solved():
    own = CustomScheme(
        lambda depth, radius, radial, norm: radius * norm,
        lambda depth, radius, radial, norm: radial / norm,
    )
    model = Equiangular(8, 3.0, scheme=own)
    np.testing.assert_allclose(model.solve([6.0]), 0.5602673761, atol=2e-10)
    np.testing.assert_allclose(model.time_to(0.5602673761), 6.0, atol=1e-7)
    with pytest.raises(mf.Unsupported, match="no law"):
        _ = model.law


def test_single_precision_is_solved_in_single_precision():
    found = eight("pre").solve(jnp.array([6.0], jnp.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 0.42191705, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Equiangular(5, 1.0, start=-0.3), r"-1/\(n-1\) = -0.25"),
        (lambda: Equiangular(5, 1.0, start=1.5), "start is 1.5"),
        (lambda: Equiangular(1, 1.0), "count is 1"),
        (lambda: Equiangular(5, -1.0), "beta is -1.0"),
        (lambda: Equiangular(5, np.inf), "beta is inf"),
        (lambda: Equiangular(5, 1.0, kind="l2"), "kind is 'l2'"),
        (lambda: Equiangular(5, 1.0, scheme="pre"), "scheme is 'pre'"),
        (lambda: Equiangular(5, 1.0).time_to(1.0), "level is 1.0; .+ below 1.$"),
        (
            lambda: Equiangular(5, 1.0, start=0.5).log_time_to(0.4),
            "above the start, 0.5",
        ),
        (lambda: Equiangular(5, 1.0).solve([2.0, 1.0]), "must increase"),
        (lambda: Equiangular(5, 1.0).solve([-1.0]), "must increase"),
        (
            lambda: Equiangular(5, 0.0, start=-0.25, scheme=mf.flows.NGPT()),
            "NGPT has no meaning",
        ),
        (lambda: phase_curve(5, [-1.0]), "positive"),
        (lambda: phase_curve(5, [1.0], start=-0.25), "nothing moves"),
    ],
)
def test_mistakes_are_told(make, message, untyped):
    with pytest.raises(mf.InvalidInput, match=message):
        make()


@pytest.mark.parametrize(
    "scheme", [mf.flows.PostNorm(), mf.flows.NGPT(), mf.flows.PreNorm()]
)
@pytest.mark.parametrize("level", [1e-14, 1e-300])
def test_a_short_way_takes_its_length_over_the_speed(scheme, level):
    model = Equiangular(8, 1.0, scheme=scheme)
    expected = level / float(model.velocity(0.0))
    np.testing.assert_allclose(model.time_to(level), expected, rtol=1e-12)


def test_near_the_simplex_the_time_is_the_logarithm_of_its_distance():
    start = -1 / 7 * (1 - 1e-14)
    room = float(1 + 7 * Fraction(start))
    time = Equiangular(8, 0.0, start=start).time_to(0.5)
    exact = 0.5 * (np.log(4.5 / room) + np.log((1 - start) / 0.5))
    np.testing.assert_allclose(time, exact, rtol=1e-14)


def test_radii_that_grow_make_the_logarithm_of_the_time_exponential_in_beta():
    def growth(z, beta):
        gap = 8 / 7 * np.exp(-z) / (1 / 7 + np.exp(-z))
        return (np.expm1(beta * gap) + 8 - 7 * gap) / 16

    length = np.log1p(0.999 * 7) - np.log(0.001)
    for beta in (10.0, 20.0):
        log_radius = scipy.integrate.quad(
            growth, 0, length, args=(beta,), points=[0.1, 1.0], epsrel=1e-12
        )[0]
        for scheme in (mf.flows.PreNorm(), mf.flows.PeriNorm()):
            found = Equiangular(8, beta, scheme=scheme).log_time_to()
            # In the end dr/dt is one to two per cent.
            np.testing.assert_allclose(found, log_radius, rtol=1e-9, atol=0.02)
    with pytest.raises(mf.Overflow, match="even the logarithm"):
        Equiangular(8, 800.0, scheme=mf.flows.PreNorm()).log_time_to()


def test_numbers_beyond_all_numbers_are_refused():
    model = Equiangular(8, 1000.0, kind="unnormalised")
    with pytest.raises(mf.Overflow, match="lower beta"):
        _ = model.law
    with pytest.raises(mf.Overflow, match="lower beta"):
        model.velocity(0.9)


@pytest.mark.parametrize("depth", [1e-12, 1e-100, 1e-300])
def test_a_short_depth_needs_half_the_number_of_tokens_over_it(depth):
    # The time is n / (2 beta) up to a share of order n / beta.
    beta = critical_beta(32, depth, kind="unnormalised")
    np.testing.assert_allclose(beta, 16 / depth, rtol=1e-11)
    with pytest.raises(mf.Overflow, match="less extreme"):
        critical_beta(32, 1e-309, kind="unnormalised")


def test_a_depth_that_is_no_number_is_refused(untyped):
    with pytest.raises(mf.InvalidInput, match="must be a number"):
        critical_beta(32, "a")


@pytest.mark.parametrize("start", [0.5, -0.25, 1.0])
def test_a_level_that_the_start_has_passed_is_reached_at_depth_zero(start):
    model = Equiangular(5, 1.0, start=start)
    assert model.time_to(start) == model.time_to(start - 0.2) == 0
