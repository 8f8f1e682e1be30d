"""Forests of token segments, for an algorithm with torch: common prefixes of samples are computed once.

`segments` finds the common prefixes, `attention` lets each token attend to its own history, `sequences` makes tensors,
`scoring` returns log-probabilities, and `kernels` has fused kernels for a GPU. All modules except `segments` import
torch.
"""
