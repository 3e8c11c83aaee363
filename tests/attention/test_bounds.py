"""A priori bounds: reference values, validity on random clouds, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from map_zoo import cast
from meanformer.attention import (
    L2,
    Blocks,
    Causal,
    Hardmax,
    LayerNorm,
    Linear,
    Masked,
    MultiHead,
    Prefix,
    Residual,
    Sigmoid,
    Sinkhorn,
    Softmax,
    StrictCausal,
    Sum,
    Unnormalised,
    Window,
    compose,
)
from meanformer.attention.bounds import (
    lipschitz_bounds,
    speed_bound,
    stability_constant,
)
from meanformer.attention.lipschitz import local_lipschitz
from meanformer.errors import InvalidInput, Overflow, Unsupported
from meanformer.measures import TokenCloud
from reference import (
    KEY,
    QUERY,
    RADIUS,
    SCORE_NORM,
    SECOND_HEAD,
    VALUE,
    VALUE_NORM,
)

SOFTMAX = Softmax(QUERY, KEY, VALUE)
TALL = np.array([[0.3, -0.4], [0.8, 0.1], [0.2, 0.5]])
BIASED = {"query_bias": np.array([0.4, -0.7]), "value_bias": np.array([0.2, 0.3])}


def test_the_bounds_in_the_table_are_reproduced():
    bounds = lipschitz_bounds(SOFTMAX, RADIUS, 4)
    close = {"atol": 1e-10, "rtol": 0}
    np.testing.assert_allclose(bounds.by_count, 3.353160065626017, **close)
    np.testing.assert_allclose(bounds.by_count_published, 4.314759969199783, **close)
    np.testing.assert_allclose(bounds.mean_field, 5.634562259378124, **close)
    np.testing.assert_allclose(bounds.mean_field_loose, 6.537343161349541, **close)
    np.testing.assert_allclose(bounds.upper, bounds.by_count, **close)
    assert bounds.lower is None


def test_the_bounds_in_single_precision_have_five_digits():
    bounds = lipschitz_bounds(cast(SOFTMAX, jnp.float32), RADIUS, 4)
    expected = {
        "by_count": 3.353160065626017,
        "by_count_published": 4.314759969199783,
        "mean_field": 5.634562259378124,
        "mean_field_loose": 6.537343161349541,
    }
    for name, value in expected.items():
        assert getattr(bounds, name).dtype == jnp.float32
        np.testing.assert_allclose(getattr(bounds, name), value, rtol=0, atol=1e-5)


def test_the_stability_constant_is_the_sum_of_its_two_parts():
    strength = SCORE_NORM * RADIUS**2
    bounds = lipschitz_bounds(SOFTMAX, RADIUS, 4)
    np.testing.assert_allclose(bounds.in_query, VALUE_NORM * strength, rtol=1e-12)
    in_measure = VALUE_NORM * (1 + 2 * strength) * np.exp(2 * strength)
    np.testing.assert_allclose(bounds.in_measure, in_measure, rtol=1e-12)
    constant = stability_constant(SOFTMAX, RADIUS)
    np.testing.assert_allclose(constant, bounds.in_query + in_measure, rtol=1e-12)


def test_the_bound_in_the_query_is_attained_by_two_opposite_masses():
    left, sizes, _ = np.linalg.svd(KEY.T @ QUERY)
    direction = RADIUS * left[:, 0]
    gamma = Softmax(QUERY, KEY, np.eye(2))
    cloud = TokenCloud(np.stack([direction, -direction]))
    derivative = jax.jacfwd(lambda x: gamma(cloud, x[None])[0])(jnp.zeros(2))
    bound = lipschitz_bounds(gamma, RADIUS, 2).in_query
    np.testing.assert_allclose(np.linalg.norm(derivative, 2), bound, rtol=1e-12)
    np.testing.assert_allclose(bound, sizes[0] * RADIUS**2, rtol=1e-12)


@pytest.mark.slow
def test_with_weights_the_count_is_replaced_by_the_smallest_weight():
    beta, weights = np.log(1000) / 2, [1e-3, 1 - 1e-3]
    gamma = Softmax([[-1.0]], [[1.0]], [[1.0]], beta=beta)
    measured = local_lipschitz(gamma, TokenCloud([[-1.0], [1.0]], weights))
    by_count = lipschitz_bounds(gamma, 1.0, 2).by_count
    np.testing.assert_allclose(measured, 70.55, atol=0.005)
    np.testing.assert_allclose(by_count, 10.65, atol=0.005)
    bounds = lipschitz_bounds(gamma, 1.0, 2, weights=weights)
    assert by_count < measured <= bounds.upper
    expected = np.sqrt(3 * (beta**2 * 1001 + 1000))
    np.testing.assert_allclose(bounds.by_count, expected, rtol=1e-12)


def test_the_constants_of_l2_are_the_tabulated_ones():
    for gamma, beta in (
        (L2(QUERY, KEY, VALUE), 1.0),
        (L2(QUERY, KEY, VALUE, half=True), 0.5),
    ):
        bounds = lipschitz_bounds(gamma, RADIUS, 4)
        query, key = np.linalg.norm(QUERY, 2), np.linalg.norm(KEY, 2)
        in_query = 2 * beta * VALUE_NORM * SCORE_NORM * RADIUS**2
        reach = (query + key) * RADIUS
        in_measure = VALUE_NORM * (1 + 4 * beta * key * reach * RADIUS)
        in_measure *= np.exp(beta * reach**2)
        np.testing.assert_allclose(bounds.in_query, in_query, rtol=1e-12)
        np.testing.assert_allclose(bounds.in_measure, in_measure, rtol=1e-12)
        assert bounds.by_count_published is None


def test_a_bias_of_the_queries_adds_to_the_slope_of_the_score():
    bias = BIASED["query_bias"]
    slope = SCORE_NORM * RADIUS + np.linalg.norm(bias @ KEY)
    in_measure = VALUE_NORM * (1 + 2 * slope * RADIUS) * np.exp(2 * slope * RADIUS)
    found = lipschitz_bounds(Softmax(QUERY, KEY, VALUE, **BIASED), RADIUS, 4)
    np.testing.assert_allclose(found.in_measure, in_measure, rtol=1e-12)
    key = np.linalg.norm(KEY, 2)
    reach = (np.linalg.norm(QUERY, 2) + key) * RADIUS + np.linalg.norm(bias)
    in_measure = VALUE_NORM * (1 + 4 * key * reach * RADIUS) * np.exp(reach**2)
    found = lipschitz_bounds(L2(QUERY, KEY, VALUE, **BIASED), RADIUS, 4)
    np.testing.assert_allclose(found.in_measure, in_measure, rtol=1e-12)


def test_the_layer_of_kim_has_the_bounds_of_the_values_it_stands_for():
    kim = lipschitz_bounds(L2(KEY, KEY, VALUE, value_map="kim"), RADIUS, 4)
    plain = L2(KEY, KEY, VALUE @ KEY.T @ KEY / np.sqrt(2))
    expected = lipschitz_bounds(plain, RADIUS, 4)
    np.testing.assert_allclose(kim.mean_field, expected.mean_field, rtol=1e-12)
    np.testing.assert_allclose(kim.by_count, expected.by_count, rtol=1e-12)


def test_the_bounds_by_count_of_a_network_are_made_of_those_of_its_layers():
    def by_count(gamma, radius=RADIUS):
        return lipschitz_bounds(gamma, radius, 4).by_count

    moved = Residual(SOFTMAX, -0.5)
    first = 1 + 0.5 * by_count(SOFTMAX)
    np.testing.assert_allclose(by_count(moved), first, rtol=1e-12)
    last = by_count(SOFTMAX, RADIUS * (1 + VALUE_NORM / 2))
    np.testing.assert_allclose(by_count(SOFTMAX @ moved), last * first, rtol=1e-12)


def test_sinkhorn_has_a_bound_in_the_query_and_a_lower_one_only():
    gamma = Sinkhorn(QUERY, KEY, VALUE)
    bounds = lipschitz_bounds(gamma, RADIUS, 4)
    in_query = 2 * VALUE_NORM * SCORE_NORM * RADIUS**2
    np.testing.assert_allclose(bounds.in_query, in_query, rtol=1e-12)
    np.testing.assert_allclose(bounds.lower, VALUE_NORM, rtol=1e-12)
    assert bounds.upper is None
    with pytest.raises(Unsupported, match="measure it"):
        stability_constant(gamma, RADIUS)


MAPS = {
    "softmax": SOFTMAX,
    "softmax with biases": Softmax(QUERY, KEY, VALUE, beta=2.0, **BIASED),
    "repulsive": Softmax(QUERY, KEY, VALUE, beta=-1.5, allow_negative_beta=True),
    "tall values": Softmax(TALL, TALL[::-1], TALL),
    "l2": L2(QUERY, KEY, VALUE),
    "l2 with biases": L2(QUERY, KEY, VALUE, **BIASED),
    "kim": L2(KEY, KEY, VALUE, value_map="kim"),
    "linear": Linear(QUERY, KEY, VALUE, **BIASED),
    "unnormalised": Unnormalised(QUERY, KEY, VALUE, **BIASED),
    "sigmoid": Sigmoid(QUERY, KEY, VALUE, bias=0.5, **BIASED),
    "repulsive linear": Linear(QUERY, KEY, VALUE, beta=-1.5, allow_negative_beta=True),
    "causal": Masked(SOFTMAX, Causal()),
    "window": Masked(SOFTMAX, Window(0.3)),
    "prefix": Masked(SOFTMAX, Prefix(0.5), divide=True),
    "blocks": Masked(L2(QUERY, KEY, VALUE), Blocks([0.4])),
    "masked linear": Masked(Linear(QUERY, KEY, VALUE)),
    "divided sigmoid": Masked(Sigmoid(QUERY, KEY, VALUE), divide=True),
    "heads": MultiHead([SOFTMAX, L2(KEY, QUERY, SECOND_HEAD)]),
    "heads with outputs": MultiHead([Softmax(TALL, TALL, TALL)], [TALL.T]),
    "masked heads": Masked(MultiHead([Softmax(TALL, TALL, TALL)], [TALL.T])),
    "sum": Sum([SOFTMAX, Sigmoid(KEY, QUERY, VALUE)]),
    "residual": Residual(SOFTMAX, 0.5),
    "network": compose(Residual(Sigmoid(QUERY, KEY, VALUE)), Residual(SOFTMAX)),
}


@pytest.mark.parametrize("name", MAPS)
def test_no_random_cloud_exceeds_the_bounds(name):
    gamma, random = MAPS[name], np.random.default_rng(7)
    for _ in range(3):
        points = random.normal(size=(5, 2))
        points *= RADIUS / np.linalg.norm(points, axis=1).max()
        weights = random.dirichlet(np.full(5, 0.3)) + 1e-4
        cloud = TokenCloud(
            points, weights / weights.sum(), positions=np.arange(1, 6) / 5
        )
        bounds = lipschitz_bounds(gamma, RADIUS, 5, weights=cloud.weights)
        measured = local_lipschitz(gamma, cloud, method="svd")
        assert measured <= bounds.mean_field * (1 + 1e-12)
        assert bounds.by_count is None or measured <= bounds.by_count * (1 + 1e-12)
        values = gamma(cloud, cloud.points, positions=cloud.positions)
        speeds = np.linalg.norm(values, axis=1)
        assert speeds.max() <= speed_bound(gamma, RADIUS) * (1 + 1e-12)


def line_map(kind, **options):
    return kind([[0.8]], [[1.5]], [[0.6]], beta=0.7, **options)


LINE_BIASES = {"query_bias": [0.3], "value_bias": [0.2]}
CUBE, STEEP = line_map(Linear, **LINE_BIASES), line_map(Unnormalised, **LINE_BIASES)
# On the line every term of these bounds has its largest value at the ball's end point.
ATTAINED = {
    "linear": CUBE,
    "unnormalised": STEEP,
    "shifted": line_map(Unnormalised, shift=0.4),
    "masked": Masked(CUBE),
    "heads": MultiHead([CUBE, STEEP], [[[2.0]], [[0.5]]]),
    "masked heads": Masked(MultiHead([CUBE], [[[2.0]]])),
    "sum": Sum([CUBE, STEEP]),
    "residual": Residual(STEEP, 0.5),
    "two layers": compose(line_map(Linear), STEEP),
    "three layers": compose(CUBE, Residual(CUBE, 0.1), CUBE),
}


@pytest.mark.parametrize("name", ATTAINED)
def test_one_token_on_the_line_attains_the_bounds_of_what_has_no_denominator(name):
    gamma, radius, place = ATTAINED[name], 0.9, jnp.ones(1)
    cloud = TokenCloud([[radius]], positions=place)

    def image(token, query):
        return gamma(cloud.moved(token), query, positions=place)[0, 0]

    token = cloud.points
    in_measure, in_query = jax.grad(image, (0, 1))(token, token)
    bounds = lipschitz_bounds(gamma, radius, 1)
    exact = {"rtol": 1e-12}
    np.testing.assert_allclose(bounds.in_query, in_query[0, 0], **exact)
    np.testing.assert_allclose(bounds.in_measure, in_measure[0, 0], **exact)
    np.testing.assert_allclose(speed_bound(gamma, radius), image(token, token), **exact)


def test_the_bounds_of_sigmoid_attention_are_those_of_its_slope():
    gamma = Sigmoid(QUERY, KEY, np.eye(2))
    left, _, right = np.linalg.svd(gamma.score)
    cloud = TokenCloud(RADIUS * np.stack([left[:, 0], -left[:, 0]]))
    derivative = jax.jacfwd(lambda x: gamma(cloud, x[None])[0])(jnp.zeros(2))
    bounds = lipschitz_bounds(gamma, RADIUS, 2)
    np.testing.assert_allclose(bounds.in_query, np.linalg.norm(derivative, 2))
    # A token's own change, where the sigmoid is steepest and where it is one.
    steepest = np.linalg.norm(derivative @ right[0])
    np.testing.assert_allclose(bounds.in_measure, 1 + steepest)


def test_a_mask_multiplies_the_second_term_by_hardys_factor():
    plain = lipschitz_bounds(SOFTMAX, RADIUS, 4)
    for order, factor in ((2.0, 2.0), (3.0, 1.5)):
        masked = lipschitz_bounds(Masked(SOFTMAX), RADIUS, 4, order=order)
        np.testing.assert_allclose(
            masked.in_measure, factor * plain.in_measure, rtol=1e-12
        )
        np.testing.assert_allclose(masked.by_count, plain.by_count, rtol=1e-12)
        assert masked.mean_field_loose is None
    gate = Sigmoid(QUERY, KEY, VALUE)
    divided = lipschitz_bounds(Masked(gate, divide=True), RADIUS, 4).in_measure
    plain = lipschitz_bounds(gate, RADIUS, 4).in_measure
    np.testing.assert_allclose(divided, 2 * plain, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5, 12])
def test_random_causal_layers_stay_well_below_their_bound(count):
    random = np.random.default_rng(count)
    places = np.arange(1, count + 1) / count

    @jax.jit
    @jax.vmap
    def ratio(points, weights, query, value):
        causal = Masked(Softmax(query, np.eye(3), value))
        cloud = TokenCloud(points, weights, positions=places)
        bound = lipschitz_bounds(causal, cloud.radius(), count).mean_field
        return local_lipschitz(causal, cloud, method="svd") / bound

    ratios = ratio(
        random.normal(size=(150, count, 3)) * random.uniform(size=(150, 1, 1)),
        random.dirichlet(np.ones(count), size=150),
        random.normal(size=(150, 3, 3)),
        random.normal(size=(150, 3, 3)),
    )
    assert np.max(ratios) <= 0.75


def test_at_order_one_the_masked_bound_fails_like_a_logarithm():
    assert lipschitz_bounds(Masked(SOFTMAX), RADIUS, 4, order=1.0).mean_field is None
    count = 50
    running_mean = Masked(Softmax([[0.0]], [[0.0]], [[1.0]]))
    places = np.arange(1, count + 1) / count
    cloud = TokenCloud(np.zeros((count, 1)), positions=places)
    move = jnp.zeros((count, 1)).at[0].set(1.0)
    _, change = jax.jvp(
        lambda x: running_mean(cloud.moved(x), x, positions=cloud.positions),
        (cloud.points,),
        (move,),
    )
    harmonic = np.sum(1 / np.arange(1, count + 1))
    np.testing.assert_allclose(np.abs(change).sum(), harmonic, rtol=1e-12)


def test_a_strict_mask_has_no_bound_free_of_the_weights():
    strict = Masked(SOFTMAX, StrictCausal())
    assert lipschitz_bounds(strict, RADIUS, 3).mean_field is None
    without = lipschitz_bounds(Masked(SOFTMAX), RADIUS, 3).mean_field
    weights = np.array([1e-6, 0.5, 0.5 - 1e-6])
    cloud = TokenCloud(
        np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5]]),
        weights,
        positions=np.array([0.2, 0.6, 1.0]),
    )
    measured = local_lipschitz(strict, cloud, method="svd")
    assert measured > without
    assert measured <= lipschitz_bounds(strict, RADIUS, 3, weights=weights).by_count


def test_speeds_are_those_of_the_radius_bound():
    for kind in (Softmax, L2, Sinkhorn, Sigmoid, Hardmax):
        speed = speed_bound(kind(QUERY, KEY, VALUE), 2.0)
        np.testing.assert_allclose(speed, 2 * VALUE_NORM, rtol=1e-12)
        biased = speed_bound(kind(QUERY, KEY, VALUE, value_bias=[3.0, -4.0]), 2.0)
        np.testing.assert_allclose(biased, 2 * VALUE_NORM + 5, rtol=1e-12)
    heads = MultiHead([SOFTMAX, Softmax(KEY, QUERY, SECOND_HEAD)])
    np.testing.assert_allclose(speed_bound(heads, 2.0), 2 * (VALUE_NORM + 0.3))
    linear = speed_bound(Linear(QUERY, KEY, VALUE, beta=3.0), 2.0)
    np.testing.assert_allclose(linear, 3 * VALUE_NORM * SCORE_NORM * 8, rtol=1e-12)


def test_kinds_without_a_bound_are_refused():
    with pytest.raises(Unsupported, match="LayerNorm"):
        lipschitz_bounds(LayerNorm(), 1.0, 4)
    with pytest.raises(Unsupported, match="not continuous"):
        lipschitz_bounds(Hardmax(QUERY, KEY, VALUE), 1.0, 4)
    with pytest.raises(Unsupported, match="feature map"):
        lipschitz_bounds(Linear(QUERY, KEY, VALUE, feature_map=jnp.exp), 1.0, 4)
    column = Sinkhorn(QUERY, KEY, VALUE, half_steps=2, end_on="column")
    with pytest.raises(Unsupported, match="column"):
        lipschitz_bounds(column, 1.0, 4)


def test_wrong_numbers_are_named():
    with pytest.raises(InvalidInput, match="radius is -1"):
        lipschitz_bounds(SOFTMAX, -1.0, 4)
    with pytest.raises(InvalidInput, match="count is 0"):
        lipschitz_bounds(SOFTMAX, 1.0, 0)
    with pytest.raises(InvalidInput, match="order is 0.5"):
        lipschitz_bounds(SOFTMAX, 1.0, 4, order=0.5)
    with pytest.raises(InvalidInput, match="weights has shape"):
        lipschitz_bounds(SOFTMAX, 1.0, 4, weights=[0.5, 0.5])


def test_a_bound_too_large_for_the_type_is_never_infinite():
    bounds = lipschitz_bounds(SOFTMAX, 50.0, 4)
    assert bounds.mean_field is None
    np.testing.assert_allclose(bounds.upper, bounds.by_count)
    with pytest.raises(Overflow, match="radius 50"):
        stability_constant(SOFTMAX, 50.0)
    steep = Unnormalised(QUERY, KEY, VALUE)
    assert lipschitz_bounds(steep, 100.0, 3).in_query is None
    with pytest.raises(Overflow, match="the speed of Unnormalised at radius 100"):
        speed_bound(steep, 100.0)


def test_bounds_can_be_compiled_in_the_radius():
    gamma = Softmax(QUERY, QUERY, 2 * np.eye(2))

    @jax.jit
    def bounds(radius):
        found = lipschitz_bounds(gamma, radius, 4)
        assert found.lower is None
        assert found.lower_cloud is None
        return found.by_count, found.mean_field

    plain = lipschitz_bounds(gamma, RADIUS, 4)
    assert plain.lower_cloud is not None
    np.testing.assert_allclose(bounds(RADIUS), [plain.by_count, plain.mean_field])


def test_the_stability_constant_is_differentiable_and_keeps_its_type():
    def constant(beta):
        return stability_constant(Softmax(QUERY, KEY, VALUE, beta=beta), RADIUS)

    slope = jax.jit(jax.grad(constant))(jnp.asarray(1.0))
    numerical = (constant(1 + 1e-6) - constant(1 - 1e-6)) / 2e-6
    np.testing.assert_allclose(slope, numerical, rtol=1e-7)
    narrow = Softmax(*(np.float32(matrix) for matrix in (QUERY, KEY, VALUE)))
    constant = stability_constant(narrow, RADIUS)
    assert constant.dtype == jnp.float32
    np.testing.assert_allclose(constant, 5.634562259378124, rtol=1e-5)
