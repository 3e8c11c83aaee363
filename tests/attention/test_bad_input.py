"""Bad input: one sentence that names the argument, what it was and what is allowed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from map_zoo import QUERIES, cloud_of
from meanformer.attention import (
    L2,
    Blocks,
    Causal,
    Hardmax,
    LayerNorm,
    Linear,
    Masked,
    MultiHead,
    Perceptron,
    PointMap,
    Prefix,
    Residual,
    RMSNorm,
    Sigmoid,
    Sinkhorn,
    Softmax,
    StrictCausal,
    Sum,
    UnitNorm,
    Unnormalised,
    Window,
    adversarial_cloud,
    compose,
    identity_attention,
    lipschitz_bounds,
    local_lipschitz,
    push_forward,
)
from meanformer.errors import InvalidInput
from meanformer.measures import TokenCloud
from reference import reference_attention, reference_cloud


@pytest.fixture(autouse=True)
def _only_the_library_checks():
    """Let wrong types through to the library, as they are without the tests' checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


EYE = np.eye(2)
HOLED = np.array([[1.0, np.nan], [0.0, 1.0]])
INFINITE = np.array([[1.0, 0.0], [0.0, np.inf]])
KINDS = [Softmax, L2, Sinkhorn, Linear, Unnormalised, Sigmoid, Hardmax]

FOR_EVERY_KIND = {
    "query of one axis": (
        ((np.ones(2), EYE, EYE), {}),
        r"query is \(2,\), key is \(2, 2\), value is \(2, 2\); they must be",
    ),
    "key of another shape": (
        ((EYE, np.ones((3, 2)), EYE), {}),
        r"query is \(2, 2\), key is \(3, 2\), value is \(2, 2\); they must be",
    ),
    "value of another dimension": (
        ((EYE, EYE, np.ones((2, 3))), {}),
        r"value is \(2, 3\); they must be \(k, d\), \(k, d\) and \(e, d\)",
    ),
    "query left out": (((None, EYE, EYE), {}), "query is None; it must be an array"),
    "query in words": ((("Q", EYE, EYE), {}), "query is 'Q'; it must be an array"),
    "query with holes": (
        ((HOLED, EYE, EYE), {}),
        r"query holds nan at index \(0, 1\); all its entries must be finite",
    ),
    "key infinite": (((EYE, INFINITE, EYE), {}), r"key holds inf at index \(1, 1\)"),
    "value with holes": (((EYE, EYE, HOLED), {}), "value holds nan at index"),
    "value complex": (((EYE, EYE, 1j * EYE), {}), "value is complex"),
    "negative beta": (
        ((EYE, EYE, EYE), {"beta": -1.0}),
        r"beta is -1\.0; it must not be negative; for the repulsive case change the "
        "sign of query, or set allow_negative_beta to true",
    ),
    "beta with an axis": (
        ((EYE, EYE, EYE), {"beta": np.ones(2)}),
        r"beta has shape \(2,\); it must be one number",
    ),
    "beta not a number": (((EYE, EYE, EYE), {"beta": np.nan}), "beta holds nan"),
    "beta left out": (((EYE, EYE, EYE), {"beta": None}), "beta is None"),
    "query bias too long": (
        ((EYE, EYE, EYE), {"query_bias": np.ones(3)}),
        r"query_bias has shape \(3,\); it must be \(2,\)",
    ),
    "value bias a matrix": (
        ((EYE, EYE, EYE), {"value_bias": EYE}),
        r"value_bias has shape \(2, 2\); it must be \(2,\)",
    ),
    "value bias infinite": (
        ((EYE, EYE, EYE), {"value_bias": [np.inf, 0.0]}),
        r"value_bias holds inf at index \(0,\)",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", FOR_EVERY_KIND)
def test_every_attention_refuses(case, kind):
    (arguments, options), message = FOR_EVERY_KIND[case]
    with pytest.raises(InvalidInput, match=message):
        kind(*arguments, **options)


def soft(**options):
    return Softmax(EYE, EYE, EYE, **options)


def sink(**options):
    return Sinkhorn(EYE, EYE, EYE, **options)


CONSTRUCTIONS = {
    "kim untied": (
        lambda: L2(EYE, 2 * EYE, EYE, value_map="kim"),
        'value_map="kim" needs query equal to key; they differ',
    ),
    "value map unknown": (
        lambda: L2(EYE, EYE, EYE, value_map="lee"),
        "value_map is 'lee'; it must be \"kim\" or None",
    ),
    "kernel unknown": (
        lambda: sink(kernel="rbf"),
        'kernel is \'rbf\'; it must be "l2" or "dot"',
    ),
    "end unknown": (
        lambda: sink(end_on="diagonal"),
        'end_on is \'diagonal\'; it must be "row" or "column"',
    ),
    "half-steps even": (
        lambda: sink(half_steps=2),
        "half_steps is 2; to end on a row step it must be odd",
    ),
    "half-steps odd": (
        lambda: sink(half_steps=3, end_on="column"),
        "half_steps is 3; to end on a column step it must be even",
    ),
    "half-steps negative": (
        lambda: sink(half_steps=-1),
        "half_steps is -1; it must be",
    ),
    "column without steps": (
        lambda: sink(end_on="column"),
        'end_on="column" needs half_steps',
    ),
    "sinkhorn tolerance": (
        lambda: sink(tolerance=-1.0),
        r"tolerance is -1\.0; it must be positive",
    ),
    "sinkhorn steps": (
        lambda: sink(max_steps=0),
        "max_steps is 0; it must be 1 or more",
    ),
    "sinkhorn steps in words": (
        lambda: sink(max_steps="many"),
        "max_steps is 'many'; it must be an integer, 0 or more",
    ),
    "sinkhorn tolerance in words": (
        lambda: sink(tolerance="small"),
        "tolerance is 'small'; it must be a number",
    ),
    "half-steps in words": (
        lambda: sink(half_steps="three"),
        "half_steps is 'three'; it must be an integer, 1 or more",
    ),
    "sinkhorn start": (
        lambda: sink(start=[0.0, np.nan]),
        r"start holds nan at index \(1,\)",
    ),
    "sigmoid bias": (
        lambda: Sigmoid(EYE, EYE, EYE, bias=np.nan),
        "bias holds nan",
    ),
    "sigmoid biases": (
        lambda: Sigmoid(EYE, EYE, EYE, bias=np.ones(2)),
        r"bias has shape \(2,\)",
    ),
    "hardmax tolerance": (
        lambda: Hardmax(EYE, EYE, EYE, tolerance=-1),
        r"tolerance is -1\.0; it must not be negative",
    ),
    "hardmax tolerance in words": (
        lambda: Hardmax(EYE, EYE, EYE, tolerance="small"),
        "tolerance is 'small'; it must be a number",
    ),
    "linear tolerance": (
        lambda: Linear(EYE, EYE, EYE, tolerance=np.nan),
        "tolerance is nan; it must be finite",
    ),
    "kind unknown": (
        lambda: identity_attention("softmin", 2),
        r"kind is 'softmin'; it must be one of hardmax, l2, .*unnormalised, or a class "
        r"of attention \(did you mean softmax\?\)",
    ),
    "kernel misspelt": (
        lambda: Sinkhorn(EYE, EYE, EYE, kernel="dott"),
        r'it must be "l2" or "dot" \(did you mean dot\?\)',
    ),
    "no dimension": (
        lambda: identity_attention("softmax", 0),
        "dimension is 0; it must be 1 or more",
    ),
    "half a dimension": (
        lambda: identity_attention("softmax", 2.5),
        r"dimension is 2\.5; it must be an integer",
    ),
    "kind a number": (
        lambda: identity_attention(3, 2),
        r"kind is 3; it must be one of .*, or a class of attention",
    ),
    "empty": (
        lambda: Masked(soft(), empty="nan"),
        'empty is \'nan\'; it must be "error" or "zero"',
    ),
    "masked residual": (
        lambda: Masked(Residual(soft())),
        "attention is a Residual; mask the attentions inside it instead",
    ),
    "masked number": (
        lambda: Masked(3),
        "attention is 3; it must be an in-context map",
    ),
    "mask in words": (
        lambda: Masked(soft(), "causal"),
        r"mask is 'causal'; it must be a mask, for instance Causal\(\)",
    ),
    "masked mask": (lambda: Masked(Masked(soft())), "attention is a Masked; mask the"),
    "causal tolerance": (
        lambda: Causal(-0.1),
        r"tolerance is -0\.1; it must not be negative",
    ),
    "strict tolerance": (lambda: StrictCausal("no"), "tolerance is 'no'; it must be a"),
    "window length": (
        lambda: Window(-1),
        r"length is -1\.0; it must not be negative",
    ),
    "window length in words": (
        lambda: Window("long"),
        "length is 'long'; it must be a",
    ),
    "prefix end": (lambda: Prefix(2), r"end is 2\.0; it must lie in \[0, 1\]"),
    "blocks decreasing": (
        lambda: Blocks([0.5, 0.2]),
        r"boundaries is \[0\.5 0\.2\]; it must increase within \[0, 1\]",
    ),
    "blocks outside": (lambda: Blocks([0.5, 1.5]), "must increase within"),
    "blocks as a table": (
        lambda: Blocks([[0.5]]),
        r"boundaries has shape \(1, 1\); it must be \(any,\)",
    ),
    "blocks with holes": (lambda: Blocks([0.1, np.nan]), "boundaries holds nan"),
    "no heads": (lambda: MultiHead([]), "heads is empty; at least one map is needed"),
    "heads of matrices": (
        lambda: MultiHead([EYE]),
        "heads holds a ndarray; it must hold in-context maps",
    ),
    "one head without brackets": (
        lambda: MultiHead(soft()),
        "heads is a Softmax; it must be a list",
    ),
    "outputs a number": (
        lambda: MultiHead([soft()], 3),
        "outputs is 3; it must be a list of matrices, one for each head",
    ),
    "outputs too many": (
        lambda: MultiHead([soft()], [EYE, EYE]),
        "outputs holds 2 matrices for 1 heads; there must be one for each",
    ),
    "outputs too wide": (
        lambda: MultiHead([soft()], [np.eye(3)]),
        r"outputs has shape \(3, 3\); it must be \(any, 2\)",
    ),
    "outputs with holes": (lambda: MultiHead([soft()], [HOLED]), "outputs holds nan"),
    "heads of two dimensions": (
        lambda: MultiHead([soft(), identity_attention("softmax", 3)]),
        r"the input dimensions are \[2, 3\]; they must agree",
    ),
    "no terms": (lambda: Sum([]), "maps is empty; at least one map is needed"),
    "nothing to compose": (lambda: compose(), "maps is empty; at least one map"),
    "a number to compose": (
        lambda: compose(3),
        "maps holds a int; it must hold in-context maps",
    ),
    "function a number": (
        lambda: PointMap(3),
        "function is 3; it must be a function of an array",
    ),
    "features a number": (
        lambda: Linear(EYE, EYE, EYE, feature_map=3),
        "feature_map is 3; it must be a function of an array",
    ),
    "activation in words": (
        lambda: Perceptron(EYE, np.ones(2), EYE, activation="relu"),
        "activation is 'relu'; it must be a function of an array",
    ),
    "step not a number": (lambda: Residual(soft(), np.nan), "step holds nan"),
    "step in words": (lambda: Residual(soft(), "one"), "step is 'one'"),
    "steps": (lambda: Residual(soft(), np.ones(2)), r"step has shape \(2,\)"),
    "perceptron bias": (
        lambda: Perceptron(EYE, np.ones(3), EYE),
        r"bias_in has shape \(3,\); it must be \(2,\)",
    ),
    "perceptron weights": (
        lambda: Perceptron(EYE, np.ones(2), np.ones((2, 3))),
        r"weights_out has shape \(2, 3\); it must be \(any, 2\)",
    ),
    "perceptron outer bias": (
        lambda: Perceptron(EYE, np.ones(2), EYE, np.ones(3)),
        r"bias_out has shape \(3,\); it must be \(2,\)",
    ),
    "perceptron with holes": (
        lambda: Perceptron(HOLED, np.ones(2), EYE),
        "weights_in holds nan",
    ),
    "perceptron left out": (
        lambda: Perceptron(EYE, None, EYE),
        "bias_in is None; it must be an array of numbers",
    ),
    "norm scale": (
        lambda: LayerNorm(EYE),
        r"scale has shape \(2, 2\); it must be a number or a vector",
    ),
    "norm vectors": (
        lambda: RMSNorm(np.ones(2), np.ones(3)),
        r"scale has shape \(2,\), shift has shape \(3,\); vectors must agree",
    ),
    "norm epsilon": (
        lambda: UnitNorm(epsilon=0),
        r"epsilon is 0\.0; it must be positive",
    ),
    "norm shift": (lambda: UnitNorm(1.0, np.inf), "shift holds inf"),
}


@pytest.mark.parametrize("case", CONSTRUCTIONS)
def test_construction_refuses(case):
    build, message = CONSTRUCTIONS[case]
    with pytest.raises(InvalidInput, match=message):
        build()


CALLS = {
    "queries of another dimension": (
        lambda: soft()(reference_cloud(), jnp.ones((4, 3))),
        r"x has shape \(4, 3\); Softmax takes points of shape \(m, 2\)",
    ),
    "queries with holes": (
        lambda: soft()(reference_cloud(), jnp.full((1, 2), jnp.nan)),
        r"x holds nan at index \(0, 0\)",
    ),
    "context of another dimension": (
        lambda: soft()(TokenCloud(np.ones((4, 3))), jnp.ones((4, 2))),
        "the context has dimension 3; Softmax takes 2",
    ),
    "residual of another dimension": (
        lambda: Residual(soft())(reference_cloud(), jnp.ones((4, 3))),
        r"x has shape \(4, 3\); Residual takes points of shape \(m, 2\)",
    ),
    "norm of another dimension": (
        lambda: LayerNorm(np.ones(2))(reference_cloud(), jnp.ones((4, 3))),
        r"x has shape \(4, 3\); LayerNorm takes points of shape \(m, 2\)",
    ),
    "perceptron of another dimension": (
        lambda: Perceptron(EYE, np.ones(2), EYE)(reference_cloud(), jnp.ones((4, 3))),
        r"x has shape \(4, 3\); Perceptron takes",
    ),
    "query places outside": (
        lambda: Masked(soft())(
            cloud_of(), jnp.asarray(QUERIES), positions=jnp.array([0.0, 0.5, 1.0, 1.5])
        ),
        r"positions range over \[0\.0, 1\.5\]; they must lie in \[0, 1\]",
    ),
    "query places with holes": (
        lambda: Masked(soft())(
            cloud_of(), jnp.asarray(QUERIES), positions=jnp.array([0, jnp.nan, 1, 1.0])
        ),
        r"positions holds nan at index \(1,\)",
    ),
    "warm start too short": (
        lambda: sink(start=np.zeros(3))(reference_cloud(), jnp.ones((1, 2))),
        r"start has shape \(3,\); it must be \(4,\)",
    ),
    "push by a number": (
        lambda: push_forward(3, reference_cloud()),
        "gamma is 3; it must be a function of an array",
    ),
    "slope of a number": (
        lambda: local_lipschitz(3, reference_cloud()),
        "gamma is 3; it must be an in-context map",
    ),
    "radius in words": (
        lambda: lipschitz_bounds(soft(), "a", 2),
        "radius is 'a'; it must be finite and >= 0",
    ),
    "half a token": (
        lambda: lipschitz_bounds(soft(), 1.0, 2.5),
        r"count is 2\.5; it must be an integer, 1 or more",
    ),
    "half an adversary": (
        lambda: adversarial_cloud(soft(), 2.5, 1.0),
        r"count is 2\.5; it must be an integer, 2 or more",
    ),
    "error too large": (
        lambda: sink().predicted_half_steps(reference_cloud(), 2.0),
        r"error is 2\.0; it must be between 0 and 1",
    ),
    "image of another count": (
        lambda: push_forward(lambda points: points[:2], reference_cloud()),
        r"the image of the points has shape \(2, 2\); it must be \(4, any\)",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_refuse(case):
    call, message = CALLS[case]
    with pytest.raises(InvalidInput, match=message):
        call()


def test_integers_are_promoted():
    attention = Softmax([[1, 0], [0, 1]], np.eye(2, dtype=int), EYE, beta=1)
    cloud = TokenCloud([[1, 2], [3, 4]], positions=[0, 1])
    values = attention(cloud, cloud.points)
    assert values.dtype == jnp.float64
    assert Residual(attention, 1).step.dtype == jnp.float64
    assert Hardmax(EYE, EYE, EYE, tolerance=1).tolerance == 1.0


def test_negative_beta_is_allowed_on_request():
    cloud = reference_cloud()
    repulsive = reference_attention(beta=-1.0, allow_negative_beta=True)
    flipped = Softmax(-repulsive.query, repulsive.key, repulsive.value)
    np.testing.assert_allclose(
        repulsive(cloud, cloud.points), flipped(cloud, cloud.points), atol=1e-15
    )


def test_messages_are_one_sentence():
    cases = [case for case, _ in CONSTRUCTIONS.values()]
    cases += [case for case, _ in CALLS.values()]
    for build in cases:
        with pytest.raises(InvalidInput) as raised:
            build()
        message = str(raised.value)
        assert message.endswith(".")
        assert ". " not in message


def test_negative_beta_is_refused_when_it_becomes_known():
    def output(beta):
        return reference_attention(beta=beta)(reference_cloud(), jnp.ones((1, 2)))

    compiled = eqx.filter_jit(output)
    np.testing.assert_allclose(compiled(jnp.array(0.5)), output(0.5), rtol=1e-14)
    with pytest.raises(RuntimeError, match="beta must not be negative; for the repul"):
        jax.block_until_ready(compiled(jnp.array(-1.0)))
