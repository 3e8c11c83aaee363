"""Infinitely many tokens: densities, growth rates, noise."""
