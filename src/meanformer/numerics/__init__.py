"""Numerical methods that know nothing of attention: pair sums, special functions."""
