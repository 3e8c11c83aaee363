"""Contexts from which heads read what is linearly dependent, and why."""
