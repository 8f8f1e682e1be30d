"""The reference agent: a LangGraph that writes, runs, checks and rewrites SQL.

`graph.build_graph` needs no run of agentrig; `agent` is the thin plugin around it.
"""
