"""A run, from start to end."""
