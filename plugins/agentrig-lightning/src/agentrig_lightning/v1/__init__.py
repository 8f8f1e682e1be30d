"""Runs agents that were written for the gateway of Agent Lightning 1.x, unchanged, as programs."""
