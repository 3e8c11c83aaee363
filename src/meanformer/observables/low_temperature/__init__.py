"""Flows at low temperature next to those at zero."""
