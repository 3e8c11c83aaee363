"""Exact transport between token clouds, and the front door to all methods."""

import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from meanformer.errors import InvalidInput, QuadratureWarning, Unsupported
from meanformer.measures import (
    Gaussian,
    TokenCloud,
    UniformBox,
    UniformSphere,
    pairwise_wasserstein,
    transport_plan,
    wasserstein,
)

X = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5], [0.5, -1.0]])
Y = jnp.array([[0.2, 0.3], [1.5, -0.5], [-0.7, -0.7], [0.0, 2.0]])
W = jnp.array([0.4, 0.3, 0.2, 0.1])
V = jnp.array([0.1, 0.2, 0.3, 0.4])
METHODS = {
    "exact": {},
    "sinkhorn": {"method": "sinkhorn", "epsilon": 0.3},
    "sliced": {"method": "sliced", "directions": 32, "key": jr.key(7)},
}


@pytest.fixture(params=METHODS)
def options(request):
    return METHODS[request.param]


def random_cloud(key, count, dimension, *, shift=0.0):
    key_x, key_w = jr.split(key)
    points = shift + jr.normal(key_x, (count, dimension))
    return TokenCloud(points, jr.dirichlet(key_w, jnp.ones(count)))


def central_difference(function, point, direction, step=1e-6):
    ahead, behind = (function(point + s * step * direction) for s in (1, -1))
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize(
    ("order", "uniform", "weighted"),
    [(1, 1.040147743733, 1.121547697746), (2, 1.061838029080, 1.196662024132)],
)
def test_reference_distances(order, uniform, weighted):
    equal = wasserstein(TokenCloud(X), TokenCloud(Y), order=order)
    unequal = wasserstein(TokenCloud(X, W), TokenCloud(Y, V), order=order)
    np.testing.assert_allclose(equal, uniform, rtol=0, atol=1e-11)
    np.testing.assert_allclose(unequal, weighted, rtol=0, atol=1e-11)


def test_the_reference_plan_is_the_reference_matching():
    plan = transport_plan(TokenCloud(X), TokenCloud(Y)).matrix()
    expected = np.zeros((4, 4))
    expected[[0, 1, 2, 3], [1, 3, 0, 2]] = 0.25
    np.testing.assert_array_equal(plan, expected)


def test_equal_weights_need_no_extra_and_give_the_same(monkeypatch):
    with_pot = wasserstein(TokenCloud(X), TokenCloud(Y), order=3)
    monkeypatch.setitem(sys.modules, "ot", None)
    without = wasserstein(TokenCloud(X), TokenCloud(Y), order=3)
    np.testing.assert_allclose(without, with_pot, rtol=1e-15)


def test_a_missing_extra_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(Unsupported, match=r"pip install 'meanformer\[transport\]'"):
        wasserstein(TokenCloud(X, W), TokenCloud(Y, V))


@pytest.mark.parametrize("dimension", [1, 2])
@pytest.mark.parametrize("order", [1, 2, 3.5])
def test_plans_have_the_right_marginals_and_cost(key, dimension, order):
    mu, nu = (
        random_cloud(k, c, dimension)
        for k, c in zip(jr.split(key), (5, 8), strict=True)
    )
    plan = transport_plan(mu, nu, order=order).matrix()
    moves = np.linalg.norm(mu.points[:, None, :] - nu.points[None, :, :], axis=2)
    np.testing.assert_allclose(plan.sum(1), mu.weights, atol=1e-14)
    np.testing.assert_allclose(plan.sum(0), nu.weights, atol=1e-14)
    distance = wasserstein(mu, nu, order=order)
    np.testing.assert_allclose((plan * moves**order).sum(), distance**order, rtol=1e-12)


def test_distances_are_symmetric_and_vanish_only_on_equal_measures(options):
    mu, nu = TokenCloud(X, W), TokenCloud(Y, V)
    distance = wasserstein(mu, nu, **options)
    assert distance > 0.1
    np.testing.assert_allclose(distance, wasserstein(nu, mu, **options), rtol=1e-10)
    assert wasserstein(mu, mu, **options) == 0


@pytest.mark.parametrize("dimension", [1, 3])
@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_triangle_inequality_holds(key, dimension, order):
    clouds = [
        random_cloud(k, c, dimension)
        for k, c in zip(jr.split(key, 3), (4, 6, 3), strict=True)
    ]
    table = pairwise_wasserstein(clouds, order=order)
    for middle in range(3):
        detour = table[:, middle][:, None] + table[middle][None, :]
        assert (table <= detour + 1e-12).all()


def test_distances_grow_with_the_order(key):
    mu, nu = (random_cloud(k, 6, 2) for k in jr.split(key))
    distances = [float(wasserstein(mu, nu, order=p)) for p in (1, 1.5, 2, 3, 50)]
    assert distances == sorted(distances)
    assert distances[0] < distances[-1]


@pytest.mark.parametrize("weights", [None, W])
@pytest.mark.parametrize("method", ["exact", "sinkhorn"])
def test_a_translation_costs_its_length(weights, method):
    shift = jnp.array([0.3, -0.4])
    mu, nu = TokenCloud(X, weights), TokenCloud(X + shift[None, :], weights)
    np.testing.assert_allclose(wasserstein(mu, nu, method=method), 0.5, rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_common_motions_change_nothing(method):
    rotation = jnp.array([[0.6, -0.8], [0.8, 0.6]])
    shift = jnp.array([[30.0, -20.0]])
    still = turned = METHODS[method]
    if method == "sliced":
        lines = jr.normal(jr.key(7), (32, 2))
        still = {"method": method, "directions": lines}
        turned = {"method": method, "directions": lines @ rotation.T}
    distance = wasserstein(TokenCloud(X, W), TokenCloud(Y, V), **still)
    moved = wasserstein(
        TokenCloud(X @ rotation.T + shift, W),
        TokenCloud(Y @ rotation.T + shift, V),
        **turned,
    )
    np.testing.assert_allclose(moved, distance, rtol=1e-10)


def test_order_and_splitting_of_tokens_do_not_matter(options):
    distance = wasserstein(TokenCloud(X, W), TokenCloud(Y, V), **options)
    order = jnp.array([2, 0, 3, 1])
    shuffled = TokenCloud(X[order], W[order])
    split = TokenCloud(
        jnp.concatenate([X, X[:1]]), jnp.array([0.1, 0.3, 0.2, 0.1, 0.3])
    )
    for same in (shuffled, split):
        again = wasserstein(same, TokenCloud(Y, V), **options)
        np.testing.assert_allclose(again, distance, rtol=1e-10)


SPLITTING = [
    (dimension, method, order)
    for dimension in (1, 2)
    for method, orders in {"exact": (1, 2, 4, 10), "sliced": (2, 10)}.items()
    for order in orders
]
SPLITTING = [(*case, jnp.float64) for case in [*SPLITTING, (2, "sinkhorn", 2)]]
SPLITTING += [(1, "exact", 10, jnp.float32), (2, "exact", 10, jnp.float32)]


@pytest.mark.parametrize(("dimension", "method", "order", "dtype"), SPLITTING)
def test_a_cloud_with_split_atoms_is_at_distance_zero(dimension, method, order, dtype):
    points = jr.normal(jr.key(3), (10, dimension), dtype)
    weights = jnp.full(10, 0.1, dtype)
    parts = jnp.concatenate([0.3 * weights, 0.7 * weights])
    split = TokenCloud(jnp.concatenate([points, points]), parts)
    options = {} if method == "exact" else METHODS[method]
    distance = wasserstein(TokenCloud(points, weights), split, order=order, **options)
    np.testing.assert_allclose(distance, 0, atol=5 * jnp.finfo(dtype).eps)


@pytest.mark.parametrize("order", [2, 10])
@pytest.mark.parametrize("dimension", [1, 2])
def test_light_atoms_far_away_still_count(dimension, order):
    points = jnp.zeros((2, dimension)).at[1].set(1.0)
    light = TokenCloud(points, jnp.array([1 - 1e-12, 1e-12]))
    expected = np.sqrt(dimension) * 1e-12 ** (1 / order)
    distance = wasserstein(TokenCloud(points[:1]), light, order=order)
    np.testing.assert_allclose(distance, expected, rtol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_single(options, dtype):
    half = [TokenCloud(p.astype(dtype)) for p in (X, Y)]
    single = [TokenCloud(p.points.astype(jnp.float32)) for p in half]
    distance = wasserstein(*half, **options)
    assert distance.dtype == dtype
    np.testing.assert_array_equal(
        distance, wasserstein(*single, **options).astype(dtype)
    )


def test_numbers_of_numpy_are_numbers(untyped):
    mu, nu = TokenCloud(X, W), TokenCloud(Y, V)
    lines = {"method": "sliced", "key": jr.key(7)}
    np.testing.assert_array_equal(
        wasserstein(mu, nu, order=np.int64(2)), wasserstein(mu, nu)
    )
    np.testing.assert_array_equal(
        wasserstein(mu, nu, directions=np.int64(8), **lines),
        wasserstein(mu, nu, directions=8, **lines),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "2"}, "order is '2'; it must be a finite number, at least 1"),
        ({"order": True}, "order is True; it must be a finite number"),
        (
            {"method": "sliced", "directions": 2.5, "key": jr.key(0)},
            "directions is 2.5; it must be an integer, 1 or more",
        ),
        (
            {"method": "sinkhorn", "epsilon": "a"},
            "epsilon is 'a'; it must be one positive, finite number",
        ),
        (
            {"method": "sinkhorn", "epsilon": np.ones(2)},
            "epsilon is .*; it must be one positive, finite number",
        ),
    ],
)
def test_options_that_are_no_numbers_are_refused(untyped, options, message):
    with pytest.raises(InvalidInput, match=message):
        wasserstein(TokenCloud(X), TokenCloud(Y), **options)


@pytest.mark.parametrize(
    ("order", "uniform", "weighted"),
    [(1, 1.040147743733, 1.121547697746), (2, 1.061838029080, 1.196662024132)],
)
def test_reference_distances_in_single_precision(order, uniform, weighted):
    x, y, w, v = (array.astype(jnp.float32) for array in (X, Y, W, V))
    equal = wasserstein(TokenCloud(x), TokenCloud(y), order=order)
    unequal = wasserstein(TokenCloud(x, w), TokenCloud(y, v), order=order)
    np.testing.assert_allclose([equal, unequal], [uniform, weighted], atol=1e-5)


def test_absent_tokens_change_neither_value_nor_gradient(options):
    junk = jnp.array([[1e6, -1e6], [3.0, 4.0]])
    padded_points = jnp.concatenate([junk[:1], X, junk[1:]])
    padded_weights = jnp.concatenate([jnp.zeros(1), W, jnp.zeros(1)])

    def distance(points, weights):
        return wasserstein(TokenCloud(points, weights), TokenCloud(Y, V), **options)

    value, gradients = jax.value_and_grad(distance, (0, 1))(X, W)
    padded, padded_gradients = jax.value_and_grad(distance, (0, 1))(
        padded_points, padded_weights
    )
    np.testing.assert_allclose(padded, value, rtol=1e-12)
    for gradient, padded_gradient in zip(gradients, padded_gradients, strict=True):
        np.testing.assert_allclose(padded_gradient[1:5], gradient, atol=1e-9)
        assert (padded_gradient[np.array([0, 5])] == 0).all()


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("weights", [None, W])
def test_the_gradient_in_the_points_agrees_with_differences(key, order, weights):
    def distance(points):
        return wasserstein(TokenCloud(points, weights), TokenCloud(Y, V), order=order)

    # Shifted, because between X and Y with equal weights two plans are optimal.
    points, direction = X + 0.1 * jr.normal(jr.key(5), X.shape), jr.normal(key, X.shape)
    slope = jnp.vdot(jax.grad(distance)(points), direction)
    expected = central_difference(distance, points, direction)
    np.testing.assert_allclose(slope, expected, rtol=1e-6)


@pytest.mark.parametrize("dimension", [1, 2])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_gradient_in_the_weights_agrees_with_differences(key, dimension, order):
    mu, nu = (
        random_cloud(k, c, dimension)
        for k, c in zip(jr.split(key), (4, 5), strict=True)
    )

    def distance(weights):
        return wasserstein(TokenCloud(mu.points, weights), nu, order=order)

    direction = jnp.array([1.0, -2.0, 0.5, 0.5])
    slope = jnp.vdot(jax.grad(distance)(mu.weights), direction)
    expected = central_difference(distance, mu.weights, direction, 1e-7)
    np.testing.assert_allclose(slope, expected, rtol=1e-6)


def test_at_equal_weights_the_gradient_in_the_weights_is_a_subgradient():
    """The squared distance is convex in the weights; its kinks are at such points."""
    equal = jnp.full(4, 0.25)

    def cost(weights):
        return wasserstein(TokenCloud(X, weights), TokenCloud(Y)) ** 2

    gradient = jax.grad(cost)(equal)
    for direction in jr.normal(jr.key(0), (10, 4)):
        change = 0.05 * (direction - direction.mean()) / jnp.abs(direction).max()
        assert cost(equal + change) >= cost(equal) + gradient @ change - 1e-12


def test_at_distance_zero_the_gradient_is_zero(options):
    def distance(points):
        return wasserstein(TokenCloud(points, W), TokenCloud(X, W), **options)

    value, gradient = jax.value_and_grad(distance)(X)
    assert value == 0
    assert (gradient == 0).all()


def test_touching_tokens_have_finite_gradients(options):
    targets = Y.at[0].set(X[0])

    def distance(points):
        return wasserstein(TokenCloud(points), TokenCloud(targets), **options)

    assert jnp.isfinite(jax.grad(distance)(X)).all()


def test_compiled_values_and_gradients_agree_with_plain_ones(options):
    def distance(clouds):
        return wasserstein(*clouds, **options)

    clouds = TokenCloud(X, W), TokenCloud(Y, V)
    value, gradient = eqx.filter_value_and_grad(distance)(clouds)
    compiled = eqx.filter_jit(eqx.filter_value_and_grad(distance))(clouds)
    np.testing.assert_allclose(compiled[0], value, rtol=1e-10)
    for ours, theirs in zip(
        jax.tree.leaves(compiled[1]), jax.tree.leaves(gradient), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)


def test_batches_agree_with_single_calls(options):
    points = jnp.stack([X, 2 * X, X + 1.0])

    def distance(points):
        return wasserstein(TokenCloud(points, W), TokenCloud(Y, V), **options)

    expected = jnp.stack([distance(single) for single in points])
    np.testing.assert_allclose(jax.vmap(distance)(points), expected, rtol=1e-10)


def test_single_precision_is_kept(options):
    single, double = (
        (TokenCloud(X.astype(t), W.astype(t)), TokenCloud(Y.astype(t), V.astype(t)))
        for t in (jnp.float32, jnp.float64)
    )
    lines = {"directions": jnp.eye(2)} if "key" in options else options
    lines = {"method": "sliced", **lines} if "key" in options else lines
    distance = wasserstein(*single, **lines)
    assert distance.dtype == jnp.float32
    np.testing.assert_allclose(distance, wasserstein(*double, **lines), rtol=2e-5)


@pytest.mark.parametrize("method", ["exact", "sinkhorn"])
def test_clouds_of_one_token_are_as_far_as_their_points(method):
    mu, nu = TokenCloud(jnp.array([[1.0, 2.0]])), TokenCloud(jnp.array([[4.0, 6.0]]))
    distance = wasserstein(mu, nu, **METHODS[method])
    np.testing.assert_allclose(distance, 5.0, rtol=1e-12)


def test_clouds_of_different_sizes_are_compared():
    mu, nu = TokenCloud(jnp.array([[0.0, 0.0]])), TokenCloud(X)
    expected = np.sqrt((X**2).sum(axis=1).mean())
    np.testing.assert_allclose(wasserstein(mu, nu), expected, rtol=1e-14)


@pytest.mark.parametrize("scale", [1e-100, 1e100])
def test_high_orders_neither_overflow_nor_underflow(scale):
    mu, nu = TokenCloud(scale * X, W), TokenCloud(scale * Y, V)
    distance, gradient = jax.value_and_grad(
        lambda points: wasserstein(TokenCloud(points, W), nu, order=40)
    )(mu.points)
    expected = scale * wasserstein(TokenCloud(X, W), TokenCloud(Y, V), order=40)
    np.testing.assert_allclose(distance, expected, rtol=1e-12)
    assert jnp.isfinite(gradient).all()


def test_the_pairwise_matrix_holds_all_distances(key):
    clouds = [
        random_cloud(k, c, 2) for k, c in zip(jr.split(key, 3), (2, 5, 3), strict=True)
    ]
    table = pairwise_wasserstein(clouds, order=1)
    np.testing.assert_array_equal(table, table.T)
    np.testing.assert_array_equal(jnp.diag(table), 0)
    np.testing.assert_allclose(table[0, 2], wasserstein(clouds[0], clouds[2], order=1))
    assert pairwise_wasserstein(clouds[:1]).shape == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 0.5}, "order is 0.5; it must be a finite number, at least 1"),
        ({"order": float("inf")}, "order is inf"),
        ({"method": "simplex"}, "method is 'simplex'; it must be one of"),
        ({"epsilon": 0.1}, "epsilon is given with method='exact'; it belongs to"),
        ({"key": jr.key(0)}, "directions or key is given with method='exact'"),
        ({"method": "sliced"}, "needs a key"),
        (
            {"method": "sliced", "directions": 0},
            "directions is 0; it must be 1 or more",
        ),
        ({"method": "sliced", "directions": jnp.zeros((2, 2))}, "zero row"),
        ({"method": "sliced", "directions": jnp.ones((2, 3))}, r"shape \(2, 3\)"),
        ({"method": "sinkhorn", "order": 1}, "order must be 2"),
        (
            {"method": "sinkhorn", "epsilon": 0.0},
            "epsilon is 0.0; it must be one positive, finite number",
        ),
        (
            {"method": "sinkhorn", "epsilon": -1.0},
            "epsilon is -1.0; it must be one positive, finite number",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options, message):
    with pytest.raises(InvalidInput, match=message):
        wasserstein(TokenCloud(X), TokenCloud(Y), **options)


def test_different_dimensions_are_refused():
    with pytest.raises(
        InvalidInput, match="mu lives in dimension 2, nu in dimension 1"
    ):
        wasserstein(TokenCloud(X), TokenCloud(Y[:, :1]))


def test_different_types_are_refused():
    with pytest.raises(InvalidInput, match="mu is float64, nu is float32"):
        wasserstein(TokenCloud(X), TokenCloud(Y.astype(jnp.float32)))


def told_error(warned) -> float:
    (message,) = (str(one.message) for one in warned)
    return float(re.search(r"differs by (\S+) from", message)[1])


@pytest.mark.slow
def test_a_distance_between_unlike_measures_tells_its_error():
    box, normal = UniformBox([0.0], [1.0]), Gaussian([0.0], [[1.0]])
    with pytest.warns(
        QuadratureWarning, match="UniformBox and a Gaussian .* 768 tok"
    ) as w:
        distance = wasserstein(box, normal)
    # On the line the distance is that of the quantiles, here E[(q(U) - U)^2].
    expected = np.sqrt(1 + 1 / 3 - 1 / np.sqrt(np.pi))
    error = abs(float(distance) - expected)
    assert error < 1e-3
    assert told_error(w) / 3 < error < 3 * told_error(w)


def test_a_distance_from_a_cloud_needs_nodes_of_the_other_measure_only():
    box = UniformBox([0.0, 0.0], [1.0, 1.0])
    with pytest.warns(QuadratureWarning, match="between 784 and 1 tokens") as warned:
        distance = wasserstein(box, TokenCloud([[0.0, 0.0]]))
    np.testing.assert_allclose(distance, np.sqrt(2 / 3), rtol=1e-12)
    assert told_error(warned) < 1e-12
    with pytest.warns(QuadratureWarning, match="between 2 and 1 tokens"):
        pair = wasserstein(UniformSphere(1), TokenCloud([[0.0]]), order=1)
    np.testing.assert_allclose(pair, 1.0, rtol=1e-12)


def test_a_distance_from_a_continuous_measure_has_a_gradient():
    box = UniformBox([0.0, 0.0], [1.0, 1.0])
    point = jnp.array([0.2, -0.4])
    found = jax.grad(lambda point: wasserstein(TokenCloud(point[None]), box))(point)
    away = point - 0.5
    np.testing.assert_allclose(found, away / jnp.sqrt(away @ away + 1 / 6), rtol=1e-12)


def test_distances_without_few_nodes_or_without_numbers_are_refused():
    large = UniformBox(np.zeros(9), np.ones(9))
    with pytest.raises(Unsupported, match="of dimension 9 has no quadrature of few"):
        wasserstein(large, Gaussian(np.zeros(9), np.eye(9)))
    with pytest.raises(Unsupported, match="Gaussian is traced.*under jit pass quad"):
        jax.jit(lambda mean: wasserstein(Gaussian(mean, jnp.eye(2)), TokenCloud(X)))(
            jnp.zeros(2)
        )


def test_measures_without_an_exact_plan_are_refused():
    with pytest.raises(Unsupported, match="mu is a Gaussian"):
        transport_plan(Gaussian(jnp.zeros(2), jnp.eye(2)), TokenCloud(X))


def test_clouds_above_the_limit_are_sent_to_the_other_methods():
    large = TokenCloud(jnp.zeros((4001, 2)))
    with pytest.raises(InvalidInput, match=r'have 4001; use method="sinkhorn" or'):
        wasserstein(large, large)


def test_an_empty_list_has_no_pairwise_matrix():
    with pytest.raises(InvalidInput, match="measures is empty"):
        pairwise_wasserstein([])
