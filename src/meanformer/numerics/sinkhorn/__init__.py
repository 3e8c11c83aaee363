"""Sinkhorn's algorithm for a cloud transported onto itself."""
