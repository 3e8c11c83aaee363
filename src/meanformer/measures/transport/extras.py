"""Optional transport libraries, imported when they are first needed."""

import importlib
import warnings
from types import ModuleType

from meanformer.errors import Unsupported


def import_extra(module: str, need: str) -> ModuleType:
    """Import an optional library, or say how to install it.

    What the library itself imports may be deprecated; that is not the user's concern.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(
            f"{need}, which is not installed; pip install 'meanformer[transport]'."
        ) from error
