"""Where a round's time goes: kernels of a profiler trace by what they do, `python -m benchmarks.breakdown TRACE`."""

import argparse
import collections
import dataclasses
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

COLLECTIVES, COLLECTIVE_OPS = "collectives", r"^(all-reduce|all-gather|reduce-scatter|collective)"
# The first pattern that a kernel's name has in it decides.
KINDS: tuple[tuple[str, str], ...] = (
    (COLLECTIVES, r"nccl|all_?reduce|all_?gather|AllReduce|AllGather"),
    ("products", r"gemm|nvjet|cutlass|cublas|splitKreduce|dot|^linear"),
    ("delta rule", r"gdn_tree|gdn_paths|gdn_step|gdn_chunk|gdn_commit"),
    ("front and gated norm", r"gdn_front|gdn_gated_norm"),
    ("attention", r"tree_attention"),
    ("attention front", r"attention_front"),
    ("tree", r"tree_search|tree_walk|draft_chunks|draft_candidates"),
    ("residual norm", r"add_norm"),
    ("sort and top-k", r"sort|TopK|topk"),
    ("copies", r"^Mem(cpy|set)|memcpy|memset"),
)
OTHER = "everything else"
LONGEST = 5  # kernels of no kind that are named


@dataclasses.dataclass(frozen=True)
class Share:
    """Attributes: seconds of one device, launches, and seconds by kernel."""

    seconds: float
    launches: int
    kernels: dict[str, float]


def newest_trace(folder: Path) -> Path:
    """The newest trace that `jax.profiler` wrote below a folder.

    Raises:
      FileNotFoundError: there is none.
    """
    traces = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise FileNotFoundError(f"{folder}: no *.trace.json.gz below it")
    return traces[-1]


def kind_of(name: str, op: str = "") -> str:
    """What a kernel does, by its name and that of its HLO operation, which tells XLA's own kernels for sums."""
    if re.search(COLLECTIVE_OPS, op):
        return COLLECTIVES
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), OTHER)


def shares(events: list[dict[str, Any]]) -> dict[str, Share]:
    """Time of the kernels of each kind on the first device, longest first.

    Args:
      events: `traceEvents` of a trace in the Trace Event Format (durations in microseconds).
    """
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    device = min((name for name in processes.values() if "GPU" in name), default=None)
    kernels = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    launches = collections.Counter[str]()
    for event in events:
        if event.get("ph") != "X" or processes.get(event["pid"]) != device or device is None:
            continue
        if "Stream" not in threads.get((event["pid"], event["tid"]), ""):
            continue
        kind = kind_of(event["name"], str(event.get("args", {}).get("hlo_op", "")))
        kernels[kind][event["name"]] += event["dur"] * 1e-6
        launches[kind] += 1
    found = {kind: Share(sum(own.values()), launches[kind], dict(own.most_common())) for kind, own in kernels.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def read(trace: Path) -> dict[str, Share]:
    """`shares` of a trace file."""
    with gzip.open(trace) as file:
        return shares(json.load(file)["traceEvents"])


def show(found: dict[str, Share], rounds: int) -> None:
    """Prints microseconds and launches a round, and shares of the whole."""
    whole = sum(share.seconds for share in found.values())
    for kind, share in found.items():
        print(
            f"    {kind:22} {1e6 * share.seconds / rounds:9.1f} us {share.launches / rounds:7.1f} launches "
            f"{100 * share.seconds / whole:5.1f} %"
        )
    for name, seconds in list(found[OTHER].kernels.items())[:LONGEST] if OTHER in found else ():
        print(f"      of it {1e6 * seconds / rounds:9.1f} us {name[:80]}")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.breakdown", description=__doc__)
    parser.add_argument("folder", type=Path, help="what --profile wrote")
    parser.add_argument("--rounds", type=int, default=1, help="rounds in the trace (default: 1)")
    args = parser.parse_args(argv)
    try:
        trace = newest_trace(args.folder)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(read(trace), args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
