"""Fixtures shared by the tests of measures."""

import jaxtyping
import pytest


@pytest.fixture
def untyped():
    """Leave the checks of arguments to the library, as they are for users."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
