"""The limit predicted from query, key and value alone."""

import jax
import numpy as np
import pytest

import meanformer as mf
from limit_cases import KINDS, VALUE, plain, random_case
from meanformer.errors import InvalidInput, Unsupported
from meanformer.observables import predict_limit

CODIMENSION = np.array(
    [
        [0.92761287, 0.94333073, 0.3827744],
        [0.94333073, 0.59991396, 0.47825472],
        [0.3827744, 0.47825472, 0.46668605],
    ]
)


def test_the_spectrum_of_the_plane_example_is_tabulated():
    found = predict_limit(plain(VALUE))
    assert found.geometry == "hyperplanes"
    values = np.array([1.3479896139, -0.0682573539])
    np.testing.assert_allclose(found.spectrum.eigenvalues, values, atol=1e-10)
    np.testing.assert_allclose(
        found.spectrum.vectors, [[0.7598109326, 0.6501440969]], atol=1e-10
    )
    np.testing.assert_allclose(
        found.functionals, [[0.6647784745, 0.7612067074]], atol=1e-10
    )
    np.testing.assert_allclose(found.gap, values[0] + values[1], atol=1e-9)
    np.testing.assert_allclose(found.alignment, 1.0, atol=1e-12)


@pytest.mark.parametrize(
    ("value", "geometry", "codimension"),
    [
        (1.0, "boolean-1d", 1),
        (-1.0, "origin", 1),
        (2 * np.eye(3), "polytope", 3),
        (-np.eye(2), "origin", 2),
        (VALUE, "hyperplanes", 1),
        (np.diag([1, 1, -0.5]), "polytope x subspace", 2),
        (np.zeros((2, 2)), "unknown", 0),
    ],
    ids=["line", "line inwards", "identity", "inwards", "plane", "mixed", "zero"],
)
def test_each_row_of_the_table_is_recognised(value, geometry, codimension):
    found = predict_limit(plain(value))
    assert found.geometry == geometry
    assert found.codimension == codimension
    assert (found.status == "none") == (geometry == "unknown")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.array([[0.0, 1], [-1, 0]]), "complex"),
        (np.array([[1.0, 1], [0, 1]]), "Jordan block"),
        (np.diag([-2.0, 1]), "not positive"),
        (np.diag([1.0, -1]), "not clearly smaller"),
        (np.zeros((2, 2)), "nothing moves"),
    ],
    ids=["rotation", "Jordan", "negative", "opposite", "zero"],
)
def test_what_is_unknown_comes_with_the_hypothesis_that_fails(value, reason):
    found = predict_limit(plain(value))
    assert found.geometry == "unknown"
    assert reason in found.reason
    assert set(found.failures) == {
        "boolean-1d",
        "polytope",
        "hyperplanes",
        "polytope x subspace",
        "codimension-k",
        "origin",
    }


def test_scores_that_turn_away_have_no_hyperplanes():
    identity = np.eye(2)
    found = predict_limit(mf.Softmax(-identity, identity, VALUE))
    assert found.geometry == "unknown"
    assert "must be positive" in found.reason
    assert found.alignment == pytest.approx(-1)


def test_several_leading_eigenvalues_are_a_conjecture_where_no_theorem_applies():
    query = np.diag([1.0, 1, -1])
    found = predict_limit(mf.Softmax(query, np.eye(3), np.diag([1.0, 1, 0.5])))
    assert (found.geometry, found.status) == ("codimension-k", "conjecture")
    np.testing.assert_allclose(np.abs(found.functionals), np.eye(3)[:2], atol=1e-12)


def test_the_published_codimension_example_has_hyperplanes_first():
    found = predict_limit(plain(CODIMENSION))
    assert found.geometry == "hyperplanes"
    values = np.sort(np.linalg.eigvalsh(CODIMENSION))
    np.testing.assert_allclose(found.spectrum.leading.real, values[-1], rtol=1e-12)


def test_margins_do_not_depend_on_coordinates():
    rng = np.random.default_rng(0)
    layer = random_case("simple leading", 5)[0]
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    turned = mf.Softmax(
        layer.query @ turn.T, layer.key @ turn.T, turn @ layer.value @ turn.T
    )
    first, second = predict_limit(layer), predict_limit(turned)
    for name in ("gap", "alignment", "definiteness", "time_scale"):
        assert getattr(first, name) == pytest.approx(getattr(second, name))


def test_flows_and_rescaled_flows_are_looked_through():
    layer = plain(VALUE)
    for gamma in (mf.Flow(layer), mf.Rescaled(layer), mf.Flow(mf.Rescaled(layer))):
        assert predict_limit(gamma).geometry == "hyperplanes"


def test_no_temperature_no_bias_and_no_other_attention_is_in_the_theorems():
    identity = np.eye(2)
    assert "beta is 0" in predict_limit(plain(identity, beta=0.0)).reason
    biased = plain(identity, query_bias=np.ones(2))
    assert "biases" in predict_limit(biased).reason
    hard = mf.Hardmax(identity, identity, identity)
    assert "Hardmax" in predict_limit(hard).reason


def test_single_precision_gives_the_same_answers():
    for kind in KINDS:
        layer, _, _ = random_case(kind, 3)
        narrow = jax.tree.map(lambda leaf: leaf.astype(np.float32), layer)
        assert predict_limit(narrow).geometry == predict_limit(layer).geometry


@pytest.mark.parametrize("kind", KINDS)
def test_random_layers_of_known_limit_are_recognised(kind):
    for seed in range(12):
        layer, _, geometry = random_case(kind, seed)
        assert predict_limit(layer).geometry == geometry


@pytest.mark.parametrize("sign", [1, -1])
def test_nearly_equal_eigenvalues_that_fill_the_space_leave_no_subspace(sign):
    near, exact = (
        predict_limit(plain(sign * np.diag([1, 1 + gap]))) for gap in (1e-13, 0.0)
    )
    assert near.geometry == exact.geometry == ("polytope" if sign > 0 else "origin")
    for gap in (1e-11, 1e-9):
        found = predict_limit(plain(sign * np.diag([1, 1 + gap])))
        assert found.geometry in ("unknown", "codimension-k")
        assert found.status != "theorem"


@pytest.mark.parametrize("size", [1e-11, 1e-10, 1e-8, 1.0])
def test_a_small_jordan_block_is_one(size):
    block = np.array([[1, size], [0, 1]])
    for value in (block, np.block([[block, np.zeros((2, 1))], [np.zeros(2), 0.5]])):
        found = predict_limit(plain(value))
        assert found.geometry == "unknown"
        assert "Jordan block" in found.reason


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_cannot_be_told_from_a_jordan_block_is_unknown(size):
    block = np.eye(size) + np.eye(size, k=1)
    for seed in range(4):
        vectors = np.random.default_rng(seed).normal(size=(size, size))
        found = predict_limit(plain(vectors @ block @ np.linalg.inv(vectors)))
        assert found.geometry == "unknown"
        assert "Jordan block" in found.reason
        assert found.spectrum.cosine < 1e-3


def test_single_precision_tells_eigenvalues_apart():
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(64, 64))
    for value in (np.diag([1, 0.99]), np.diag([2, 1.9, 1.8, 1]), factor @ factor.T):
        narrow = value.astype(np.float32)
        identity = np.eye(len(value), dtype=np.float32)
        assert predict_limit(mf.Softmax(identity, identity, narrow)).geometry == (
            "hyperplanes"
        )


def test_flows_on_the_sphere_or_with_noise_are_not_covered():
    layer = plain(np.eye(2))
    with pytest.raises(Unsupported, match="on Sphere"):
        predict_limit(mf.Flow(layer, space=mf.Sphere()))
    with pytest.raises(InvalidInput, match="without noise"):
        predict_limit(mf.Flow(layer, noise=0.1))
    huge = mf.Softmax(1e200 * np.eye(2), 1e200 * np.eye(2), np.eye(2))
    with pytest.raises(InvalidInput, match="rescale them"):
        predict_limit(huge)


def test_what_is_no_single_layer_is_refused():
    layer = plain(np.eye(2))
    with pytest.raises(Unsupported, match="of several heads give one"):
        predict_limit(mf.MultiHead([layer, layer]))
    with pytest.raises(InvalidInput, match="must be square"):
        predict_limit(mf.Softmax(np.eye(2), np.eye(2), np.ones((1, 2))))
