"""Settings of the documentation build; `make docs` runs it with warnings as errors."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "meanformer"
author = "The meanformer contributors"
copyright = author
version = release = installed_version("meanformer")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinxcontrib.bibtex",
    "myst_nb",
    "short_signatures",
    "key_citations",
    "markdown_docstrings",
]
exclude_patterns = ["_build", "jupyter_execute"]

# Pages and notebooks.
myst_enable_extensions = ["amsmath", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

# Docstrings: Markdown with LaTeX, translated by `markdown_docstrings`.
default_role = "code"
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "show-inheritance": True,
}
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "keys"
bibtex_reference_style = "label"

html_theme = "furo"
html_title = "meanformer"
html_show_sourcelink = False
html_show_copyright = False
