"""Compiles whole programs for GPUs that need not be there: `python -m benchmarks.whole_program --device a6000 --tp 2`.

Prefill, autoregressive, chain and tree programs of a published shape, on a described mesh, down to machine code; and
what a device must hold for each: weights, caches and workspace, as the compiler counts them. Nothing runs.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.shapes import NAMES, configs
from dflash_jax import UserError
from dflash_jax.programs import Programs
from dflash_jax.random_weights import abstract_drafter, abstract_target
from dflash_jax.round import RoundSpec
from dflash_jax.sharding import check_divides, make_mesh
from dflash_jax.tree import BestFirst, SpineFirst
from pallas_kernels.devices import GPUS, describe

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of one device. Attributes: arguments (weights and caches), results that are no argument's, workspace."""

    arguments: int
    results: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.results + self.workspace


def device_bytes(tree: Any) -> int:
    """Bytes of one device of a pytree of (abstract) arrays on a mesh."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree)
    )


def footprint(compiled: Any) -> Footprint:
    """What the compiler says a program needs of a device."""
    memory = compiled.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Footprint(memory.argument_size_in_bytes, fresh, memory.temp_size_in_bytes)


def run(args: argparse.Namespace, devices: list[jax.Device]) -> dict[str, Any]:
    """Compiles every program for the (described) devices and returns what was found."""
    target_config, drafter_config = configs(args.shape, args.layers)
    check_divides(target_config, drafter_config, args.tp)
    mesh = make_mesh(args.tp, devices)
    dtype = jnp.dtype(args.dtype)
    target, drafter = abstract_target(target_config, dtype, mesh), abstract_drafter(drafter_config, dtype, mesh)
    programs = Programs(target, drafter, mesh)
    capacity = -(-args.context // args.page_size) * args.page_size

    state = programs.init(drafter_config, args.batch, capacity, args.page_size, abstract=True)
    parts = {
        "target": device_bytes(nnx.state(target)),
        "drafter": device_bytes(nnx.state(drafter)),
        "caches": device_bytes(state),
    }
    what = f"{args.shape}, {args.dtype}, {args.tp} x {devices[0].device_kind}, {args.batch} x {capacity} tokens"
    print(
        f"{what}; a device: "
        + ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items()),
        flush=True,
    )
    block = drafter_config.block_size
    pages = capacity // args.page_size
    found: dict[str, Any] = {}
    with jax.default_device(devices[0]):
        for name, budget in (("prefill", 1), ("chain", block - 1), ("tree", args.budget)):
            if name not in args.programs:
                continue
            policy = BestFirst() if name == "tree" else SpineFirst()
            spec = RoundSpec(budget, 1 if name == "prefill" else block, policy, context_pages=pages)
            start = time.perf_counter()
            if name == "prefill":
                programs.prefill(state, 0, [0] * args.chunk, 1, True, spec, compile_only=True)
            else:
                programs.decode(state, 1, spec, 256, compile_only=True)
            compiled = list(programs.compiled.values())[-1]
            took = time.perf_counter() - start
            size = footprint(compiled)
            kernels = programs.kernels(spec)
            text = compiled.as_text()
            collectives = {
                op: text.count(f" {op}(") + text.count(f" {op}-start(") for op in ("all-reduce", "all-gather")
            }
            found[name] = dataclasses.asdict(size) | {"total": size.total, "kernels": kernels} | collectives
            print(
                f"  {name:10} {size.total / GIB:6.2f} GiB a device: arguments {size.arguments / GIB:.2f}, workspace "
                f"{(size.workspace + size.results) / GIB:.2f}; {collectives['all-reduce']} all-reduces, "
                f"{collectives['all-gather']} all-gathers; {', '.join(f'{k} {v}' for k, v in kernels.items())}; "
                f"{took:.0f} s",
                flush=True,
            )
            if args.dump:
                os.makedirs(args.dump, exist_ok=True)
                with open(os.path.join(args.dump, f"{name}.hlo.txt"), "w") as file:
                    file.write(text)
    record = {"device": args.device, "tp": args.tp, "shape": args.shape, "parts": parts}
    return record | {"programs": found}


def main(argv: list[str] | None = None) -> int:
    """The command line. Status 1: a program does not fit or does not compile; 2: nothing could be compiled."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.whole_program", description="Compiles whole programs for GPUs that are not there."
    )
    parser.add_argument("--device", choices=GPUS, required=True)
    parser.add_argument("--tp", type=int, default=1, help="devices of the mesh (default: 1)")
    parser.add_argument("--shape", choices=NAMES, default="qwen3.6-27b")
    parser.add_argument("--layers", type=int, help="cut the target to its first layers")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--programs", type=lambda text: text.split(","), default=["prefill", "chain", "tree"], metavar="NAMES",
        help="which (default: prefill,chain,tree)",
    )
    parser.add_argument("--context", type=int, default=32768, help="tokens a slot holds (default: 32768)")
    parser.add_argument("--batch", type=int, default=1, help="slots (default: 1)")
    parser.add_argument("--budget", type=int, default=63, help="nodes of the tree (default: 63)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prefill chunk (default: 512)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page (default: 64)")
    parser.add_argument("--limit", type=float, metavar="GB", help="fail where a device needs more than this")
    parser.add_argument("--json", metavar="FILE", help="write what was found")
    parser.add_argument("--dump", metavar="DIR", help="write the compiled programs as text")
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_platforms", "cpu")
    try:
        devices = describe(args.device, args.tp)
    except RuntimeError as error:
        print(f"error: --device {args.device}: {error}; `make gate` has an environment with it", file=sys.stderr)
        return 2
    try:
        result = run(args, devices)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        print(f"FAILED: {args.device}: {str(error).splitlines()[0]}")
        return 1
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
    most = max(program["total"] for program in result["programs"].values())
    fits = args.limit is None or most <= args.limit * 1e9
    limit = "" if args.limit is None else f" (limit {args.limit:g} GB)"
    print(f"{'ok' if fits else 'FAILED'}: {args.tp} x {args.device}: at most {most / 1e9:.2f} GB a device{limit}")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
