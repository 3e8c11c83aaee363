"""The low-rank conjecture: explorer, search, confirmation."""
