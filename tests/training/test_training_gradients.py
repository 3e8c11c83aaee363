import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer import training
from meanformer.experiments.helpers.engines import Continuous
from meanformer.training import Automatic, Checkpointed, Reversible
from training_problems import (
    first_reference,
    largest_difference,
    random_problem,
)

METHODS = {"euler": diffrax.Euler(), "heun": diffrax.Heun(), "rk4": mf.flows.RK4()}
# Gradients by the tokens at the end too, with bias and neurons, on uneven depths.
RICH = {"value_bias": True, "neurons": 3, "depths": jnp.array([0.0, 0.2, 0.7, 1.0])}


def by_ordinary_layers(model, data):
    """The risk by `solve` on maps of the library, one context at a time."""
    losses = []
    for cloud, query, target in zip(
        data.contexts, data.queries, data.targets, strict=True
    ):
        losses.append(jnp.sum((model(cloud, query) - target) ** 2) / 2)
    return jnp.stack(losses).mean()


def test_the_reference_network_has_its_risk_and_gradient():
    model, data = first_reference()
    found = training.gradient(model, data)
    heads = found.parameters.heads
    np.testing.assert_allclose(found.risk, 1.6808851103560536, rtol=1e-14)
    np.testing.assert_allclose(found.squared_norm, 3.245003493284794, rtol=1e-13)
    published = {
        "query": [
            [-0.037020141810, -0.142965673979],
            [-0.242141835543, 0.114676337819],
        ],
        "key": [[-0.184803666634, 0.016101145482], [0.114676337819, 0.200303842888]],
        "value": [[-0.532669332506, 0.085425115638], [1.250462459827, -0.681464047378]],
    }
    for name, matrix in published.items():
        found_matrix = getattr(heads, name)[0, 0]
        np.testing.assert_allclose(found_matrix, matrix, atol=1e-12)
    last = {
        "query": [[-0.002804622217, 0.016622222498], [0.001594401563, -0.009449578402]],
        "key": [[0.013817600281, -0.021672777120], [0.016622222498, -0.026071800900]],
        "value": [[-0.086686661241, 0.056797342353], [1.597010588204, -1.046365794022]],
    }
    for name, matrix in last.items():
        found_matrix = getattr(heads, name)[1, 1]
        np.testing.assert_allclose(found_matrix, matrix, atol=1e-12)


def test_the_reference_network_moves_tokens_and_query_as_published():
    model, data = first_reference()
    path = model.run(data.contexts[0], data.queries[0])
    ends = [
        [1.391493313991, 0.037054837203],
        [0.511493374417, 0.790904777664],
        [-0.796190039636, 0.430453484476],
    ]
    np.testing.assert_allclose(path.points[-1], ends, atol=1e-12)
    end = [[0.099377858939, -0.830817921549]]
    np.testing.assert_allclose(path.probes[-1], end, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "interpolate"),
    [
        ("euler", False),
        pytest.param("heun", False, marks=pytest.mark.slow),
        pytest.param("rk4", False, marks=pytest.mark.slow),
        pytest.param("euler", True, marks=pytest.mark.slow),
        ("rk4", True),
    ],
)
def test_the_risk_is_that_of_the_ordinary_solver(key, name, interpolate):
    options = dict(RICH, sizes=(4, 4), method=METHODS[name], interpolate=interpolate)
    if interpolate:
        options["depths"] = options["depths"][:3]
    model, data = random_problem(key, **options)
    expected = by_ordinary_layers(model, data)
    np.testing.assert_allclose(training.risk(model, data), expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("name", "interpolate", "context"),
    [
        ("euler", False, "moving"),
        ("euler", True, "moving"),
        ("euler", False, "frozen"),
        ("heun", False, "moving"),
        ("rk4", True, "moving"),
        pytest.param("rk4", False, "frozen", marks=pytest.mark.slow),
    ],
)
def test_the_adjoint_is_the_derivative(key, name, interpolate, context):
    options = dict(RICH, method=METHODS[name], interpolate=interpolate)
    if interpolate:
        options["depths"] = options["depths"][:3]
    model, data = random_problem(key, context=context, **options)
    found = training.gradient(model, data)
    expected = training.gradient(model, data, engine=Automatic())
    assert largest_difference(found.parameters, expected.parameters) < 1e-12
    np.testing.assert_allclose(found.risk, expected.risk, rtol=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_the_adjoint_is_that_of_random_shapes_with_absent_tokens(seed):
    keys = jr.split(jr.key(seed), 4)
    sizes = np.asarray(jr.randint(keys[0], (3,), 1, 6))
    d, k, m = (int(n) for n in jr.randint(keys[1], (3,), 1, 4))
    model, data = random_problem(
        keys[2], sizes=sizes, dimension=d, heads=m, key_dimension=k, beta=1.3
    )
    found = training.gradient(model, data).parameters
    expected = jax.grad(lambda model: training.risk(model, data))(model).parameters
    scaled = jax.tree.map(lambda leaf: 3 * leaf.shape[1] * leaf, expected)
    assert largest_difference(found, scaled) < 1e-12


@pytest.mark.parametrize(
    "engine",
    [Automatic(is_rematerialised=True), Checkpointed(), Checkpointed(2), Reversible()],
    ids=str,
)
def test_exact_engines_agree(key, engine):
    model, data = random_problem(key, layers=7, value_bias=True, neurons=2)
    # Small values, so that a layer moves points by a contraction.
    small = jax.tree.map(lambda leaf: 0.7 * leaf, model.parameters)
    model = model.with_parameters(small)
    expected = training.gradient(model, data)
    found = training.gradient(model, data, engine=engine)
    assert largest_difference(found.parameters, expected.parameters) < 1e-12


@pytest.mark.parametrize(
    ("engine", "states"),
    [(Reversible(), 0.01), (training.Stored(), 1.1), (Automatic(True), 1.1)],
    ids=str,
)
def test_a_layer_more_takes_no_memory_or_that_of_its_points(engine, states):
    def temporary(layers):
        model, data = random_problem(jr.key(0), layers=layers, heads=1, sizes=(256,))

        @jax.jit
        def found(parameters):
            moved = model.with_parameters(parameters)
            return training.gradient(moved, data, engine=engine).parameters

        compiled = found.lower(model.parameters).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    of_points = 8 * 257 * 2
    assert temporary(64) - temporary(8) < 56 * states * of_points


@pytest.mark.parametrize("engine", [Reversible(corrections=0), Continuous()], ids=str)
def test_engines_that_discretise_an_equation_have_first_order(key, engine):
    errors = []
    for layers in (64, 128, 256):
        model, data = random_problem(key, layers=layers, style="every layer")
        expected = training.gradient(model, data).parameters
        found = training.gradient(model, data, engine=engine).parameters
        errors.append(largest_difference(found, expected))
    orders = -np.diff(np.log2(errors))
    np.testing.assert_allclose(orders, 1, atol=0.15)


@pytest.mark.slow
def test_adaptive_steps_have_the_gradient_of_the_equation(key):
    options = {"layers": 2, "sizes": (2, 3)}
    solved, data = random_problem(key, method=mf.Adaptive(), **options)
    fine, _ = random_problem(key, method=mf.flows.RK4(), **options)
    parameters = jax.tree.map(lambda a: jnp.repeat(a, 16, axis=0), fine.parameters)
    heads = parameters.heads
    fine = training.MeanFieldTransformer(*heads[:3], method=mf.flows.RK4())
    expected = training.gradient(fine, data).parameters.heads.value
    found = training.gradient(solved, data).parameters.heads.value
    means = expected.reshape(2, 16, *expected.shape[1:]).mean(axis=1)
    np.testing.assert_allclose(found, means, atol=1e-6)


def test_input_adjoints_are_derivatives_in_tokens_and_queries(key):
    model, data = random_problem(key)

    def of_inputs(tokens, queries):
        moved = training.Dataset(list(zip_clouds(data, tokens)), queries, data.targets)
        return training.risk(model, moved)

    def zip_clouds(data, tokens):
        for points, weights in zip(tokens, data.weights, strict=True):
            yield mf.TokenCloud(points, weights)

    fields = training.gradient(model, data).fields
    by_tokens, by_queries = jax.grad(of_inputs, argnums=(0, 1))(
        data.tokens, data.queries
    )
    count = len(data)
    weighted = data.weights[:, :, None] * fields.tokens[0] / count
    np.testing.assert_allclose(by_tokens, weighted, atol=1e-14)
    np.testing.assert_allclose(by_queries, fields.queries[0] / count, atol=1e-14)


def test_a_change_of_gauge_changes_no_risk(key):
    model, data = random_problem(key)
    gauge = jnp.array([[2.0, 0.5], [-0.3, 0.7]])
    query, keys, value, _ = model.parameters.heads
    moved = training.MeanFieldTransformer(
        gauge @ query, jnp.linalg.inv(gauge).T @ keys, value
    )
    expected = training.risk(model, data)
    np.testing.assert_allclose(training.risk(moved, data), expected, rtol=1e-12)


def test_the_gradient_keeps_the_balance_of_queries_and_keys(key):
    model, data = random_problem(key)
    query, keys = model.parameters.heads[:2]
    of_query, of_key = training.gradient(model, data).parameters.heads[:2]
    one = of_query @ query.mT + query @ of_query.mT
    other = of_key @ keys.mT + keys @ of_key.mT
    np.testing.assert_allclose(one, other, atol=1e-13)


def test_order_of_heads_and_splitting_of_tokens_change_nothing(key):
    model, data = random_problem(key, heads=3)
    found = training.gradient(model, data).parameters
    turned = jax.tree.map(lambda leaf: leaf[:, ::-1], model.parameters)
    again = training.gradient(model.with_parameters(turned), data).parameters
    assert largest_difference(jax.tree.map(lambda a: a[:, ::-1], again), found) < 1e-12
    clouds = []
    for cloud in data.contexts:
        points = jnp.concatenate([cloud.points, cloud.points[:1]])
        weights = jnp.append(cloud.weights, cloud.weights[0] / 2)
        clouds.append(mf.TokenCloud(points, weights.at[0].divide(2.0)))
    split = training.Dataset(clouds, data.queries, data.targets)
    again = training.gradient(model, split).parameters
    assert largest_difference(again, found) < 1e-12


def test_without_temperature_scores_have_no_gradient(key):
    model, data = random_problem(key, beta=0.0)
    heads = training.gradient(model, data).parameters.heads
    assert not jnp.any(heads.query)
    assert not jnp.any(heads.key)
    assert jnp.any(heads.value)


def test_duplicated_heads_have_the_same_gradient(key):
    model, data = random_problem(key)
    twice = jax.tree.map(lambda a: jnp.concatenate([a, a], 1), model.parameters)
    found = training.gradient(model.with_parameters(twice), data)
    expected = training.gradient(model, data)
    np.testing.assert_allclose(found.squared_norm, expected.squared_norm, rtol=1e-12)
    half = jax.tree.map(lambda a: a[:, :2], found.parameters)
    assert largest_difference(half, expected.parameters) < 1e-12


def test_large_scores_do_not_overflow(key):
    model, data = random_problem(key, beta=1e4)
    found = training.gradient(model, data)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_decay_adds_its_penalty(key):
    model, data = random_problem(key)
    plain, decayed = (training.gradient(model, data, decay=x) for x in (0.0, 0.3))
    heads = model.parameters.heads
    square = sum(float(jnp.sum(leaf**2)) for leaf in heads[:3]) / (3 * 2)
    np.testing.assert_allclose(decayed.risk - plain.risk, 0.15 * square, rtol=1e-12)
    added = decayed.parameters.heads.value - plain.parameters.heads.value
    np.testing.assert_allclose(added, 0.3 * heads.value, atol=1e-14)


def test_tokens_may_have_targets(key):
    model, data = random_problem(key, sizes=(4, 4))
    targets = jr.normal(key, data.tokens.shape)
    field = training.Dataset(data.contexts, targets=targets)
    found = training.gradient(model, field).parameters
    expected = training.gradient(model, field, engine=Automatic()).parameters
    assert largest_difference(found, expected) < 1e-12


def cross_entropy(end, label):
    readout = jnp.array([[1.0, 0.5], [-0.3, 1.0], [0.2, -1.0]])
    return -jax.nn.log_softmax(readout @ end.queries[0])[label]


def distance_of_means(end, target):
    return jnp.sum((end.weights @ end.tokens - target[0]) ** 2)


@pytest.mark.parametrize("loss", [cross_entropy, distance_of_means])
def test_a_loss_of_ones_own_is_differentiated(key, loss):
    model, data = random_problem(key)
    if loss is cross_entropy:
        data = data.with_targets(jnp.array([0, 2, 1]))
    found = training.gradient(model, data, loss=loss).parameters
    expected = training.gradient(model, data, loss=loss, engine=Automatic()).parameters
    assert largest_difference(found, expected) < 1e-12


@pytest.mark.slow
def test_linear_heads_have_gradients_too(key):
    model, data = random_problem(key, kind=mf.Linear, value_bias=True)
    found = training.gradient(model, data).parameters
    expected = training.gradient(model, data, engine=Automatic()).parameters
    assert largest_difference(found, expected) < 1e-12


def test_the_first_variation_is_the_change_by_a_new_head(key):
    model, data = random_problem(key, layers=2)
    variation = training.FirstVariation(model, data)
    fresh = training.Heads(*jr.normal(key, (3, 1, 2, 2)))
    small = 1e-5

    def risk_with(mass):
        # Heads of little mass are many heads, of which few are new.
        query, keys, value = (
            jnp.concatenate([old, jnp.broadcast_to(new, (2, 1, 2, 2))], axis=1)
            for old, new in zip(model.parameters.heads[:3], fresh[:3], strict=True)
        )
        masses = jnp.array([(1 - mass) / 2, (1 - mass) / 2, mass])
        mixed = value * (3 * masses)[None, :, None, None]
        # The second layer keeps its heads.
        kept = value[1] * jnp.array([1.5, 1.5, 0.0])[:, None, None]
        value = jnp.stack([mixed[0], kept])
        return training.risk(training.MeanFieldTransformer(query, keys, value), data)

    slope = (risk_with(small) - risk_with(-small)) / (2 * small)
    # A layer makes up half of the depth.
    np.testing.assert_allclose(variation.excess(0, fresh)[0] / 2, slope, rtol=1e-8)


def test_mistakes_are_told(key, untyped):
    model, data = random_problem(key)
    with pytest.raises(mf.InvalidInput, match="engine is 'adjoint'"):
        training.gradient(model, data, engine="adjoint")
    other, _ = random_problem(key, dimension=3)
    with pytest.raises(mf.InvalidInput, match="data has dimension 2; the heads take 3"):
        training.risk(other, data)
    heads = model.parameters.heads
    with pytest.raises(mf.InvalidInput, match="value has shape"):
        training.MeanFieldTransformer(heads.query, heads.key, heads.value[:, :, :1])
    with pytest.raises(mf.InvalidInput, match="beta is -1.0; it must not be negative"):
        training.MeanFieldTransformer(*heads[:3], beta=-1.0)
    with pytest.raises(mf.InvalidInput, match="method is 'rk4'"):
        training.MeanFieldTransformer(*heads[:3], method="rk4")
    heun, _ = random_problem(key, method=diffrax.Heun())
    with pytest.raises(mf.Unsupported, match=r"Continuous\(\) is for Euler steps"):
        training.gradient(heun, data, engine=Continuous())
    with pytest.raises(mf.InvalidInput, match="data has no targets"):
        training.risk(model, training.Dataset(data.contexts, data.queries))
    frozen, _ = random_problem(key, context="frozen")
    with pytest.raises(mf.InvalidInput, match="data has no queries; in a frozen"):
        training.gradient(frozen, training.Dataset(data.contexts, targets=data.tokens))


def test_layers_that_cannot_be_run_backward_are_told(key):
    model, data = random_problem(key, scale=10.0)
    with pytest.raises(mf.errors.Overflow, match=r"fails for layers that move points"):
        training.gradient(model, data, engine=Reversible())


def test_layers_run_backward_to_other_points_are_told():
    options = {"layers": 2, "sizes": (3,), "context": "frozen", "scale": 2.5}
    model, data = random_problem(jr.key(22), **options)
    with pytest.raises(mf.errors.Overflow, match=r"fails for layers that move points"):
        training.gradient(model, data, engine=Reversible())


def test_what_blows_up_is_told(key):
    model, data = random_problem(key)
    large = jax.tree.map(lambda leaf: 1e120 * leaf, model.parameters)
    model = model.with_parameters(large)
    for call in (training.risk, training.outputs, training.gradient):
        with pytest.raises(mf.Overflow, match="tokens have blown up on their way"):
            call(model, data)


def test_absent_tokens_may_be_anywhere(key):
    model, data = random_problem(key, sizes=(3, 3))
    clouds = [
        mf.TokenCloud(
            jnp.concatenate([cloud.points, jnp.full((1, 2), 1e160)]),
            jnp.append(cloud.weights, 0.0),
        )
        for cloud in data.contexts
    ]
    far = training.Dataset(clouds, data.queries, data.targets)
    found, expected = (training.gradient(model, one) for one in (far, data))
    assert largest_difference(found.parameters, expected.parameters) < 1e-13


def test_layers_and_losses_are_checked(key, untyped):
    model, data = random_problem(key)
    variation = training.FirstVariation(model, data)
    heads = training.Heads(*jr.normal(key, (3, 1, 2, 2)))
    with pytest.raises(mf.InvalidInput, match="layer is 99; the last one is 2"):
        variation(99, heads)
    with pytest.raises(mf.InvalidInput, match=r"array of shape \(1, 2\), not one"):
        training.risk(model, data, loss=lambda end, target: end.queries - target)
    with pytest.raises(mf.InvalidInput, match="loss is 'mse'; it must be a function"):
        training.gradient(model, data, loss="mse")
    with pytest.raises(mf.InvalidInput, match="decay is -1.0; it must be a number"):
        training.risk(model, data, decay=-1.0)
    with pytest.raises(mf.InvalidInput, match="segments"):
        Checkpointed(0)


def test_heads_of_another_shape_are_told(key, untyped):
    model, data = random_problem(key)
    variation = training.FirstVariation(model, data)
    heads = jax.tree.map(lambda leaf: leaf[0], model.parameters.heads)
    variation.excess(np.int64(0), heads)
    for wrong in (model.parameters.heads, jax.tree.map(lambda a: a[0], heads), 3):
        with pytest.raises(mf.InvalidInput, match="those of layer 0 are"):
            variation.excess(0, wrong)
        with pytest.raises(mf.InvalidInput, match="those of layer 0 are"):
            training.head_kernel(wrong, data)
    with pytest.raises(mf.InvalidInput, match="layer is 9; the last one is"):
        variation.excess(9, heads)


def test_the_first_variation_of_a_penalty_is_half_the_square(key):
    model, data = random_problem(key, layers=2)
    plain = training.FirstVariation(model, data)
    penalised = training.FirstVariation(model, data, decay=0.3)
    fresh = training.Heads(*jr.normal(key, (3, 1, 2, 2)))
    size = sum(np.sum(np.square(leaf)) for leaf in fresh[:3])
    found = penalised(0, fresh) - plain(0, fresh)
    np.testing.assert_allclose(found, 0.15 * size, rtol=1e-10)


def test_tokens_of_unequal_contexts_may_have_targets(key):
    points = [jr.normal(key, (count, 2)) for count in (2, 4)]
    targets = [one + 1 for one in points]
    data = training.Dataset(points, targets=targets)
    still = training.MeanFieldTransformer(*np.zeros((3, 1, 1, 2, 2)), kind=mf.Linear)
    np.testing.assert_allclose(training.risk(still, data), 1.0, rtol=1e-12)


def test_a_data_set_without_tokens_or_with_positions_is_refused(untyped):
    with pytest.raises(mf.InvalidInput, match="tokens are missing"):
        training.Dataset(np.zeros((2, 0, 2)))
    with pytest.raises(mf.InvalidInput, match="contexts is a int"):
        training.Dataset(3)
    placed = mf.TokenCloud(np.ones((2, 2)), positions=np.array([0.0, 1.0]))
    with pytest.raises(mf.InvalidInput, match="contexts have positions"):
        training.Dataset([placed])
    gaussian = mf.Gaussian(np.zeros(2), np.eye(2))
    with pytest.raises(mf.InvalidInput, match="a context is a Gaussian; .* quadrature"):
        training.Dataset([gaussian])


def test_shapes_of_a_data_set_are_told_as_they_were_given(untyped):
    with pytest.raises(mf.InvalidInput, match=r"contexts has .*it must be \(N, n, d\)"):
        training.Dataset(np.ones((3, 2)))
    contexts = np.ones((3, 4, 2))
    wanted = r"it must be \(3, 2\), or \(3, m, 2\)"
    for shape in ((2, 2), (2,), (3, 3), (3, 5, 3)):
        given = str(shape).replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(mf.InvalidInput, match=f"shape {given}; {wanted}"):
            training.Dataset(contexts, np.ones(shape))
    with pytest.raises(mf.InvalidInput, match="queries has shape"):
        training.Dataset(contexts, np.ones((3, 1, 2, 1)))
    assert training.Dataset(contexts, np.ones((3, 2))).queries.shape == (3, 1, 2)


def test_what_is_no_attention_is_no_kind(untyped):
    heads = np.ones((3, 1, 1, 2, 2))
    with pytest.raises(mf.InvalidInput, match="kind returns a tuple"):
        training.MeanFieldTransformer(*heads, kind=lambda *args, **rest: args)
    for kind in ("softmax", mf.identity_attention("softmax", 2)):
        with pytest.raises(mf.InvalidInput, match="must be a class of attention"):
            training.MeanFieldTransformer(*heads, kind=kind)


def test_the_search_for_a_head_is_compiled_once_for_all_layers(key):
    traced = []

    def counted(*matrices, **options):
        traced.append(1)
        return mf.Softmax(*matrices, **options)

    model, data = random_problem(key, layers=2)
    model = training.MeanFieldTransformer(*model.parameters.heads[:3], kind=counted)
    variation = training.FirstVariation(model, data)
    variation.best_head(0, value_norm=1.0, key=key, starts=1)
    count = len(traced)
    variation.best_head(1, value_norm=2.0, key=key, starts=1)
    assert len(traced) == count


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_best_head_is_better_than_random_ones(key, decay):
    model, data = random_problem(key, layers=2)
    variation = training.FirstVariation(model, data, decay=decay)
    best = variation.best_head(1, value_norm=2.0, key=key, starts=3)
    query, keys, value = jr.normal(jr.key(1), (3, 200, 2, 2))
    sizes = jnp.linalg.norm(value, axis=(1, 2))[:, None, None]
    random = training.Heads(query, keys, 2 * value / sizes)
    found = variation.excess(1, best)[0]
    assert found < variation.excess(1, random).min()
    assert jnp.linalg.norm(best.value) <= 2 * (1 + 1e-12)
