"""Where tokens of the plane and of space end up."""
