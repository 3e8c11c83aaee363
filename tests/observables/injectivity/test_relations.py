"""Tests of the detectors of relations between contexts."""

import numpy as np
import pytest

from meanformer.measures import Gaussian, TokenCloud, UniformBall, UniformBox
from meanformer.observables.injectivity.relations import find_relations, prepared

X, Y = np.array([1.0, 0.5]), np.array([-0.4, 1.0])
RNG = np.random.default_rng(5)
TOKENS, OTHER = RNG.standard_normal((4, 2)), RNG.standard_normal((3, 2))
SHIFT = np.array([0.7, -0.3])


def found(measures, queries=X, *, bias=False, tolerance=1e-9):
    places = np.broadcast_to(queries, (len(measures), measures[0].dimension))
    return find_relations(prepared(measures, places, tolerance), bias=bias)


def names(*given, **options):
    return [one.name for one in found(*given, **options)]


def convolved(a, b):
    return (a[:, None] + b[None]).reshape(-1, a.shape[1])


def test_unrelated_contexts_have_no_relation():
    measures = [TokenCloud(TOKENS), TokenCloud(OTHER), UniformBall(2)]
    assert names(measures) == []


def test_the_order_of_convolutions_and_translates_adds_up():
    sums = convolved(TOKENS, OTHER)
    relations = found(
        [TokenCloud(one) for one in (TOKENS + SHIFT, OTHER - 3 * SHIFT, sums)]
    )
    assert relations == []
    clouds = [
        TokenCloud(one)
        for one in (TOKENS + SHIFT, OTHER, sums, TOKENS + 3 * SHIFT, TOKENS)
    ]
    relations = found(clouds)
    assert len(relations) == 2
    means = np.stack([one.mean() for one in clouds])
    rows = np.stack([one.row(5) for one in relations])
    np.testing.assert_allclose(rows @ means, 0, atol=1e-12)


@pytest.mark.parametrize("power", [2, 3, 4])
def test_convolution_powers_are_found(power):
    many = TOKENS
    for _ in range(power - 1):
        many = convolved(many, TOKENS)
    (relation,) = found([TokenCloud(TOKENS), TokenCloud(many)])
    assert relation.name == "convolution power"
    assert relation.coefficients == pytest.approx((power, -1))


def test_convolutions_of_three_are_found_through_those_of_two():
    pair = convolved(TOKENS, OTHER)
    many = convolved(pair, OTHER)
    relations = found([TokenCloud(one) for one in (TOKENS, OTHER, pair, many)])
    assert [one.name for one in relations] == ["convolution"] * 2


def test_relations_hold_between_scaled_contexts_and_queries():
    sums = convolved(TOKENS, OTHER)
    measures = [TokenCloud(TOKENS / 2), TokenCloud(-OTHER), TokenCloud(sums)]
    (relation,) = found(measures, np.array([2 * X, -X, X]))
    assert relation.name == "convolution"
    assert relation.coefficients == pytest.approx((2, -1, -1))


def test_mirrored_and_scaled_copies_have_their_names():
    cloud = TokenCloud(TOKENS)
    mirrored, halved = TokenCloud(-TOKENS), TokenCloud(TOKENS / 2)
    queries = np.array([X, -X, 2 * X])
    relations = found([cloud, mirrored, halved], queries)
    assert [one.name for one in relations] == ["parity", "dilation"]
    assert [one.persists for one in relations] == [True, False]
    assert found([cloud, mirrored, halved], X) == []


def test_two_mirrored_pairs_survive_a_bias():
    clouds = [TokenCloud(one) for one in (TOKENS, -TOKENS, OTHER, -OTHER)]
    (relation,) = found(clouds, np.array([X, -X, X, -X]), bias=True)
    assert relation.name == "parity"
    assert relation.coefficients == pytest.approx((1, 1, -1, -1))


def test_shifts_of_translates_must_cancel():
    steps = (0, 1, 3)
    clouds = [TokenCloud(TOKENS + step * SHIFT) for step in steps]
    (relation,) = found(clouds)
    assert relation.name == "translates"
    assert relation.coefficients == pytest.approx((2, -3, 1))
    bent = [TokenCloud(TOKENS + shift) for shift in (0 * X, X, Y)]
    assert found(bent) == []
    assert names([*bent, TokenCloud(TOKENS + X + Y)]) == ["translates"]


def test_boxes_of_different_places_need_their_means_to_cancel():
    def box(*sides, corner=(0.0, 0.0)):
        low = np.array(corner)
        return UniformBox(low, low + np.array(sides, float))

    four = [box(1, 1), box(2, 1), box(1, 3), box(2, 3)]
    assert names(four) == ["boxes"]
    assert names([*four[:3], box(2, 3, corner=(0.5, 0))]) == []
    assert names([box(1, 2), box(1, 2)]) == ["equal measures"]


def test_diracs_on_any_lines_are_dependent_like_their_points():
    points = np.array([[1.0, 0], [0, 1], [2, -1]])
    diracs = [TokenCloud(one[None]) for one in points]
    (relation,) = found(diracs, np.array([X, Y, X + Y]))
    assert relation.name == "Diracs"
    assert relation.persists
    assert relation.coefficients == pytest.approx((2, -1, -1))
    assert found(diracs[:2]) == []
    assert "single tokens are linearly dependent" in relation.sentence
    assert "+2 m0 -1 m1 -1 m2 = 0 at every depth" in relation.sentence


def test_gaussians_of_equal_covariance_are_translates_and_more():
    gaussians = [Gaussian(k * SHIFT, np.eye(2)) for k in range(3)]
    (relation,) = found(gaussians)
    assert relation.name == "Gaussians"
    np.testing.assert_allclose(relation.coefficients, (1, -2, 1), rtol=1e-9)


def test_relations_of_several_kinds_are_combined():
    dirac = TokenCloud(SHIFT[None])
    (relation,) = found([TokenCloud(TOKENS), TokenCloud(TOKENS + SHIFT), dirac])
    assert relation.name == "combination"
    assert relation.coefficients == pytest.approx((1, -1, 1))


def test_the_tolerance_decides_what_is_the_same():
    moved = TOKENS.copy()
    moved[0, 0] += 1e-6
    pair = [TokenCloud(TOKENS), TokenCloud(moved)]
    assert names(pair) == []
    assert names(pair, tolerance=1e-5) == ["equal measures"]


def test_other_masses_are_other_measures():
    uneven = TokenCloud(TOKENS, np.array([0.4, 0.2, 0.2, 0.2]))
    assert names([TokenCloud(TOKENS), uneven]) == []


@pytest.mark.parametrize("size", [1.0, 200.0, 1e4])
def test_relations_are_named_whatever_the_size_of_queries(size):
    places = np.random.default_rng(0).standard_normal((3, 1, 2))
    one, other = TokenCloud(TOKENS), TokenCloud(TOKENS + SHIFT)
    measures = [one, other, *map(TokenCloud, places)]
    queries = size * np.array([X, X, X, Y, X + Y])
    assert sorted(names(measures, queries)) == ["Diracs", "combination"]


def test_diracs_are_related_at_every_depth_whatever_else_is_related():
    one, *more = map(TokenCloud, np.random.default_rng(0).standard_normal((3, 1, 2)))
    measures = [one, TokenCloud(TOKENS), *more]
    relations = found(measures, np.array([X, 0 * X, Y, X + Y]))
    (persisting,) = [one for one in relations if one.persists]
    assert (persisting.name, persisting.indices) == ("Diracs", (0, 2, 3))


def test_a_dilation_of_a_single_token_is_a_relation_of_single_tokens():
    measures = [TokenCloud(np.array([place])) for place in ([0.4, 1.0], [0.8, 2.0])]
    for queries in ([X, X / 2], [X, Y]):
        (relation,) = found(measures, np.array(queries))
        assert (relation.name, relation.persists) == ("Diracs", True)
        np.testing.assert_allclose(relation.coefficients, (2, -1), rtol=1e-12)


def test_equal_dilations_of_a_context_are_equal_measures():
    measures = [TokenCloud(factor * TOKENS) for factor in (1, 2, 2, -2)]
    queries = np.array([X, X / 2, X / 2, -X / 2])
    assert names(measures, queries) == ["dilation", "equal measures", "parity"]
