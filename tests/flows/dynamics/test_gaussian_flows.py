"""Flows and layers of Gaussians against values and programs from elsewhere."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import meanformer as mf
from gaussian_reference import (
    COVARIANCE,
    KEY,
    KINDS,
    MEAN,
    PRECISE,
    QUERY,
    VALUE,
    attention,
    gaussian,
    integrated,
    numbers,
    perceptron,
    root_of,
    slope_and_constant,
)
from meanformer.errors import InvalidInput, StoppedEarly, Unsupported
from meanformer.flows import AbstractProgress

AT_HALF = {
    "softmax": [
        0.372736662226,
        -0.621750649595,
        1.178027558944,
        0.428694433931,
        0.739732816668,
    ],
    "l2": [
        0.387417580171,
        -0.526299539252,
        1.264009939127,
        0.483319040957,
        0.793340238403,
    ],
    "sinkhorn": [
        0.328828027154,
        -0.616073138149,
        1.283791744675,
        0.488343861744,
        0.821769577919,
    ],
    "linear": [
        0.338074237963,
        -0.410561615947,
        1.170914830325,
        0.456353015090,
        0.812857224171,
    ],
}
AT_ONE = {
    "softmax": [
        0.458739126804,
        -0.964809063496,
        1.465481018613,
        0.653376758187,
        0.970033844588,
    ],
    "l2": [
        0.523437473244,
        -0.669042848981,
        1.699515482301,
        0.817530221393,
        1.133074330233,
    ],
    "sinkhorn": [
        0.335838342329,
        -0.939644817944,
        1.751705843592,
        0.823670540015,
        1.198704978327,
    ],
    "linear": [
        0.389726202238,
        -0.411689656665,
        1.469299064243,
        0.761743786037,
        1.218414745166,
    ],
}
TEN_LAYERS = {
    "softmax": [
        0.372144311100,
        -0.615966132935,
        1.174536342791,
        0.425878296354,
        0.737611860490,
    ],
    "l2": [
        0.385350672442,
        -0.525154696721,
        1.258613866847,
        0.479059756635,
        0.790168645666,
    ],
    "sinkhorn": [
        0.329824294399,
        -0.610917171142,
        1.277997690753,
        0.484151779281,
        0.818491618178,
    ],
    "linear": [
        0.337521958431,
        -0.410894752892,
        1.166987069854,
        0.452023339876,
        0.808479131637,
    ],
}
WITH_DEPTH = {
    "softmax": [
        0.422034155468,
        -0.554321629993,
        1.153736077698,
        0.454159682468,
        0.756313074717,
    ],
    "l2": [
        0.407966911194,
        -0.461352827532,
        1.209383738313,
        0.497841830850,
        0.794836728985,
    ],
    "sinkhorn": [
        0.372050297084,
        -0.575438232884,
        1.237977110501,
        0.517323922968,
        0.828614923140,
    ],
    "linear": [
        0.343189797948,
        -0.392826707867,
        1.131511276190,
        0.468228194626,
        0.820117176717,
    ],
}
TWO_HEADS = [
    0.513366838776,
    -0.821297183104,
    1.704884571986,
    0.422639247227,
    0.856258121044,
]
AT_ZERO = {
    "softmax": (
        [[0.1569, -0.0397], [0.1425, 0.1163]],
        [0.13295, -0.35377],
        [0.28998, 0.20064, 0.22506],
    ),
    "l2": (
        [[0.22708031, -0.0582066152], [0.1969903119, 0.1507828707]],
        [0.1430786924, -0.2295764525],
        [0.4192366509, 0.275425297, 0.299133632],
    ),
    "sinkhorn": (
        [[0.2508142621, -0.0907763313], [0.2071251886, 0.182615066]],
        [0.07, -0.35],
        [0.4471627254, 0.2826881883, 0.3434131924],
    ),
    "linear": (
        [[0.15249, -0.05377], [0.16455, 0.18665]],
        [0.067255, -0.025295],
        [0.272718, 0.23403, 0.32271],
    ),
}
ROTATED = scipy.linalg.expm(0.7 * np.array([[0.0, -1.0], [1.0, 0.0]]))


def flow_of(kind, beta=1.0, matrices=(QUERY, KEY, VALUE)):
    return mf.Flow(attention(kind, beta, matrices))


def solved(kind, depth=1.0, mu=None, beta=1.0, matrices=(QUERY, KEY, VALUE), **options):
    """Solve with the options that all tests share, so that they share a program."""
    mu = gaussian() if mu is None else mu
    options = {"save": 3, **PRECISE, **options}
    return mf.solve(flow_of(kind, beta, matrices), mu, depth, **options)


def by_scipy(kind, depths, mean=MEAN, spread=COVARIANCE, beta=1.0, points=None):
    def closure(depth, mean, spread):
        return slope_and_constant(kind, (QUERY, KEY, VALUE), beta, mean, spread)

    return integrated(closure, mean, spread, depths, points)


def every_number_is_finite(path):
    leaves = [path.factors, path.covariances, *jax.tree.leaves(path.along_depth())]
    return all(np.isfinite(leaf).all() for leaf in leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_gaussian_goes_where_an_independent_solver_puts_it(kind):
    path = solved(kind)
    np.testing.assert_allclose(path.depths, [0.0, 0.5, 1.0])
    np.testing.assert_allclose(numbers(path.gaussian(1)), AT_HALF[kind], atol=1e-9)
    np.testing.assert_allclose(numbers(path.gaussian(2)), AT_ONE[kind], atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_velocities_at_depth_zero_have_the_tabulated_values(kind):
    path = solved(kind)
    slope, drift, change = AT_ZERO[kind]
    np.testing.assert_allclose(path.slopes[0], slope, atol=1e-9)
    np.testing.assert_allclose(path.drifts[0], drift, atol=1e-9)
    moved = np.asarray(path.slopes[0] @ path.covariances[0])
    total = moved + moved.T
    np.testing.assert_allclose(total[np.triu_indices(2)], change, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_ten_layers_have_the_tabulated_output(kind):
    path = mf.run_layers(flow_of(kind), gaussian(), 10, step=0.05)
    assert len(path) == 11
    np.testing.assert_allclose(path.depths, 0.05 * np.arange(11), atol=1e-15)
    np.testing.assert_allclose(numbers(path.gaussian(-1)), TEN_LAYERS[kind], atol=1e-9)


@pytest.mark.slow
def test_layers_converge_to_the_flow_at_first_order():
    limit = np.array(AT_HALF["softmax"])[2:]
    errors = []
    for count in (1, 10, 100, 1000):
        path = mf.run_layers(flow_of("softmax"), gaussian(), count, step=0.5 / count)
        errors.append(np.abs(numbers(path.gaussian(-1))[2:] - limit).max())
    np.testing.assert_allclose(
        errors, [2.76e-2, 3.49e-3, 3.59e-4, 3.60e-5], rtol=1.5e-3
    )


@pytest.mark.slow
def test_a_layer_moves_a_gaussian_as_it_moves_quadrature_nodes():
    flow, nodes = flow_of("l2"), mf.quadrature(gaussian(), 40)
    path = mf.run_layers(flow, gaussian(), 2, step=0.4)
    tokens = mf.run_layers(flow, nodes, 2, step=0.4).cloud(-1)
    np.testing.assert_allclose(path.means[-1], tokens.mean(), atol=1e-9)
    np.testing.assert_allclose(path.covariances[-1], tokens.covariance(), atol=1e-9)


def depth_dependent(kind):
    def gamma(depth):
        cosine, sine = jnp.cos(depth), jnp.sin(depth)
        turn = jnp.stack([jnp.stack([cosine, -sine]), jnp.stack([sine, cosine])])
        return KINDS[kind](QUERY * cosine, KEY * (1 + depth / 2), VALUE @ turn)

    return mf.Flow(gamma)


@pytest.mark.parametrize(
    "kind",
    [
        "linear",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("softmax", "l2", "sinkhorn")
        ),
    ],
)
def test_parameters_that_change_with_depth_lead_to_the_tabulated_values(kind):
    path = mf.solve(depth_dependent(kind), gaussian(), 0.5, save=2, **PRECISE)
    np.testing.assert_allclose(numbers(path.gaussian(-1)), WITH_DEPTH[kind], atol=1e-9)


@pytest.mark.slow
def test_two_heads_lead_to_the_tabulated_values():
    eye = np.eye(2)
    heads = mf.MultiHead(
        [
            mf.Softmax([[0.4, 0.0], [0.1, -0.3]], eye, [[1.0, 0.0], [0.0, 0.0]]),
            mf.Softmax([[-0.2, 0.5], [0.0, 0.3]], eye, [[0.0, 0.3], [0.0, 1.0]]),
        ]
    )
    path = mf.solve(mf.Flow(heads), gaussian(), 0.5, save=2, **PRECISE)
    np.testing.assert_allclose(numbers(path.gaussian(-1)), TWO_HEADS, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_mixed_heads_and_a_perceptron_follow_the_equations_in_numpy(seed):
    random = np.random.default_rng(seed)
    kinds, betas = ("softmax", "l2", "sinkhorn", "linear"), (0.8, 1.1, 0.6, 0.5)
    heads = 0.45 * random.standard_normal((4, 3, 3, 3))
    outputs = 0.6 * random.standard_normal((4, 3, 3))
    matrix, shift = 0.4 * random.standard_normal((3, 3)), random.standard_normal(3)
    mean, factor = 0.5 * random.standard_normal(3), random.standard_normal((3, 3))
    spread, points = factor @ factor.T / 3, random.standard_normal((5, 3))

    def closure(depth, mean, spread):
        slope, constant = matrix, shift
        for kind, beta, head, output in zip(kinds, betas, heads, outputs, strict=True):
            query, key, value = head
            found = slope_and_constant(
                kind, (query, key, output @ value), beta, mean, spread
            )
            slope, constant = slope + found[0], constant + found[1]
        return slope, constant

    whole = mf.MultiHead(
        [
            KINDS[kind](*head, beta=beta)
            for kind, head, beta in zip(kinds, heads, betas, strict=True)
        ],
        list(outputs),
    )
    flow = mf.Flow(mf.Sum([whole, perceptron(matrix, shift)]))
    path = mf.solve(flow, mf.Gaussian(mean, spread), 0.4, save=3, **PRECISE)
    expected = integrated(closure, mean, spread, path.depths, points)
    for index, (mean, spread, moved) in enumerate(expected):
        size = np.abs(spread).max()
        np.testing.assert_allclose(path.means[index], mean, atol=1e-9 * size)
        np.testing.assert_allclose(path.covariances[index], spread, atol=1e-9 * size)
        carried = path.transport(path.depths[index])(jnp.asarray(points))
        np.testing.assert_allclose(carried, moved, atol=1e-9 * size)


@pytest.mark.parametrize(
    "kind",
    [
        "softmax",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(KINDS)[1:]),
    ],
)
def test_the_transport_map_carries_points_as_the_velocity_does(kind):
    points = np.array([[1.0, 2.0], [-0.5, 0.1], [3.0, -2.0]])
    path = solved(kind, beta=0.9)
    expected = by_scipy(kind, path.depths, beta=0.9, points=points)
    for index, (_, _, moved) in enumerate(expected):
        carried = path.transport(path.depths[index])(jnp.asarray(points))
        np.testing.assert_allclose(carried, moved, atol=1e-9)


@pytest.mark.slow
def test_tokens_at_quadrature_nodes_flow_as_the_transport_map_says():
    path = solved("softmax", 0.5)
    nodes = mf.quadrature(gaussian(), 24)
    tokens = mf.solve(flow_of("softmax"), nodes, 0.5, save=2, rtol=1e-9, atol=1e-11)
    # Nodes far out have weights too small to matter, and are not where a Gaussian is.
    seen = np.asarray(nodes.weights) > 1e-6
    carried = path.transport(0.5)(nodes.points)
    np.testing.assert_allclose(tokens.points[-1][seen], carried[seen], atol=1e-5)
    found = tokens.cloud(-1).covariance()
    np.testing.assert_allclose(found, path.covariances[-1], atol=1e-6)


@pytest.mark.slow
def test_between_saved_depths_the_gaussian_is_interpolated_at_fourth_order():
    widths, errors = (0.4, 0.2), []
    for width in widths:
        path = solved("softmax", 2 * width)
        exact = by_scipy("softmax", [0.0, width / 2, 2 * width])[1][1]
        errors.append(np.abs(path.at(width / 2).covariance() - exact).max())
    assert errors[0] < 1e-3
    assert np.log2(errors[0] / errors[1]) == pytest.approx(4, abs=0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_logarithm_of_the_determinant_grows_at_twice_the_trace(kind):
    width = 1e-3
    near = solved(kind, 1 + width, save=np.array([0.0, 1 - width, 1 + width]))
    _, below, above = np.linalg.slogdet(near.covariances)[1]
    rate = (above - below) / (2 * width)
    slope = solved(kind).slopes[-1]
    assert rate == pytest.approx(2 * float(jnp.trace(slope)), rel=1e-6)
    volume = np.asarray(near.statistics["log_volume"])
    first = np.linalg.slogdet(COVARIANCE)[1]
    np.testing.assert_allclose(2 * volume[1:] + first, [below, above], atol=1e-12)


def test_softmax_sees_query_and_key_through_their_product_only():
    gauge = np.array([[1.0, 0.4], [-0.7, 2.0]])
    other = (gauge @ QUERY, np.linalg.inv(gauge).T @ KEY, VALUE)
    first, second = solved("softmax"), solved("softmax", matrices=other)
    np.testing.assert_allclose(second.means, first.means, atol=1e-11)
    np.testing.assert_allclose(second.covariances, first.covariances, atol=1e-11)


def test_scaling_the_covariance_is_scaling_the_temperature():
    scale = 7.0
    first = solved("softmax")
    second = solved("softmax", mu=gaussian(MEAN, scale * COVARIANCE), beta=1 / scale)
    np.testing.assert_allclose(second.slopes, first.slopes, atol=1e-11)
    np.testing.assert_allclose(second.means, first.means, atol=1e-11)
    np.testing.assert_allclose(
        second.covariances, scale * first.covariances, atol=1e-10
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_turned_gaussian_under_turned_matrices_flows_turned(kind):
    matrices = (QUERY @ ROTATED.T, KEY @ ROTATED.T, ROTATED @ VALUE @ ROTATED.T)
    mu = gaussian(ROTATED @ MEAN, ROTATED @ COVARIANCE @ ROTATED.T)
    first, second = solved(kind), solved(kind, mu=mu, matrices=matrices)
    means, spreads = first.means @ ROTATED.T, ROTATED @ first.covariances @ ROTATED.T
    np.testing.assert_allclose(second.means, means, atol=1e-10)
    np.testing.assert_allclose(second.covariances, spreads, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_depth_undoes_forward_depth(kind):
    end = solved(kind).gaussian(-1)
    back = solved(kind, (1.0, 0.0), mu=gaussian(end.mean(), end.covariance()))
    np.testing.assert_allclose(back.depths, [1.0, 0.5, 0.0])
    np.testing.assert_allclose(numbers(back.gaussian(1)), AT_HALF[kind], atol=1e-9)
    np.testing.assert_allclose(numbers(back.gaussian(2)), numbers(gaussian()), 1e-9)


def test_negative_depth_is_the_past():
    path = solved("l2", -0.7)
    mean, spread, _ = by_scipy("l2", [0.0, -0.7])[-1]
    np.testing.assert_allclose(path.means[-1], mean, atol=1e-10)
    np.testing.assert_allclose(path.covariances[-1], spread, atol=1e-10)


@pytest.mark.parametrize("kind", ["softmax", "l2", "sinkhorn"])
def test_a_point_mass_moves_by_the_value_matrix(kind):
    path = solved(kind, mu=gaussian(MEAN, np.zeros((2, 2))))
    expected = [scipy.linalg.expm(depth * VALUE) @ MEAN for depth in path.depths]
    np.testing.assert_allclose(path.means, expected, atol=1e-11)
    assert not np.any(path.covariances)
    assert every_number_is_finite(path)


def test_a_point_mass_under_linear_attention_sees_its_own_square():
    path = solved("linear", mu=gaussian(MEAN, np.zeros((2, 2))))
    expected = by_scipy("linear", path.depths, spread=np.zeros((2, 2)))
    np.testing.assert_allclose(path.means, [e[0] for e in expected], atol=1e-11)
    assert not np.any(path.covariances)


def negative_score(direction):
    """Values I and score minus the square of a vector: no blow-up, a limit."""
    query = np.array([direction, [0.0, 0.0]])
    return query, -query, np.eye(2)


@pytest.mark.slow
def test_eigenvalues_stay_positive_and_right_relatively_over_a_million():
    direction = np.array([1.0, 2.0]) / np.sqrt(5)
    matrices = negative_score(direction)
    mu = gaussian(np.zeros(2))
    depths = np.array([0.0, 1e3, 1e6])
    path = solved("softmax", 1e6, mu, 1.0, matrices, save=depths, solver=mf.LongDepth())
    inverse = np.linalg.inv(COVARIANCE)
    exact = [inverse + 2 * t * np.outer(direction, direction) for t in depths]
    values = np.stack([1 / np.linalg.eigvalsh(matrix) for matrix in exact])
    assert np.all(np.asarray(path.statistics["eigenvalues"]) > 0)
    np.testing.assert_allclose(path.statistics["eigenvalues"], values, rtol=1e-8)


@pytest.mark.slow
def test_a_singular_covariance_keeps_its_rank_over_a_million():
    direction, column = np.array([1.0, 2.0]) / np.sqrt(5), np.array([0.6, -1.1])
    mu = mf.Gaussian(np.zeros(2), factor=column[:, None])
    flow = flow_of("softmax", 1.0, negative_score(direction))
    path = mf.solve(flow, mu, 1e6, save=3, solver=mf.LongDepth(), **PRECISE)
    shares = 1 + 2 * path.depths * (direction @ column) ** 2
    exact = np.outer(column, column) / np.asarray(shares)[:, None, None]
    np.testing.assert_allclose(path.covariances, exact, rtol=1e-9)
    assert path.factors.shape == (3, 2, 1)
    assert np.all(np.asarray(path.statistics["eigenvalues"]) > 0)


def test_a_singular_covariance_moves_its_range_and_keeps_its_rank():
    column = np.array([0.6, -1.1])
    spread = np.outer(column, column)
    path = solved("softmax", mu=gaussian(MEAN, spread))
    expected = by_scipy("softmax", path.depths, spread=spread)
    for index, (mean, found, _) in enumerate(expected):
        np.testing.assert_allclose(path.means[index], mean, atol=1e-10)
        np.testing.assert_allclose(path.covariances[index], found, atol=1e-10)
        values = np.linalg.eigvalsh(path.covariances[index])
        assert abs(values[0]) < 1e-14 * values[1]


BLOW_UPS = {
    "softmax": (
        "softmax",
        (np.array([[1.0, 0.3], [0.0, -0.5]]), np.eye(2), np.eye(2)),
        0.47846889952153115,
    ),
    # The range of K does not see the direction in which Q pulls.
    "l2": (
        "l2",
        (
            np.array([[0.0, 1.0], [0.0, 0.0]]),
            np.array([[1.0, 0.0], [0.0, 0.0]]),
            np.diag([0.0, 1.0]),
        ),
        5.0,
    ),
    "linear": (
        "linear",
        (np.array([[1.0, 0.3], [0.0, -0.5]]), np.eye(2), np.eye(2)),
        0.47846889952153115,
    ),
}


@pytest.mark.parametrize("name", BLOW_UPS)
def test_a_blow_up_is_met_where_the_closed_form_has_it(name):
    kind, matrices, exact = BLOW_UPS[name]
    mu = gaussian(np.zeros(2))
    depths = np.array([0.0, exact / 2, 3 * exact])
    with pytest.warns(StoppedEarly, match="blow-up"):
        path = solved(kind, depths[-1], mu, 1.0, matrices, save=depths, rtol=1e-6)
    assert bool(path.status == mf.Status.blow_up_suspected)
    assert path.blow_up is not None
    assert float(path.blow_up) == pytest.approx(exact, rel=1e-6)
    assert len(path) == 3
    assert every_number_is_finite(path)
    assert np.all(np.asarray(path.statistics["trace"]) > 0)
    assert np.asarray(path.statistics["trace"])[-1] > 1e4


def test_a_solve_that_ends_before_a_blow_up_meets_none():
    kind, matrices, exact = BLOW_UPS["softmax"]
    mu = gaussian(np.zeros(2))
    depths = np.array([0.0, (1 - 1e-3) * exact, (1 - 1e-4) * exact])
    path = solved(kind, depths[-1], mu, 1.0, matrices, save=depths)
    assert path.blow_up is None
    traces = np.asarray(path.statistics["trace"])
    np.testing.assert_allclose(traces[1:], [1090.41, 10900.41], atol=5e-3)


def test_long_depth_meets_the_same_blow_up():
    kind, matrices, exact = BLOW_UPS["softmax"]
    mu = gaussian(np.zeros(2))
    with pytest.warns(StoppedEarly, match="blow-up"):
        path = solved(kind, 1e6, mu, 1.0, matrices, solver=mf.LongDepth(), rtol=1e-6)
    assert path.blow_up is not None
    assert float(path.blow_up) == pytest.approx(exact, rel=1e-6)
    assert every_number_is_finite(path)


def test_layers_that_overflow_keep_the_last_finite_gaussian():
    kind, matrices, _ = BLOW_UPS["softmax"]
    with pytest.warns(StoppedEarly, match="not finite"):
        path = mf.run_layers(flow_of(kind, 1.0, matrices), gaussian(), 100, step=1.0)
    assert bool(path.status == mf.Status.not_finite)
    assert len(path) < 100
    assert every_number_is_finite(path)


@pytest.mark.slow
def test_two_fast_solvers_agree_with_the_default():
    for solver in (mf.FixedStep(0.01), mf.LongDepth()):
        path = solved("softmax", solver=solver)
        np.testing.assert_allclose(
            numbers(path.gaussian(-1)), AT_ONE["softmax"], atol=1e-9
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver", [mf.Adaptive(), mf.Stiff()], ids=["Adaptive", "Stiff"]
)
def test_other_adaptive_solvers_agree_with_the_default(solver):
    path = solved("softmax", solver=solver, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(numbers(path.gaussian(-1)), AT_ONE["softmax"], atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["l2", "sinkhorn", "linear"])
def test_long_depth_agrees_with_the_default_for_every_kind(kind):
    path = solved(kind, solver=mf.LongDepth())
    np.testing.assert_allclose(numbers(path.gaussian(-1)), AT_ONE[kind], atol=1e-9)


def orders(errors):
    return np.log2(np.array(errors[:-1]) / np.array(errors[1:]))


def test_equal_steps_are_of_fourth_order():
    errors = []
    for step in (0.5, 0.25, 0.125, 0.0625):
        path = solved("softmax", solver=mf.FixedStep(step))
        errors.append(np.abs(numbers(path.gaussian(-1)) - AT_ONE["softmax"]).max())
    np.testing.assert_allclose(orders(errors)[1:], 4, atol=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2])
def test_splitting_has_its_order(order):
    matrix, shift = np.array([[0.1, -0.6], [0.4, 0.2]]), np.array([0.3, -0.2])
    flow = mf.Flow(mf.Sum([attention("softmax"), perceptron(matrix, shift)]))

    def closure(depth, mean, spread):
        slope, constant = slope_and_constant(
            "softmax", (QUERY, KEY, VALUE), 1.0, mean, spread
        )
        return slope + matrix, constant + shift

    mean, spread, _ = integrated(closure, MEAN, COVARIANCE, [0.0, 1.0])[-1]
    errors = []
    for step in (1 / 8, 1 / 16, 1 / 32):
        solver = mf.flows.Splitting(step, order=order)
        path = mf.solve(flow, gaussian(), 1.0, save=2, solver=solver)
        wrong = [
            np.abs(path.means[-1] - mean),
            np.abs(path.covariances[-1] - spread).ravel(),
        ]
        errors.append(np.concatenate(wrong).max())
    np.testing.assert_allclose(orders(errors), order, atol=0.1)


@pytest.mark.slow
def test_a_schedule_holds_each_map_up_to_its_jump():
    schedule = mf.Schedule([attention("softmax"), attention("l2", 0.7)], [0.0, 0.3])
    path = mf.solve(mf.Flow(schedule), gaussian(), 1.0, save=2, **PRECISE)
    middle = by_scipy("softmax", [0.0, 0.3])[-1]
    mean, spread, _ = by_scipy("l2", [0.3, 1.0], *middle[:2], beta=0.7)[-1]
    np.testing.assert_allclose(path.means[-1], mean, atol=1e-9)
    np.testing.assert_allclose(path.covariances[-1], spread, atol=1e-9)


@pytest.mark.slow
def test_an_interpolated_schedule_blends_the_parameters():
    maps = [attention("softmax"), attention("softmax", 1.5, (KEY, QUERY, -VALUE))]
    schedule = mf.Schedule(maps, [0.0, 1.0], interpolate=True)
    path = mf.solve(mf.Flow(schedule), gaussian(), 1.0, save=2, **PRECISE)

    def closure(depth, mean, spread):
        blend = [
            (1 - depth) * first + depth * second
            for first, second in ((QUERY, KEY), (KEY, QUERY), (VALUE, -VALUE))
        ]
        return slope_and_constant("softmax", blend, 1 + depth / 2, mean, spread)

    mean, spread, _ = integrated(closure, MEAN, COVARIANCE, [0.0, 1.0])[-1]
    np.testing.assert_allclose(path.means[-1], mean, atol=1e-9)
    np.testing.assert_allclose(path.covariances[-1], spread, atol=1e-9)


def test_statistics_describe_the_covariances():
    path = solved("l2")
    found = path.statistics
    values = np.linalg.eigvalsh(path.covariances)[:, ::-1]
    np.testing.assert_allclose(found["eigenvalues"], values, rtol=1e-12)
    np.testing.assert_allclose(found["trace"], values.sum(axis=1), rtol=1e-12)
    for index, spread in enumerate(path.covariances):
        # The mean square of the velocity over the Gaussian, by quadrature.
        mu = gaussian(path.means[index], spread)
        nodes = mf.quadrature(mu, 6)
        velocities = attention("l2")(mu, nodes.points)
        square = np.asarray(nodes.weights) @ np.sum(np.asarray(velocities) ** 2, axis=1)
        assert float(found["speed"][index]) == pytest.approx(np.sqrt(square), rel=1e-9)
    assert np.all(np.diff(found["accepted_steps"]) > 0)


def test_a_trajectory_is_labelled_saved_and_read_again(tmp_path):
    import xarray

    path = solved("sinkhorn")
    path.save(tmp_path / "run")
    with xarray.open_zarr(tmp_path / "run") as found:
        np.testing.assert_array_equal(found.depth, path.depths)
        for name in ("means", "covariances", "linear", "drifts", "slopes", "root"):
            np.testing.assert_array_equal(found[name], getattr(path, name))
        assert found.means.sel(depth=0.5).shape == (2,)
        assert found.status.values.tolist() == [0, 0, 0]
    with pytest.raises(InvalidInput, match="run exists"):
        path.save(tmp_path / "run")


# One program serves the three conditions: each flow below meets one of them.
STOPS = (
    mf.flows.EscapeRadius(5.0),
    mf.flows.SteadyState(0.02),
    mf.StopWhen(lambda depth, mu: (depth > 0.3) & (mu.covariance()[0, 0] > 1.1)),
)
STOPPED = {
    "escaped": (np.diag([0.0, 2.0]), np.zeros((2, 2))),
    "steady": (np.diag([-2.0, -2.0]), np.zeros((2, 2))),
    "condition_met": (np.eye(2) / 2, np.diag([0.5, 0.0])),
}


@pytest.mark.parametrize("name", STOPPED)
def test_conditions_on_a_gaussian_end_the_solve(name):
    value, query = STOPPED[name]
    # Without a query the values pull the mean only; the covariance rests.
    matrices, mean = (query, np.eye(2), value), np.array([1.0, 1.0])
    flow = flow_of("softmax", 1.0, matrices)
    options = {"save": 11, "stop": STOPS, "rtol": 1e-9}
    if name == "escaped":
        with pytest.warns(StoppedEarly, match="radius"):
            path = mf.solve(flow, gaussian(mean), 10.0, **options)
    else:
        path = mf.solve(flow, gaussian(mean), 10.0, **options)
    assert bool(path.status == getattr(mf.Status, name))
    end = float(path.depths[-1])
    assert 0 < end < 10
    if name == "condition_met":
        # With values I/2 the covariance is S (I - t A S)^-1.
        inverse = np.linalg.inv(COVARIANCE) - end * query
        spread = np.linalg.inv(inverse)
        np.testing.assert_allclose(path.covariances[-1], spread, rtol=1e-7)
        assert end > 0.3
        assert spread[0, 0] > 1.1
        return
    mean = scipy.linalg.expm(end * value) @ mean
    np.testing.assert_allclose(path.means[-1], mean, rtol=1e-7)
    np.testing.assert_allclose(path.covariances[-1], COVARIANCE, atol=1e-12)
    if name == "escaped":
        assert np.sqrt(mean @ mean + np.trace(COVARIANCE)) > 5
    else:
        assert np.linalg.norm(value @ mean) < 0.02


def test_the_trajectory_says_how_it_ended():
    path = solved("softmax")
    assert path.message == "At depth 1 the depth asked for was reached."
    assert path.blow_up is None


class Counted(AbstractProgress):
    """Keeps what it is told."""

    def __init__(self):
        self.seen = []

    def update(self, done, total):
        self.seen.append((done, total))


@pytest.mark.slow
def test_progress_is_reported_and_changes_nothing():
    progress = Counted()
    path = solved("softmax", progress=progress)
    np.testing.assert_allclose(numbers(path.gaussian(-1)), AT_ONE["softmax"], atol=1e-9)
    assert progress.seen[-1][0] == progress.seen[-1][1]


def end_numbers(score, spread):
    flow = mf.Flow(mf.Softmax(score, np.eye(2), VALUE))
    path = mf.solve(flow, mf.Gaussian(MEAN, spread), 0.5, save=2, rtol=1e-10)
    mean, spread = path.means[-1], path.covariances[-1]
    return jnp.concatenate([mean, spread.ravel()])


@pytest.mark.slow
def test_jit_and_vmap_agree_with_the_plain_call():
    scores = jnp.asarray([[[0.15, -0.23], [0.27, 0.33]], [[0.4, 0.0], [0.1, -0.3]]])
    spread = jnp.asarray(COVARIANCE)
    plain = np.stack([end_numbers(score, spread) for score in scores])
    jitted = np.stack([jax.jit(end_numbers)(score, spread) for score in scores])
    batched = jax.vmap(end_numbers, in_axes=(0, None))(scores, spread)
    np.testing.assert_allclose(jitted, plain, atol=1e-12)
    np.testing.assert_allclose(batched, plain, atol=1e-9)


@pytest.mark.slow
def test_under_jit_the_states_after_a_blow_up_repeat_the_last_one():
    _, matrices, exact = BLOW_UPS["softmax"]

    @eqx.filter_jit
    def run(mu):
        return mf.solve(flow_of("softmax", 1.0, matrices), mu, 1.0, save=5)

    path = run(gaussian(np.zeros(2)))
    assert len(path) == 5
    assert bool(path.status == mf.Status.blow_up_suspected)
    assert every_number_is_finite(path)
    np.testing.assert_allclose(path.depths[2:], exact, rtol=1e-5)
    np.testing.assert_array_equal(path.covariances[-1], path.covariances[-2])


def differences(function, x, step=1e-5):
    """Central differences of a scalar function of a matrix."""
    found = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[place] = step
        found[place] = (function(x + moved) - function(x - moved)) / (2 * step)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "sinkhorn"])
def test_gradients_agree_with_finite_differences(kind):
    target = np.arange(1.0, 7.0)

    def loss(query):
        flow = mf.Flow(KINDS[kind](query, jnp.asarray(KEY), jnp.asarray(VALUE)))
        path = mf.solve(flow, gaussian(), 0.5, save=2, **PRECISE)
        ends = jnp.concatenate([path.means[-1], path.covariances[-1].ravel()])
        return ends @ target

    gradient = jax.grad(loss)(jnp.asarray(QUERY))
    np.testing.assert_allclose(
        gradient, differences(lambda q: float(loss(q)), QUERY), atol=1e-7
    )


@pytest.mark.slow
def test_gradients_of_layers_agree_with_finite_differences():
    def loss(value):
        flow = mf.Flow(mf.L2(QUERY, KEY, value))
        path = mf.run_layers(flow, gaussian(), 4, step=0.25)
        return path.means[-1][0] + jnp.sum(path.covariances[-1] ** 2)

    gradient = jax.jit(jax.grad(loss))(jnp.asarray(VALUE))
    plain = jax.jit(loss)
    expected = differences(lambda value: float(plain(value)), VALUE)
    np.testing.assert_allclose(gradient, expected, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_is_kept_and_accurate(kind):
    flow = mf.Flow(attention(kind, dtype=np.float32))
    path = mf.solve(flow, gaussian(dtype=np.float32), 1.0, save=2, rtol=1e-6)
    assert path.covariances.dtype == path.means.dtype == jnp.float32
    found = numbers(path.gaussian(-1))
    np.testing.assert_allclose(found, AT_ONE[kind], rtol=0, atol=5e-6)


@pytest.mark.slow
def test_layers_in_single_precision_are_kept_and_accurate():
    flow = mf.Flow(attention("l2", dtype=np.float32))
    path = mf.run_layers(flow, gaussian(dtype=np.float32), 10, step=0.05)
    assert path.covariances.dtype == jnp.float32
    found = numbers(path.gaussian(-1))
    np.testing.assert_allclose(found, TEN_LAYERS["l2"], rtol=0, atol=1e-6)


REFUSED = {
    "sphere": (
        lambda: mf.Flow(attention("softmax"), space=mf.Sphere()),
        {},
        "does not live on Sphere",
    ),
    "noise": (
        lambda: mf.Flow(attention("softmax"), noise=0.1),
        {},
        "without noise",
    ),
    "masked": (
        lambda: mf.Flow(mf.Masked(attention("softmax"), mf.Causal())),
        {},
        "Masked is not affine on a Gaussian",
    ),
    "sigmoid": (
        lambda: mf.Flow(mf.Sigmoid(QUERY, KEY, VALUE)),
        {},
        "Sigmoid is not affine on a Gaussian",
    ),
    "unnormalised": (
        lambda: mf.Flow(mf.Unnormalised(QUERY, KEY, VALUE)),
        {},
        "Unnormalised is not affine on a Gaussian",
    ),
    "activation": (
        lambda: mf.Flow(mf.Perceptron(np.eye(2), np.zeros(2), np.eye(2))),
        {},
        "its derivative changes with the query",
    ),
    "sigmoid in a sum in a schedule": (
        lambda: mf.Flow(
            mf.Schedule(
                [
                    attention("softmax"),
                    mf.Sum([attention("l2"), mf.Sigmoid(QUERY, KEY, VALUE)]),
                ]
            )
        ),
        {},
        "Sigmoid is not affine on a Gaussian",
    ),
    "probes": (
        lambda: flow_of("softmax"),
        {"probes": np.zeros((1, 2))},
        "probes is for token clouds: .* transport",
    ),
    "merge": (
        lambda: flow_of("softmax"),
        {"merge": 0.1},
        "merge is for token clouds",
    ),
    "key": (
        lambda: flow_of("softmax"),
        {"key": jax.random.key(0)},
        "key is for token clouds",
    ),
    "long depth of a schedule": (
        lambda: mf.Flow(mf.Schedule([attention("softmax"), attention("softmax")])),
        {"solver": mf.LongDepth()},
        "LongDepth.* needs the same map at every depth",
    ),
    "dimension": (
        lambda: flow_of("softmax", 1.0, (np.eye(3), np.eye(3), np.eye(3))),
        {},
        "dimension 3",
    ),
    "depth zero": (lambda: flow_of("softmax"), {"depth": 0.0}, "must not be zero"),
    "tolerance": (lambda: flow_of("softmax"), {"rtol": 0.0}, "must be positive"),
    "solver": (lambda: flow_of("softmax"), {"solver": diffrax.Tsit5()}, "Adaptive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gaussian_cannot_do_is_refused_with_the_reason(name, untyped):
    flow, options, message = REFUSED[name]
    with pytest.raises(InvalidInput, match=message):
        mf.solve(flow(), gaussian(), **{"depth": 1.0, **options})


def test_layers_refuse_what_bends_gaussians_and_probes(untyped):
    with pytest.raises(Unsupported, match="Sigmoid is not affine"):
        mf.run_layers(mf.Flow(mf.Sigmoid(QUERY, KEY, VALUE)), gaussian(), 2)
    with pytest.raises(InvalidInput, match="probes is for token clouds"):
        mf.run_layers(flow_of("softmax"), gaussian(), 2, probes=np.zeros((1, 2)))


def test_a_depth_outside_the_trajectory_is_refused():
    path = solved("softmax")
    with pytest.raises(InvalidInput, match="1.5"):
        path.at(1.5)


@pytest.mark.slow
def test_a_flow_given_by_a_factor_is_the_flow_given_by_its_covariance():
    root = root_of(COVARIANCE) @ ROTATED
    first = mf.run_layers(flow_of("l2"), gaussian(), 10, step=0.05)
    other = mf.Gaussian(MEAN, factor=root)
    second = mf.run_layers(flow_of("l2"), other, 10, step=0.05)
    np.testing.assert_allclose(second.covariances, first.covariances, atol=1e-13)
    np.testing.assert_allclose(second.factors[0], root, atol=1e-15)


@pytest.mark.slow
def test_a_map_that_overflows_its_type_in_the_long_clock_is_not_returned():
    identity, zero = jnp.eye(2, dtype=jnp.float32), jnp.zeros(2, jnp.float32)
    growth = mf.Perceptron.affine(identity)
    point = mf.Gaussian(zero, 0 * identity)
    with pytest.warns(StoppedEarly, match="not finite"):
        path = mf.solve(mf.Flow(growth), point, 200.0, solver=mf.LongDepth(), save=3)
    assert path.linear.dtype == jnp.float32
    assert bool(jnp.isfinite(path.linear).all())
