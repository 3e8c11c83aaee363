"""Clusters of tokens: how many there are, and where to cut the tree through them."""
