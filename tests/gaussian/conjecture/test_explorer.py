"""Ensembles of cases, and the search for counterexamples."""

import dataclasses
import json

import numpy as np
import pytest

import meanformer as mf
from gaussian_reference import COVARIANCE, KEY, QUERY, VALUE, slope_and_constant
from meanformer.errors import InvalidInput
from meanformer.gaussian import (
    KNOWN_CASES,
    Case,
    Draw,
    Ensemble,
    Exploration,
    affine_velocity,
    examine,
    explore,
)
from meanformer.gaussian.conjecture import explorer as explorer_file
from meanformer.gaussian.conjecture.ensembles import ENSEMBLES, case_from_json

CASE = Case(
    "l2",
    [(QUERY, KEY, VALUE), (KEY, VALUE, QUERY)],
    COVARIANCE,
    0.7,
    np.array([[0.1, 1 / 3], [0.0, -0.2]]),
)


def same(first, second):
    return first.to_json() == second.to_json()


@pytest.mark.parametrize("family", ENSEMBLES)
def test_a_draw_depends_on_seed_and_index_alone(family):
    ensemble = Ensemble(family, 4, "sinkhorn", heads=2, perceptron=0.3, seed=5)
    assert same(ensemble.draw(3), ensemble.draw(3))
    assert not same(ensemble.draw(3), ensemble.draw(4))
    other = dataclasses.replace(ensemble, seed=6)
    assert not same(ensemble.draw(3), other.draw(3))
    assert len(ensemble.draw(0).heads) == 2


def matrices_of(family, dimension=4):
    query, key, value = Ensemble(family, dimension).draw(0).heads[0]
    return key.T @ query, value


def test_families_have_the_structure_of_their_names():
    score, value = matrices_of("orthogonal")
    for matrix in (score, value):
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(4), atol=1e-12)
    score, value = matrices_of("symmetric")
    np.testing.assert_array_equal(score, score.T)
    np.testing.assert_array_equal(value, value.T)
    score, value = matrices_of("commuting")
    np.testing.assert_allclose(score @ value, value @ score, atol=1e-12)
    score, value = matrices_of("negative")
    assert np.linalg.matrix_rank(score) == 2
    assert np.linalg.eigvalsh(score)[-1] < 1e-12
    assert np.linalg.eigvalsh(value)[0] > -1e-12
    score, value = matrices_of("near-rotation")
    assert np.linalg.norm(score - np.eye(4), 2) < 0.5
    assert np.linalg.norm(value @ value + np.eye(4), 2) < 1
    assert Ensemble("negative", 4).draw(0).kernel_dimension == 2
    assert Ensemble("normal", 3).draw(0).kernel_dimension == 0


def test_entries_of_the_normal_family_are_standard_normal():
    entries = np.concatenate(
        [
            np.ravel(Ensemble("normal", 3).draw(index).heads[0][::2])
            for index in range(400)
        ]
    )
    assert abs(entries.mean()) < 4 / np.sqrt(len(entries))
    assert abs(entries.var() - 1) < 4 * np.sqrt(2 / len(entries))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "cauchy"}, "family is 'cauchy'; it must be one of normal"),
        ({"kind": "sigmoid"}, "kind is 'sigmoid'; it must be one of softmax"),
        ({"dimension": 0}, "dimension is 0"),
        ({"heads": 0}, "heads is 0"),
    ],
)
def test_unknown_ensembles_are_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        Ensemble(**options)


def test_rotations_need_an_even_dimension():
    with pytest.raises(InvalidInput, match="dimension is 3; rotations need an even"):
        Ensemble("near-rotation", 3).draw(0)


def test_a_case_is_written_and_read_to_the_last_digit():
    again = case_from_json(json.loads(json.dumps(CASE.to_json())))
    assert same(again, CASE)
    for one, two in zip(again.heads, CASE.heads, strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(again.perceptron, CASE.perceptron)


@pytest.mark.slow
def test_a_case_has_the_velocity_of_its_matrices():
    slope, _ = affine_velocity(CASE.gamma(), CASE.gaussian())
    expected = CASE.perceptron + sum(
        slope_and_constant("l2", head, 0.7, np.zeros(2), COVARIANCE)[0]
        for head in CASE.heads
    )
    np.testing.assert_allclose(slope, expected, atol=1e-13)
    np.testing.assert_array_equal(CASE.gaussian().covariance(), COVARIANCE)
    assert CASE.dimension == 2


@pytest.fixture
def counted(monkeypatch):
    """Examine by a cheap rule, and keep which draws were examined."""
    seen = []

    def examine_cheaply(case, index, depth):
        seen.append(index)
        values = np.linalg.eigvalsh(case.covariance)[::-1].tolist()
        return Draw(index, "converges", 1, 1, 1, values, f"followed to {depth}")

    monkeypatch.setattr(explorer_file, "examine", examine_cheaply)
    return seen


def test_draws_on_disk_are_not_computed_again(counted, tmp_path):
    ensemble = Ensemble("normal", 2, seed=3)
    first = explore(ensemble, 3, folder=tmp_path)
    assert counted == [0, 1, 2]
    second = explore(ensemble, 5, folder=tmp_path)
    assert counted == [0, 1, 2, 3, 4]
    assert second.draws[:3] == first.draws
    assert explore(ensemble, 5, folder=tmp_path) == second
    assert counted == [0, 1, 2, 3, 4]
    assert second == explore(ensemble, 5)


def test_a_line_that_was_cut_off_is_computed_again_and_harms_no_other(
    counted, tmp_path
):
    ensemble = Ensemble("normal", 2, seed=3)
    whole = explore(ensemble, 4, folder=tmp_path)
    file = tmp_path / "draws.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2][:40])
    assert explore(ensemble, 4, folder=tmp_path) == whole
    assert counted == [0, 1, 2, 3, 2, 3]
    assert explore(ensemble, 4, folder=tmp_path) == whole
    assert counted == [0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize(
    ("other", "depth"),
    [(Ensemble("normal", 2, seed=4), 1e5), (Ensemble("normal", 2, seed=3), 1e4)],
)
def test_a_folder_with_other_draws_is_refused(counted, tmp_path, other, depth):
    explore(Ensemble("normal", 2, seed=3), 1, folder=tmp_path)
    with pytest.raises(InvalidInput, match="use another folder"):
        explore(other, 1, folder=tmp_path, depth=depth)


def test_progress_is_told_after_every_draw(counted):
    class Counted(mf.flows.AbstractProgress):
        def __init__(self):
            self.seen = []

        def update(self, done, total):
            self.seen.append((done, total))

    progress = Counted()
    explore(Ensemble(), 3, progress=progress)
    assert progress.seen == [(1, 3), (2, 3), (3, 3)]


def draw(index, kind, rank, normalised_rank, exception=""):
    return Draw(index, kind, rank, normalised_rank, 1, [1.0, 0.0], "", exception)


def test_the_table_counts_every_draw_once():
    draws = (
        draw(0, "blow-up", None, None),
        draw(1, "converges", 1, 1),
        draw(2, "converges", 0, 2, "normalised limit of full rank"),
        draw(3, "converges", 1, 1),
        draw(4, "converges", 2, 2, "limit of rank 2, more than 1"),
    )
    found = Exploration(Ensemble(), draws)
    table = found.table()
    assert sum(row[-1] for row in table) == 5
    assert ("converges", 1, 1, 2) in table
    assert ("blow-up", None, None, 1) in table
    assert [one.index for one in found.exceptions] == [2, 4]
    assert [one.index for one in found.full_rank_decays] == [2]
    assert [one.index for one in found.full_rank_limits] == [4]


def test_an_ordinary_draw_keeps_no_matrices():
    with pytest.raises(InvalidInput, match="draw 7 is no exception"):
        draw(7, "converges", 1, 1).replay()


@pytest.mark.slow
def test_draws_of_negative_scores_have_limits_in_the_kernel(tmp_path):
    ensemble = Ensemble("negative", 2, seed=1)
    found = explore(ensemble, 2, folder=tmp_path)
    # A_s has rank one and is negative, V is definite: every limit lies in the kernel.
    assert [(one.kind, one.rank, one.bound) for one in found.draws] == [
        ("converges", 1, 1)
    ] * 2
    assert not found.exceptions
    assert not found.full_rank_limits
    assert explore(ensemble, 2, folder=tmp_path) == found


@pytest.mark.slow
def test_known_counterexamples_are_found_confirmed_and_replayed():
    expected = {
        "rotation, stationary": ("limit of rank 2, more than 1", "converges", 2, 2),
        "rotation, periodic": ("periodic", "periodic", None, None),
        "rotation, contracting": ("normalised limit of full rank", "converges", 0, 2),
        "full rank over t": ("normalised limit of full rank", "converges", 0, 2),
        "rotation, expanding": ("", "blow-up", None, None),
    }
    for name, (exception, *what) in expected.items():
        found = examine(KNOWN_CASES[name])
        assert found.exception == exception
        assert [found.kind, found.rank, found.normalised_rank] == what
        assert found.confirmed is (True if exception else None)
        if exception:
            assert same(found.replay(), KNOWN_CASES[name])


@pytest.mark.slow
def test_random_draws_have_no_limit_of_full_rank():
    found = explore(Ensemble("normal", 2, seed=11), 20)
    assert len(found.draws) == 20
    assert not found.full_rank_limits
    assert {"blow-up", "converges"} <= {one.kind for one in found.draws}
