"""Exponents of errors that fall, or grow, like a power."""

import numpy as np


def exponent(sizes, errors) -> tuple[float, float]:
    """The exponent of mean errors, and its standard error by leaving draws out.

    Args:
        sizes: what the errors are a power of.
        errors: a row for each size, with independent draws in columns.
    """
    count = errors.shape[1]
    kept = [errors, *(np.delete(errors, k, axis=1) for k in range(count))]
    fits = [np.polyfit(np.log(sizes), np.log(one.mean(axis=1)), 1)[0] for one in kept]
    return fits[0], np.std(fits[1:]) * np.sqrt(count - 1)
