"""One report of what the benchmarks measured: `python -m benchmarks.report DIR`.

Reads every `*.json` in DIR that `--json` of `benchmarks.acceptance`, `divergence`, `kernels`, `round`, `torch_round` or
of `serve.load` wrote, told apart by their keys, and writes `report.md` and its pictures (SVG) beside them. Nothing is
measured here, and no figure is left out: what a record says of a failure is in the report too.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import acceptance_plots
from dflash_jax.errors import UserError
from dflash_jax.plots import Curve, check_matplotlib, round_times, serving_load

Record = dict[str, Any]
Section = tuple[str, list[str]]  # a heading, lines of Markdown

# Keys that a record of each benchmark has and no other's.
_KEYS: dict[str, set[str]] = {
    "acceptance": {"methods", "settings", "batch"},
    "divergence": {"findings", "depth_error"},
    "kernels": {"cases", "machine"},
    "round": {"shape", "copy_bandwidth", "rows"},
    "torch_round": {"torch", "transformers", "rows"},
    "load": {"points", "server"},
}


def kind_of(record: Any) -> str | None:
    """Which benchmark wrote a record; None for any other JSON."""
    keys = set(record) if isinstance(record, dict) else set()
    return next((kind for kind, needed in _KEYS.items() if needed <= keys), None)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table and an empty line."""
    lines = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(str(x).replace("|", "\\|") for x in line) + " |" for line in lines), ""]


def _machine(record: Record) -> str:
    versions = [f"{name} {record[name]}" for name in ("jax", "torch", "transformers") if record.get(name)]
    parts = [record["device"], *versions, record.get("dtype"), record.get("model")]
    return ", ".join(str(part) for part in parts if part)


def _flags(settings: Record) -> str:
    """The flags of a command from its recorded settings, those that are off or output files left out."""
    words = []
    for name, value in settings.items():
        if value in ("None", "False") or name in ("json", "plot", "plots", "address"):
            continue
        if value.startswith("[") and value.endswith("]"):
            value = value[1:-1].replace("'", "").replace(",", "")
        words.append(f"--{name.replace('_', '-')}" + ("" if value == "True" else f" {value}"))
    return " ".join(words)


def acceptance(record: Record, save: Callable[[str, Any], str]) -> list[str]:
    """Tokens a round, speed, and pictures."""
    lines = [f"    python -m benchmarks.acceptance {_flags(record['settings'])}", ""]
    rows = record["methods"]
    cells = []
    for row in rows:
        group = [r for r in rows if (r["set"], r["temperature"]) == (row["set"], row["temperature"])]
        same = row["same_tokens_as_first_method"]
        cells.append(
            [
                row["set"], f"{row['temperature']:g}", row["method"], row["tree_budget"], f"{row['tau']:.2f}",
                f"{row['milliseconds_per_round']:.3f}", f"{row['tokens_per_second']:,.1f}",
                f"{row['tokens_per_second'] / group[0]['tokens_per_second']:.2f}",
                "" if same is None else f"{same}/{row['prompts']}",
            ]
        )  # fmt: skip
    header = ("set", "temperature", "method", "nodes", "τ", "ms a round", "tokens/s", "speed-up", "same tokens")
    lines += table(header, cells)
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        part = [row for row in rows if row["temperature"] == temperature]
        for name, (title, draw) in acceptance_plots.PICTURES.items():
            figure = draw(part)
            if figure is not None:
                figure.suptitle(f"{title}, temperature {temperature:g}\n{_machine(record)}", fontsize=10)
                lines += [save(f"{name}-t{temperature:g}", figure), ""]
    return lines


def rounds(record: Record, save: Callable[[str, Any], str]) -> list[str]:
    """Times against their floors."""
    rows = record["rows"]

    def listed(name: str) -> str:
        return ",".join(str(x) for x in dict.fromkeys(row[name] for row in rows))

    command = f"python -m benchmarks.round --shape {record['shape']} --dtype {record['dtype']} --tp {record['tp']}"
    lines = [
        f"    {command} --methods {listed('method')} --contexts {listed('context')} --batch {listed('batch')}", "",
        (f"{record['layers']} layers, tp {record['tp']}; copies reach {record['copy_bandwidth'] / 1e12:.2f} TB/s. "
        "The floor is the bytes that a round must move at that speed; c is the cycle cost."), "",
    ]  # fmt: skip
    cells = []
    for row in rows:
        spread = 1e3 * (max(row["seconds"]) - min(row["seconds"]))
        cells.append(
            [
                row["method"], f"{row['context']:,}", row["batch"], f"{1e3 * statistics.median(row['seconds']):.3f}",
                f"{spread:.3f}", f"{1e3 * row['floor_seconds']:.3f}", f"{row['ratio']:.3f}",
                "" if row["c"] is None else f"{row['c']:.3f}",
            ]
        )  # fmt: skip
    lines += table(("method", "context", "batch", "ms a round", "spread", "floor ms", "ratio", "c"), cells)
    for prompt in record.get("prefill", []):
        seconds = statistics.median(prompt["seconds"])
        speed = f"{prompt['tokens'] / seconds:,.0f} tokens/s, {100 * prompt['share']:.0f} % of"
        lines += [f"Prefill of {prompt['tokens']:,} tokens: {1e3 * seconds:.1f} ms, {speed} a large product's.", ""]
    # Rows of a chain are the drafter's block, which the record does not hold; trees and steps say theirs.
    curves = []
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in rows):
        sized = {}
        for row in rows:
            method, _, nodes = row["method"].partition(":")
            if (row["context"], row["batch"]) == (context, batch) and method in ("ar", "tree"):
                sized[int(nodes or 0) + 1] = row
        if len(sized) > 1:
            counts, name = sorted(sized), f"context {context:,}, batch {batch}"
            measured = [1e3 * statistics.median(sized[n]["seconds"]) for n in counts]
            floor = [1e3 * sized[n]["floor_seconds"] for n in counts]
            curves += [Curve(name, counts, measured, "measured"), Curve(name, counts, floor, "predicted")]
    if curves:
        title = f"Time of a round, {record['shape']}, {record['dtype']}, {record['device']} (predicted: bytes alone)"
        lines += [save("times", round_times(curves, title=title)), ""]
    return lines


def kernels(record: Record, save: Callable[[str, Any], str]) -> list[str]:
    """Microseconds of every case against the larger of its floors."""
    del save
    machine = record["machine"]
    lines = [
        f"    python -m benchmarks.kernels --dtype {record['dtype']}", "",
        f"Copies: {machine['bandwidth'] / 1e12:.2f} TB/s, products: {machine['throughput'] / 1e12:.0f} TFLOP/s.", "",
    ]  # fmt: skip
    cells = [
        [
            case["case"], f"{case['microseconds']:.2f}", case["larger_floor"], f"{case['times_larger_floor']:.2f}",
            *("" if case[key] is None else f"{case[key]:.2f} ×" for key in ("xla_ratio", "torch_ratio")),
        ]
        for case in record["cases"]
    ]  # fmt: skip
    return lines + table(("case", "µs", "floor of", "times floor", "XLA takes", "PyTorch takes"), cells)


def divergence(record: Record, save: Callable[[str, Any], str]) -> list[str]:
    """Whether rounding explains every token that differs."""
    del save
    model = "" if record["model"] == "bundled" else f" --model {record['model']}"
    methods = ",".join(name for name in record["methods"] if name != "ar")
    beyond = sum(not finding["explained"] for finding in record["findings"])
    verdict = "passed: rounding explains every token" if record["passed"] else f"**FAILED: {beyond} beyond rounding**"
    lines = [
        f"    python -m benchmarks.divergence{model} --set {' '.join(record['sets'])} --methods {methods}", "",
        (f"{verdict}; {record['prompts']} prompts; error of bf16 in a difference of logits: median "
        f"{record['depth_error_median']:.3f}, largest {record['depth_error']:.3f}."), "",
    ]  # fmt: skip
    parted = record["parted"].items()
    cells = [[name, record["tokens"][name], f"{count}/{record['prompts']}"] for name, count in parted]
    return lines + table(("method", "tokens", "texts that part from ar"), cells)


def torch_round(record: Record, save: Callable[[str, Any], str]) -> list[str]:
    """PyTorch's times."""
    del save
    tiny = " --tiny" if record["tiny"] else ""
    lines = [f"    python -m benchmarks.torch_round --context {record['context']}{tiny}", ""]
    if record["tiny"]:
        lines += ["Tiny widths, to try the program: **no result**.", ""]
    cells = [
        [
            row["what"], row["rows"], f"{1e3 * statistics.median(row['seconds']):.3f}",
            "" if row["c"] is None else f"{row['c']:.2f}", row["note"],
        ]
        for row in record["rows"]
    ]  # fmt: skip
    lines += table(("what", "rows", "ms", "c", "note"), cells)
    for name, error in record["errors"].items():
        lines += [f"**{name} failed**: {error}", ""]
    return lines


def load(record: Record, save: Callable[[str, Any], str]) -> list[str]:
    """Throughput and latency of a server under load."""
    from serve import load_figures  # needs the extra "serve", which the other records do not

    points = record["points"]
    lines = [f"    python -m serve.load {_flags(record['settings'])}", ""]
    lines += [f"A server with {record['server']['slots']} slots; times as in `serve/load_figures.py`.", ""]
    lines += table(load_figures.HEADER, [load_figures.cells(point) for point in points])
    for remark in load_figures.remarks(points):
        lines += [remark, ""]
    return [*lines, save("load", serving_load(points, title=f"A server under load: {_machine(record)}")), ""]


_SECTIONS: dict[str, tuple[str, Callable[[Record, Callable[[str, Any], str]], list[str]]]] = {
    "acceptance": ("Acceptance and speed", acceptance),
    "round": ("Time of a round", rounds),
    "kernels": ("Kernels", kernels),
    "divergence": ("Differences in bf16", divergence),
    "torch_round": ("PyTorch", torch_round),
    "load": ("A server under load", load),
}


def write_report(folder: Path) -> Path:
    """Writes `report.md` and its pictures into the folder of the records; returns its path.

    Raises:
      UserError: no folder, a file that is not JSON, a record that lacks a key, no record at all, or no matplotlib.
    """
    check_matplotlib("benchmarks.report")
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a folder")
    found: list[tuple[str, Path, Record]] = []
    skipped = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: is not JSON ({error})") from None
        kind = kind_of(record)
        if kind is None:
            skipped.append(path.name)
        else:
            found.append((kind, path, record))
    if not found:
        raise UserError(f"{folder}: no *.json of a benchmark there; write some with --json")
    lines = ["# Benchmarks", ""]
    hardware = [[path.name, kind, _machine(record)] for kind, path, record in found]
    lines += table(("record", "benchmark", "hardware and versions"), hardware)
    lines += ["Commands are given as far as the records hold them.", ""]
    if skipped:
        lines += [f"Not of a benchmark known here, and left out: {', '.join(skipped)}.", ""]
    for kind, (title, section) in _SECTIONS.items():
        for own, path, record in found:
            if own != kind:
                continue

            def save(name: str, figure: Any, path: Path = path) -> str:
                picture = folder / f"{path.stem}-{name}.svg"
                figure.savefig(picture, metadata={"Date": None})
                return f"![{name}]({picture.name})"

            lines += [f"## {title}: {path.name}", "", f"{_machine(record)}.", ""]
            try:
                lines += section(record, save)
            except KeyError as error:
                raise UserError(f"{path}: a record of benchmarks.{kind} without {error}; write it anew") from None
    report = folder / "report.md"
    report.write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")
    return report


def main(argv: list[str] | None = None) -> int:
    """Writes the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the benchmarks' --json files are")
    args = parser.parse_args(argv)
    try:
        print(f"wrote {write_report(args.folder)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
