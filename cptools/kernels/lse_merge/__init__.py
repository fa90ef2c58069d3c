"""Merging attention over disjoint parts of the keys by their log-sum-exp."""

from cptools.kernels.lse_merge.reference import merge_states, merge_weights

__all__ = ["merge_states", "merge_weights"]
