"""Runners: the processes that run agents, and the code that moves rollouts in and out of them."""
