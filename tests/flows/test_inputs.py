"""What a flow and a solve are given, and what they say to mistakes."""

import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer.experiments import reference_attention, reference_cloud
from meanformer.flows.inputs import checked_probes, saved_depths

pytestmark = pytest.mark.usefixtures("untyped")


def solved(**options):
    return mf.solve(mf.Flow(reference_attention()), reference_cloud(), 1.0, **options)


def test_both_ends_are_saved_where_only_some_depths_are_listed():
    forward = saved_depths((0.5, 2.0), [0.75, 1.0], np.float64, None)
    np.testing.assert_array_equal(forward, [0.5, 0.75, 1.0, 2.0])
    backward = saved_depths(-1.0, [-0.25], np.float64, None)
    np.testing.assert_array_equal(backward, [0.0, -0.25, -1.0])
    np.testing.assert_array_equal(saved_depths(1.0, [], np.float64, None), [0.0, 1.0])


def test_depths_listed_without_the_last_one_are_those_of_the_whole_path():
    options = {"solver": mf.FixedStep(0.25)}
    some, whole = solved(save=[0.5], **options), solved(save=3, **options)
    np.testing.assert_array_equal(some.points, whole.points)


@pytest.mark.parametrize(
    ("save", "words"),
    [
        ([0.2, 1.5], "must lie between 0.0 and 1.0"),
        ([-0.2, 0.5], "must lie between 0.0 and 1.0"),
        ([0.5, 0.2], "in order from 0.0 to 1.0, without repetition"),
        ([0.5, 0.5], "without repetition"),
        (0.5, "save is 0.5; it must be a number of depths, or a list"),
    ],
)
def test_depths_that_cannot_be_saved_are_refused(save, words):
    with pytest.raises(mf.InvalidInput, match=words):
        saved_depths(1.0, save, np.float64, None)


@pytest.mark.parametrize("depth", [[0.0, 1.0], (0.0, np.ones(2)), np.arange(3.0)])
def test_several_depths_instead_of_the_last_one_are_told_where_they_belong(depth):
    words = r"it must be a number, or a pair \(first, last\); save=… takes"
    with pytest.raises(mf.InvalidInput, match=words):
        saved_depths(depth, 2, np.float64, None)


def test_a_folder_given_as_store_is_told_what_to_be_wrapped_in(tmp_path):
    words = r"store is '.+'; it must be meanformer.storage.RunStore\(folder\)"
    with pytest.raises(mf.InvalidInput, match=words):
        solved(store=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_a_tolerance_that_is_no_number_is_refused(name):
    with pytest.raises(mf.InvalidInput, match=f"{name} is 'small'; it must be"):
        solved(**{name: "small"})


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (diffrax.Dopri5(), r"solver=Adaptive\(Dopri5\(\)\)"),
        (diffrax.Tsit5, r"solver=Adaptive\(Tsit5\(\)\)"),
        (diffrax.Kvaerno5(), r"solver=Stiff\(Kvaerno5\(\)\)"),
        (diffrax.Euler(), r"solver=FixedStep\(h, Euler\(\)\)"),
        ("adaptive", "it must be Adaptive"),
    ],
)
def test_a_method_of_diffrax_is_told_what_to_be_wrapped_in(solver, words):
    with pytest.raises(mf.InvalidInput, match=words):
        solved(solver=solver)


def test_a_tolerance_below_the_precision_is_said_as_that():
    with pytest.raises(mf.InvalidInput, match="float64 resolves no more than 2.2e-16"):
        solved(rtol=1e-17)
    cloud = mf.TokenCloud(jnp.eye(2, dtype=jnp.float32))
    gamma = mf.identity_attention("softmax", 2, 1.0)
    with pytest.raises(mf.InvalidInput, match="give float64 tokens"):
        mf.solve(mf.Flow(gamma), cloud, 1.0, rtol=1e-9)


def test_a_function_of_measure_and_points_is_no_velocity():
    with pytest.raises(
        mf.InvalidInput, match=r"a function of \(mu, x\).*takes the depth"
    ):
        mf.Flow(lambda mu, x: -x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: -x, "returns an array when it is given a depth"),
        (lambda x: x @ jnp.eye(2), "fails when it is given a depth"),
        (lambda depth: None, "returns a NoneType"),
    ],
)
def test_a_function_of_points_is_told_to_be_a_map_of_points(function, words):
    with pytest.raises(
        mf.InvalidInput, match=words + r".*Flow\(PointMap\(function\)\)"
    ):
        mf.solve(mf.Flow(function), reference_cloud(), 1.0)


def test_the_velocity_of_a_cloud_is_asked_of_the_flow():
    flow, cloud = mf.Flow(reference_attention(), space=mf.Sphere()), reference_cloud()
    points = cloud.points / jnp.linalg.norm(cloud.points, axis=1, keepdims=True)
    cloud = cloud.moved(points)
    found = flow.velocity_at(cloud)
    np.testing.assert_array_equal(found, flow.field(jnp.array(0.0), cloud, points))
    np.testing.assert_allclose(jnp.sum(found * points, axis=1), 0, atol=1e-15)
    np.testing.assert_allclose(
        flow.velocity_at(cloud, points[1:3]), found[1:3], atol=1e-15
    )


def test_the_velocity_of_a_flow_that_changes_is_that_of_the_depth():
    maps = [reference_attention(), reference_attention(mf.L2)]
    flow, cloud = mf.Flow(mf.Schedule(maps)), reference_cloud()
    for depth, gamma in ((0.2, maps[0]), (0.7, maps[1])):
        found = flow.velocity_at(cloud, depth=depth)
        np.testing.assert_allclose(found, gamma(cloud, cloud.points), atol=1e-14)


def test_points_among_tokens_in_order_stand_at_the_end_of_the_sequence():
    flow = mf.Flow(mf.Masked(reference_attention()))
    cloud = mf.in_order(reference_cloud())
    last = flow.velocity_at(cloud)[-1:]
    np.testing.assert_allclose(
        flow.velocity_at(cloud, cloud.points[-1:]), last, atol=1e-15
    )
    first = flow.velocity_at(cloud, cloud.points[:1], positions=cloud.positions[:1])
    np.testing.assert_allclose(first, flow.velocity_at(cloud)[:1], atol=1e-15)
    places = checked_probes(flow, cloud, cloud.points[:2])[1]
    np.testing.assert_array_equal(places, [1.0, 1.0])


def test_the_velocity_at_points_of_another_dimension_is_refused():
    with pytest.raises(mf.InvalidInput, match="x has shape"):
        mf.Flow(reference_attention()).velocity_at(reference_cloud(), jnp.ones((2, 3)))


TAKING_A_KEY = {
    "cloud": lambda key: reference_cloud().sample(2, key=key),
    "Gaussian": lambda key: mf.Gaussian(np.zeros(2), np.eye(2)).sample(2, key=key),
    "box": lambda key: mf.UniformBox([0.0], [1.0]).sample(2, key=key),
    "sphere": lambda key: mf.UniformSphere(2).sample(2, key=key),
    "mixture": lambda key: mf.Mixture([1.0], [mf.UniformBox([0.0], [1.0])]).sample(
        2, key=key
    ),
    "density": lambda key: mf.FourierDensity(jnp.zeros((1, 2))).sample(2, key=key),
    "resample": lambda key: mf.measures.resample(reference_cloud(), 2, key=key),
    "wasserstein": lambda key: mf.wasserstein(
        reference_cloud(), reference_cloud(), method="sliced", key=key
    ),
    "perturbed": lambda key: mf.observables.perturbed(
        reference_cloud(), 0.1, key=key, space=mf.Euclidean()
    ),
    "modes": lambda key: mf.observables.sample_modes(4, 2.0, samples=2, key=key),
    "solve": lambda key: mf.solve(
        mf.Flow(reference_attention(), noise=0.1),
        reference_cloud(),
        1.0,
        solver=mf.FixedStep(0.5),
        key=key,
    ),
    "solve_many": lambda key: mf.solve_many(
        mf.Flow(reference_attention(), noise=0.1),
        [reference_cloud()],
        1.0,
        solver=mf.FixedStep(0.5),
        key=key,
    ),
}


@pytest.mark.parametrize("call", TAKING_A_KEY.values(), ids=TAKING_A_KEY)
def test_what_is_no_random_key_is_told_what_to_be(call):
    with pytest.raises(mf.InvalidInput, match=r"key is 0; .* jax.random.key\(0\)"):
        call(0)
    with pytest.raises(mf.InvalidInput, match=r"Generator.*jax.random.key\(seed\)"):
        call(np.random.default_rng(0))
    with pytest.raises(mf.InvalidInput, match="an array of keys"):
        call(jr.split(jr.key(0)))


def test_raw_keys_are_random_keys_too():
    raw = jax.random.PRNGKey(3)
    np.testing.assert_array_equal(
        reference_cloud().sample(3, key=raw), reference_cloud().sample(3, key=jr.key(3))
    )
