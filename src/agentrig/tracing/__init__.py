"""Tracing: records a rollout's spans, with nothing asked of the agent."""
