"""The low-rank conjecture: explorer, search, second look."""
