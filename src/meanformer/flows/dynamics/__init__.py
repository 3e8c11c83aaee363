"""The dynamics of tokens, Gaussians and densities, and the loop through depth."""
