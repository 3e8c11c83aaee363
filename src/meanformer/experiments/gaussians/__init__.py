"""Gaussians stay Gaussian: closed equations, blow-up, rank."""
