"""`agentrig new`: a component of somebody's own, copied from a template with its names replaced."""
