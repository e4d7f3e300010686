"""Acceptance and speed of the methods on a prompt set: `python -m benchmarks.acceptance`.

All methods decode every prompt, one after the other (interleaved), each in one device loop after a warm-up that
compiles everything. Greedy decoding in fp32 must give the same tokens for every method; in bf16 the number of prompts
that part from autoregressive decoding is printed.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax

import dflash_jax
from dflash_jax import Completion, Engine, SamplingParams, UserError
from dflash_jax.loading import BUNDLED_PROMPTS
from dflash_jax.prompts import encode_prompt, read_prompt_file
from dflash_jax.repetition import repeated_ngram_share


def parse_methods(text: str, base: SamplingParams) -> dict[str, SamplingParams]:
    """`ar,dflash,ddtree:63` -> name -> parameters; a number after a colon is the tree budget."""
    methods = {}
    for name in text.split(","):
        method, _, budget = name.partition(":")
        if budget and not budget.isdigit():
            raise UserError(f"--methods {name}: the tree budget after ':' must be a number")
        changes: dict[str, Any] = {"method": method}
        if budget:
            changes["tree_budget"] = int(budget)
        methods[name] = dataclasses.replace(base, **changes)
    return methods


def measure(
    engine: Engine, prompts: list[list[int]], methods: dict[str, SamplingParams], batch: int, repeats: int
) -> dict[str, list[list[Completion]]]:
    """Completions by method, then by repeat, then by prompt."""
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    for params in methods.values():
        engine.generate(groups[0], dataclasses.replace(params, max_new_tokens=2))
        engine.generate(groups[0], params)
    results: dict[str, list[list[Completion]]] = {name: [[] for _ in range(repeats)] for name in methods}
    for repeat in range(repeats):
        for group in groups:
            for name, params in methods.items():
                results[name][repeat] += engine.generate(group, params)
    return results


def summarise(name: str, runs: list[list[Completion]], baseline: list[Completion] | None) -> dict[str, Any]:
    """One method's figures: pooled over prompts, median over repeats."""
    completions = runs[0]
    rounds = sum(c.rounds for c in completions)
    emitted = sum(c.completion_tokens - 1 for c in completions)
    width = max(len(c.accepted_length_histogram) for c in completions)
    histogram = [
        sum(c.accepted_length_histogram[i] for c in completions if i < len(c.accepted_length_histogram))
        for i in range(width)
    ]
    reached = [sum(histogram[depth + 1 :]) / rounds if rounds else 0.0 for depth in range(width - 1)]
    rates = [sum(c.completion_tokens - 1 for c in run) / sum(c.decode_seconds for c in run) for run in runs]
    same = (
        None
        if baseline is None
        else sum(a.token_ids == b.token_ids for a, b in zip(completions, baseline, strict=True))
    )
    return {
        "method": name,
        "tree_budget": completions[0].tree_budget,
        "rounds": rounds,
        "tokens": emitted,
        "tau": emitted / rounds if rounds else 0.0,
        "accepted_length_histogram": histogram,
        "share_of_rounds_reaching_depth": reached[1:],
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_runs": rates,
        "milliseconds_per_round": 1e3
        * statistics.median(
            sum(c.decode_seconds for c in run) / max(sum(c.rounds for c in run), 1) for run in runs
        ),
        "repeated_8grams": repeated_ngram_share(c.token_ids for c in completions),
        "prompts": len(completions),
        "same_tokens_as_first_method": same,
    }


def table(rows: list[dict[str, Any]], engine: Engine, batch: int) -> str:
    """The figures as text."""
    first = rows[0]
    lines = [
        (
            f"{first['prompts']} prompts, batch {batch}, {engine.device.device_kind}, {engine.target.dtype}, "
            f"jax {jax.__version__}; tokens/s: a slot's, prefill and compilation left out"
        ),
        (
            f"{'method':12s} {'nodes':>5s} {'rounds':>7s} {'tau':>6s} {'ms/round':>9s} {'tokens/s':>9s} "
            f"{'speed-up':>8s} {'same':>7s} {'8-grams':>8s}"
        ),
    ]
    for row in rows:
        same = row["same_tokens_as_first_method"]
        lines.append(
            f"{row['method']:12s} {row['tree_budget']:5d} {row['rounds']:7d} {row['tau']:6.2f} "
            f"{row['milliseconds_per_round']:9.3f} {row['tokens_per_second']:9.1f} "
            f"{row['tokens_per_second'] / first['tokens_per_second']:7.2f}x "
            f"{'-' if same is None else str(same) + '/' + str(row['prompts']):>7s} {100 * row['repeated_8grams']:7.2f}%"
        )
    lines.append("share of rounds in which the walk reached a depth (1, 2, ...):")
    for row in rows:
        reached = row["share_of_rounds_reaching_depth"]
        if any(reached):
            lines.append(f"{row['method']:12s} " + " ".join(f"{share:.2f}" for share in reached))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", help="target (default: the bundled pair)")
    parser.add_argument("--draft-model", help="its drafter")
    parser.add_argument("--methods", default="ar,dflash,ddtree:63", help="default: %(default)s")
    parser.add_argument(
        "--prompt-file", type=Path, default=BUNDLED_PROMPTS, help="as generate's (default: held-out prompts)"
    )
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the raw figures there")
    args = parser.parse_args(argv)
    try:
        engine = dflash_jax.load(
            args.model, args.draft_model, dtype=args.dtype, max_slots=args.batch, kernels=args.kernels
        )
        methods = parse_methods(args.methods, SamplingParams(max_new_tokens=args.max_new_tokens))
        entries = read_prompt_file(str(args.prompt_file))[: args.limit]
        prompts = [encode_prompt(engine, entry, chat=None, system=None, thinking=None) for entry in entries]
        results = measure(engine, prompts, methods, args.batch, args.repeats)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    names = list(methods)
    rows = [
        summarise(name, results[name], None if name == names[0] else results[names[0]][0]) for name in names
    ]
    print(table(rows, engine, args.batch))
    if args.json is not None:
        settings = {key: str(value) for key, value in vars(args).items()}
        record = {
            "settings": settings,
            "device": engine.device.device_kind,
            "jax": jax.__version__,
            "methods": rows,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
