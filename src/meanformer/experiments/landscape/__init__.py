"""Critical points of the energy."""
