"""Kernels one by one: `python -m benchmarks.kernels`. Time, the share of what the device can do, and others' time.

For every op and named shape: median microseconds a call; bytes of the floor over time, and as a share of the copy
bandwidth measured in the same run; the flops of the floor over time as a share of the measured bf16 matrix throughput;
which of the two floors is the larger; and how many times longer the XLA reference and a PyTorch counterpart take,
measured in turn with the kernel. The floors' formulas are in `benchmarks.kernel_cases`.
"""

import os

# PyTorch needs memory of its own in this process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import dataclasses
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import torch_counterparts
from benchmarks.kernel_cases import Case, cases, smoke_cases
from benchmarks.timing import Loop, looped, measure_machine, medians
from dflash_jax.errors import UserError
from pallas_kernels.dispatch import target_device, unsupported_device

DEFAULT_OPS = "^(?!.*bundled)"
CHECK_RUNS = 20


def program(case: Case, implementation: str, config: Any = None) -> tuple[Callable[..., Any], int]:
    """The loop of a case and its calls a trip, see `timing.looped`.

    Pallas calls are ordered by `case.chain` alone and have their layer as a constant, so that nothing else runs between
    them. The XLA reference, which the compiler could take apart, gets its layer from the loop's counter, its operands
    nudged by the last result, and all its results carried along.
    """
    pallas = implementation == "pallas"
    calls = case.calls if pallas else 1
    nudged = case.pallas_nudged if pallas else case.nudged
    # Traced and lowered once for all calls of a trip.
    one = jax.jit(lambda operands, layer: case.call(operands, layer, implementation, config))

    def step(operands: Any, trip: jax.Array, carry: Any) -> Any:
        chained, results = carry
        for i in range(calls):
            current = list(operands)
            for (_, place), value in zip(case.chain, chained, strict=True):
                current[place] = value
            for place in nudged:
                zero = 0 * results[0].reshape(-1)[0]
                current[place] = current[place] + zero.astype(current[place].dtype)
            layer = np.int32(i % case.layers) if pallas else trip % case.layers
            results = one(tuple(current), layer)
            chained = tuple(results[r].astype(operands[p].dtype) for r, p in case.chain)
        return chained, results if nudged or not pallas else ()

    return step, calls


def prepare(case: Case, implementation: str, operands: Any, overhead: float, config: Any = None) -> Loop:
    """Compiles the loop of a case for operands that exist."""
    step, calls = program(case, implementation, config)
    shapes = jax.eval_shape(lambda x: case.call(x, np.int32(0), implementation, config), operands)
    chained = tuple(operands[place] for _, place in case.chain)
    results = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tuple(shapes))
    nudged = case.pallas_nudged if implementation == "pallas" else True
    arguments = (operands, (chained, results if nudged else ()))
    compiled = jax.jit(looped(step)).lower(jnp.int32(1), *arguments).compile()
    return Loop(compiled, arguments, calls=calls * case.divide, overhead=overhead)


def compare(case: Case, operands: Any) -> dict[str, Any]:
    """Relative error (norms) of each Pallas result to the XLA reference's, and whether 20 runs agree bit for bit."""
    pallas, xla = (
        jax.jit(lambda x, name=name: case.call(x, np.int32(case.layers - 1), name, None)) for name in ("pallas", "xla")
    )
    first = pallas(operands)
    errors = []
    for got, want in zip(first, xla(operands), strict=True):
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        errors.append(float(jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel())))
    same = all(
        bool(jnp.array_equal(a, b)) for _ in range(CHECK_RUNS - 1) for a, b in zip(first, pallas(operands), strict=True)
    )
    return {"relative_errors": errors, "repeatable": same}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Measured limits: seconds of an empty trip, bytes a second of a copy, bf16 operations a second of a product."""

    overhead: float
    bandwidth: float
    throughput: float


def figures(case: Case, seconds: dict[str, float], machine: Machine) -> dict[str, Any]:
    """One line of the table. Shares are of the fastest that the measured limits allow, by bytes and by flops."""
    own = seconds.get("pallas", seconds.get("xla", float("nan")))
    by_bytes, by_flops = case.moved / machine.bandwidth, case.flops / machine.throughput
    return {
        "case": case.name,
        "op": case.op,
        "microseconds": own * 1e6,
        "floor_bytes": case.moved,
        "floor_flops": case.flops,
        "bytes_per_second": case.moved / own,
        "share_of_copy_bandwidth": by_bytes / own,
        "share_of_matrix_throughput": by_flops / own,
        "larger_floor": "flops" if by_flops > by_bytes else "bytes",
        "times_larger_floor": own / max(by_bytes, by_flops),
        "seconds": seconds,
        "xla_ratio": seconds["xla"] / own if "xla" in seconds and "pallas" in seconds else None,
        "torch_ratio": seconds["torch"] / own if "torch" in seconds else None,
    }


HEADER = (
    f"{'case':42s} {'us':>9s} {'TB/s':>7s} {'copy':>6s} {'matrix':>6s} {'floor':>6s} {'x floor':>8s}"
    f" {'xla':>8s} {'torch':>8s}"
)


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    ratios = ["-" if row[k] is None else f"{row[k]:.2f}x" for k in ("xla_ratio", "torch_ratio")]
    return (
        f"{row['case']:42s} {row['microseconds']:9.2f} {row['bytes_per_second'] / 1e12:7.3f}"
        f" {row['share_of_copy_bandwidth']:6.1%} {row['share_of_matrix_throughput']:6.1%} {row['larger_floor']:>6s}"
        f" {row['times_larger_floor']:7.2f}x {ratios[0]:>8s} {ratios[1]:>8s}"
    )


def one_line(error: BaseException) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:140]}"


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--op", metavar="REGEX", default=DEFAULT_OPS,
        help="cases whose name (op/shape/rows or context) has a match (default: all but the bundled pair's)",
    )
    parser.add_argument(
        "--implementation", choices=("pallas", "xla"), default="pallas",
        help="what to time; xla needs no GPU (default: pallas, beside the XLA reference)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter loops")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--check", action="store_true", help="first compare with XLA, and 20 runs with one another")
    parser.add_argument("--sweep", action="store_true", help="time alternative launch parameters and print the best")
    parser.add_argument(
        "--smoke", action="store_true",
        help="run one small case an op once, outside any loop, and end: what to run under compute-sanitizer",
    )
    parser.add_argument(
        "--seconds", type=float, default=220.0, metavar="S", help="begin no further case after so long (default: 220)"
    )
    return parser


def select(pattern: str, dtype: str, source: Callable[[Any], Iterable[Case]] = cases) -> list[Case]:
    """The cases that a pattern names, or `UserError`."""
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--op {pattern}: not a regular expression ({error})") from None
    everything = list(source(jnp.dtype(dtype)))
    chosen = [case for case in everything if wanted.search(case.name)]
    if not chosen:
        ops = ", ".join(sorted({case.op for case in everything}))
        raise UserError(f"--op {pattern}: no case has a match; ops are {ops}")
    return chosen


def smoke(chosen: Sequence[Case], implementation: str) -> None:
    """Runs every case once, without a loop and without other launches than those that make its operands."""
    for case in chosen:
        results = jax.block_until_ready(
            case.call(jax.jit(case.build)(jax.random.key(0)), 0, implementation, None)
        )
        finite = all(bool(np.isfinite(np.asarray(x, np.float32)).all()) for x in results)
        print(f"{case.name}: {'ok' if finite else 'NOT FINITE'}", flush=True)
        if not finite:
            raise FloatingPointError(f"{case.name} has results that are not finite")


class Bench:
    """One run: compiles every case in threads, then times case by case as they become ready."""

    def __init__(self, args: argparse.Namespace, chosen: Sequence[Case], machine: Machine, started: float):
        self.args, self.chosen, self.machine, self.started = args, chosen, machine, started
        self.torch = None if args.no_torch or args.implementation == "xla" else torch_counterparts.find_torch()
        self.rows: list[dict[str, Any]] = []
        self.unfinished = 0

    def _left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.started)

    def _variants(self, case: Case) -> list[tuple[str, str, Any]]:
        """(label, implementation, config) of what is compiled for a case."""
        variants: list[tuple[str, str, Any]] = []
        if self.args.implementation == "pallas":
            variants.append(("pallas", "pallas", None))
            if self.args.sweep:
                variants += [(str(config), "pallas", config) for config in case.configs]
        if self.args.implementation == "xla" or (case.xla and not self.args.sweep):
            variants.append(("xla", "xla", None))
        return variants

    def run(self) -> list[dict[str, Any]]:
        """Prints the table as it grows and returns its lines."""
        pool = ThreadPoolExecutor(os.cpu_count() or 1)
        submitted: list[tuple[Case, Future[Any], list[tuple[str, Future[Loop]]]]] = []
        # All operands first: a compilation waits for its operands, and must not hold the thread that would make them.
        operands = [pool.submit(lambda c=c: jax.jit(c.build)(jax.random.key(0))) for c in self.chosen]
        for case, made in zip(self.chosen, operands, strict=True):
            jobs = [
                (label, pool.submit(
                    lambda c=case, m=made, i=implementation, x=config:
                    prepare(c, i, m.result(), self.machine.overhead, x)
                ))
                for label, implementation, config in self._variants(case)
            ]  # fmt: skip
            submitted.append((case, made, jobs))
        # Compilation tries products out on the device, so as little as possible is timed beside it.
        wait([job for _, _, jobs in submitted for _, job in jobs], timeout=max(1.0, 0.7 * self._left()))
        submitted.sort(key=lambda entry: not all(job.done() for _, job in entry[2]))
        print(f"compiled after {time.monotonic() - self.started:.0f} s\n{HEADER}", flush=True)
        for case, made, jobs in submitted:
            if self._left() <= 0:
                self.unfinished += 1
                print(f"{case.name}: left out, --seconds {self.args.seconds:g} are over", flush=True)
                continue
            self._one(case, made, jobs)
        pool.shutdown(wait=False, cancel_futures=True)
        return self.rows

    def _one(self, case: Case, made: Future[Any], jobs: list[tuple[str, Future[Loop]]]) -> None:
        """Times one case; what fails is named and the rest goes on."""
        loops: dict[str, Any] = {}
        for label, job in jobs:
            try:
                loops[label] = job.result(timeout=max(self._left(), 1.0))
            except Exception as error:
                self._fail(case, label, error)
        checked: dict[str, Any] = {}
        if self.args.check and "pallas" in loops and case.xla:
            checked = compare(case, made.result())
            errors = " ".join(f"{e:.1e}" for e in checked["relative_errors"])
            print(f"  check {case.name}: relative errors to XLA {errors}; {CHECK_RUNS} runs "
                  f"{'bitwise equal' if checked['repeatable'] else 'DIFFER'}", flush=True)  # fmt: skip
            self.unfinished += not checked["repeatable"]
        if self.torch is not None and case.counterpart is not None and "pallas" in loops and not self.args.sweep:
            try:
                loops["torch"] = torch_counterparts.make(self.torch, case.counterpart, self.args.dtype)
            except Exception as error:
                print(f"  {case.name} torch: {one_line(error)}", flush=True)
        if not loops:
            return
        samples, seconds = (5, 0.01) if self.args.quick or self.args.sweep else (7, 0.03)
        times = medians(list(loops.values()), samples=samples, seconds=seconds)
        taken = dict(zip(loops, times, strict=True))
        row = figures(case, taken, self.machine) | checked
        self.rows.append(row)
        print(line(row), flush=True)
        if self.args.sweep:
            self._print_sweep(taken)

    def _fail(self, case: Case, label: str, error: Exception) -> None:
        # An alternative that does not fit the device is a result of a sweep, not a failure of the run.
        if label in ("pallas", "xla"):
            self.unfinished += 1
        print(f"  {case.name} {label}: {one_line(error)}", flush=True)

    def _print_sweep(self, taken: dict[str, float]) -> None:
        own = taken.get("pallas")
        for label, seconds in sorted(taken.items(), key=lambda item: item[1])[:5]:
            ratio = "" if own is None else f" {own / seconds:5.2f}x the default's speed"
            print(f"  {seconds * 1e6:9.2f} us{ratio}  {'the default' if label == 'pallas' else label}", flush=True)


def run(args: argparse.Namespace) -> tuple[int, bool]:
    """Runs the benchmark: (exit status, whether threads may still compile)."""
    started = time.monotonic()
    device = target_device()
    reason = unsupported_device(device)
    if args.implementation == "pallas" and reason is not None:
        raise UserError(f"--implementation pallas: {reason}; use --implementation xla")
    if args.implementation == "xla" and (args.sweep or args.check):
        raise UserError("--implementation xla: --sweep and --check are about Pallas kernels; leave them out")
    if args.json is not None and not args.json.parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.smoke:
        smoke(select("" if args.op == DEFAULT_OPS else args.op, args.dtype, smoke_cases), args.implementation)
        return 0, False
    chosen = select(args.op, args.dtype)
    samples, seconds = (3, 0.01) if args.quick else (5, 0.05)
    machine = Machine(*measure_machine(large=device.platform == "gpu", samples=samples, seconds=seconds))
    print(
        f"{device.device_kind}, {args.dtype}, jax {jax.__version__}; measured: copy"
        f" {machine.bandwidth / 1e12:.2f} TB/s, bf16 products {machine.throughput / 1e12:.1f} TFLOP/s,"
        f" empty trip {machine.overhead * 1e6:.1f} us",
        flush=True,
    )
    bench = Bench(args, chosen, machine, started)
    rows = bench.run()
    by_name = {row["case"]: row for row in rows}
    for row in rows:
        parts = row["case"].split("/", 1)
        if parts[0] == "gdn_layer":
            names = [f"{op}/{parts[1]}" for op in ("gdn_front", "tree_delta_rule", "gated_norm", "commit_path")]
            if all(name in by_name for name in names):
                total = sum(by_name[name]["microseconds"] for name in names)
                row["sum_of_parts_microseconds"] = total
                print(f"{row['case']}: parts alone {total:.2f} us, as one program {row['microseconds']:.2f} us a layer")
    took = time.monotonic() - started
    print(f"{len(rows)} cases in {took:.0f} s", flush=True)
    if args.json is not None:
        record = {
            "device": device.device_kind, "jax": jax.__version__, "dtype": args.dtype, "seconds": took,
            "torch": None if bench.torch is None else bench.torch.__version__,
            "machine": dataclasses.asdict(machine), "cases": rows,
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 1 if bench.unfinished else 0, bench.unfinished > 0


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status: 0, 1 where a case failed or was left out, 2 for a usage error."""
    args = build_parser().parse_args(argv)
    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
    try:
        status, compiling = run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if compiling and argv is None:
        # A compilation cannot be interrupted, and the interpreter would wait for its thread.
        sys.stdout.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
