"""What a PyTorch user gets at the shapes of `benchmarks.round`, on the same device: `python -m benchmarks.torch_round`.

Random bf16 weights made on the device, batch 1, a cache of --context tokens. Sections, in this order:

- 8b: Qwen3-8B in transformers; an eager pass over 1, 16 and 64 rows, then the same kernels in a CUDA graph.
- dflash: the Python package of that name, its own loop at that shape: its autoregressive step, one cycle of draft and
  verification. Needs the package (`pip install --no-deps dflash==0.1.0`, or its folder on PYTHONPATH).
- 27b: Qwen3.6-27B in transformers, as 8b. Its delta rule is the one in PyTorch operations, unless fla is installed.
- compiled: Qwen3-8B under torch.compile(mode="reduce-overhead") with a static cache: CUDA graphs of fused kernels.

A pass ends with the argmax of every row; the keys that it added are dropped again, outside the time measured. Eager and
compiled passes are timed by the host from call to end, so launching counts; graphs by events on the device. Cycles are
the time from one call of the target to the next, and the loop itself waits for each. c is the time over that of the
same code's own pass over 1 row; for dflash that is its cost per round. cuDNN's attention is off, since it takes some
60 ms to plan for every new length. Nothing here accepts drafts, so only costs compare, not tokens per second.

A section that fails prints one line and the rest go on, with exit status 1 at the end. At --seconds the section at work
is broken off and the rest are left out, which also is status 1. Needs torch and transformers, but not JAX.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from benchmarks.published import SHAPES, cut
from benchmarks.torch_counterparts import GraphLoop
from dflash_jax.errors import UserError

ROWS = (1, 16, 64)
WARMUP = 3
SECTIONS = ("8b", "dflash", "27b", "compiled")
# Small enough for a CPU; head_dim and the rotary part of the hybrid stay, its position sections depend on them.
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip


class Table:
    """The lines measured so far, each printed at once.

    Attributes:
      lines: dicts of what, rows, seconds (all of them), c.
    """

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._own: dict[str, float] = {}

    def add(self, what: str, rows: int, seconds: list[float], note: str = "") -> None:
        """Adds a line; the first line of `what` that has one row is what later ones are divided by."""
        if not self.lines:
            print(f"{'what':44} rows {'ms':>9} {'spread':>9} {'c':>6}")
        median = statistics.median(seconds)
        if rows == 1:
            self._own.setdefault(what, median)
        c = median / self._own[what] if what in self._own else None
        self.lines.append({"what": what, "rows": rows, "seconds": seconds, "c": c, "note": note})
        spread = 1e3 * (max(seconds) - min(seconds))
        shown = "-" if c is None else f"{c:.2f}"
        print(f"{what:44} {rows:4} {1e3 * median:9.3f} {spread:9.3f} {shown:>6} {note}".rstrip(), flush=True)


def timed(
    step: Callable[[], Any], prepare: Callable[[], Any], synchronize: Callable[[], Any], iterations: int
) -> list[float]:
    """Seconds of every step after a few that warm up, by the host, from an idle device to an idle device.

    Args:
      step: what is timed.
      prepare: comes before each step, outside its time.
      synchronize: waits for the device.
      iterations: steps timed.
    """
    seconds = []
    for _ in range(WARMUP + iterations):
        prepare()
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[WARMUP:]


@contextlib.contextmanager
def limit(seconds: float) -> Generator[None]:
    """Raises TimeoutError in the block that takes longer, when Python next gets to run; in the main thread only."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    # Again and again, since a library may take the first for a failure of its own and try another way.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_sections(
    sections: dict[str, Callable[[], None]], seconds: float, clean_up: Callable[[], Any]
) -> dict[str, str]:
    """Runs the sections in turn until `seconds` are over; returns what went wrong by section, printed as it happens.

    Args:
      sections: what to run, by name.
      seconds: for all of them together.
      clean_up: called after each.
    """
    end = time.monotonic() + seconds
    errors: dict[str, str] = {}
    for name, section in sections.items():
        left = end - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError("left out, see --seconds")
            with limit(left):
                section()
        except Exception as caught:
            late = time.monotonic() >= end and left > 0  # whatever a library made of the TimeoutError
            error = TimeoutError("broken off, see --seconds") if late else caught
            first, *_ = str(error).strip().splitlines() or [""]
            errors[name] = f"{type(error).__name__}: {first}"
            print(f"{name}: {errors[name]}", flush=True)
        clean_up()
    return errors


def shape(name: str, layers: int | None, tiny: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Text configuration of the target and configuration of the drafter, as keyword arguments of transformers' classes.

    Args:
      name: a key of `SHAPES`.
      layers: cut the target to its first layers.
      tiny: replace the widths by those of `TINY`.
    """
    target, drafter = json.loads(json.dumps(SHAPES[name]))
    if layers is not None:
        cut(target, drafter, layers)
    target = target.get("text_config", target)
    for raw in (target, drafter):
        for key in ("model_type", "architectures"):
            raw.pop(key, None)
        if tiny:
            raw.update({key: value for key, value in TINY.items() if key in raw})
    if tiny:
        drafter["dflash_config"]["mask_token_id"] = TINY["vocab_size"] - 1
    return target, drafter


class Bench:
    """The sections.

    Attributes:
      table: filled by them.
      device: torch's.
    """

    def __init__(self, args: argparse.Namespace, torch: Any, transformers: Any):
        self.args, self.torch, self.transformers = args, torch, transformers
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.table = Table()
        torch.manual_seed(0)
        torch.backends.cuda.enable_cudnn_sdp(False)

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.cuda:
            self.torch.cuda.synchronize()

    def clean_up(self) -> None:
        """Frees what the last section left."""
        gc.collect()
        if self.cuda:
            self.torch.cuda.empty_cache()

    def build(self, make: Callable[[Any], Any], config: Any) -> Any:
        """A model with random bf16 weights that never were anywhere but on the device."""
        torch = self.torch
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = make(config)
        model = model.to(torch.bfloat16).to_empty(device=self.device).eval()
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1)
        for module in model.modules():
            if hasattr(module, "rotary_emb"):  # its frequencies are no parameters, and empty now
                with self.device:
                    module.rotary_emb = type(module.rotary_emb)(config=config)
        return model

    def target(self, name: str) -> Any:
        """The target of a shape."""
        raw, _ = shape(name, self.args.layers, self.args.tiny)
        library = self.transformers
        if name == "qwen3-8b":
            return self.build(library.Qwen3ForCausalLM, library.Qwen3Config(**raw))
        return self.build(library.Qwen3_5ForCausalLM, library.Qwen3_5TextConfig(**raw))

    def ids(self, model: Any, rows: int) -> Any:
        """Random tokens [1, rows]."""
        return self.torch.randint(model.config.vocab_size, (1, rows), device=self.device)

    def filled(self, model: Any, cache: Any) -> Any:
        """The cache after a prompt of --context tokens."""
        model(self.ids(model, self.args.context), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def eager(self, name: str, label: str) -> None:
        """Passes of transformers as it comes, and of the same kernels in a CUDA graph."""
        model = self.target(name)
        cache = self.filled(model, self.transformers.DynamicCache(config=model.config))
        # A pass makes longer copies of the keys and values; recurrent states are updated in place and stay so.
        kept = [(layer, layer.keys, layer.values) for layer in cache.layers if hasattr(layer, "keys")]

        def restore() -> None:
            for layer, keys, values in kept:
                layer.keys, layer.values = keys, values

        def step(ids: Any, **more: Any) -> Any:
            return model(ids, past_key_values=cache, use_cache=True, **more).logits.argmax(-1)

        inputs = {rows: self.ids(model, rows) for rows in ROWS}
        for rows, ids in inputs.items():
            seconds = timed(lambda ids=ids: step(ids), restore, self.synchronize, self.args.iterations)
            self.table.add(f"{label}, eager", rows, seconds)
        for rows, ids in inputs.items() if self.cuda else ():
            # Under capture transformers makes a mask for 1 row too, and repeats the keys for it; eager does not.
            more = {} if rows > 1 else {"attention_mask": {"full_attention": None, "linear_attention": None}}

            def call(_: int, ids: Any = ids, more: dict[str, Any] = more) -> Any:
                restore()
                return step(ids, **more)

            loop = GraphLoop(self.torch, call, calls=1)
            seconds = [loop.sample() for _ in range(WARMUP + self.args.iterations)][WARMUP:]
            self.table.add(f"{label}, eager kernels in a CUDA graph", rows, seconds)

    def compiled(self) -> None:
        """Passes of torch.compile with a static cache."""
        torch = self.torch
        counters = importlib.import_module("torch._dynamo.utils").counters
        model = self.target("qwen3-8b")
        capacity = self.args.context + max(ROWS)
        cache = self.filled(model, self.transformers.StaticCache(config=model.config, max_cache_len=capacity))

        def step(ids: Any, cache: Any) -> Any:
            return model(ids, past_key_values=cache, use_cache=True).logits.argmax(-1)

        step = torch.compile(step, mode="reduce-overhead", dynamic=False)

        def prepare() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            for layer in cache.layers:
                layer.cumulative_length.fill_(self.args.context)

        for rows in ROWS:
            ids = self.ids(model, rows)
            skipped = counters["inductor"]["cudagraph_skips"]
            seconds = timed(lambda ids=ids: step(ids, cache), prepare, self.synchronize, self.args.iterations)
            skipped = counters["inductor"]["cudagraph_skips"] > skipped or not self.cuda
            note = "without CUDA graphs" if skipped else ""
            self.table.add("Qwen3-8B, torch.compile reduce-overhead", rows, seconds, note)

    def peer(self) -> None:
        """Steps and cycles of the dflash package's own loop."""
        package = importlib.import_module("dflash.model")
        target = self.target("qwen3-8b")
        _, raw = shape("qwen3-8b", self.args.layers, self.args.tiny)
        drafter = self.build(package.DFlashDraftModel, self.transformers.Qwen3Config(**raw))
        prompt = self.ids(target, self.args.context)
        block = drafter.block_size
        calls: list[tuple[float, int]] = []

        def note(_: Any, args: tuple[Any, ...]) -> None:
            calls.append((time.perf_counter(), args[0].shape[1]))

        target.register_forward_pre_hook(note)
        for rows in (1, block):
            calls.clear()
            # The last cycles of a request are cut to what is left of it.
            wanted = WARMUP + self.args.iterations + block
            package.dflash_generate(
                drafter, target, prompt, max_new_tokens=wanted, stop_token_ids=None, block_size=rows
            )
            pairs = itertools.pairwise(calls)
            seconds = [after - before for (before, n), (after, m) in pairs if n == m == rows][WARMUP:]
            if len(seconds) < self.args.iterations:
                raise RuntimeError(
                    f"{len(seconds)} full cycles of {rows} rows instead of {self.args.iterations}"
                )
            self.table.add(
                "Qwen3-8B, dflash package", rows, seconds, "" if rows == 1 else "draft + verification"
            )

    def sections(self) -> dict[str, Callable[[], None]]:
        """What --sections asked for, in the order of `SECTIONS`."""
        known = {
            "8b": lambda: self.eager("qwen3-8b", "Qwen3-8B"),
            "dflash": self.peer,
            "27b": lambda: self.eager("qwen3.6-27b", "Qwen3.6-27B"),
            "compiled": self.compiled,
        }
        return {name: known[name] for name in SECTIONS if name in self.args.sections}


def _sections(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SECTIONS)}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, found {text!r}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torch_round",
        description="Time of a decode step, a verification and a DFlash cycle in PyTorch, random weights.",
    )
    add = parser.add_argument
    add("--sections", type=_sections, default=list(SECTIONS), help=f"of {','.join(SECTIONS)} (default: all)")
    add("--context", type=_positive, default=1024, help="tokens in the cache (default: 1024)")
    add("--iterations", type=_positive, default=25, help="times of a line (default: 25)")
    add("--layers", type=_positive, help="cut the targets to their first layers")
    add("--tiny", action="store_true", help="widths that a CPU can run, to try the program; no result")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--seconds", type=float, default=140.0, metavar="S", help="end after so long (default: 140)")
    add("--json", type=Path, metavar="FILE", help="write every measurement")
    return parser


def run(args: argparse.Namespace, began: float) -> int:
    """Measures what was asked for; returns the exit status."""
    if args.json and not args.json.parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder {args.json.parent}")
    try:
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed: this benchmark needs torch and transformers"
        ) from None
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; --device cpu --tiny tries the program")
    bench = Bench(args, torch, transformers)
    device = torch.cuda.get_device_name() if bench.cuda else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    fla = importlib.util.find_spec("fla") is not None
    print(
        f"{device}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{'fla' if fla else 'no fla'}, {args.context} tokens in the cache"
    )
    with torch.no_grad():
        left = args.seconds - (time.monotonic() - began)
        errors = run_sections(bench.sections(), left, bench.clean_up)
    took = time.monotonic() - began
    print(f"took {took:.1f} s")
    if args.json:
        result = {
            "device": device, **versions, "fla": fla, "context": args.context, "layers": args.layers,
            "tiny": args.tiny, "rows": bench.table.lines, "errors": errors, "wall_seconds": took,
        }  # fmt: skip
        args.json.write_text(json.dumps(result, indent=1))
    return 1 if errors else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    began = time.monotonic()
    args = build_parser().parse_args(argv)
    try:
        return run(args, began)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
