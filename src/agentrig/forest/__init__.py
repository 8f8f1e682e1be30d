"""Forests of token segments, for an algorithm with torch: what samples have in common is computed once.

`segments` finds what samples share, `attention` lets each token see its own history, `sequences` makes tensors of them,
`scoring` returns log-probabilities, and `kernels` has what a GPU computes faster in one piece. All but `segments`
import torch, which the core itself does not need.
"""
