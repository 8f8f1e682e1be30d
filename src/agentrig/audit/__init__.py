"""The auditor: an independent reader of a run's record.

It knows what a run writes and what the papers say, and nothing of the code that trains: it computes each link of a step
again, in the plainest way there is, and compares. `agentrig.audit.auditor` has the order, one file each the links.
"""
