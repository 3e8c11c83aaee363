"""Tokens, walks and independent methods that experiments share."""
