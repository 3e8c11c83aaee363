"""Very many tokens and very long depths."""
