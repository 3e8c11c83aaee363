"""Metastability: separated groups, dwell times, clocks, plateaus, saddles."""
