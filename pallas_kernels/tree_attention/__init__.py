"""Attention of a few tree rows over a paged context and over each other."""

from pallas_kernels.tree_attention.api import tree_attention

__all__ = ["tree_attention"]
