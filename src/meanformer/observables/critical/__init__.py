"""Critical points of energies: atoms that rest, and measures of extreme energy."""
