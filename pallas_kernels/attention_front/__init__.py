"""From an attention layer's projections to rotated queries and the keys and values of its pages, in one launch."""

from pallas_kernels.attention_front.api import attention_front

__all__ = ["attention_front"]
