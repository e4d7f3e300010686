"""Pictures of what `benchmarks.acceptance` measured: speed, acceptance by depth, accepted ranks.

Each says what it was measured on, so that it can be read away from the command that made it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.plots import COLOURS, check_matplotlib, depth_axes, draw_depths, new_figure, style

_RANKS = 4  # shown one by one; the rest together

Rows = list[dict[str, Any]]


def _unique(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _counts(rows: Rows) -> dict[str, int]:
    return {row["set"]: row["prompts"] for row in rows}


def _colours(rows: Rows) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(_unique(rows, "method"))}


def speed(rows: Rows) -> Any:
    """Bars of τ and of tokens/s, by prompt set and method."""
    counts, colours = _counts(rows), _colours(rows)
    width = 0.8 / len(colours)
    figure = new_figure(max(7.0, 1.2 + 0.45 * len(colours) * len(counts)), 7.5)
    panels = figure.subplots(2, 1)
    for axes, key, label in zip(
        panels,
        ("tau", "tokens_per_second"),
        ("τ: tokens a round (bonus included)", "decoding speed (tokens/s a slot)"),
        strict=True,
    ):
        for i, (method, colour) in enumerate(colours.items()):
            values = {row["set"]: row[key] for row in rows if row["method"] == method}
            places = [j + (i - (len(colours) - 1) / 2) * width for j in range(len(counts))]
            bars = axes.bar(places, [values[s] for s in counts], 0.9 * width, color=colour, label=method)
            axes.bar_label(bars, fmt="{:.2f}" if key == "tau" else "{:,.0f}", fontsize=7, padding=1)
        axes.set_xticks(range(len(counts)), [f"{name}\n({n} prompts)" for name, n in counts.items()])
        axes.set_ylabel(label)
        axes.margins(y=0.12)
        style(axes)
    panels[1].set_xlabel("prompt set")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(colours), 6)
    )
    return figure


def _panels(rows: Rows, wanted: list[tuple[str, str | None]], columns: int) -> tuple[Any, list[Any]]:
    """A figure with one panel for each (set, method), with shared axes."""
    columns = min(len(wanted), columns)
    lines = -(-len(wanted) // columns)
    figure = new_figure(max(6.5, 4.2 * columns), 3.2 * lines + 1.2)
    grid = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for spare in grid[len(wanted) :]:
        spare.set_visible(False)
    counts = _counts(rows)
    for i, (axes, (name, method)) in enumerate(zip(grid, wanted, strict=False)):
        axes.set_title(f"{name} ({counts[name]} prompts)" + (f", {method}" if method else ""), fontsize=9)
        depth_axes(axes)
        axes.tick_params(labelbottom=True)
        if i % columns:
            axes.set_ylabel("")
    return figure, grid[: len(wanted)]


def by_depth(rows: Rows) -> Any | None:
    """Acceptance at each depth, given that the walk got there; None where nothing was drafted."""
    drafting = [row for row in rows if row["acceptance_by_depth"]]
    if not drafting:
        return None
    colours = _colours(rows)
    names = _unique(drafting, "set")
    figure, grid = _panels(rows, [(name, None) for name in names], 3)
    for axes, name in zip(grid, names, strict=True):
        for row in drafting:
            if row["set"] == name:
                # Attempts never rise with the depth: what was never tried is at the end, and is left out.
                seen = row["acceptance_by_depth"][: sum(n > 0 for n in row["attempts_by_depth"])]
                draw_depths(axes, row["method"], seen, colours[row["method"]])
    handles = {label: h for axes in grid for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=6)
    return figure


def by_rank(rows: Rows) -> Any | None:
    """Which rank was taken at each depth, stacked; None where there was no tree."""
    trees = [row for row in rows if row["taken_by_depth_and_rank"] and row["method"].startswith("ddtree")]
    if not trees:
        return None
    methods = len(_unique(trees, "method"))
    columns = methods if methods > 1 else 3  # a row for each set, or as many sets as fit
    figure, grid = _panels(rows, [(row["set"], row["method"]) for row in trees], columns)
    for axes, row in zip(grid, trees, strict=True):
        attempts, taken = row["attempts_by_depth"], row["taken_by_depth_and_rank"]
        bottom = [0.0] * len(attempts)
        for rank in range(_RANKS + 1):
            counts = [sum(line[rank:]) if rank == _RANKS else sum(line[rank : rank + 1]) for line in taken]
            shares = [c / n if n else 0.0 for c, n in zip(counts, attempts, strict=True)]
            label = f"rank {rank}" + (
                " and more" if rank == _RANKS else " (drafter's best)" if rank == 0 else ""
            )
            depths = range(1, len(shares) + 1)
            axes.bar(depths, shares, 0.8, bottom, color=COLOURS[1:][rank], label=label)
            bottom = [b + s for b, s in zip(bottom, shares, strict=True)]
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


PICTURES: dict[str, tuple[str, Callable[[Rows], Any | None]]] = {
    "speed": ("Tokens a round and decoding speed", speed),
    "depth": ("Acceptance by depth", by_depth),
    "rank": ("Which of the drafter's candidates was accepted", by_rank),
}


def plot(record: dict[str, Any], folder: Path) -> list[Path]:
    """Draws a record of `benchmarks.acceptance`, one file a picture and temperature.

    Args:
      record: what `--json` writes.
      folder: made if need be.

    Returns:
      The files written.

    Raises:
      UserError: matplotlib is not installed, or the folder cannot be made.
    """
    check_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--plots {folder}: cannot be made ({error.strerror})") from None
    machine = f"{record['model']}, {record['dtype']}, batch {record['batch']}, {record['device']}, jax {record['jax']}"
    written = []
    for temperature in _unique(record["methods"], "temperature"):
        rows = [row for row in record["methods"] if row["temperature"] == temperature]
        for name, (title, draw) in PICTURES.items():
            figure = draw(rows)
            if figure is None:
                continue
            figure.suptitle(f"{title}, temperature {temperature:g}\n{machine}", fontsize=10)
            path = folder / f"{name}-t{temperature:g}.png"
            figure.savefig(path, dpi=130)
            written.append(path)
    return written
