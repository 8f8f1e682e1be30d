"""The gateway: a reverse proxy in front of the model's server that records the calls of agents without a tap."""
