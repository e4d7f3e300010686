"""Acceptance and speed of the methods on prompt sets: `python -m benchmarks.acceptance`.

In every repeat the methods take turns, all prompts each, in one device loop a prompt, after a warm-up that compiles
everything. (Not a prompt each: a GPU's graphs have to be told where their arrays are when another program has run in
between. That takes as long as a few rounds of a small model, and nobody who stays with a method pays it.) A token's
noise depends on seed, position and token alone, so in fp32 every method must give the same tokens at every temperature;
in bf16 the number of prompts that part from the first method is printed (and `benchmarks.divergence` says whether
rounding explains them). Which drafts were accepted is read from one more run of each method, which is not timed.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dflash_jax
from benchmarks.acceptance_plots import plot
from benchmarks.accepted import Accepted, count_accepted
from benchmarks.methods import parse_methods
from benchmarks.policies import POLICIES
from benchmarks.prompt_sets import SET_NAMES, prompt_set
from dflash_jax import Completion, Engine, SamplingParams, UserError
from dflash_jax.plots import check_matplotlib
from dflash_jax.prompts import encode_prompt
from dflash_jax.repetition import repeated_ngram_share
from dflash_jax.tree import BestFirst, TreePolicy


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method with what else decides its drafts; `policy` matters to ddtree alone."""

    params: SamplingParams
    policy: TreePolicy = dataclasses.field(default_factory=BestFirst)

    def run(self, engine: Engine, prompts: list[list[int]], **changes: Any) -> list[Completion]:
        """Decodes prompts with it."""
        engine.policy = self.policy
        return engine.generate(prompts, dataclasses.replace(self.params, **changes))


def parse_temperatures(text: str) -> list[float]:
    """`0,0.7,1` -> numbers."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--temperatures must be numbers separated by commas, found {text!r}") from None


def parse_variants(methods: str, policies: str, base: SamplingParams) -> dict[str, Variant]:
    """Every method, and every tree with every policy; a policy is named where there are several."""
    names = policies.split(",")
    for name in names:
        if name not in POLICIES:
            raise UserError(f"--policies {name}: must be one of {', '.join(POLICIES)}")
    variants = {}
    for method, params in parse_methods(methods, base).items():
        if params.method != "ddtree":
            variants[method] = Variant(params)
            continue
        for name in names:
            variants[f"{method}/{name}" if len(names) > 1 else method] = Variant(params, POLICIES[name])
    return variants


@dataclasses.dataclass
class Run:
    """One method on all prompts.

    Attributes:
      completions: one a prompt.
      seconds: in which they were decoded, see `decoding_seconds`.
      rounds: that the device did for them, a batch's slots at once.
    """

    completions: list[Completion] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    rounds: int = 0


def decoding_seconds(completions: list[Completion]) -> float:
    """From the last one's first token to the last token of all: prompts are read before any of a batch decodes."""
    begun = [c.started + c.prefill_seconds for c in completions]
    return max(start + c.decode_seconds for start, c in zip(begun, completions, strict=True)) - max(begun)


def measure(
    engine: Engine, prompts: list[list[int]], variants: dict[str, Variant], batch: int, repeats: int
) -> dict[str, list[Run]]:
    """Runs by method, one a repeat."""
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    for variant in variants.values():
        variant.run(engine, groups[0], max_new_tokens=2)
        variant.run(engine, groups[0])
    results = {name: [Run() for _ in range(repeats)] for name in variants}
    # A look of Python's garbage collector at all objects takes as long as several short texts.
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            for name, variant in variants.items():
                for group in groups:
                    done = variant.run(engine, group)
                    results[name][repeat].completions += done
                    results[name][repeat].seconds += decoding_seconds(done)
                    results[name][repeat].rounds += max(c.rounds for c in done)
    finally:
        gc.enable()
    return results


def accepted(engine: Engine, prompts: list[list[int]], variant: Variant) -> Accepted | None:
    """Which drafts were accepted, from a run of programs that also return ranks; None where nothing is drafted."""
    ranks: list[list[int]] = [[] for _ in prompts]
    engine.on_ranks = lambda index, more: ranks[index].extend(more)
    try:
        completions = variant.run(engine, prompts)
    finally:
        engine.on_ranks = None
    length = max(len(c.accepted_length_histogram) for c in completions) - 2
    return count_accepted(ranks, length) if any(ranks) else None


def interval(completions: list[Completion], draws: int = 2000) -> tuple[float, float]:
    """95 % interval of τ over prompts like these: percentile bootstrap, prompts drawn again with what they emitted."""
    emitted = np.asarray([c.completion_tokens - 1 for c in completions])
    rounds = np.asarray([c.rounds for c in completions])
    drawn = np.random.default_rng(0).integers(0, len(completions), (draws, len(completions)))
    low, high = np.percentile(emitted[drawn].sum(1) / np.maximum(rounds[drawn].sum(1), 1), (2.5, 97.5))
    return float(low), float(high)


def summarise(
    name: str, runs: list[Run], baseline: list[Completion] | None, drafts: Accepted | None
) -> dict[str, Any]:
    """One method's figures: pooled over prompts, median over repeats."""
    completions = runs[0].completions
    rounds = sum(c.rounds for c in completions)
    emitted = sum(c.completion_tokens - 1 for c in completions)
    width = max(len(c.accepted_length_histogram) for c in completions)
    histogram = [
        sum(c.accepted_length_histogram[i] for c in completions if i < len(c.accepted_length_histogram))
        for i in range(width)
    ]
    reached = [sum(histogram[depth + 1 :]) / rounds if rounds else 0.0 for depth in range(width - 1)]
    budgets: dict[int, int] = {}
    for c in completions:
        for nodes, count in c.tree_budgets.items():
            budgets[nodes] = budgets.get(nodes, 0) + count
    rates = [sum(c.completion_tokens - 1 for c in run.completions) / run.seconds for run in runs]
    same = (
        None
        if baseline is None
        else sum(a.token_ids == b.token_ids for a, b in zip(completions, baseline, strict=True))
    )
    return {
        "method": name,
        "tree_budget": max(budgets, key=lambda nodes: budgets[nodes], default=completions[0].tree_budget),
        "tree_budgets": {nodes: budgets[nodes] for nodes in sorted(budgets)},
        "rounds": rounds,
        "tokens": emitted,
        "tau": emitted / rounds if rounds else 0.0,
        "tau_interval": interval(completions),
        "accepted_length_histogram": histogram,
        "share_of_rounds_reaching_depth": reached[1:],
        "acceptance_by_depth": None if drafts is None else drafts.by_depth,
        "acceptance_by_rank": None if drafts is None else drafts.by_rank,
        "attempts_by_depth": None if drafts is None else drafts.attempts,
        "taken_by_depth_and_rank": None if drafts is None else drafts.taken,
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_runs": rates,
        "milliseconds_per_round": 1e3
        * statistics.median(run.seconds / max(run.rounds, 1) for run in runs),
        "repeated_8grams": repeated_ngram_share(c.token_ids for c in completions),
        "prompts": len(completions),
        "same_tokens_as_first_method": same,
    }


def table(rows: list[dict[str, Any]], machine: str) -> str:
    """The figures of one prompt set at one temperature as text."""
    first = rows[0]
    lines = [
        (
            f"{first['set']}: {first['prompts']} prompts, temperature {first['temperature']:g}, {machine}; "
            "tokens/s: all slots', prefill and compilation left out; tau with its 95 % interval over prompts"
        ),
        (
            f"{'method':18s} {'nodes':>5s} {'rounds':>7s} {'tau':>6s} {'95 %':>13s} {'ms/round':>9s} {'tokens/s':>9s} "
            f"{'speed-up':>8s} {'same':>7s} {'8-grams':>8s}"
        ),
    ]
    for row in rows:
        same = row["same_tokens_as_first_method"]
        low, high = row["tau_interval"]
        lines.append(
            f"{row['method']:18s} {row['tree_budget']:5d} {row['rounds']:7d} {row['tau']:6.2f} "
            f"{f'{low:.2f}-{high:.2f}':>13s} {row['milliseconds_per_round']:9.3f} {row['tokens_per_second']:9.1f} "
            f"{row['tokens_per_second'] / first['tokens_per_second']:7.2f}x "
            f"{'-' if same is None else str(same) + '/' + str(row['prompts']):>7s} {100 * row['repeated_8grams']:7.2f}%"
        )
    for row in rows:
        if len(row["tree_budgets"]) > 1:
            taken = ", ".join(f"{count} of {nodes}" for nodes, count in row["tree_budgets"].items())
            lines.append(f"{row['method']}: rounds by nodes: {taken}")
    drafting = [row for row in rows if row["acceptance_by_depth"]]
    for title, key, form in (
        (
            "share of rounds in which the walk reached a depth (1, 2, ...):",
            "share_of_rounds_reaching_depth",
            "{:.2f}",
        ),
        (
            "share of the rounds that could go a depth further (1, 2, ...) and did:",
            "acceptance_by_depth",
            "{:.2f}",
        ),
        ("share of the accepted drafts by their rank (0, 1, ...):", "acceptance_by_rank", "{:.3f}"),
    ):
        if drafting:
            lines.append(title)
        lines += [f"{row['method']:18s} " + " ".join(form.format(x) for x in row[key]) for row in drafting]
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", help="target (default: the bundled pair)")
    parser.add_argument("--draft-model", help="its drafter")
    parser.add_argument(
        "--methods", default="ar,dflash,ddtree:63", help="of ar, mtp[:STEPS], dflash, ddtree[:NODES|:auto]"
    )
    parser.add_argument("--policies", default="best", help=f"of the trees: {', '.join(POLICIES)}")
    parser.add_argument("--temperatures", default="0", help="such as 0,0.7,1 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", nargs="+", default=["heldout"], metavar="SET",
        help=f"{', '.join(SET_NAMES)} or a prompt file (default: heldout)",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, help="only the first so many prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--speed-only", action="store_true", help="leave out which drafts were accepted")
    parser.add_argument("--json", type=Path, help="write the raw figures there")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the figures there (needs matplotlib)")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints; returns the record that `--json` writes."""
    temperatures = parse_temperatures(args.temperatures)
    base = SamplingParams(max_new_tokens=args.max_new_tokens, seed=args.seed)
    variants = {
        t: parse_variants(args.methods, args.policies, dataclasses.replace(base, temperature=t))
        for t in temperatures
    }
    entries = {name: prompt_set(name, args.limit) for name in args.set}
    engine = dflash_jax.load(
        args.model, args.draft_model, dtype=args.dtype, max_slots=args.batch, kernels=args.kernels
    )
    for variant in variants[temperatures[0]].values():
        engine.method_of(variant.params)  # what cannot be served is said before hours of measuring
    machine = f"batch {args.batch}, {engine.device.device_kind}, {engine.target.dtype}, jax {jax.__version__}"
    record: dict[str, Any] = {
        "settings": {key: str(value) for key, value in vars(args).items()},
        "device": engine.device.device_kind,
        "dtype": str(engine.target.dtype),
        "model": engine.names[0],
        "batch": args.batch,
        "jax": jax.__version__,
        "methods": [],
    }
    for name, prompts in entries.items():
        ids = [encode_prompt(engine, entry, chat=None, system=None, thinking=None) for entry in prompts]
        for temperature, methods in variants.items():
            results = measure(engine, ids, methods, args.batch, args.repeats)
            first = next(iter(methods))
            rows = []
            for method, variant in methods.items():
                runs = results[method]
                no_drafts = args.speed_only or variant.params.method == "ar"
                drafts = None if no_drafts else accepted(engine, ids, variant)
                figures = summarise(method, runs, None if method == first else results[first][0].completions, drafts)
                rows.append({"set": name, "temperature": temperature} | figures)
            print(table(rows, machine), flush=True)
            record["methods"] += rows
    return record


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        if args.plots is not None:
            check_matplotlib()
        record = run(args)
        if args.plots is not None:
            for path in plot(record, args.plots):
                print(f"wrote {path}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
