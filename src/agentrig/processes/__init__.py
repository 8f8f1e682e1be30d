"""Processes: how they start clean, end in time, and leave nothing behind."""
