"""Compiles every kernel for a GPU that need not be there: `python -m pallas_kernels.aot --device a6000`.

The cases are the named shapes of the ops, each in the config that its heuristics pick for that GPU, compiled by the
real compiler down to machine code. What does not fit the GPU's shared memory fails, and so does a kernel that spills
registers, unless `SPILLS` names it with a reason. `ptxas` is the one that JAX finds: of the `nvidia-cuda-nvcc` package
where that is installed. Other versions allocate registers differently, so the bytes in `SPILLS` are those of the
version in `locks/aot.txt`.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import jax

import pallas_kernels.add_norm.shapes
import pallas_kernels.attention_front.shapes
import pallas_kernels.gdn_scan.shapes
import pallas_kernels.linear.shapes
import pallas_kernels.scalars.shapes
import pallas_kernels.tree_attention.shapes
import pallas_kernels.tree_search.shapes
import pallas_kernels.tree_walk.shapes
from pallas_kernels.devices import GPUS, describe

# Every kernel once, as one of two GPUs runs it with the default tree budget: what `make test` has time for.
SUBSET = (
    r"gdn_\w+/qwen3.6-27b-tp2/bfloat16(/64|/512)?$|add_norm/qwen3.6-27b/bfloat16/64$|(qwen3.6-27b-tp2-64|27b-tp2-prefill|drafter-tp2)/bfloat16$|scalars/bucket3$"
)

_PARITY = "fp32 serves tests and parity only, and its split products need two or three registers a number"
_WIDEST = "every tiling tried spills; trees of up to 64 rows, the default, spill nothing"
_PREPARE = "eleven registers, once a chunk; no key block or number of warps tried is without"
_BUNDLED = (
    "two registers, for the bundled pair alone; key blocks of 16 avoid it and halve every model's loads"
)
# (devices, kernel and case, most bytes a thread, why that is accepted). What no line names may not spill at all.
SPILLS: tuple[tuple[str, str, int, str], ...] = (
    ("a6000", r"gdn_tree_128 .*/bfloat16/128", 500, _WIDEST),
    ("a100", r"gdn_tree_128 .*/bfloat16/128", 488, _WIDEST),
    ("h200", r"gdn_tree_128 .*/bfloat16/128", 2008, _WIDEST),
    ("a100", r"linear .*/smollm2-gate_up/bfloat16/1", 4, "one register, for a single row"),
    ("a6000", r"gdn_chunk_prepare .*/bundled/bfloat16/.*", 8, _BUNDLED),
    ("a100", r"gdn_chunk_prepare .*/bfloat16/.*", 44, _PREPARE),
    ("a6000", r"tree_attention .*27b.*/float32", 16, _PARITY),
    ("a100", r"tree_attention .*27b.*/float32", 48, _PARITY),
    ("h200", r"tree_attention .*27b.*/float32", 24, _PARITY),
    ("a6000", r"gdn_tree_64 .*/float32/64", 312, _PARITY),
    ("a100 h200", r"gdn_tree_64 .*/float32/64", 412, _PARITY),
    ("a6000 a100", r"gdn_tree_128 .*/float32/128", 2352, _PARITY),
    ("h200", r"gdn_tree_128 .*/float32/128", 2596, _PARITY),
    ("a6000 a100 h200", r"gdn_chunk_walk .*27b.*/float32/.*", 192, _PARITY),
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
      case: op, shape and dtype, as the op's `cases` name them.
      name: of the kernel; a case may launch several.
      shared_bytes: shared memory of a program.
      registers, spill_bytes: of a thread; bytes that are stored for want of registers.
      seconds: that the case took to compile, all of its kernels together.
    """

    case: str
    name: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    seconds: float


def all_cases(device_kind: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every op, shape and dtype."""
    yield from pallas_kernels.tree_attention.shapes.cases(device_kind)
    yield from pallas_kernels.gdn_scan.shapes.cases(device_kind)
    yield from pallas_kernels.add_norm.shapes.cases(device_kind)
    yield from pallas_kernels.attention_front.shapes.cases(device_kind)
    yield from pallas_kernels.linear.shapes.cases(device_kind)
    yield from pallas_kernels.tree_search.shapes.cases(device_kind)
    yield from pallas_kernels.tree_walk.shapes.cases(device_kind)
    yield from pallas_kernels.scalars.shapes.cases(device_kind)


@contextmanager
def stderr_to(file: IO[bytes]) -> Generator[None]:
    """What this process and its libraries write on stderr goes to `file`."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def ptxas_reports(log: str) -> dict[str, tuple[int, int]]:
    """Kernel -> (registers, spilled bytes) a thread, from what `ptxas -v` says."""
    found = re.findall(
        r"Function properties for (\S+)\n.*?, (\d+) bytes spill stores, .*\n.*?Used (\d+) registers", log
    )
    return {name: (int(registers), int(spilled)) for name, spilled, registers in found}


def compile_case(
    name: str, function: Callable[..., Any], arguments: tuple[Any, ...], device: jax.Device
) -> list[Kernel]:
    """Compiles `function` for `device` and says what each of its Pallas kernels takes.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses, for one because shared memory is too small.
      RuntimeError: the compiler does not say what a kernel takes.
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as dump, tempfile.TemporaryFile() as log:
        with stderr_to(log), jax.default_device(device):
            jax.jit(function).lower(*arguments).compile(compiler_options={"xla_dump_to": dump})
        seconds = time.perf_counter() - start
        log.seek(0)
        reports = ptxas_reports(log.read().decode())
        launches = "".join(path.read_text() for path in Path(dump).glob("*thunk_sequence.txt"))
    shared = re.findall(r"kCustomKernel .*?(\w+) grid: .*shared_memory: (\d+) bytes", launches)
    if not shared or not {kernel for kernel, _ in shared} <= reports.keys():
        raise RuntimeError(f"launches {shared}, but ptxas reports {reports}: other versions of JAX or ptxas?")
    return [Kernel(name, kernel, int(size), *reports[kernel], seconds) for kernel, size in shared]


def allowed_spill(device: str, kernel: Kernel) -> tuple[int, str]:
    """Most bytes a thread that `kernel` may spill on `device`, and why."""
    for devices, pattern, most, why in SPILLS:
        if device in devices.split() and re.fullmatch(pattern, f"{kernel.name} {kernel.case}"):
            return most, why
    return 0, "SPILLS in pallas_kernels/aot.py does not name it"


def main() -> int:
    """The command line. Status 1: a kernel failed; 2: nothing could be compiled."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--device", choices=GPUS, required=True)
    parser.add_argument("--filter", default="", metavar="REGEX", help="only cases whose name has a match")
    parser.add_argument("--subset", action="store_true", help="only a few representative cases")
    parser.add_argument(
        "--json", action="store_true", help="an object a kernel, a line each, and the summary's"
    )
    args = parser.parse_args()

    # XLA runs `ptxas -v` and repeats what it says only if asked to. A cached program would not be compiled at all.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="0", TF_CPP_VMODULE="subprocess_compilation=3")
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_platforms", "cpu")
    try:
        selected = re.compile(args.filter)
        device = describe(args.device)[0]
    except re.error as error:
        parser.exit(2, f"--filter {args.filter}: not a regular expression ({error})\n")
    except RuntimeError as error:
        parser.exit(2, f"--device {args.device}: {error}; `make gate` sets up an environment that has it\n")
    cases = [
        case for case in all_cases(device.device_kind)
        if selected.search(case[0]) and (not args.subset or re.search(SUBSET, case[0]))
    ]  # fmt: skip
    if not cases:
        parser.exit(2, f"--filter {args.filter}: no case has this in its name\n")

    start, kernels, failures = time.perf_counter(), 0, 0
    spills = []
    for name, function, arguments in cases:
        try:
            compiled = compile_case(name, function, arguments, device)
        except Exception as error:  # whatever it is, the other cases are still worth a look
            failures += 1
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            print(
                json.dumps({"case": name, "failure": reason}) if args.json else f"{name}  FAILED: {reason}",
                flush=True,
            )
            continue
        for kernel in compiled:
            kernels += 1
            most, why = allowed_spill(args.device, kernel)
            failure = None
            if kernel.spill_bytes:
                spills.append(kernel.spill_bytes)
            if kernel.spill_bytes > most:
                failures += 1
                failure = f"spills {kernel.spill_bytes} bytes, {most} allowed ({why})"
            if args.json:
                print(json.dumps(dataclasses.asdict(kernel) | {"failure": failure}), flush=True)
            else:
                print(
                    f"{name:48} {kernel.name:22} {kernel.shared_bytes:7} B shared {kernel.registers:4} registers "
                    f"{kernel.spill_bytes:5} B spilled {kernel.seconds:5.1f} s"
                    + (f"  FAILED: {failure}" if failure else f"  ({why})" if kernel.spill_bytes else ""),
                    flush=True,
                )
    summary = {
        "device": device.device_kind, "cases": len(cases), "kernels": kernels, "failures": failures,
        "spilling": len(spills), "most_spilled_bytes": max(spills, default=0),
        "seconds": round(time.perf_counter() - start, 1), "jax": jax.__version__,
    }  # fmt: skip
    if args.json:
        print(json.dumps(summary))
    else:
        print(
            f"{'FAILED' if failures else 'ok'}: {summary['device']}: {len(cases)} cases, {kernels} kernels, "
            f"{failures} failures, {len(spills)} kernels spill (at most {summary['most_spilled_bytes']} bytes a "
            f"thread), {summary['seconds']} s, jax {jax.__version__}"
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
