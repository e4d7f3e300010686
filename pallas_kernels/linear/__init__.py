"""Products of few rows with weights, with what stands before and after them in a layer, in one launch."""

from pallas_kernels.linear.api import MAX_ROWS, joins_norm, linear, norm_linear

__all__ = ["MAX_ROWS", "joins_norm", "linear", "norm_linear"]
