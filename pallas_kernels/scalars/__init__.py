"""A function of scalars as one launch."""

from pallas_kernels.scalars.api import scalars

__all__ = ["scalars"]
