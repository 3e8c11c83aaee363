"""Sphinx extension: signatures name array types as the code does.

Imported before the library, because jaxtyping copies the name of the array class.
"""

import jax
from jaxtyping import ArrayLike, ScalarLike
from sphinx.util.typing import stringify_annotation

jax.Array.__name__ = jax.Array.__qualname__ = "Array"

# Spelled out, these unions would fill a signature.
UNIONS = {
    stringify_annotation(union, "smart"): name
    for name, union in {"ArrayLike": ArrayLike, "ScalarLike": ScalarLike}.items()
}


def shorten(signature: str | None) -> str | None:
    """Return a signature with its long unions by name."""
    for union, name in UNIONS.items():
        signature = signature and signature.replace(union, name)
    return signature


def shorten_both(app, what, name, obj, options, arguments, result):
    """Return both parts of a signature for Sphinx, shortened."""
    return shorten(arguments), shorten(result)


def setup(app) -> dict[str, bool]:
    """Register the shortening with Sphinx."""
    app.connect("autodoc-process-signature", shorten_both)
    return {"parallel_read_safe": True}
