"""Settings and fixtures shared by all tests."""

import jax
import jax.random as jr
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def key():
    """A fixed random key; a test that needs several splits it."""
    return jr.key(2024)
