"""The sum of a residual stream and a layer's output, and its RMSNorm, in one launch."""

from pallas_kernels.add_norm.api import add_norm

__all__ = ["add_norm"]
