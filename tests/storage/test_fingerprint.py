"""What tells one run from another: everything that was asked, and nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer.experiments import reference_attention, reference_cloud
from meanformer.flows.dynamics.driver import State
from meanformer.flows.dynamics.joining import MergingTokens
from meanformer.flows.dynamics.merging import Merge
from meanformer.flows.dynamics.tokens import Points, Tokens
from meanformer.flows.inputs import Settings
from meanformer.storage.fingerprint import fingerprint, parameters, short_hash


def asked(**changes):
    """A solve that was asked for, with changes."""
    cloud = reference_cloud(positions=jnp.array([0.25, 0.5, 0.75, 1.0]))
    given = {
        "flow": mf.Flow(reference_attention()),
        "cloud": cloud,
        "probe_positions": None,
        "integrator": mf.FixedStep(0.1),
        "stops": (),
        "rtol": jnp.asarray(1e-6),
        "atol": jnp.asarray(1e-9),
        "max_steps": 100,
        "probes": None,
    } | changes
    points = Points(given["cloud"].points, given.pop("probes"))
    merge = given.pop("merge", None)
    names = ("integrator", "stops", "rtol", "atol", "max_steps")
    settings = Settings(**{name: given.pop(name) for name in names})
    tokens = Tokens(**given, settings=settings)
    dynamics = tokens if merge is None else MergingTokens(tokens, merge)
    return dynamics.request(State.first(jnp.zeros(()), points))


def other_cloud(**changes):
    cloud = reference_cloud(positions=jnp.array([0.25, 0.5, 0.75, 1.0]))
    parts = ("points", "weights", "positions", "sums")
    given = {name: getattr(cloud, name) for name in parts} | changes
    return mf.TokenCloud(given.pop("points"), given.pop("weights"), **given)


POINTS, WEIGHTS = reference_cloud().points, reference_cloud().weights
OTHERS = {
    "another flow": ("flow", {"flow": mf.Flow(reference_attention(beta=2.0))}),
    "another space": (
        "flow",
        {"flow": mf.Flow(reference_attention(), space=mf.Sphere())},
    ),
    "noise": ("flow", {"flow": mf.Flow(reference_attention(), noise=0.1)}),
    "other tokens": (
        "tokens",
        {"cloud": other_cloud(points=POINTS.at[0, 0].add(1e-9))},
    ),
    "other positions": (
        "tokens",
        {"cloud": other_cloud(positions=jnp.array([0.25, 0.5, 0.75, 0.9]))},
    ),
    "other sums": ("tokens", {"cloud": other_cloud(sums=mf.Blocked())}),
    "other blocks": (
        "tokens",
        {"cloud": other_cloud(sums=mf.Fourier(tolerance=1e-6))},
    ),
    "other weights": ("weights", {"cloud": other_cloud(weights=WEIGHTS[::-1])}),
    "probes": ("probes", {"probes": jnp.ones((1, 2))}),
    "places of probes": ("probes", {"probe_positions": jnp.ones(1)}),
    "another solver": ("solver", {"integrator": mf.Adaptive()}),
    "another step": ("solver", {"integrator": mf.FixedStep(0.05)}),
    "a relative tolerance": ("tolerances", {"rtol": jnp.asarray(1e-5)}),
    "an absolute tolerance": ("tolerances", {"atol": jnp.asarray(1e-8)}),
    "a condition": ("stop conditions", {"stops": (mf.flows.SteadyState(),)}),
    "a step budget": ("stop conditions", {"max_steps": 101}),
    "a key": ("key", {"key": jr.key(1)}),
    "merging": ("merging", {"merge": Merge(1e-3)}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_thing_asked_for_shows_in_its_part_of_the_fingerprint(name):
    part, changes = OTHERS[name]
    before, after = fingerprint(asked()), fingerprint(asked(**changes))
    different = {key for key in before | after if before.get(key) != after.get(key)}
    assert different == {part}
    shown, now = parameters(asked()), parameters(asked(**changes))
    assert {key for key in shown | now if shown.get(key) != now.get(key)} == {part}


def test_the_same_question_has_the_same_fingerprint():
    assert fingerprint(asked()) == fingerprint(asked())


def test_runs_of_earlier_versions_are_still_known():
    assert fingerprint(asked()) == {
        "flow": "32888c37d9cc552a",
        "tokens": "7c74720d5162bcba",
        "weights": "44b557a9740dc35c",
        "probes": "af401bdea6f1f983",
        "solver": "9bb82113b6a8b8bb",
        "tolerances": "9b60e63ede27b2b1",
        "stop conditions": "0f1ef67975a7d0c7",
        "key": "f193ee68331ffe60",
    }
    option = ("causal", bool, False)
    first, later = (
        dataclasses.make_dataclass("Layer", ["beta", *options])
        for options in ((), (option,))
    )
    assert short_hash(first(1.0)) == short_hash(later(1.0))
    assert short_hash(first(1.0)) != short_hash(later(1.0, True))


def with_default(rate):
    def schedule(depth, rate=rate):
        return rate * depth

    return schedule


def with_keyword(rate):
    def schedule(depth, *, rate=rate):
        return rate * depth

    return schedule


def enclosing(rate):
    return lambda depth: rate * depth


class Cooling:
    """An object with a method."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, depth):
        return self.rate * depth

    def schedule(self, depth):
        return self.rate * depth


@pytest.mark.parametrize(
    "make",
    [
        with_default,
        with_keyword,
        enclosing,
        Cooling,
        lambda rate: Cooling(rate).schedule,
        lambda rate: functools.partial(with_default(1.0), rate=rate),
        lambda rate: functools.partial(jnp.multiply, rate),
        lambda rate: jax.jit(enclosing(rate)),
        lambda rate: {"rate": rate},
        lambda rate: [1.0, rate],
        lambda rate: np.array([rate]),
        lambda rate: jr.key(int(rate)),
        lambda rate: enclosing(enclosing(rate)),
    ],
)
def test_a_function_is_told_from_one_with_other_numbers(make):
    assert short_hash(make(1.0)) == short_hash(make(1.0))
    assert short_hash(make(1.0)) != short_hash(make(2.0))


def test_arrays_are_told_apart_by_precision_and_shape():
    hashes = {
        short_hash(np.zeros(4)),
        short_hash(np.zeros(4, np.float32)),
        short_hash(np.zeros((2, 2))),
        short_hash(np.zeros(4, np.int64)),
        short_hash([0.0] * 4),
        short_hash(jr.key(0, impl="rbg")),
        short_hash(jr.key(0, impl="unsafe_rbg")),
        short_hash([1, 23]),
        short_hash([12, 3]),
    }
    assert len(hashes) == 9


def test_a_function_that_encloses_itself_is_described():
    def forever(depth):
        return forever(depth)

    assert short_hash(forever) == short_hash(forever)
    flow = mf.Flow(lambda depth: forever(depth))
    assert parameters(asked(flow=flow))["flow"]["velocity"]
