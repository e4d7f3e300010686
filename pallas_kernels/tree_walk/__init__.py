"""What a verified tree comes to: the walk, where the text ends, and the slots' new counters, in one launch."""

from pallas_kernels.tree_walk.api import tree_walk, tree_walk_serves

__all__ = ["tree_walk", "tree_walk_serves"]
