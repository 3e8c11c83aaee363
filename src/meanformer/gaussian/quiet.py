"""Solves whose end is looked at need not warn of it."""

import contextlib
import warnings
from collections.abc import Iterator

from meanformer.errors import StoppedEarly


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Leave out the warning of a solve that ended early."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedEarly)
        yield
