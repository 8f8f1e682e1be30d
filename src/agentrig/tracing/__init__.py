"""Tracing: records a rollout's spans; the agent does nothing for it."""
