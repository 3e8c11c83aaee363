"""Linearised flows: rates of growth, derivatives of velocities, symmetries."""
