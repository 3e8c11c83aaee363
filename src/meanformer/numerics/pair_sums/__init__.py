"""Exact sums over all pairs of queries and tokens."""
