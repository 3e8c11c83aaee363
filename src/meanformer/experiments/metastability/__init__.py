"""Clusters that last exponentially long."""
