"""Forests of token segments, for an algorithm with torch: what samples have in common is computed once.

`segments` finds what samples share, `attention` lets each token see its own history, `sequences` makes tensors of them,
and `scoring` returns log-probabilities. All but `segments` import torch, which the core itself does not need.
"""
