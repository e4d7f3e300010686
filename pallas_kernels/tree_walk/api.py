"""Public entry of the walk; the XLA reference is `dflash_jax.settle`, which asks here first."""

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.tree_walk.kernel import tree_walk

__all__ = ["tree_walk", "tree_walk_serves"]

# The ancestor mask of a slot is held by one program.
MAX_ROWS = 128


def tree_walk_serves(rows: int, implementation: Implementation = "auto") -> bool:
    """Whether `tree_walk` takes trees of so many rows.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    reason = f"{rows} tree rows are more than {MAX_ROWS}" if rows > MAX_ROWS else None
    return resolve("tree_walk", implementation, reason) == "pallas"
