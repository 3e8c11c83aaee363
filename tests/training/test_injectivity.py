"""Tests of the report on what one layer can fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanformer.attention.averaged_heads import Heads
from meanformer.errors import InvalidInput
from meanformer.experiments.training.injectivity_catalogue import (
    SUMS,
    A,
    B,
    C,
    E,
    X,
    Y,
    catalogue,
)
from meanformer.measures import Gaussian, Mixture, TokenCloud
from meanformer.training import dependence, injectivity_report, value_kernel
from meanformer.training.data import Dataset
from meanformer.training.kernels import head_kernel
from meanformer.training.transformer import MeanFieldTransformer

ROWS = catalogue(seed=3)
NAMES = {
    "equal measures": "equal measures",
    "three translates": "translates in arithmetic progression",
    "three, small and far away": "translates in arithmetic progression",
    "two translates, two queries": "two translates, two queries",
    "convolution": "convolution",
    "convolution power": "convolution power",
    "boxes": "boxes",
    "parity": "parity",
    "dilation": "dilation",
    "three Diracs": "Diracs",
    "queries zero": "zero queries",
    "six Gaussians": "Gaussians",
}


def random_clouds(count, seed=0, size=2):
    rng = np.random.default_rng(seed)
    return [TokenCloud(rng.standard_normal((5, size))) for _ in range(count)]


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_catalogue_is_classified(name):
    row = ROWS[name]
    found = [
        dependence(row.measures, modulo="constants"),
        dependence(row.measures, modulo="affine"),
        injectivity_report(row.measures, row.queries),
        injectivity_report(row.measures, row.queries, bias=True),
    ]
    for one, wanted in zip(found, row.status, strict=True):
        assert wanted in ("-", one.verdict[0])
        if one.verdict == "dependent":
            assert one.statistic < 1e-13
    assert found[2].statistic > 1e-3 or found[2].verdict == "dependent"


@pytest.mark.parametrize("name", ROWS)
def test_relations_are_named_and_cancel_what_random_heads_read(name):
    row = ROWS[name]
    report = injectivity_report(row.measures, row.queries)
    named = [NAMES[name]] if name in NAMES else []
    assert [one.name for one in report.relations] == named
    rng = np.random.default_rng(1)
    size = row.measures[0].dimension
    scores = np.matmul(*rng.standard_normal((2, 300, size, size)))
    kernel = value_kernel(row.measures, row.queries, scores=scores)
    values, vectors = np.linalg.eigh(kernel)
    rank = len(report.null_vectors)
    assert np.abs(values[:rank]).max(initial=0) < 1e-13 * values[-1]
    assert values[rank:].min(initial=np.inf) > 1e-9 * values[-1]
    for relation in report.relations:
        c = relation.row(len(kernel))
        assert np.abs(kernel @ c).max() < 1e-10 * np.abs(c).max() * values[-1]


@pytest.mark.parametrize(
    ("name", "integers"),
    [
        ("three translates", (1, -2, 1)),
        ("convolution", (-1, -1, 1)),
        ("convolution power", (-2, 1)),
        ("boxes", (1, -1, -1, 1)),
        ("parity", (1, 1)),
        ("dilation", (-1, 2)),
        ("two translates, two queries", (1, -1, -1, 1)),
        ("queries zero", (-1, 1)),
    ],
)
def test_null_vectors_are_those_of_the_table_in_integers(name, integers):
    report = injectivity_report(ROWS[name].measures, ROWS[name].queries)
    assert report.integers == (integers,)


def test_random_heads_give_the_null_space_of_the_whole_kernel():
    dep = Dataset([[A, B], [C, E], SUMS], np.tile(X, (3, 1)))
    keys = jax.random.split(jax.random.key(0), 3)
    heads = Heads(*(jax.random.normal(one, (64, 2, 2)) for one in keys))
    values, vectors = np.linalg.eigh(np.asarray(head_kernel(heads, dep)))
    null = np.kron(injectivity_report(dep).null_vectors, np.eye(2))
    assert np.abs(values[:2]).max() < 1e-13 * values[-1]
    assert values[2] > 1e-3
    assert np.abs(null @ vectors[:, 2:]).max() < 1e-12
    part = value_kernel(dep, scores=jnp.matmul(heads.key.mT, heads.query))
    blocks = head_kernel(heads, dep, block="values")
    np.testing.assert_allclose(np.kron(part, np.eye(2)), blocks, atol=1e-12)


@pytest.mark.parametrize(("count", "constants"), [(6, 0.078), (10, 8.7e-3)])
def test_statistics_of_random_clouds_have_the_order_of_the_table(count, constants):
    found = [
        dependence(random_clouds(count, seed), modulo=modulo).statistic
        for seed in range(5)
        for modulo in ("constants", "affine")
    ]
    assert constants / 5 < np.exp(np.mean(np.log(found))) < 5 * constants


@pytest.mark.slow
@pytest.mark.parametrize(("count", "wanted"), [(20, 3.0e-3), (40, 5.7e-4)])
def test_the_statistic_decays_with_the_number_of_contexts(count, wanted):
    report = injectivity_report(random_clouds(count), X)
    assert wanted / 4 < report.statistic < 4 * wanted
    assert report.verdict == "independent"


def test_translates_far_away_are_dependent_modulo_affine_functions():
    base = 0.01 * np.random.default_rng(0).standard_normal((5, 2))
    far = dependence([TokenCloud(base), TokenCloud(base + 100)], modulo="affine")
    assert far.verdict == "dependent"
    assert far.statistic < 1e-12


def test_a_common_scale_changes_no_statistic():
    clouds = random_clouds(4)
    large = [TokenCloud(1000 * one.points) for one in clouds]
    first = injectivity_report(clouds, X)
    second = injectivity_report(large, X / 7)
    assert second.statistic == pytest.approx(first.statistic, rel=1e-9)


def test_gaussians_on_several_lines_are_judged_by_linear_algebra():
    one, cloud = Gaussian(np.zeros(2), np.eye(2)), random_clouds(1)[0]
    moved = Gaussian(np.array([1.0, 0.5]), np.eye(2))
    queries = np.array([X, Y, X + Y])
    report = injectivity_report([one, moved, moved], queries)
    assert report.integers == ((-1, -1, 1),)
    mixed = injectivity_report([one, moved, moved, cloud], [*queries, X])
    assert mixed.integers == ((-1, -1, 1, 0),)
    assert mixed.relations[0].name == "Gaussians"


def test_mixtures_of_gaussians_are_independent():
    rng = np.random.default_rng(0)
    mixtures = [
        Mixture(
            [0.4, 0.6], [Gaussian(m, np.eye(2) * s) for m, s in zip(*pair, strict=True)]
        )
        for pair in [
            (rng.standard_normal((2, 2)), rng.uniform(0.5, 2, 2)) for _ in range(3)
        ]
    ]
    assert injectivity_report(mixtures, X).statistic > 0.01
    assert dependence(mixtures, modulo="affine").statistic > 0.01
    twice = injectivity_report([*mixtures, mixtures[0]], X)
    assert [one.name for one in twice.relations] == ["equal measures"]


def test_offsets_beside_a_convolution_leave_one_ninehundredth():
    offsets = 0.1 * np.array([[1, 0], [0, 1], [0, 0]])
    data = Dataset([[A, B], [C, E], SUMS], np.tile(X, (3, 1)), X + offsets)
    report = injectivity_report(data)
    assert report.floor == pytest.approx(1 / 900, abs=1e-15)
    assert report.deep_floor == 0
    null = 0.1 * np.outer([-1, -1, 1], [1, 0]) / np.sqrt(3)
    report = injectivity_report(data.with_targets(X + null))
    assert report.floor == pytest.approx(1 / 600, abs=1e-15)
    harmless = 0.1 * np.array([[1, 0], [0, 1], [1, 1]]) / np.sqrt(2)
    report = injectivity_report(data.with_targets(X + harmless))
    assert report.floor == pytest.approx(0, abs=1e-15)
    assert "cannot fall below" in str(report)


def test_duplicates_leave_their_distance_from_the_mean_at_every_depth():
    rng = np.random.default_rng(0)
    (one, two), targets = random_clouds(2), rng.standard_normal((5, 2))
    copy = TokenCloud(one.points[::-1])
    data = Dataset([one, two, copy, one, two], np.tile(X, (5, 1)), targets)
    report = injectivity_report(data)
    spread = [targets[[0, 2, 3]], targets[[1, 4]]]
    wanted = sum(np.sum((part - part.mean(axis=0)) ** 2) for part in spread) / 10
    assert report.floor == pytest.approx(wanted, rel=1e-12)
    assert report.deep_floor == pytest.approx(wanted, rel=1e-12)
    assert "equal measures (contexts 0, 2)" in str(report)


def test_a_mirrored_pair_leaves_the_sum_of_its_targets_unless_there_is_a_bias():
    cloud, y = random_clouds(1)[0], np.array([[0.3, 1.0], [0.5, -0.2]])
    data = Dataset([cloud, TokenCloud(-cloud.points)], [X, -X], y)
    report = injectivity_report(data)
    wanted = np.sum(y.sum(axis=0) ** 2) / 8
    assert report.deep_floor == pytest.approx(wanted, rel=1e-12)
    cured = injectivity_report(data, bias=True)
    assert (cured.verdict, cured.floor) == ("independent", 0)


def test_nearly_dependent_data_are_told_with_the_time_they_take():
    cloud, size = random_clouds(1)[0], 3e-8
    moved = TokenCloud(cloud.points.at[0, 0].add(size))
    report = injectivity_report([cloud, moved], X)
    assert report.verdict == "undecided"
    assert 1e-11 < report.statistic < 1e-6
    assert report.slow_time > 1e12
    assert "time of about" in str(report)
    loose = injectivity_report([cloud, moved], X, tolerance=1e-6)
    assert loose.verdict == "dependent"
    assert "time of about" in str(loose)
    rounded = TokenCloud(cloud.points.at[0, 0].add(1e-10))
    assert injectivity_report([cloud, rounded], X).verdict == "dependent"


def test_one_context_is_dependent_only_if_nothing_moves_its_query():
    cloud = random_clouds(1)[0]
    even = TokenCloud(np.array([[1.0, 0], [-1, 0]]))
    nothing = TokenCloud(np.zeros((1, 2)))
    skew = TokenCloud(np.array([[1.0, 0], [-0.5, 0]]), np.array([1 / 3, 2 / 3]))
    zero = np.zeros(2)
    assert injectivity_report([cloud], X).statistic == 1
    assert injectivity_report([cloud], zero).verdict == "independent"
    assert injectivity_report([even], X).verdict == "independent"
    for context, query, persists in [
        (nothing, X, True),
        (even, zero, True),
        (skew, zero, False),
    ]:
        report = injectivity_report([context], query)
        assert (report.verdict, report.statistic) == ("dependent", 0)
        assert [one.persists for one in report.relations] == [persists]


def test_queries_are_grouped_by_lines_and_zero():
    clouds = random_clouds(5)
    queries = np.array([X, -2 * X, Y, np.zeros(2), X * (1 + 1e-12)])
    report = injectivity_report(clouds, queries)
    assert report.groups == ((0, 1, 4), (2,))
    assert report.zero_queries == (3,)


def test_padding_order_and_splitting_change_no_verdict():
    one, two = random_clouds(2)
    padded = TokenCloud(
        jnp.concatenate([one.points[::-1], one.points[:1], jnp.full((1, 2), 9.0)]),
        jnp.array([0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.0]),
    )
    first = injectivity_report([one, two], X)
    second = injectivity_report([padded, two], X)
    assert second.statistic == pytest.approx(first.statistic, rel=1e-12)


def test_single_precision_finds_relations_by_their_tokens():
    tokens = [np.float32([A, B]), np.float32([C, E]), np.float32(SUMS)]
    clouds = [TokenCloud(jnp.asarray(one)) for one in tokens]
    report = injectivity_report(clouds, X)
    assert report.verdict == "dependent"
    assert [one.name for one in report.relations] == ["convolution"]
    with pytest.raises(InvalidInput, match="a Gaussian is float32, too few"):
        injectivity_report(
            [Gaussian(jnp.zeros(2, "float32"), jnp.eye(2, dtype="float32"))] * 2, X
        )


@pytest.mark.parametrize(
    ("data", "queries", "options", "message"),
    [
        ([], X, {}, "data is empty"),
        (random_clouds(2), None, {}, "queries is None; measures need queries"),
        (random_clouds(2), np.ones(3), {}, r"queries has shape \(2, 3\)"),
        (random_clouds(2), np.ones((3, 2)), {}, r"it must be \(2, 2\)"),
        (random_clouds(2), np.array([np.nan, 1]), {}, "and finite"),
        (random_clouds(2), X, {"tolerance": -1.0}, "tolerance is -1.0"),
        (random_clouds(2), X, {"points": 3}, "points is 3; it must be 5 or more"),
        (random_clouds(2), X, {"radii": (1.0, 0.0)}, "list of positive numbers"),
        ([*random_clouds(1), *random_clouds(1, size=3)], X, {}, "they must agree"),
    ],
)
def test_bad_input_is_told(data, queries, options, message, untyped):
    with pytest.raises(InvalidInput, match=message):
        injectivity_report(data, queries, **options)


def test_bad_data_sets_are_told():
    clouds = random_clouds(2)
    several = Dataset(clouds, np.ones((2, 3, 2)))
    with pytest.raises(InvalidInput, match="data has 3 queries for each context"):
        injectivity_report(several)
    with pytest.raises(InvalidInput, match="queries is given twice"):
        injectivity_report(Dataset(clouds, np.ones((2, 2))), X)
    with pytest.raises(InvalidInput, match='modulo is .*"constants" or "affine"'):
        dependence(clouds, modulo="linear")


@pytest.mark.slow
def test_relations_that_persist_hold_for_deep_networks_and_others_do_not():
    names = ["equal measures", "parity", "three Diracs", "dilation", "convolution"]
    for layers in (1, 3):
        model = MeanFieldTransformer.draw(layers, 4, 2, key=jax.random.key(layers))
        for name in names:
            measures, queries, _ = ROWS[name]
            queries = np.broadcast_to(queries, (len(measures), 2))
            (relation,) = injectivity_report(measures, queries).relations
            ends = [
                np.asarray(model(one, jnp.asarray(x[None])))[0] - x
                for one, x in zip(measures, queries, strict=True)
            ]
            left = np.abs(relation.row(len(ends)) @ np.stack(ends)).max()
            holds = relation.persists or layers == 1
            assert left < 1e-12 if holds else left > 1e-3


def test_twelve_contexts_on_a_line_are_independent():
    rng = np.random.default_rng(0)
    clouds = [TokenCloud(rng.normal(size=(3, 1))) for _ in range(12)]
    report = injectivity_report(clouds, [1.0])
    assert report.verdict != "dependent"


@pytest.mark.parametrize("small", [0.1, 0.03, 0.01])
def test_queries_of_other_sizes_on_a_line_make_no_dependence(small):
    rows = [[-1, 1], [-1.5, 0, 1.5], [-2, -1, 1, 2], [-3, -1, 1, 3], [0.3, -1.2, 0.7]]
    clouds = [TokenCloud(np.array(row)[:, None]) for row in rows]
    queries = np.array([[small]] * 4 + [[1.0]])
    report = injectivity_report(clouds, queries)
    assert report.verdict != "dependent"


def test_a_gaussian_and_a_mixture_of_it_are_the_same():
    one = Gaussian(np.array([0.5, -0.2]), np.array([[1.0, 0.3], [0.3, 0.5]]))
    for same in (Mixture([1.0], [one]), Mixture([0.5, 0.5], [one, one])):
        report = injectivity_report([same, one], X)
        assert report.verdict == "dependent"
        np.testing.assert_allclose(np.abs(report.null_vectors), np.sqrt(0.5), rtol=1e-9)


def test_gaussians_are_as_dependent_as_mixtures_of_one():
    roots = np.random.default_rng(5).standard_normal((6, 2, 2))
    given = [Gaussian(root[0], root @ root.T + np.eye(2)) for root in roots]
    wrapped = [Mixture([1.0], [one]) for one in given]
    for measures in (given, wrapped):
        assert injectivity_report(measures, X).verdict == "dependent"


def test_parity_does_not_persist_with_value_biases():
    one, two = random_clouds(2)
    contexts = [one, mirrored(one), two, mirrored(two)]
    queries = np.array([X, -X, Y, -Y])
    plain = injectivity_report(contexts, queries)
    assert [one.persists for one in plain.relations] == [True, True]
    biased = injectivity_report(contexts, queries, bias=True)
    assert [one.persists for one in biased.relations] == [False]


def test_mirrored_contexts_with_queries_zero_are_related_at_every_depth():
    one = random_clouds(1)[0]
    report = injectivity_report([one, mirrored(one)], np.zeros(2))
    (relation,) = report.relations
    assert relation.name == "parity"
    assert relation.persists


def test_queries_that_nearly_agree_are_not_called_independent():
    cloud = random_clouds(1)[0]
    report = injectivity_report([cloud, cloud], np.array([X, X + 1e-7 * Y]))
    assert report.verdict == "undecided"


@pytest.mark.parametrize(
    ("place", "query"), [((0.7, -0.2), (0.2, 0.2)), ((0.3, -1.3), (0.3, 0.8))]
)
def test_mirrored_single_tokens_are_independent_with_a_bias(place, query):
    point, query = TokenCloud(np.array([place])), np.array(query)
    contexts, queries = [point, mirrored(point)], np.array([query, -query])
    assert injectivity_report(contexts, queries).relations[0].name == "parity"
    biased = injectivity_report(contexts, queries, bias=True)
    assert (biased.verdict, biased.relations) == ("independent", ())


def mirrored(cloud):
    return TokenCloud(-cloud.points, cloud.weights)
