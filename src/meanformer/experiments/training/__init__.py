"""Training: gradient flows of heads, what they can fit and how fast."""
