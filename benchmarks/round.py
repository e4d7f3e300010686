"""Time of one round against its floor, at published shapes with random weights: `python -m benchmarks.round`.

Every figure is a difference: the same compiled `while_loop` runs a few rounds and many rounds, and the time between is
divided by the rounds between, so that neither dispatch nor the host is in it. Cases are interleaved; medians are over
repeats. Random weights accept next to nothing, hence only costs are measured here: the implied tokens a second are
τ / round time for τ given by --tau.

Floor of a round: bytes that must be read or written once, over the copy bandwidth measured in the same run. Weights of
all layers and the head; for a drafter its weights, and the head once more; keys and values of the context; recurrent
states, read by the pass and read and written by the commit.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from benchmarks.breakdown import newest_trace, read, show
from benchmarks.shapes import NAMES, configs
from benchmarks.timing import measure_machine
from dflash_jax import UserError
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.generate import set_up_compile_cache
from dflash_jax.programs import Programs
from dflash_jax.random_weights import random_drafter, random_target
from dflash_jax.round import DecodeState, RoundSpec
from dflash_jax.sharding import check_divides, make_mesh
from dflash_jax.tree import BestFirst, SpineFirst

PAGE = 64
FEW, MANY = 4, 24


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
      method: "ar", "chain" or "tree:B".
      context: tokens in the caches.
      batch: slots.
    """

    method: str
    context: int
    batch: int

    @property
    def budget(self) -> int | None:
        """Nodes besides the anchor; None for the drafter's whole chain."""
        return {"ar": 0, "chain": None}.get(self.method, int(self.method.partition(":")[2] or 0))


def spec_of(case: Case, drafter: DrafterConfig, capacity: int, kernels: Any) -> RoundSpec:
    """The round of a case."""
    pages = capacity // PAGE
    if case.budget == 0:
        return RoundSpec(0, context_pages=pages, implementation=kernels)
    budget, policy = (drafter.block_size - 1, SpineFirst()) if case.budget is None else (case.budget, BestFirst())
    return RoundSpec(budget, drafter.block_size, policy, context_pages=pages, implementation=kernels)


def floor_bytes(
    case: Case, target: TargetConfig, drafter: DrafterConfig, target_bytes: int, drafter_bytes: int, size: int
) -> int:
    """See the module's docstring; of all devices together."""
    kv = len(target.attention_layers) * 2 * target.num_kv_heads * target.head_dim * size * case.context
    state = target.linear_num_value_heads * target.linear_key_head_dim * target.linear_value_head_dim * 4
    total = target_bytes + case.batch * (kv + 3 * len(target.linear_layers) * state)
    if case.budget != 0:
        head = target.vocab_size * target.hidden_size * size
        seen = sum(min(window or case.context, case.context) for window in drafter.layer_windows)
        draft_kv = 2 * drafter.num_kv_heads * drafter.head_dim * size * seen
        total += drafter_bytes + head + case.batch * draft_kv
    return total


def weight_bytes(module: nnx.Module, skip: tuple[str, ...] = ()) -> int:
    """Bytes of all parameters but those of the modules named."""
    flat = nnx.to_flat_state(nnx.state(module))
    return sum(leaf.get_value().nbytes for path, leaf in flat if path[0] not in skip)


class Bench:
    """Models, programs and one state for each batch size."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh | None):
        self.args = args
        self.target_config, self.drafter_config = configs(args.shape, args.layers)
        check_divides(self.target_config, self.drafter_config, args.tp)
        dtype = jnp.dtype(args.dtype)
        self.target = random_target(self.target_config, dtype, mesh)
        self.drafter = random_drafter(self.drafter_config, dtype, mesh)
        self.programs = Programs(self.target, self.drafter, mesh)
        untied = () if self.target_config.tie_word_embeddings else ("embed_tokens",)
        self.bytes = weight_bytes(self.target, untied), weight_bytes(self.drafter)
        self.capacity = -(-(max(args.contexts) + 16 * (FEW + MANY)) // PAGE) * PAGE
        self.states: dict[tuple[int, bool], DecodeState] = {}

    def state(self, case: Case) -> DecodeState:
        """A state with `context` tokens of random keys and values in every slot."""
        drafted = case.budget != 0
        state = self.states.pop((case.batch, drafted), None)
        if state is None:
            self.states = {key: other for key, other in self.states.items() if key[0] == case.batch}  # one batch size
            config = self.drafter_config if drafted else None
            state = self.programs.init(config, case.batch, self.capacity, PAGE)
            rng = np.random.default_rng(0)
            noise = jax.jit(
                lambda x: jax.random.normal(jax.random.key(1), x.shape, x.dtype), donate_argnums=0,
                out_shardings=jax.tree.map(lambda x: x.sharding, state.cache.kv),
            )  # fmt: skip
            pages = rng.permutation(case.batch * self.capacity // PAGE).reshape(case.batch, -1)
            state = dataclasses.replace(
                state,
                cache=dataclasses.replace(state.cache, kv=noise(state.cache.kv)),
                block_tables=self.small(pages),
                stop_ids=self.small(np.full(state.stop_ids.shape, -1)),
            )
        ones = np.ones((case.batch,))
        return dataclasses.replace(
            state,
            lengths=self.small(ones * case.context),
            num_taps=self.small(ones * (1 if drafted else 0)),
            remaining=self.small(ones * 2**30),
            active=self.small(ones > 0, bool),
        )

    def small(self, x: np.ndarray, dtype: Any = np.int32) -> jax.Array:
        """A replicated array of the state."""
        return self.programs.replicated(jnp.asarray(x, dtype))

    def spec(self, case: Case) -> RoundSpec:
        """The round of a case."""
        return spec_of(case, self.drafter_config, self.capacity, self.args.kernels)

    def run(self, case: Case, rounds: int) -> float:
        """Seconds of `rounds` rounds and their dispatch."""
        state = self.state(case)
        jax.block_until_ready(state)
        start = time.perf_counter()
        result = self.programs.decode(state, rounds, self.spec(case), 16 * MANY)
        assert result is not None
        state, (results, _) = result
        results.fetch()
        seconds = time.perf_counter() - start
        self.states[case.batch, case.budget != 0] = state
        return seconds

    def compile(self, cases: list[Case]) -> None:
        """Compiles the programs of all cases and of --prefill, on as many threads as there are programs."""
        start = time.perf_counter()
        states, jobs = {}, []
        distinct = {(self.spec(case), case.batch) for case in cases}
        with concurrent.futures.ThreadPoolExecutor(len(distinct) + 1) as pool:
            if self.args.prefill:
                state = self.programs.init(self.drafter_config, 1, self.capacity, PAGE, abstract=True)
                jobs.append(pool.submit(self.chunk, state, np.zeros(self.args.chunk), True, compile_only=True))
            for spec, batch in distinct:
                config = self.drafter_config if spec.budget else None
                if (batch, config) not in states:
                    states[batch, config] = self.programs.init(config, batch, self.capacity, PAGE, abstract=True)
                state = states[batch, config]
                jobs.append(pool.submit(self.programs.decode, state, 1, spec, 16 * MANY, compile_only=True))
            for job in jobs:
                job.result()
        print(f"compiled {len(jobs)} programs in {time.perf_counter() - start:.1f} s", flush=True)

    def chunk(self, state: DecodeState, tokens: np.ndarray, last: bool, **options: bool) -> Any:
        """One chunk of a prompt in slot 0."""
        spec = dataclasses.replace(self.spec(Case("chain", 0, 1)), budget=1, block_size=1)
        return self.programs.prefill(state, 0, tokens, len(tokens), last, spec, **options)

    def prefill(self, tokens: int, chunk: int) -> float:
        """Seconds to run a prompt of `tokens` tokens through target and drafter, first token included."""
        state = self.state(Case("chain", 0, 1))
        ids = np.random.default_rng(0).integers(0, self.target_config.vocab_size, tokens)
        jax.block_until_ready(state)
        start = time.perf_counter()
        output = None
        for begin in range(0, tokens, chunk):
            state, output = self.chunk(state, ids[begin : begin + chunk], begin + chunk >= tokens)
        assert output is not None
        output.fetch()
        seconds = time.perf_counter() - start
        self.states[1, True] = state
        return seconds


def measure(bench: Bench, cases: list[Case], repeats: int) -> dict[Case, list[float]]:
    """Seconds a round of every repeat; cases of one batch size are interleaved."""
    times: dict[Case, list[float]] = {case: [] for case in cases}
    bench.compile(cases)
    for batch in dict.fromkeys(case.batch for case in cases):
        group = [case for case in cases if case.batch == batch]
        for repeat in range(repeats + 1):
            for case in group:
                few, many = bench.run(case, FEW), bench.run(case, MANY)
                if repeat:  # before, programs run that have never run
                    times[case].append((many - few) / (MANY - FEW))
    return times


def report(
    bench: Bench, times: dict[Case, list[float]], bandwidth: float, taus: dict[str, float]
) -> list[dict[str, Any]]:
    """Prints the table; returns its rows."""
    size = jnp.dtype(bench.args.dtype).itemsize
    rows = []
    print("method      context batch   ms/round    spread   floor ms  ratio     c   tok/s")
    for case, seconds in times.items():
        median = statistics.median(seconds)
        bytes_ = floor_bytes(case, bench.target_config, bench.drafter_config, *bench.bytes, size)
        floor = bytes_ / bench.args.tp / bandwidth
        ar = times.get(dataclasses.replace(case, method="ar"))
        cost = median / statistics.median(ar) if ar else None
        tau = 1.0 if case.method == "ar" else taus.get(case.method.partition(":")[0])
        rate = None if tau is None else tau * case.batch / median
        rows.append(
            dataclasses.asdict(case)
            | {"seconds": seconds, "floor_bytes": bytes_, "floor_seconds": floor, "ratio": median / floor, "c": cost}
            | {"tokens_per_second": rate}
        )
        spread = max(seconds) - min(seconds)
        print(
            f"{case.method:10} {case.context:8} {case.batch:5} {1e3 * median:10.3f} {1e3 * spread:9.3f}"
            f" {1e3 * floor:10.3f} {median / floor:6.3f} {'     ' if cost is None else f'{cost:5.3f}'}"
            f" {'      -' if rate is None else f'{rate:7.1f}'}",
            flush=True,
        )
    return rows


def _numbers(text: str) -> list[int]:
    try:
        return [int(part.lower().replace("k", "")) * (1024 if "k" in part.lower() else 1) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1K,32K, found {text!r}") from None


def _taus(text: str) -> dict[str, float]:
    return {name: float(value) for name, _, value in (part.partition("=") for part in text.split(","))}


def _methods(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        method, _, budget = name.partition(":")
        if name not in ("ar", "chain") and not (method == "tree" and budget.isdigit() and int(budget)):
            raise argparse.ArgumentTypeError(f"{name!r} is none of ar, chain, tree:BUDGET")
    return names


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round", description="Time of one round against its floor, random weights."
    )
    parser.add_argument("--shape", choices=NAMES, default="bundled")
    parser.add_argument("--layers", type=int, help="cut the target to its first layers")
    parser.add_argument("--methods", type=_methods, default=["ar", "chain", "tree:63"], help="ar,chain,tree:63")
    parser.add_argument("--contexts", type=_numbers, default=[1024], help="tokens, e.g. 1K,8K (default: 1K)")
    parser.add_argument("--batch", type=_numbers, default=[1], help="slots, e.g. 1,2,4 (default: 1)")
    parser.add_argument("--prefill", type=_numbers, default=[], help="also time prompts of these lengths")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prefill chunk (default: 2048)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel devices (default: 1)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kernels", choices=("auto", "xla", "pallas"), default="auto")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of a case (default: 3)")
    parser.add_argument("--tau", type=_taus, default={}, help="accepted lengths, e.g. chain=6.5,tree=8.5")
    parser.add_argument("--profile", metavar="DIR", help="trace rounds of the first context and batch")
    parser.add_argument("--json", metavar="FILE", help="write every measurement")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures everything that was asked for."""
    began = time.perf_counter()
    mesh = make_mesh(args.tp) if args.tp > 1 else None
    device = jax.devices()[0]
    large = device.platform != "cpu"
    _, bandwidth, peak = measure_machine(large=large, samples=5, seconds=0.05)
    bench = Bench(args, mesh)
    jax.block_until_ready(jax.tree.leaves(nnx.state(bench.target)))
    print(
        f"{args.shape}, {args.dtype}, tp {args.tp}, {device.device_kind}, jax {jax.__version__}: copy "
        f"{bandwidth / 1e12:.2f} TB/s; weights made after {time.perf_counter() - began:.1f} s",
        flush=True,
    )
    cases = [Case(m, c, b) for b in args.batch for c in args.contexts for m in args.methods]
    times = measure(bench, cases, args.repeats)
    print(f"measured after {time.perf_counter() - began:.1f} s", flush=True)
    result = {
        "shape": args.shape, "layers": bench.target_config.num_layers, "dtype": args.dtype, "tp": args.tp,
        "device": device.device_kind, "jax": jax.__version__, "copy_bandwidth": bandwidth,
        "rows": report(bench, times, bandwidth, args.tau),
    }  # fmt: skip
    if args.prefill:
        result["prefill"] = prefill_report(bench, args, peak)
    if device.memory_stats():
        stats = device.memory_stats()
        result["memory"] = {"peak": stats.get("peak_bytes_in_use"), "weights": sum(bench.bytes)}
        print(f"peak memory {stats.get('peak_bytes_in_use', 0) / 2**30:.2f} GiB of {device}")
    if args.profile:
        for case in cases[: len(args.methods)]:
            folder = Path(args.profile) / f"{case.method.replace(':', '')}-{case.context}-{case.batch}"
            bench.run(case, FEW)
            with jax.profiler.trace(str(folder)):
                bench.run(case, FEW)
            if large:
                print(f"{case.method}, context {case.context}, batch {case.batch}: a round of device 0, profiled")
                show(read(newest_trace(folder)), FEW)
    return result


def prefill_operations(target: nnx.Module, drafter: nnx.Module) -> int:
    """Operations a prompt token in products with weights: all layers of the target, the drafter's fc, keys, values."""
    weights = sum(leaf.get_value().size for path, leaf in nnx.to_flat_state(nnx.state(target)) if path[0] == "layers")
    context = {"fc", "kv_proj"}
    flat = nnx.to_flat_state(nnx.state(drafter))
    return 2 * (weights + sum(leaf.get_value().size for path, leaf in flat if context & set(path)))


def prefill_report(bench: Bench, args: argparse.Namespace, peak: float) -> list[dict[str, Any]]:
    """Prints tokens a second and the share of matrix throughput; returns the rows."""
    flops_per_token = prefill_operations(bench.target, bench.drafter)
    rows = []
    print(f"prefill in chunks of {args.chunk}; a large product reaches {peak / 1e12:.0f} TFLOP/s")
    for tokens in args.prefill:
        bench.prefill(tokens, args.chunk)
        seconds = [bench.prefill(tokens, args.chunk) for _ in range(args.repeats)]
        median = statistics.median(seconds)
        share = flops_per_token * tokens / median / (peak * args.tp)
        rows.append({"tokens": tokens, "seconds": seconds, "share": share, "peak": peak})
        rate = f"{tokens / median:10.0f} tok/s {100 * share:5.1f} %"
        print(f"  {tokens:7} tokens {1e3 * median:9.1f} ms {rate}", flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        set_up_compile_cache(None)
        result = run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
