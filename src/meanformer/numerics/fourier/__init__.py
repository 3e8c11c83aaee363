"""Pair sums in nearly linear time, by nonuniform fast Fourier transforms."""
