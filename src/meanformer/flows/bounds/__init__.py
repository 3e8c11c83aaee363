"""Bounds on flows: before a solve, along one, and the rates behind both."""
