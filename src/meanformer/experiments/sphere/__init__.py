"""Clusters on the sphere, and how fast they form."""
