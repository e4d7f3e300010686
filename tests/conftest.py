"""Settings of the whole suite, made before a test module imports JAX, and skipping of tests that need GPUs.

Every environment variable here is a default: what the caller has set stays. On a machine with GPUs,
`JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu` runs the tests that need one.
"""

import gc
import hashlib
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest

# How many CPU devices the tests see, so that sharded code runs on any machine.
CPU_DEVICES = 4
# Memory maps of a test process above which JAX forgets its programs at the end of a file.
MOST_MAPS = 10_000


def instruction_set() -> str:
    """The processor's architecture and extensions, as a short digest."""
    lines = [platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines += [x for x in cpuinfo.read_text().splitlines() if x.startswith(("flags", "Features"))][:1]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def set_up_compilation_cache() -> None:
    """Keep compiled programs between runs; `JAX_ENABLE_COMPILATION_CACHE=false` turns this off.

    Test processes share the folder, and JAX guards it with a lock only if its size is bounded: hence the
    bound. Compiled CPU code uses the extensions of the processor it was made for: hence a folder for each set
    of them, since a home may be shared by several machines.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "dflash-jax" / f"tests-{instruction_set()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home: every run compiles
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2 << 30))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # test processes share a GPU's memory
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches the network
set_up_compilation_cache()

import jax  # noqa: E402 - reads the variables above

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Not by a variable: programs started by a test see the machine as a user's would.
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
# Most of a first run is LLVM's, for programs that run for milliseconds. XLA's own passes stay.
COMPILES_QUICKLY = os.environ["JAX_PLATFORMS"] == "cpu" and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ
if COMPILES_QUICKLY:
    jax.config.update("jax_disable_most_optimizations", True)

# Examples take as long as compilation does, so no deadline. In CI the examples are the same in every run.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@cache
def gpu_count() -> int:
    """How many NVIDIA GPUs JAX may use in this run."""
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:  # the platform is absent or not among JAX_PLATFORMS
        return 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests whose marker asks for more GPUs than there are, saying so."""
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed and gpu_count() < needed:
            reason = (
                f"needs {needed} NVIDIA GPU(s), JAX has {gpu_count()} "
                f"(JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}; a GPU run sets cuda,cpu)"
            )
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
    """For a file whose programs run for longer than compiling them well takes."""
    if COMPILES_QUICKLY:
        jax.config.update("jax_disable_most_optimizations", False)
    yield
    if COMPILES_QUICKLY:
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="session")
def no_programs_from_disk() -> Iterator[None]:
    """Command lines called in this process trace their programs, which a test may have changed."""
    from dflash_jax import executables

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executables, "keep_in", lambda folder: None)
        yield


def memory_maps() -> int:
    """Parts of memory that the system tracks for this process; 0 where it does not tell."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.fixture(autouse=True, scope="module")
def programs_end_with_their_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a file has compiled goes when it is done.

    Each compiled program takes several memory maps. A process may have 65,530 of them on an ordinary Linux, and XLA
    aborts it at the next one.
    """
    yield
    for value in vars(request.module).values():
        if getattr(value, "__module__", None) == request.module.__name__ and hasattr(value, "cache_clear"):
            value.cache_clear()
    if memory_maps() > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
