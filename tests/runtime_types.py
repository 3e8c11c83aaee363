"""The run-time type checker of the tests; `pyproject.toml` hands it to jaxtyping."""

from beartype import BeartypeConf, beartype

# As for static checkers, a whole number is a `float`: `beta=2` is no mistake.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
