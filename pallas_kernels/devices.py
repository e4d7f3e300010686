"""GPUs as data, so that XLA can compile for one that is not in this machine.

`describe` gives JAX devices that take no memory and run nothing: shardings and `jax.default_device` accept them, and
`jit(f).lower(...).compile()` goes the whole way to machine code. What is needed is the CUDA plug-in of JAX, `ptxas` and
`libdevice` (`pip install -e '.[aot]'`), but no GPU and no driver.
"""

import dataclasses
import os

import jax
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the compiler asks about a GPU.

    Attributes:
      kind: what `jax.Device.device_kind` says.
      compute_capability: major, minor.
      multiprocessors: how many there are.
      shared_memory: bytes that one program (thread block) may take at most.
      shared_memory_per_multiprocessor: bytes.
      threads_per_multiprocessor: at most.
      l2_bytes, memory_bytes, bandwidth: cache and memory in bytes, bytes a second.
      clock_ghz: boost clock.
    """

    kind: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    shared_memory_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: int
    clock_ghz: float

    def target_config(self) -> str:
        """XLA's `GpuTargetConfigProto`, as text. Numbers not in the attributes are the same on all these GPUs."""
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.multiprocessors}
              fpus_per_core: {64 if self.compute_capability == (8, 0) else 128}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_memory}
              shared_memory_per_core: {self.shared_memory_per_multiprocessor}
              threads_per_core_limit: {self.threads_per_multiprocessor}
              threads_per_block_limit: 1024
              threads_per_warp: 32
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              l2_cache_size: {self.l2_bytes}
              device_memory_size: {self.memory_bytes}
              memory_bandwidth: {self.bandwidth}
              clock_rate_ghz: {self.clock_ghz}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
            device_description_str: "{self.kind}"
        """


GPUS: dict[str, Gpu] = {
    "a6000": Gpu(
        "NVIDIA RTX A6000", (8, 6), multiprocessors=84, shared_memory=101_376,
        shared_memory_per_multiprocessor=102_400, threads_per_multiprocessor=1536, l2_bytes=6_291_456,
        memory_bytes=51_041_271_808, bandwidth=768_096_000_000, clock_ghz=1.8,
    ),
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), multiprocessors=108, shared_memory=166_912,
        shared_memory_per_multiprocessor=167_936, threads_per_multiprocessor=2048, l2_bytes=41_943_040,
        memory_bytes=85_000_000_000, bandwidth=2_039_000_000_000, clock_ghz=1.41,
    ),
    "h200": Gpu(
        "NVIDIA H200", (9, 0), multiprocessors=132, shared_memory=232_448,
        shared_memory_per_multiprocessor=233_472, threads_per_multiprocessor=2048, l2_bytes=52_428_800,
        memory_bytes=150_000_000_000, bandwidth=4_800_000_000_000, clock_ghz=1.98,
    ),
}  # fmt: skip


def describe(name: str, count: int = 1) -> list[jax.Device]:
    """`count` GPUs of one host, described and not real. `name` is a key of `GPUS`.

    Lower and compile inside `with jax.default_device(devices[0])`: what asks for the platform is answered by it.

    Raises:
      RuntimeError: the CUDA plug-in of JAX is not installed, or cannot compile for this GPU.
    """
    # The plug-in otherwise looks for the CUDA libraries that a program would need to run.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=GPUS[name].target_config(), topology=f"1x1x{count}"
        )
    except NotImplementedError:
        raise RuntimeError("the CUDA plug-in of JAX is not installed") from None
    return list(topology.devices)
