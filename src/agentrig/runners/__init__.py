"""Runners: the processes that run agents, and what moves rollouts in and out of them."""
