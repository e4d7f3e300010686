"""Choice of an implementation for an op: the one seam between the model and its kernels."""

import contextlib
import contextvars
import functools
import logging
import warnings
from collections.abc import Callable, Generator
from typing import Any, Literal

import jax

Implementation = Literal["auto", "xla", "pallas"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "xla", "pallas")

# Ops that have a Pallas kernel, by name. An op that is not here is served by its XLA reference alone.
PALLAS_OPS: frozenset[str] = frozenset(
    {
        "add_norm", "attention_front", "draft_candidates", "gdn_mixer", "gdn_scan", "linear", "scalars",
        "tree_attention", "tree_search", "tree_walk",
    }
)
# What the kernels need: asynchronous copies and bf16 products came with Ampere.
MIN_COMPUTE_CAPABILITY = (8, 0)

# Upstream deprecates the Triton backend, the one backend of Pallas that serves Ampere well. The warning comes when the
# surrounding program is lowered, long after a kernel was called, so it is silenced here, by its text, and no other.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


# Op -> the implementations that its calls got, of the innermost `recording`. Each thread has its own.
Choices = dict[str, set[str]]
_recorded: contextvars.ContextVar[Choices | None] = contextvars.ContextVar("recorded", default=None)
_logger = logging.getLogger(__name__)
_logged: set[tuple[str, str, str]] = set()


class UnsupportedError(ValueError):
    """An implementation was asked for by name that cannot serve this op, shape or device."""


def compiled_once[F: Callable[..., Any]](*static: str) -> Callable[[F], F]:
    """Makes a kernel's call a function of its own inside a program: traced and lowered once for all layers alike.

    At 64 layers, lowering each layer's kernels by itself takes longer than compiling the program.

    Args:
      static: names of the arguments that are no arrays.
    """
    return functools.partial(jax.jit, static_argnames=static)  # pyrefly: ignore[bad-return]


def target_device() -> jax.Device:
    """The device that a program compiled now is for: `jax.default_device` where it is set, else the first one.

    The first may be a described device that is not in this machine (see `jax.experimental.topologies`).
    """
    chosen = jax.config.jax_default_device
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.devices(chosen)[0]


def unsupported_device(device: jax.Device) -> str | None:
    """Why no Pallas kernel of this package runs on `device`, or None if they do."""
    needed = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
    if device.platform not in ("gpu", "cuda") or "rocm" in str(getattr(device.client, "platform_version", "")):
        return f"needs a CUDA device of compute capability >= {needed}, this is {device.device_kind!r}"
    capability = str(device.compute_capability)
    if tuple(int(x) for x in capability.split(".")) < MIN_COMPUTE_CAPABILITY:
        return f"needs compute capability >= {needed}, {device.device_kind!r} has {capability}"
    return None


@contextlib.contextmanager
def recording() -> Generator[Choices]:
    """Collects what `resolve` answers inside: op -> implementations. Enter it around the tracing of a program.

    A function that `jax.jit` has traced before asks no more and is not recorded again.
    """
    choices: Choices = {}
    token = _recorded.set(choices)
    try:
        yield choices
    finally:
        _recorded.reset(token)


def _record(op: str, choice: Literal["xla", "pallas"], reason: str) -> Literal["xla", "pallas"]:
    """Notes a choice, and logs it at level INFO the first time it is made for this reason."""
    choices = _recorded.get()
    if choices is not None:
        choices.setdefault(op, set()).add(choice)
    if (op, choice, reason) not in _logged:
        _logged.add((op, choice, reason))
        _logger.info("op '%s' runs with %s: %s", op, choice, reason)
    return choice


def resolve(
    op: str, implementation: Implementation, unsupported: str | None = None, slower: str | None = None
) -> Literal["xla", "pallas"]:
    """Returns the implementation that will run `op`: with "auto" Pallas wherever it can and is not known to be slower.

    Args:
      op: name of the op, one of `PALLAS_OPS` if it has a kernel.
      implementation: what the caller asked for.
      unsupported: why the kernel cannot serve this call's shapes, or None if it can.
      slower: why XLA's own kernels serve them better, or None; who asks for "pallas" gets it.

    Raises:
      UnsupportedError: `implementation` is "pallas" and the op, these shapes or this device have no Pallas kernel.
      ValueError: `implementation` is none of "auto", "xla", "pallas".
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is none of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "xla":
        return _record(op, "xla", "asked for")
    if op not in PALLAS_OPS:
        reason = "has no Pallas kernel in this version"
    else:
        reason = unsupported or unsupported_device(target_device())
    if reason is None and (slower is None or implementation == "pallas"):
        return _record(op, "pallas", "serves this device and shape")
    reason = reason or slower
    if implementation == "pallas":
        raise UnsupportedError(f"op '{op}' with Pallas kernels: {reason}; use 'xla' or 'auto'")
    return _record(op, "xla", str(reason))


def check_available(implementation: Implementation) -> None:
    """Raises `UnsupportedError` at once if an op of the model could not run with `implementation`."""
    for op in sorted(PALLAS_OPS):
        resolve(op, implementation)
