"""How many modes the density of a cloud of tokens has, counted and expected."""
