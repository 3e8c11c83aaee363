"""Elements of the algebra compiled into transformers."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer import expressivity
from meanformer.errors import PrecisionWarning
from meanformer.expressivity import block, compile_transformer, coordinate, stack


def drawn(rng, dimension, terms=(3, 3, 3, 3, 1)):
    """One component with terms of so many random factors."""

    def factor():
        vectors = 0.4 * rng.standard_normal((3, dimension))
        score = rng.standard_normal((dimension, dimension))
        names = dict(zip(("shift", "direct", "value"), vectors, strict=True))
        return block(dimension, score=score, constant=0.3 * rng.normal(), **names)

    def term(length):
        product = rng.normal() * factor()
        for _ in range(length - 1):
            product = product * factor()
        return product

    return sum(map(term, terms[1:]), start=term(terms[0]))


def element(dimension, seed=0, terms=(3, 3, 3, 3, 1)):
    rng = np.random.default_rng(seed)
    return stack([drawn(rng, dimension, terms) for _ in range(dimension)])


@pytest.mark.parametrize(
    ("dimension", "parameters"), [(1, 37_786), (2, 143_972), (3, 320_430)]
)
def test_width_heads_depth_and_parameters_are_as_counted(dimension, parameters):
    found = compile_transformer(element(dimension), pieces=256).certificate
    assert found.width == 4 * dimension
    assert found.heads == dimension
    assert found.attentions == 13
    assert found.parameters == parameters


@pytest.mark.parametrize("pieces", [8, 32, 128])
def test_the_error_of_a_product_is_one_over_the_square_of_the_pieces(pieces):
    gamma = coordinate(2, 0) * coordinate(2, 1)
    network = compile_transformer(gamma, radius=1.0, pieces=pieces)
    largest = 1 + 2 / pieces**2
    places = jnp.linspace(-1, 1, 401)
    x = jnp.stack(jnp.meshgrid(places, places), axis=-1).reshape(-1, 2)
    x = x[jnp.linalg.norm(x, axis=1) <= 1]
    error = np.abs(network(mf.TokenCloud(x[:1]), x)[:, 0] - x[:, 0] * x[:, 1]).max()
    bound = network.certificate.bound[0]
    assert bound == pytest.approx((largest / pieces) ** 2, rel=1e-12)
    assert 0.8 * bound < error <= bound


@pytest.mark.parametrize(
    "dimension", [1, *[pytest.param(d, marks=pytest.mark.slow) for d in (2, 3)]]
)
def test_errors_stay_below_the_certificate_for_any_number_of_tokens(dimension, key):
    network = compile_transformer(element(dimension, seed=1), 1e-3)
    assert max(network.certificate.bound) <= 1e-3
    found = expressivity.verify(network, key=key, contexts=2)
    assert found.holds
    assert (found.errors > 1e-8).all()


def test_the_layers_run_as_a_flow(key):
    gamma = element(2, terms=(2, 1))
    network = compile_transformer(gamma, 1e-2)
    keys = jr.split(key)
    cloud = mf.TokenCloud(0.6 * jr.uniform(keys[0], (6, 2), minval=-1))
    x = 0.6 * jr.uniform(keys[1], (3, 2), minval=-1)
    path = network.run(cloud, x)
    assert len(path) == len(network.layers) + 1
    found = network.readout.apply(path.probes[-1])
    np.testing.assert_allclose(found, network(cloud, x), atol=1e-13)
    np.testing.assert_allclose(found, gamma(cloud, x), atol=1e-2)
    np.testing.assert_allclose(path.points[-1][:, :2], cloud.points, atol=1e-15)


def test_terms_of_one_factor_are_exact(key):
    gamma = block(2, value=[0.5, 1.0], direct=[2.0, -1.0], constant=3.0) - 1
    network = compile_transformer(gamma, radius=5.0)
    assert network.certificate.bound == (0.0,)
    cloud, x = mf.TokenCloud(jr.normal(key, (4, 2))), jnp.array([[1.0, 2.0]])
    np.testing.assert_allclose(network(cloud, x), gamma(cloud, x), rtol=1e-13)


def test_queries_beyond_the_ball_are_told():
    gamma = coordinate(1, 0) * coordinate(1, 0)
    network = compile_transformer(gamma, radius=1.0)
    cloud = mf.TokenCloud([[0.0]])
    is_right = network.is_certified(cloud, jnp.array([[0.5], [1.5]]))
    np.testing.assert_array_equal(is_right, [True, False])


def test_a_certificate_below_rounding_is_told():
    with jax.enable_x64(False):
        gamma = coordinate(1, 0) * coordinate(1, 0)
        with pytest.warns(PrecisionWarning, match="below the rounding of float32"):
            compile_transformer(gamma, 1e-8)


def test_what_has_no_bound_is_refused():
    with pytest.raises(mf.InvalidInput, match="a finite radius"):
        compile_transformer(coordinate(1, 0), radius=np.inf)
    with pytest.raises(mf.InvalidInput, match="accuracy is 0"):
        compile_transformer(coordinate(1, 0), 0)
    with pytest.raises(mf.InvalidInput, match="pieces is 1"):
        compile_transformer(coordinate(1, 0) * coordinate(1, 0), pieces=1)


def test_a_certificate_says_what_it_promises():
    network = compile_transformer(coordinate(1, 0) * coordinate(1, 0), 1e-2)
    said = str(network.certificate)
    assert "error at most" in said
    assert "2 attentions of 1 heads" in said
