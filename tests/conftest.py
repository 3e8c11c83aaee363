"""Settings and fixtures shared by all tests."""

import itertools

import jax
import jax.random as jr
import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# For sums over several devices; everything else stays on the first.
jax.config.update("jax_num_cpu_devices", 4)

# A busy machine is slow, and no fault.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# Compiled programs stay mapped, and Linux allows a process 65530 mappings: thousands of
# tests in one process would pass that.
TESTS_BETWEEN_CLEARINGS = 400
_tests_so_far = itertools.count(1)


@pytest.fixture
def key():
    """A fixed random key; a test that needs several splits it."""
    return jr.key(2024)


@pytest.fixture
def untyped():
    """Leave the checks of arguments to the library, as they are for users."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """Let go of all compiled programs from time to time."""
    yield
    if next(_tests_so_far) % TESTS_BETWEEN_CLEARINGS == 0:
        jax.clear_caches()
