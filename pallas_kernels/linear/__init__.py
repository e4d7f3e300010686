"""Products of few rows with weights, with what stands after them in a layer, in one launch."""

from pallas_kernels.linear.api import MAX_ROWS, linear

__all__ = ["MAX_ROWS", "linear"]
