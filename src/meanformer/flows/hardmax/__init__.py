"""Attention at zero temperature, step by step and in continuous depth."""
