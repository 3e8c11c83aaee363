"""Normalisation schemes: where a network normalises, as directions and radii."""
