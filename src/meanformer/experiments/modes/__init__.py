"""Modes of the density of random tokens."""
