"""The examples of the documentation and of the README run, and say the truth."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def run(name: str) -> dict:
    # A reader of the documentation does not run with the strictness of the tests.
    with jax.numpy_rank_promotion("allow"):
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_the_first_flow_stays_on_the_sphere_and_gathers_the_tokens():
    names = run("first_flow")
    first, final = names["cloud"], names["final"]
    np.testing.assert_allclose(np.linalg.norm(final.points, axis=1), 1, atol=1e-12)
    assert np.linalg.norm(final.mean()) > 3 * np.linalg.norm(first.mean())


@pytest.mark.slow
def test_the_figure_of_the_readme_can_be_drawn_again(tmp_path):
    names = run("sphere_figure")
    figure = names["draw"](names["trajectory"])
    figure.savefig(tmp_path / "figure.png")
    assert len(figure.axes) == len(names["DEPTHS"])
    assert (ROOT / "docs" / "figures" / "sphere-flow.png").exists()


@pytest.mark.slow
def test_the_waiting_groups_are_separated_and_their_meeting_is_predicted():
    names = run("dwell_time")
    assert names["report"].holds
    np.testing.assert_allclose(names["log_wait"], 36.79, atol=5e-3)
    assert [step.count for step in names["steps"]] == [4, 2]
    assert names["steps"][0].is_tied
    assert "1 merge predicted" in names["prediction"].verdict


@pytest.mark.slow
def test_the_density_of_the_example_becomes_three_clusters(capsys):
    names = run("circle_density")
    np.testing.assert_allclose(names["path"].moments[-1, 2, 0], 0.3660580605, 1e-8)
    assert names["later"].hand_over is not None
    assert capsys.readouterr().out.split()[-1] == "3"


@pytest.mark.slow
def test_the_causal_example_moves_its_first_token_by_its_values_alone():
    names = run("own_weights")
    value = names["first"].value + names["second"].value
    angle, decay = float(value[1, 0]), float(value[0, 0])
    turned = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    expected = np.exp(decay) * np.array(turned) @ names["tokens"][0]
    np.testing.assert_allclose(names["trajectory"].at(1.0).points[0], expected, 1e-5)


@pytest.mark.slow
def test_the_metastable_example_lasts_as_long_as_its_page_says():
    names = run("metastable")
    assert 9.4e15 < float(names["meetings"][-1]) < 9.5e15
    assert names["steps"] < 120


def test_the_gaussian_example_agrees_with_its_closed_form():
    names = run("gaussian_context")
    np.testing.assert_allclose(names["values"], names["expected"], rtol=1e-12)


@pytest.mark.slow
def test_the_gaussian_flow_blows_up_and_loses_rank_as_its_page_says():
    names = run("gaussian_flow")
    np.testing.assert_allclose(names["blow_up"].depth, 0.47846889952153, rtol=1e-13)
    start, identity = np.asarray(names["start"].covariance()), np.eye(2)
    symmetric = np.array([[1.0, 0.15], [0.15, -0.5]])
    expected = start @ np.linalg.inv(identity - 0.8 * symmetric @ start)
    np.testing.assert_allclose(names["path"].covariances[-1], expected, rtol=1e-5)
    assert (names["outcome"].kind, names["outcome"].rank) == ("converges", 1)


def test_the_attention_of_ones_own_accepts_clouds_and_gaussians():
    names = run("own_attention")
    cloud = names["mf"].TokenCloud(np.array([[1.0, 0.0], [-1.0, 0.0]]))
    values = names["attention"](cloud, np.array([[2.0, 0.0]]))
    np.testing.assert_allclose(names["values"], [[0.5, 0]], atol=1e-12)
    np.testing.assert_allclose(values, [[np.tanh(0.5), 0]], atol=1e-12)
    matrix = names["mf"].attention_matrix(names["attention"], cloud)
    np.testing.assert_allclose(matrix @ cloud.points, [values[0], -values[0]])


@pytest.mark.slow
def test_the_kernel_of_ones_own_has_a_matrix_a_mask_and_an_energy():
    names = run("own_kernel")
    mf, attention, cloud = (names[name] for name in ("mf", "attention", "cloud"))
    points = np.asarray(cloud.points)
    expected = (points @ points.T) ** 2 / 3
    np.testing.assert_allclose(names["matrix"], expected, rtol=1e-12)
    np.testing.assert_allclose(names["values"], expected @ points, rtol=1e-12)
    np.testing.assert_allclose(names["causal"], np.tril(expected), rtol=1e-12)
    seen = mf.Masked(attention)(cloud, cloud.points, positions=cloud.positions)
    np.testing.assert_allclose(seen, np.tril(expected) @ points, rtol=1e-12)
    energy = np.sum((points @ points.T) ** 3) / 54
    np.testing.assert_allclose(names["energy"], energy, rtol=1e-12)
    # Weight 1/n times the velocity is the gradient of the energy.
    slope = jax.grad(lambda x: mf.observables.energy(attention, cloud.moved(x)))
    np.testing.assert_allclose(3 * slope(cloud.points), names["values"], rtol=1e-12)
    assert mf.observables.is_gradient_flow(attention).is_wasserstein
    rate = mf.observables.dissipation(attention, cloud)
    np.testing.assert_allclose(rate, np.mean(np.sum(names["values"] ** 2, axis=1)))
    with pytest.raises(mf.Unsupported, match="Gaussian .* function of the score"):
        attention(mf.Gaussian(np.zeros(2), np.eye(2)), cloud.points)


@pytest.mark.slow
def test_two_processes_compute_one_velocity():
    script = EXAMPLES / "two_processes.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # The library that connects them prints too, sometimes on the same line.
    reports = re.findall(
        r"process (\d) computed 500 of 1000 rows on 2 of 4 devices; "
        r"largest difference (\S+e-\d+)",
        done.stdout,
    )
    assert {index for index, _ in reports} == {"0", "1"}
    assert all(float(difference) < 1e-13 for _, difference in reports)


@pytest.mark.slow
def test_the_simulation_of_the_command_line_page_is_what_it_says():
    from meanformer.storage.config import build, read_config

    simulation = build(read_config(EXAMPLES / "two_heads.toml"), EXAMPLES)
    cloud = simulation.measure
    start = simulation.depths[0]
    velocity = simulation.flow.field(start, cloud, cloud.points, cloud.positions)
    assert velocity.shape == (200, 3)
    np.testing.assert_allclose((velocity * cloud.points).sum(1), 0, atol=1e-12)
    np.testing.assert_allclose(velocity[0], 0, atol=1e-12)
    np.testing.assert_allclose(simulation.depths, np.arange(21) / 2)


def test_the_experiment_of_ones_own_holds_and_draws():
    from meanformer import experiments

    record = experiments.run(str(EXAMPLES / "weak_attention.py"), count=10)
    assert record.holds, record.error
    assert len(record.prints) == 1


@pytest.mark.slow
def test_the_limit_of_the_example_is_predicted_and_found():
    names = run("limit")
    assert names["report"].agrees
    assert len(names["report"].detection.offsets) == 2


@pytest.mark.slow
def test_the_figure_of_a_limit_has_its_polytope_and_its_leaders():
    names = run("limit_figure")
    count = len(names["found"].leaders)
    assert names["axes"].get_title("left") == f"rank {count}"
    low, high = names["right"].get_zlim()
    heights = names["found"].vertices[:, 2]
    assert low < heights.min() < heights.max() < high


@pytest.mark.slow
def test_the_file_of_hyperplanes_tells_its_limit(tmp_path):
    script = EXAMPLES / "hyperplanes.toml"
    command = [sys.executable, "-m", "meanformer", "limit", str(script)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.count("hyperplanes") == 2
    assert "reached" in told


@pytest.mark.slow
def test_a_block_of_the_gpt_like_network_is_its_first_layer():
    names = run("gpt_block")
    for block, path, layer in (
        ("block", "sequential", 2),
        ("parallel_block", "parallel", 1),
    ):
        moved = mf.push_forward(names[block], names["cloud"]).points
        np.testing.assert_allclose(moved, names[path].points[layer], atol=1e-12)


@pytest.mark.slow
def test_the_training_of_the_example_goes_as_its_report_and_its_kernel_say():
    names = run("train")
    found, judged = names["run"], names["judged"]
    assert names["report"].verdict == "independent"
    assert found.risks[-1] < 1e-6 * found.risks[0]
    assert found.status == mf.Status.reached
    assert judged.verdict != "failed"
    late = np.log(found.risks[-2] / found.risks[-1]) / np.diff(found.times)[-1]
    slowest = 2 * judged.smallest[-1] / len(names["data"])
    np.testing.assert_allclose(late, slowest, rtol=0.1)


@pytest.mark.slow
def test_the_compiled_example_stays_below_its_certificate():
    names = run("compile")
    (bound,) = names["network"].certificate.bound
    np.testing.assert_allclose(names["exact"], 0.5 * 0.5**2, rtol=1e-12)
    assert 0 < np.abs(names["found"] - names["exact"]).max() <= bound <= 1e-3
    last = names["network"].readout.apply(names["trajectory"].probes[-1])
    np.testing.assert_allclose(last, names["found"], atol=1e-14)
    assert names["checked"].holds


def test_every_example_file_is_tested_here():
    source = Path(__file__).read_text()
    tested = re.findall(r'run\("(\w+)"\)|EXAMPLES / "(\w+)\.', source)
    names = {script or file for script, file in tested}
    assert names == {path.stem for path in EXAMPLES.glob("*.*")}


@pytest.mark.parametrize("example", ["first_flow"])
def test_the_readme_shows_a_tested_example(example):
    _, _, code = (EXAMPLES / f"{example}.py").read_text().partition('"""\n\n')
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()


def test_the_count_on_many_clouds_that_the_questions_advise_runs():
    text = (ROOT / "docs" / "faq.md").read_text()
    (advice,) = re.findall(r"`(\[observables.count_clusters.+?\])`", text)
    cloud = mf.TokenCloud.from_angles([0.0, 0.1, 2.0])
    flow = mf.Flow(mf.identity_attention("softmax", 2, beta=9.0), space=mf.Sphere())
    paths = [mf.run_layers(flow, cloud, 1)]
    assert eval(
        advice, {**vars(mf), "observables": mf.observables, "paths": paths}
    ) == [2]


def test_dynamics_of_ones_own_are_solved_stored_and_continued(tmp_path):
    from meanformer.storage import RunStore

    solve = run("own_dynamics")["solve_with_inertia"]
    # A lone token under the value -4 is an oscillator with friction.
    flow = mf.Flow(mf.Softmax(np.eye(1), np.eye(1), -4 * np.eye(1)))
    cloud, depths = mf.TokenCloud([[1.0]]), jnp.linspace(0, 3, 7)
    path = solve(flow, cloud, depths, friction=0.8)
    rate = np.sqrt(4 - 0.4**2)
    phase = rate * np.asarray(depths)
    bow = np.cos(phase) + 0.4 / rate * np.sin(phase)
    expected = np.exp(-0.4 * np.asarray(depths)) * bow
    np.testing.assert_allclose(path.points[:, 0, 0], expected, atol=2e-6)
    solve(flow, cloud, depths[:4], friction=0.8, store=RunStore(tmp_path / "run"))
    longer = solve(flow, cloud, depths, friction=0.8, store=RunStore(tmp_path / "run"))
    np.testing.assert_array_equal(longer.points, path.points)
    np.testing.assert_array_equal(mf.open_run(tmp_path / "run").points, path.points)


@pytest.mark.slow
def test_an_attention_with_an_exponential_kernel_has_what_is_known_of_such():
    names = run("own_exponential")
    cloud = names["cloud"]
    shift = float(np.log(2))
    known = mf.Unnormalised(np.eye(2), np.eye(2), np.eye(2), beta=2.0, shift=shift)
    assert names["is_gradient"]
    np.testing.assert_allclose(names["energy"], mf.observables.energy(known, cloud))
    rates = mf.mean_field.growth_rates(known, [1, 2])
    np.testing.assert_allclose(names["rates"], rates)
    assert bool(names["late"].status == mf.Status.reached)
    matrix = mf.attention_matrix(names["attention"], cloud)
    np.testing.assert_allclose(matrix, mf.attention_matrix(known, cloud))
