"""Configuration files: what they build, and how mistakes in them are told."""

import copy
import datetime
import random
import tomllib

import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.storage.config import build, depth_grid, read_config

BASE = """
[tokens]
points = [[1.0, 0.0], [0.0, 1.0]]
[solve]
depth = 1.0
"""


SAMPLE = "[tokens]\nlaw = 'box'\ndimension = 2\ncount = 3\n"


def run_of(text, folder):
    return build(tomllib.loads(text), folder)


def test_the_smallest_file_is_softmax_with_identity_matrices(tmp_path):
    run = run_of(BASE, tmp_path)
    gamma = run.flow.velocity.gamma
    assert isinstance(gamma, mf.Softmax)
    np.testing.assert_array_equal(gamma.query, jnp.eye(2))
    np.testing.assert_allclose(run.depths, np.linspace(0, 1, 11), atol=1e-15)


def test_every_part_of_a_run_can_be_described(tmp_path):
    run = run_of(
        """
[tokens]
law = "gaussian"
count = 5
dimension = 3
seed = 2
scale = 0.5
in_order = true
[attention]
mask = { kind = "window", length = 0.5 }
heads = [
  { kind = "l2", beta = 2.0, query = 0.5, half = true },
  { kind = "sigmoid", key = { seed = 1, scale = 0.1 }, bias = -1.0 },
]
[perceptron]
weights_in = [[1.0, 0.0, 0.0]]
bias_in = [0.0]
weights_out = [[1.0], [0.0], [0.0]]
activation = "tanh"
[flow]
noise = 0.1
seed = 4
[solve]
depth = 2.0
save_every = 0.5
solver = "fixed"
step = 0.1
[stop]
escape_radius = 10.0
step_budget = 50
""",
        tmp_path,
    )
    masked, perceptron = run.flow.velocity.gamma.maps
    assert isinstance(masked, mf.Masked)
    assert isinstance(masked.mask, mf.attention.Window)
    assert [type(head) for head in masked.attention.heads] == [mf.L2, mf.Sigmoid]
    assert masked.attention.heads[0].half
    assert perceptron.activation is jnp.tanh
    assert run.measure.positions is not None
    assert isinstance(run.options["solver"], mf.FixedStep)
    assert [type(stop) for stop in run.options["stop"]] == [
        mf.flows.EscapeRadius,
        mf.flows.StepBudget,
    ]
    assert run.options["key"] is not None


def test_tokens_can_come_from_a_file(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    text = '[tokens]\nfile = "x.npy"\n[solve]\ndepth = 1.0\n'
    assert run_of(text, tmp_path).measure.count == 3


def test_a_longer_grid_of_depths_begins_with_the_shorter_one():
    short, long = depth_grid(1.0, 0.1), depth_grid(1.7, 0.1)
    np.testing.assert_array_equal(long[: len(short)], short)
    assert float(short[-1]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tokns]\n", "did you mean tokens"),
        (BASE + "[attention]\nbata = 2.0\n", "did you mean beta"),
        (BASE + "[attention]\nkind = 'sofmax'\n", "did you mean softmax"),
        (BASE + "[attention]\nbeta = 'hot'\n", "attention.beta is 'hot'"),
        (BASE + "[attention]\nbeta = -1.0\n", "beta is -1.0"),
        (BASE + "[attention]\nquery = [[1.0]]\n", "query is"),
        (BASE + "[attention]\nquery = 'unity'\n", "attention.query is 'unity'"),
        (BASE + "[attention]\nmask = 'casual'\n", "did you mean causal"),
        (BASE + "[attention]\nhalf = true\n", "attention.half is not known"),
        (BASE + "[flow]\nspace = 'spere'\n", "did you mean sphere"),
        (BASE + "step = 0.1\n", "solve.step must not be given"),
        (BASE + "solver = 'fixed'\n", "solve.step must be given"),
        (BASE + "save_every = 3.0\n", "save_every is 3.0"),
        ("[tokens]\npoints = [[1.0]]\n", "solve.depth is missing"),
        (BASE.replace("depth", "depht"), "solve.depth is missing.+by depht"),
        (
            BASE + "[perceptron]\nweight_in = [[1.0]]\nbias_in = [0.0]\n",
            "mean weights_in",
        ),
        ("[tokens]\n[solve]\ndepth = 1.0\n", "exactly one of points"),
        ("[tokens]\nlaw = 'cube'\n[solve]\ndepth = 1.0\n", "tokens.law is 'cube'"),
        ("[tokens]\nlaw = 'gausian'\n[solve]\ndepth = 1.0\n", "did you mean gaussian"),
        ("tokens = 3\n", "must be a table"),
        (SAMPLE + "seed = 100000000000000000000\n", "tokens.seed is 1000"),
        (SAMPLE.replace("3", "-3"), "tokens.count is -3; it must be positive"),
        (SAMPLE.replace("3", "10000000000000"), "tokens.count is 1000"),
        (
            "[tokens]\npoints = [[1.0], [1.0, 2.0]]\n",
            "tokens.points is .* equal length",
        ),
        ("[tokens]\npoints = [['a']]\n", "tokens.points is .* finite numbers"),
        ("[tokens]\npoints = [[inf]]\n", "tokens.points is .* finite numbers"),
        ("[tokens]\npoints = [[1.0]]\nweights = [2.0]\n", "tokens.weights sum to 2"),
        (BASE.replace("1.0\n", "inf\n"), "solve.depth is inf; .* a finite number"),
        (BASE + "save_every = 1e-13\n", "save_every is 1e-13; it must be at least"),
        (BASE + "save_every = 0.3\n", "the nearest are 0.9 and 1.2"),
        (BASE + "rtol = -1.0\n", "solve.rtol is -1.0; it must be positive"),
        (BASE + "atol = 0\n", "solve.atol is 0.0; it must be positive"),
        (BASE + "solver = 'fixed'\nstep = 0.0\n", "solve.step is 0.0"),
        (BASE + "[stop]\nstep_budget = -1\n", "stop.step_budget is -1"),
        (BASE + "[stop]\nescape_radius = 0.0\n", "stop.escape_radius is 0.0"),
        (BASE + "[attention]\nheads = 3\n", "attention.heads is 3; .* list of tables"),
        (BASE + "[attention]\nheads = []\n", "attention.heads is"),
        (BASE + "[attention]\nheads = [3]\n", r"heads\[0\]\] is 3; it must be a table"),
        (BASE + "[attention]\nquery = [[1.0], [1.0, 2.0]]\n", "attention.query is"),
        (BASE + "[attention]\nquery = [['a', 'b']]\n", "attention.query is"),
        (BASE + "[attention]\nquery = {seed=5, rows=-2}\n", "query.rows is -2"),
        (
            BASE + "[attention]\nkind = 'l2'\nhalf = 'yes'\n",
            "half is 'yes'; .* true or",
        ),
        (
            BASE + "[attention]\nkind = 'sinkhorn'\ntolerance = 'x'\n",
            "attention.tolerance is 'x'; it must be a finite number",
        ),
        (
            BASE + "[attention]\nkind = 'sinkhorn'\nmax_steps = 2.5\n",
            "attention.max_steps is 2.5; it must be a whole number",
        ),
        (BASE + "[attention]\nvalue_bias = 'x'\n", "attention.value_bias is 'x'"),
        (BASE + "[attention]\nmask = 'causal'\n", "tokens.in_order = true"),
        (BASE + "[attention]\nmask = {kind='blocks'}\n", "boundaries is missing"),
        (BASE + "[perceptron]\nweights_in = [['a']]\n", "perceptron.weights_in is"),
        (BASE + "[flow]\nnoise = 0.1\n", 'solve.solver = "fixed"'),
        (
            "[tokens]\nfile = 'none.npy'\n[solve]\ndepth = 1.0\n",
            r"tokens.file is '.*none.npy', where there is no file; it must name a .npy",
        ),
        ("[tokens]\nfile = '.'\n[solve]\ndepth = 1.0\n", "where there is no file"),
        ("[tokens]\npoints = " + 100 * "[" + 100 * "]", "tokens.points is .* finite"),
        (BASE + f"saves_per_decade = {400 * '9'}\n", "saves_per_decade is 999"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(text, message, tmp_path):
    with pytest.raises(mf.InvalidInput, match=message) as caught:
        run_of(text, tmp_path)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("depth", [0.3, 1.1, 7.0, 123.4])
def test_the_depth_is_the_last_one_saved(depth):
    assert float(depth_grid(depth, 0.1)[-1]) == pytest.approx(depth, rel=1e-12)


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path):
    with pytest.raises(mf.InvalidInput, match="does not exist"):
        read_config(tmp_path / "none.toml")
    for text, message in {
        "[tokens\n": "not a TOML file",
        f"a = {5000 * '9'}\n": "not a TOML file",
        f"a = {500 * '['}{500 * ']'}": "nested too deeply",
        f"a = {500 * '{a = '}1{500 * '}'}": "nested too deeply",
    }.items():
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(mf.InvalidInput, match=message):
            read_config(tmp_path / "bad.toml")


def test_a_flow_can_be_rescaled_and_switch_to_implicit_steps(tmp_path):
    solver = BASE.replace("depth = 1.0", 'depth = 1.0\nsolver = "switching"')
    run = run_of(solver + "[flow]\nrescaled = true\n", tmp_path)
    assert isinstance(run.flow.velocity, mf.Rescaled)
    assert isinstance(run.options["solver"], mf.flows.Switching)


@pytest.mark.parametrize(
    ("words", "scheme"),
    [
        ('"post"', mf.flows.PostNorm()),
        ('"pre"', mf.flows.PreNorm()),
        ('"peri"', mf.flows.PeriNorm()),
        ('"ngpt"\nalpha = 0.5', mf.flows.NGPT(0.5)),
        ('"mix"\nswitch = 2.0', mf.flows.MixNorm(2.0)),
        ('"sqrt"', mf.flows.SqrtScaling()),
    ],
)
def test_a_flow_can_be_normalised_in_six_ways(words, scheme, tmp_path):
    flow = run_of(f"{BASE}[flow]\nnormalisation = {words}\n", tmp_path).flow
    assert type(flow.velocity.scheme) is type(scheme)
    assert flow.space == scheme.space


@pytest.mark.parametrize(
    "words", ['space = "sphere"', "rescaled = true", "noise = 1.0"]
)
def test_a_normalised_flow_has_its_own_space(words, tmp_path):
    text = f'{BASE}[flow]\nnormalisation = "pre"\n{words}\n'
    with pytest.raises(mf.InvalidInput, match="decides the space"):
        run_of(text, tmp_path)


KEYS = {
    "tokens": "points file law weights positions in_order count dimension seed scale",
    "attention": "kind query key value beta heads mask half tolerance normalized "
    "query_bias value_bias allow_negative_beta",
    "perceptron": "weights_in bias_in weights_out bias_out activation",
    "flow": "space noise seed rescaled normalisation alpha switch",
    "solve": "depth save_every saves_per_decade first_depth rtol atol solver step "
    "merge",
    "stop": "escape_radius steady_speed step_budget other",
}


def nested(depth, inside):
    for _ in range(depth):
        inside = [inside]
    return inside


VALUES = (
    *(
        "",
        "identity",
        "sphere",
        "causal",
        "x.npy",
        "none.npy",
        "\x00",
        "é\n",
        300 * "x",
    ),
    *(0, 1, -1, 2, 2**63, -(10**40), 10**400, True, False),
    *(0.0, 0.5, -1.5, 5e-324, 1e308, float("inf"), float("nan")),
    *(datetime.datetime(2020, 1, 1), datetime.time(1)),
    *([], {}, [[]], [1, 0], [[1.0], [1.0, 2.0]], [[0.0, 0.0], [0.0, 0.0]], [{}, 3]),
    *(nested(depth, 1.0) for depth in (3, 40, 70, 330)),
    *(nested(3, "a"), {"kind": "window", "length": 0.1}, {"seed": -1, "rows": 0}),
    {"kind": "blocks", "boundaries": nested(5, 1)},
)
GOOD = (
    {"tokens": {"law": "sphere", "count": 2, "dimension": 2}},
    {
        "tokens": {"points": [[1.0, 0.0]], "in_order": True},
        "attention": {"heads": [{}]},
    },
)


@pytest.mark.parametrize("seed", [2, 5])
def test_any_value_of_any_key_builds_a_run_or_is_told_in_one_sentence(seed, tmp_path):
    rng, told = random.Random(seed), 0
    np.save(tmp_path / "x.npy", np.array(["no", "numbers"]))
    for _ in range(150):
        config = copy.deepcopy(rng.choice(GOOD)) | {"solve": {"depth": 10.0}}
        for _ in range(rng.choice((1, 1, 2))):
            table = rng.choice(list(KEYS))
            key, value = rng.choice(KEYS[table].split()), rng.choice(VALUES)
            config.setdefault(table, {})[key] = value
        try:
            build(config, tmp_path)
        except mf.InvalidInput as error:
            told += len(str(error)) < 1000
        else:
            told += 1
    assert told == 150
