"""Choice of an implementation for an op: the one seam between the model and its kernels."""

from typing import Literal

Implementation = Literal["auto", "xla", "pallas"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "xla", "pallas")

# Ops that have a Pallas kernel, by name. An op that is not here is served by its XLA reference alone.
PALLAS_OPS: frozenset[str] = frozenset()


class UnsupportedError(ValueError):
    """An implementation was asked for by name that cannot serve this op, shape or device."""


def resolve(op: str, implementation: Implementation) -> Literal["xla", "pallas"]:
    """Returns the implementation that will run `op`.

    Raises:
      UnsupportedError: `implementation` is "pallas" and `op` has no Pallas kernel.
      ValueError: `implementation` is none of "auto", "xla", "pallas".
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is none of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "pallas" and op not in PALLAS_OPS:
        raise UnsupportedError(f"op '{op}' has no Pallas kernel in this version; use 'xla' or 'auto'")
    return "xla"


def check_available(implementation: Implementation) -> None:
    """Raises `UnsupportedError` at once if an op of the model could not run with `implementation`."""
    for op in ("tree_attention", "gdn_scan"):
        resolve(op, implementation)
