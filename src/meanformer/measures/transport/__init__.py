"""Optimal transport between measures: distances, plans and maps."""
