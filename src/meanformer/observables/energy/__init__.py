"""Energies of in-context maps, and which flows climb them."""
