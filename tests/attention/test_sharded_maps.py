"""Attention on a cloud that is shared among four devices is attention on the cloud."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from map_zoo import MAPS, POINTWISE, QUERIES, QUERY_PLACES, cloud_of, every_map
from meanformer.numerics.sharded.sums import Sharded

SUMS = Sharded(Mesh(np.array(jax.devices()), ("tokens",)))
# With a mask and without; the sums themselves have their own tests.
FEW = {"sigmoid", "causal softmax"}
SUMMING = [name for name in MAPS if name not in POINTWISE]


def clouds():
    """The five tokens on one device, and on four."""
    plain = cloud_of()
    return plain, eqx.tree_at(lambda cloud: cloud.sums, plain, SUMS)


@every_map(SUMMING, slow=set(SUMMING) - FEW)
def test_values_are_those_of_one_device(name):
    queries, places = jnp.asarray(QUERIES), jnp.asarray(QUERY_PLACES)

    @eqx.filter_jit
    def values(cloud):
        return MAPS[name](cloud, queries, positions=places)

    expected, ours = map(values, clouds())
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@every_map(SUMMING)
def test_gradients_by_points_and_weights_are_those_of_one_device(name):
    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(cloud):
        return (MAPS[name](cloud, cloud.points, positions=cloud.positions) ** 2).sum()

    expected, ours = map(gradient, clouds())
    np.testing.assert_allclose(ours.points, expected.points, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours.weights, expected.weights, rtol=1e-9, atol=1e-12)
