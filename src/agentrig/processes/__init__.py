"""Processes: a clean start, an end on time, and no leftover processes or files."""
