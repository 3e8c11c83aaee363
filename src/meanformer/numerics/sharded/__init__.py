"""Pair sums over several devices."""
