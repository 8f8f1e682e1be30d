"""A run's traces as OpenTelemetry spans, under the names of its conventions for generative AI.

These are not the names of AgentOps, which `agentrig.tracing.gen_ai` has for Agent Lightning's adapters.
"""
