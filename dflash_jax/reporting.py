"""What the command line shows: compile progress on stderr, the summary line, and the comparison of methods."""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from dflash_jax.request import Completion, SamplingParams

if TYPE_CHECKING:
    from dflash_jax.engine import Engine

# Compilations shorter than this are not worth a message.
_SHOWN_AFTER = 0.3
_CLEAR = "\r\x1b[K"

# A context in which decoding is profiled.
Trace = Callable[[], AbstractContextManager[object]]


class CompileProgress:
    """Says on stderr what is being compiled and for how long.

    On a terminal it is one line that counts seconds and vanishes; elsewhere one line a program.

    Attributes:
      method: named in the message, if set.
    """

    def __init__(self, engine: "Engine", shown: bool):
        self.method: str | None = None
        self._programs = engine.programs
        self._terminal = sys.stderr.isatty()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        if shown:
            self._programs.on_compile = self._start

    def _start(self, name: str) -> None:
        self.stop()
        what = f"compiling {name}" if self.method is None else f"compiling {name} for {self.method}"
        self._done = threading.Event()
        arguments = (what, self._programs.compile_seconds, self._done)
        self._thread = threading.Thread(target=self._show, args=arguments, daemon=True)
        self._thread.start()

    def _show(self, what: str, before: float, done: threading.Event) -> None:
        """Runs in a thread: the compiler does not call back while it works."""
        start = time.perf_counter()
        written = False
        while not done.wait(0.1) and self._programs.compile_seconds == before:
            elapsed = time.perf_counter() - start
            if elapsed < _SHOWN_AFTER or (written and not self._terminal):
                continue
            line = f"{_CLEAR}{what} … {elapsed:.0f} s" if self._terminal else f"{what} …\n"
            print(line, end="", flush=True, file=sys.stderr)
            written = True
        if written and self._terminal:
            print(_CLEAR, end="", flush=True, file=sys.stderr)

    def stop(self) -> None:
        """Takes the message away; returns when nothing more will be written."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


# Why `SamplingParams.method` "auto" took a method.
_AUTO = {
    "ddtree": "there is a drafter",
    "mtp": "no drafter, but the checkpoint's own draft head",
    "ar": "neither a drafter nor a draft head in the checkpoint",
}


def summary(completions: Sequence[Completion], wall_seconds: float, *, auto: bool = False) -> str:
    """One line on a finished run.

    Args:
      completions: of one call.
      wall_seconds: of that call, without compiling; the rate of several prompts decoded at once follows from it.
      auto: the method was chosen by what there is, which the line then says.
    """
    first = completions[0]
    tokens = sum(c.completion_tokens for c in completions)
    rounds = sum(c.rounds for c in completions)
    method = first.method
    if method in ("mtp", "ddtree"):
        taken = "+".join(map(str, sorted({budget for c in completions for budget in c.tree_budgets})))
        method += f" ({'steps' if method == 'mtp' else 'budget'} {taken or first.tree_budget})"
    if auto:
        method += f", chosen by auto: {_AUTO[first.method]}"
    parts = [f"{tokens} tokens"]
    if len(completions) == 1:
        parts.append(f"{first.tokens_per_second:.1f} tok/s")
    else:
        parts[0] += f" for {len(completions)} prompts"
        parts.append(f"{tokens / wall_seconds:.1f} tok/s together")
    parts += [f"τ {_tau(completions):.2f} in {rounds} rounds", method]
    if len(completions) == 1:
        parts.append(f"prefill {first.prefill_seconds:.2f} s, decode {first.decode_seconds:.2f} s")
    else:
        parts.append(f"{wall_seconds:.2f} s")
    parts += [f"compile {first.compile_seconds:.1f} s", f"{first.device}, {first.dtype}"]
    return " | ".join(parts)


def _tau(completions: Sequence[Completion]) -> float:
    """Mean accepted length over all rounds of several requests."""
    rounds = sum(c.rounds for c in completions)
    return sum(c.rounds * c.mean_accepted_length for c in completions) / rounds if rounds else 0.0


def measure(
    engine: "Engine", prompts: Sequence[Sequence[int]], params: SamplingParams, trace: Trace | None = None
) -> list[Completion]:
    """Decodes prompts one after the other, with every program compiled before its time counts.

    Args:
      engine: the models.
      prompts: token ids of each.
      params: of all.
      trace: entered around the runs that count, which are then all second runs.

    Returns:
      Completions in order. `compile_seconds` is what their programs took to compile before.
    """

    def run(prompt: Sequence[int]) -> Completion:
        return engine.generate([prompt], params)[0]

    # Only the engine knows which lengths share their programs, so ask it: a run that compiled is a rehearsal.
    first = [run(prompt) for prompt in prompts]
    if trace is None:
        timed = [run(p) if c.compile_seconds > 0 else c for p, c in zip(prompts, first, strict=True)]
    else:
        with trace():
            timed = [run(prompt) for prompt in prompts]
    return [
        dataclasses.replace(c, compile_seconds=f.compile_seconds) for c, f in zip(timed, first, strict=True)
    ]


def comparison_table(results: dict[str, Sequence[Completion]]) -> str:
    """A table of methods by their completions of the same prompts; rates are over all of them."""
    header = ["method", "rounds", "τ", "tokens/s", "speed-up", "prefill s", "decode s", "compile s"]
    rows = []
    rates = {}
    for method, completions in results.items():
        decode = sum(c.decode_seconds for c in completions)
        after_first = sum(c.completion_tokens - 1 for c in completions)
        rates[method] = after_first / decode if decode > 0 else 0.0
    for method, completions in results.items():
        base = rates.get("ar")
        rows.append(
            [
                method,
                str(sum(c.rounds for c in completions)),
                f"{_tau(completions):.2f}",
                f"{rates[method]:.1f}",
                f"{rates[method] / base:.2f}" if base else "-",
                f"{sum(c.prefill_seconds for c in completions):.3f}",
                f"{sum(c.decode_seconds for c in completions):.3f}",
                f"{sum(c.compile_seconds for c in completions):.1f}",
            ]
        )
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def differences(results: dict[str, Sequence[Completion]]) -> list[str]:
    """One line for every method and prompt whose tokens are not those of the first method; empty if all agree."""
    first, *others = results
    lines = []
    for method in others:
        for i, (one, other) in enumerate(zip(results[first], results[method], strict=True), 1):
            if one.token_ids == other.token_ids:
                continue
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.token_ids), len(other.token_ids)))
            lines.append(f"prompt {i}: {method} differs from {first} at token {at}")
    return lines
