"""Tokens at equal angles: their reduced equation and clustering times."""
