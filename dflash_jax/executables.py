"""Compiled programs on disk, found again without tracing them.

JAX's own cache is looked up by a program's text, so a second start still traces and lowers every program, which takes
longer than reading it. Here a program is looked up by all that its text follows from: the source files of the packages
that write it, the static arguments, the models' configurations, shapes and placement of the arguments, options,
versions and devices. What cannot be written down like that, such as a tree policy of the user's own, is not kept.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import logging
import os
import pickle
import platform
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import flax
import jax
import numpy as np
from flax import nnx
from jax.experimental import serialize_executable

import pallas_kernels
from pallas_kernels.linear import table

# The oldest programs go first beyond so much.
MOST_BYTES = 2 << 30
_PACKAGES = ("dflash_jax", "pallas_kernels")
_SUFFIX, _PART = ".program", ".part"
# Seconds after which a file that is still being written has been left behind by a process that was ended.
_ABANDONED = 3600.0
_folder: Path | None = None
_logger = logging.getLogger(__name__)


class _Counts(threading.local):
    """What this thread has asked of XLA.

    Attributes:
      asked: programs compiled or got from JAX's cache; not those that JAX has in memory.
      cached: of these the ones from JAX's cache on disk.
    """

    asked = 0
    cached = 0


_counts = _Counts()


def _count_asked(event: str, duration_secs: float, **_: Any) -> None:
    _counts.asked += event == "/jax/core/compile/backend_compile_duration"


def _count_cached(event: str, **_: Any) -> None:
    _counts.cached += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_duration_secs_listener(_count_asked)
jax.monitoring.register_event_listener(_count_cached)


def compiled(lowered: jax.stages.Lowered, options: dict[str, Any] | None) -> tuple[jax.stages.Compiled, bool]:
    """The compiled program, and whether it can be kept, which only one that XLA has just compiled can.

    On a CPU one that comes from JAX's cache lacks parts when it is serialised again, and so may one that JAX still
    has in memory, since nothing tells where that came from.
    """
    asked, cached = _counts.asked, _counts.cached
    program = lowered.compile(options)
    return program, _counts.asked > asked and _counts.cached == cached


class _Unknown(Exception):
    """Something that has no description."""


def keep_in(folder: Path | None) -> None:
    """From now on programs are kept in this folder, which is made when the first one is; None for nowhere."""
    global _folder
    _folder = folder
    if folder is not None:
        # Now, just after it was imported: what is edited while models load is not what writes this run's programs.
        source_digest()


@functools.cache
def host_digest() -> str:
    """Stands for the processor: compiled CPU code uses its extensions, and a home may be shared by many machines."""
    lines = [platform.machine()]
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        lines += [x for x in text.splitlines() if x.startswith(("flags", "Features"))][:1]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


@functools.cache
def source_digest() -> str:
    """Of every Python file of the packages that write programs."""
    digest = hashlib.sha256()
    for root in (Path(__file__).parent, Path(pallas_kernels.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def describe(value: Any) -> str:
    """A text that is the same for equal values in every process, and differs for different ones.

    Raises:
      _Unknown: for what is neither plain data nor defined in these packages.
    """
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return f"{type(value).__name__}:{value!r}"
        case enum.Enum():
            return f"{_name(type(value))}.{value.name}"
        case tuple() | list():
            return f"{type(value).__name__}({','.join(map(describe, value))})"
        case dict():
            return f"dict({','.join(f'{describe(k)}={describe(v)}' for k, v in value.items())})"
        case FunctionType():
            if value.__closure__ or "<" in value.__qualname__:
                raise _Unknown(value)
            return _name(value)
        case np.dtype():
            return f"dtype:{value}"
        case nnx.Module():
            return describe([(path, type(module), _attributes(module)) for path, module in nnx.iter_modules(value)])
        case type():
            return _name(value, "flax")
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = (f"{f.name}={describe(getattr(value, f.name))}" for f in dataclasses.fields(value))
            return f"{_name(type(value))}({','.join(fields)})"
    raise _Unknown(value)


def outline(models: Sequence[nnx.Module]) -> str | None:
    """Describes models without their weights; None for one with a class or a value from elsewhere.

    Also None where programs are not kept: of a large model it takes tens of milliseconds.
    """
    if _folder is None:
        return None
    try:
        return describe(tuple(models))
    except _Unknown:
        return None


def _attributes(module: nnx.Module) -> list[tuple[str, Any]]:
    """What a module holds, other modules aside: of a variable, whose shape is an argument's, only that it is one."""
    own = [(k, v) for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, nnx.Pytree)]
    return [(k, type(v) if isinstance(v, nnx.Variable) else v) for k, v in own]


def _name(value: type | FunctionType, *also: str) -> str:
    if value.__module__.partition(".")[0] not in (*_PACKAGES, *also):
        raise _Unknown(value)
    return f"{value.__module__}.{value.__qualname__}"


def _placed(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    weak = getattr(leaf, "weak_type", False)
    return f"{np.shape(leaf)}{leaf.dtype}{weak}{getattr(sharding, 'spec', None)}"


def _environment(devices: Sequence[jax.Device]) -> str:
    first = devices[0]
    settings = {k: v for k, v in jax.config.values.items() if "cache" not in k}
    flags = {k: v for k, v in os.environ.items() if k in ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")}
    versions = (jax.__version__, jax.lib.__version__, flax.__version__, first.client.platform_version)
    host = host_digest() if first.platform == "cpu" else None
    return repr(
        (
            source_digest(),
            table.digest(first.device_kind),
            host,
            versions,
            [(d.id, d.device_kind) for d in devices],
            sorted(settings.items()),
            flags,
        )
    )


@dataclasses.dataclass
class Entry:
    """Where a program is kept.

    Attributes:
      path: its file.
      devices: that it runs on.
    """

    path: Path
    devices: list[jax.Device]

    def load(self, arguments: tuple[Any, ...]) -> tuple[Any, Any] | None:
        """The program and what was kept beside it; None if there is none, or a damaged one."""
        try:
            payload, result, extra = pickle.loads(self.path.read_bytes())
            program = serialize_executable.deserialize_and_load(
                payload, jax.tree.structure((arguments, {})), jax.tree.structure(result),
                backend=self.devices[0].client, execution_devices=self.devices,
            )  # fmt: skip
        except Exception:  # whatever a damaged or foreign file leads to, compiling mends it
            return None
        with contextlib.suppress(OSError):  # the folder may only be read, or another process has evicted it
            os.utime(self.path)
        return program, extra

    def save(self, program: Any, extra: Any) -> None:
        """Keeps a program that has just been compiled. A full disk must not end a run: then it is not kept."""
        # Threads, and processes of several containers, may write the same one.
        part = self.path.with_suffix(f".{uuid.uuid4().hex}{_PART}")
        try:
            payload, _, out = serialize_executable.serialize(program)
            result = jax.tree.unflatten(out, range(out.num_leaves))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(pickle.dumps((payload, result, extra)))
            part.replace(self.path)
            _evict(self.path.parent)
        except Exception as error:  # of the disk, or whatever cannot be serialised
            _logger.info("a compiled program is not kept in %s: %s", self.path.parent, error)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def _evict(folder: Path) -> None:
    files = sorted(
        ((p.stat().st_mtime, p.stat().st_size, p) for p in folder.glob(f"*{_SUFFIX}")), reverse=True
    )
    whole = 0
    for _, size, path in files:
        whole += size
        if whole > MOST_BYTES:
            path.unlink(missing_ok=True)
    for path in folder.glob(f"*{_PART}"):
        if time.time() - path.stat().st_mtime > _ABANDONED:
            path.unlink(missing_ok=True)


def entry(
    devices: Sequence[jax.Device], arguments: tuple[Any, ...], static: Any, outline: str | None = ""
) -> Entry | None:
    """Where the program for these arguments is kept; None if programs are not, or this one has no description.

    An argument that is bound to other devices takes its program there: that one is not kept either.

    Args:
      devices: that it runs on.
      arguments: as it is called with.
      static: everything else that it follows from.
      outline: of the models that it runs, see `outline`.
    """
    if _folder is None or outline is None or jax.process_count() > 1:
        return None
    try:
        what = describe(static)
    except _Unknown:
        return None
    leaves, structure = jax.tree.flatten(arguments)
    if any(getattr(x, "committed", False) and not x.sharding.device_set <= set(devices) for x in leaves):
        return None
    text = "\n".join([_environment(devices), what, outline, str(structure), *map(_placed, leaves)])
    return Entry(_folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}{_SUFFIX}", list(devices))
