"""What a load measured: percentiles, rates, and the table of them.

Definitions are those of `vllm bench serve`: TTFT is the time from sending a request to its first chunk with tokens, and
ITL the time between two such chunks of a stream, one value a chunk however many tokens it has. A speculative round
emits several tokens at once, so ITL alone would make it look slow; beside it stands the time a token, which is ITL over
the tokens of the later chunk, each token counted (the server's `inter_token_latency_seconds` is this).
"""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from serve.load_driver import Load, Outcome, Part, Sample
from serve.proto import dflash_pb2 as pb

# A thread that is busy for more than this share of the time may be what is measured.
BUSY = 0.8


def percentiles(values: Sequence[float] | np.ndarray, which: Sequence[int]) -> dict[str, float] | None:
    """`{"p50": …, "mean": …, "max": …}` of values, linear between neighbours; None without any."""
    if len(values) == 0:
        return None
    found = {f"p{p}": float(x) for p, x in zip(which, np.percentile(values, which), strict=True)}
    return found | {"mean": float(np.mean(values)), "max": float(np.max(values))}


def summarise(method: str, load: Load, parts: Sequence[Part]) -> dict[str, Any]:
    """The figures of one point, all processes together.

    Args:
      method: its name.
      load: what was asked for.
      parts: of its processes.

    Returns:
      What `--json` holds of a point; times are in seconds, and None stands where nothing was measured.
    """
    samples = sorted((s for part in parts for s in part.samples), key=lambda s: s.number)
    start = min(part.start for part in parts)
    seconds = max(part.end for part in parts) - start
    done = [s for s in samples if s.outcome == "finished"]
    counted = [s for s in samples if s.outcome in ("finished", "cut")]  # tokens that came count, latencies below
    gaps = np.concatenate([np.diff(s.times) for s in counted] or [np.zeros(0)])
    sizes = np.concatenate([np.asarray(s.tokens[1:], int) for s in counted] or [np.zeros(0, int)])
    tokens = sum(sum(s.tokens) for s in counted)
    usages = [pb.Usage.FromString(s.usage) for s in done]
    rounds = sum(u.rounds for u in usages)
    return {
        "method": method,
        "concurrency": load.concurrency,
        "rate": load.rate,
        "seconds": seconds,
        **{outcome: sum(s.outcome == outcome for s in samples) for outcome in get_args(Outcome)},
        "errors": sorted({s.error for s in samples if s.outcome == "failed"}),
        "prompt_tokens": sum(u.prompt_tokens for u in usages),
        "cached_tokens": sum(u.cached_tokens for u in usages),
        "output_tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(done) / seconds,
        "ttft_seconds": percentiles([s.times[0] - s.start for s in counted if s.times], (50, 90, 99)),
        "itl_seconds": percentiles(gaps, (50, 90, 99)),
        "token_seconds": percentiles(np.repeat(gaps / np.maximum(sizes, 1), sizes), (50, 90, 99)),
        "latency_seconds": percentiles([s.end - s.start for s in done], (50, 90, 99)),
        "rounds": rounds,
        "tau": sum(u.rounds * u.mean_accepted_length for u in usages) / rounds if rounds else None,
        "client_loop_share": max(part.loop_seconds for part in parts) / seconds,
        "client_cpu": sum(part.cpu_seconds for part in parts) / seconds,
        "requests": _columns(samples, start),
    }


def _columns(samples: Sequence[Sample], start: float) -> dict[str, list[Any]]:
    """The requests one by one, rounded to microseconds."""
    return {
        "number": [s.number for s in samples],
        "outcome": [s.outcome for s in samples],
        "sent_seconds": [round(s.start - start, 6) for s in samples],
        "ttft_seconds": [round(s.times[0] - s.start, 6) if s.times else None for s in samples],
        "latency_seconds": [round(s.end - s.start, 6) for s in samples],
        "output_tokens": [sum(s.tokens) for s in samples],
        "chunks": [len(s.tokens) for s in samples],
    }


def _milliseconds(found: dict[str, float] | None, which: Sequence[int]) -> str:
    return " / ".join("-" if found is None else f"{1e3 * found[f'p{p}']:.1f}" for p in which)


HEADER = (
    "method", "load", "done", "failed", "rejected", "tokens/s", "requests/s", "TTFT p50 / p90 / p99 ms",
    "ITL p50 / p99 ms", "token p50 / p99 ms", "latency p50 ms", "τ", "client",
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """The figures of a point under `HEADER`."""
    tau = row["tau"]
    return [
        row["method"],
        str(row["concurrency"]) if row["rate"] is None else f"{row['rate']:g}/s",
        f"{row['finished']}",
        f"{row['failed']}",
        f"{row['rejected']}",
        f"{row['tokens_per_second']:,.1f}",
        f"{row['requests_per_second']:.2f}",
        _milliseconds(row["ttft_seconds"], (50, 90, 99)),
        _milliseconds(row["itl_seconds"], (50, 99)),
        _milliseconds(row["token_seconds"], (50, 99)),
        _milliseconds(row["latency_seconds"], (50,)),
        "-" if tau is None else f"{tau:.2f}",
        f"{row['client_loop_share']:.0%}",
    ]


_WIDTHS = (14, 7, 6, 6, 8, 10, 10, 24, 17, 18, 14, 5, 6)


def line(texts: Sequence[str]) -> str:
    """A line of the table: `HEADER`, or the `cells` of a point."""
    return " ".join(text.rjust(max(width, len(name))) for text, width, name in zip(texts, _WIDTHS, HEADER, strict=True))


def remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader of the figures must know: why requests failed, and where the client may have been too slow."""
    lines = [f"{row['method']} at {cells(row)[1]}: {error}" for row in rows for error in row["errors"]]
    slow = [f"{row['method']} at {cells(row)[1]}" for row in rows if row["client_loop_share"] > BUSY]
    if slow:
        lines.append(f"the client was busy more than {BUSY:.0%} of the time ({', '.join(slow)}); use more --processes")
    return lines
