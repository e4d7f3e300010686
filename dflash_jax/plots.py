"""Pictures of decoding, one function a figure; needs matplotlib (`pip install -e '.[plots]'`).

Every function returns a `matplotlib.figure.Figure` with title, units and legend, made without pyplot: nothing is shown
or kept behind the caller's back. Save it with `figure.savefig(path)`; a notebook shows it as a cell's last value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from dflash_jax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dflash_jax.tree import Tree

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
ACCEPTED = COLOURS[5]
WIDTH = 9.0  # inches: at the width of a page, 8 points are still 6
_LONGEST = 9  # characters of a token

Kind = Literal["predicted", "measured"]


def check_matplotlib(what: str = "--plots") -> None:
    """Raises `UserError` where matplotlib is not installed; `what` is the flag or function that wants it."""
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ImportError:
        raise UserError(f"{what} needs matplotlib: pip install matplotlib (or the extra 'plots')") from None


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches, whose parts are laid out so that they do not overlap."""
    check_matplotlib("dflash_jax.plots")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=110)


def style(axes: Axes) -> None:
    """No box, and faint lines behind the data to read values by."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def show_token(text: str) -> str:
    """A token as a label: blanks visible, and cut to what a node has room for."""
    text = text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥") or "∅"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _legend(figure: Figure, handles: Sequence[Any], columns: int = 4) -> None:
    figure.legend(handles=list(handles), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


# ---------------------------------------------------------------- one round


def _heights(parents: Sequence[int]) -> list[float]:
    """Line of every node: a chain runs straight on from its first child, other children start lines of their own."""
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(row)
    lines, used = [0.0] * len(parents), 0
    stack = [(0, True)]
    while stack:
        row, first = stack.pop()
        if not first:
            used += 1
        lines[row] = float(used)
        # The last pushed is drawn first, so the best child comes last.
        stack += [(child, i == 0) for i, child in reversed(list(enumerate(children[row])))]
    return lines


def token_tree(
    tree: Tree,
    decode: Callable[[int], str],
    *,
    path: Sequence[int] = (0,),
    bonus: int | None = None,
    slot: int = 0,
    title: str = "Token tree of one round",
) -> Figure:
    """The verified tree: depth to the right, siblings below each other, the accepted path outlined.

    Args:
      tree: its arrays have a batch axis, of which `slot` is drawn.
      decode: text of a token id.
      path: accepted rows from node 0 down (`Walk.path[slot, :count]`).
      bonus: the token that the target chose after the last of them; drawn there, dashed.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    valid = np.asarray(tree.valid[slot])
    rows = int(valid.sum())
    parents, depths, tokens = (np.asarray(x[slot])[:rows].tolist() for x in (tree.parents, tree.depths, tree.tokens))
    probability = np.ones(rows) if tree.log_probs is None else np.exp(np.asarray(tree.log_probs[slot])[:rows])
    accepted = set(path)
    last = max(accepted)
    # The bonus is drawn as one more child of the last accepted row.
    lines = _heights(parents if bonus is None else [*parents, last])
    figure = new_figure(WIDTH, 1.6 + 0.3 * (max(lines) + 1))
    axes = figure.subplots()
    shades = colormaps["Blues"]

    def node(x: float, y: float, text: str, face: Any, edge: str, dark: bool, dashed: bool = False) -> None:
        box = {
            "boxstyle": "round,pad=0.25", "facecolor": face, "edgecolor": edge, "linestyle": "--" if dashed else "-",
            "linewidth": 1.8 if edge == ACCEPTED else 0.6,
        }  # fmt: skip
        axes.text(
            # A comma alone would have no room inside a dashed outline.
            x, y, show_token(text).center(3), fontsize=8, ha="center", va="center", bbox=box, parse_math=False,
            zorder=3, color="white" if dark else "black",
        )  # fmt: skip

    def edge(row: int, x: float, y: float, taken: bool, dashed: bool = False) -> None:
        x0, y0 = depths[row], lines[row]
        colour, wide = (ACCEPTED, 2.0) if taken else ("#888888", 0.8)
        shape = "--" if dashed else "-"
        axes.plot([x0, x0 + 0.5, x0 + 0.5, x], [y0, y0, y, y], shape, color=colour, linewidth=wide, zorder=1 + taken)

    for row in range(rows):
        if row:
            edge(parents[row], depths[row], lines[row], row in accepted)
        strength = 0.75 * float(probability[row])
        outline = ACCEPTED if row in accepted else "#555555"
        node(depths[row], lines[row], decode(tokens[row]), shades(strength), outline, strength > 0.6)
    deepest = max(depths)
    if bonus is not None:
        deepest = max(deepest, depths[last] + 1)
        edge(last, depths[last] + 1, lines[rows], True, dashed=True)
        node(depths[last] + 1, lines[rows], decode(bonus), "white", ACCEPTED, False, dashed=True)
    axes.set_xlim(-0.6, deepest + 0.6)
    axes.set_ylim(max(lines) + 0.6, -0.6)
    axes.set_yticks([])
    axes.set_xticks(range(deepest + 1))
    axes.set_xlabel("depth (tokens after the anchor)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{title}: {rows - 1} nodes, {len(accepted) - 1} accepted", fontsize=10)
    _legend(
        figure,
        [
            Line2D([], [], color=ACCEPTED, linewidth=2, label="accepted path"),
            Line2D([], [], color=ACCEPTED, linewidth=2, linestyle="--", label="bonus: the target's own next token"),
            Patch(facecolor=shades(0.75), edgecolor="#555555", label="drafter: prefix probability 1"),
            Patch(facecolor=shades(0.0), edgecolor="#555555", label="… 0"),
        ],
    )
    return figure


def ancestor_mask(tree: Tree, *, path: Sequence[int] = (), slot: int = 0, title: str = "Ancestor mask") -> Figure:
    """Which rows each row of the pass may attend to, besides the committed context.

    Args:
      tree: its arrays have a batch axis, of which `slot` is drawn.
      path: rows whose entries among themselves are marked as the accepted path.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    mask = np.asarray(tree.ancestors[slot])
    depths = np.asarray(tree.depths[slot])
    count = len(mask)
    kinds = mask.astype(int) + (mask & np.eye(count, dtype=bool))
    chosen = np.isin(np.arange(count), np.asarray(path, int))
    kinds[np.outer(chosen, chosen) & mask] = 3
    colours = ("#FFFFFF", COLOURS[6], COLOURS[1], ACCEPTED)
    figure = new_figure(6.5, 6.6)
    axes = figure.subplots()
    axes.imshow(kinds, cmap=ListedColormap(colours), vmin=0, vmax=3, interpolation="nearest")
    for row in np.flatnonzero(np.diff(depths) > 0):
        axes.axhline(row + 0.5, color="#BBBBBB", linewidth=0.5)
        axes.axvline(row + 0.5, color="#BBBBBB", linewidth=0.5)
    axes.set_xlabel("row attended to (grey lines: a new depth)")
    axes.set_ylabel("row of the verified tree, parents before children")
    share = mask.sum() / count**2
    axes.set_title(f"{title}: {count} rows, {share:.0%} of the entries seen", fontsize=10)
    names = ("not seen", "ancestor", "the row itself", "accepted path")
    shown = range(4 if chosen.any() else 3)
    _legend(figure, [Patch(facecolor=colours[i], edgecolor="#555555", label=names[i]) for i in shown])
    return figure


def marginals(
    log_probs: Float[np.ndarray, "L V"],
    decode: Callable[[int], str],
    *,
    top: int = 5,
    depths: int = 10,
    truth: Sequence[int] = (),
    title: str = "What the drafter expects, depth by depth",
) -> Figure:
    """The drafter's best tokens of each depth with their probabilities.

    Args:
      log_probs: natural logarithms, depth 1 first.
      decode: text of a token id.
      top: candidates shown of each depth.
      depths: columns shown at most.
      truth: the target's own tokens from depth 1 on; outlined where they are among the candidates.
    """
    from matplotlib.patches import Patch, Rectangle

    values = np.asarray(log_probs)[:depths]
    order = np.argsort(-values, axis=1, kind="stable")[:, :top]
    probability = np.exp(np.take_along_axis(values, order, axis=1))
    figure = new_figure(WIDTH, 1.5 + 0.5 * top)
    axes = figure.subplots()
    image = axes.imshow(probability.T, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    found = 0
    for depth, rank in np.ndindex(*order.shape):
        token, p = int(order[depth, rank]), probability[depth, rank]
        axes.text(
            depth, rank, f"{show_token(decode(token))}\n{100 * p:.0f}%" if p >= 0.005 else show_token(decode(token)),
            fontsize=8, ha="center", va="center", parse_math=False, color="white" if p > 0.6 else "black",
        )  # fmt: skip
        if depth < len(truth) and token == truth[depth]:
            box = Rectangle((depth - 0.48, rank - 0.47), 0.96, 0.94, fill=False, edgecolor=ACCEPTED, linewidth=2)
            axes.add_patch(box)
            found += 1
    axes.set_xticks(range(len(values)), [str(d + 1) for d in range(len(values))])
    axes.set_yticks(range(top), [str(r) for r in range(top)])
    axes.set_xlabel("depth (tokens after the anchor)")
    axes.set_ylabel("rank (0: the best)")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, label="probability", pad=0.01)
    if len(truth):
        label = f"what the target says ({found} of {min(len(truth), len(values))} among the candidates)"
        _legend(figure, [Patch(facecolor="none", edgecolor=ACCEPTED, linewidth=2, label=label)])
    return figure


# ---------------------------------------------------------------- many rounds


def draw_depths(axes: Axes, name: str, shares: Sequence[float], colour: str) -> None:
    """One method's acceptance at depths 1, 2, …, as a line."""
    axes.plot(range(1, len(shares) + 1), shares, "o-", markersize=3, color=colour, label=name)


def depth_axes(axes: Axes) -> None:
    """Units and range of acceptance by depth."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("depth (tokens after the anchor)")
    axes.set_ylabel("share of the rounds that could\ntake a draft of this depth")
    axes.set_ylim(0, 1.02)
    style(axes)


def acceptance_by_depth(
    series: Mapping[str, Sequence[float]], *, title: str = "Acceptance by depth, where the walk got that far"
) -> Figure:
    """Of the rounds whose walk came to depth d - 1, the share that took a draft of depth d.

    Args:
      series: method or policy -> shares of depths 1, 2, … (`benchmarks.accepted.Accepted.by_depth`).
    """
    figure = new_figure(7.0, 3.8)
    axes = figure.subplots()
    for i, (name, shares) in enumerate(series.items()):
        draw_depths(axes, name, shares, COLOURS[(i + 1) % len(COLOURS)])
    depth_axes(axes)
    axes.set_title(title, fontsize=10)
    _legend(figure, axes.get_legend_handles_labels()[0])
    return figure


@dataclasses.dataclass(frozen=True)
class Curve:
    """Times of one machine by rows of the pass.

    Attributes:
      name: for the legend.
      rows: target rows of a round: 1 for autoregressive decoding, budget + 1 for a tree.
      milliseconds: of a round.
      kind: predicted values are joined by a dashed line, measured ones by a solid line with dots.
    """

    name: str
    rows: Sequence[int]
    milliseconds: Sequence[float]
    kind: Kind


def _draw_curves(axes: Axes, curves: Sequence[Curve], values: Callable[[Curve], Sequence[float]]) -> None:
    # A machine keeps its colour whether its times are predicted or measured.
    machines = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(c.name for c in curves))}
    for curve in curves:
        look = "--" if curve.kind == "predicted" else "o-"
        label = f"{curve.name}, {curve.kind}"
        axes.plot(curve.rows, values(curve), look, markersize=4, color=machines[curve.name], label=label)
    rows = sorted({r for curve in curves for r in curve.rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(r) for r in rows])
    axes.minorticks_off()
    axes.set_xlabel("rows of the target's pass (1: autoregressive; nodes + 1: chain or tree)")
    style(axes)


def round_times(curves: Sequence[Curve], *, title: str = "Time of a round") -> Figure:
    """Milliseconds a round over the rows of its pass: what bytes predict, and what was measured."""
    figure = new_figure(7.5, 4.4)
    axes = figure.subplots()
    _draw_curves(axes, curves, lambda curve: curve.milliseconds)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("milliseconds a round")
    axes.set_title(title, fontsize=10)
    _legend(figure, axes.get_legend_handles_labels()[0], 2)
    return figure


def budget_sweep(
    taus: Mapping[int, float], curves: Sequence[Curve], *, title: str = "Which budget pays"
) -> Figure:
    """Tokens a round, and the speed-up over autoregressive decoding, τ / c, over the rows of the pass.

    Args:
      taus: rows -> mean tokens a round; for every row count of every curve (1 row: 1.0).
      curves: each has the time of 1 row among its rows.

    Raises:
      ValueError: a row count without a τ, or a curve without 1 row.
    """
    for curve in curves:
        if 1 not in curve.rows or not set(curve.rows) <= set(taus):
            raise ValueError(f"{curve.name}: needs the time of 1 row, and a τ for each of rows {list(curve.rows)}")

    def speedup(curve: Curve) -> list[float]:
        step = curve.milliseconds[list(curve.rows).index(1)]
        return [taus[r] * step / ms for r, ms in zip(curve.rows, curve.milliseconds, strict=True)]

    figure = new_figure(7.5, 6.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    rows = sorted(taus)
    upper.plot(rows, [taus[r] for r in rows], "o-", markersize=4, color="#555555")
    upper.set_ylim(bottom=0)
    upper.set_ylabel("τ: tokens a round (bonus included)")
    style(upper)
    _draw_curves(lower, curves, speedup)
    lower.axhline(1.0, color="#999999", linewidth=0.8)
    lower.set_ylim(bottom=0)
    lower.set_ylabel("speed-up over autoregressive, τ / c")
    upper.set_title(title, fontsize=10)
    _legend(figure, lower.get_legend_handles_labels()[0], 2)
    return figure


def training_curve(
    metrics: Sequence[Mapping[str, Any]],
    *,
    heldout: Sequence[tuple[int, float]] = (),
    reference: tuple[str, float] | None = None,
    title: str = "Training of a drafter",
) -> Figure:
    """Loss and, where the stage has it, τ over steps.

    Args:
      metrics: the lines of a run's `metrics.jsonl`.
      heldout: (steps done, τ of decoding held-out prompts), drawn beside the τ of training; where there are any, `tau`
        must be among the metrics.
      reference: name and τ of another drafter on the same prompts, a horizontal line.

    Raises:
      ValueError: no lines, or a held-out τ or reference without a τ of training.
    """
    if not metrics:
        raise ValueError("a training curve needs at least one line of metrics")
    has_tau = "tau" in metrics[0]
    if (heldout or reference) and not has_tau:
        raise ValueError("these metrics have no 'tau' to draw a held-out one beside")
    figure = new_figure(7.0, 5.6 if has_tau else 3.2)
    panels = np.atleast_1d(figure.subplots(2 if has_tau else 1, 1, sharex=True))
    steps = [line["step"] for line in metrics]
    names = {"loss_mean": "training: loss, mean since the last point"}
    if has_tau:
        names["tau"] = "training: τ at random places of the last batch"
    for axes, (key, label), colour in zip(panels, names.items(), COLOURS[1:3], strict=False):
        axes.plot(steps, [line[key] for line in metrics], "o-", markersize=3, color=colour, label=label)
        axes.set_ylabel("nats a token" if key == "loss_mean" else "tokens a round")
        style(axes)
    if heldout:
        label = "held-out prompts: τ of decoding"
        panels[-1].plot(*zip(*heldout, strict=True), "s-", markersize=5, color=COLOURS[3], label=label)
    if reference is not None:
        name, tau = reference
        panels[-1].axhline(tau, color=COLOURS[0], linewidth=1, linestyle="--", label=f"{name}: τ = {tau:.2f}")
    if has_tau:
        panels[-1].set_ylim(bottom=0)
    panels[-1].set_xlabel("optimiser steps")
    panels[0].set_title(title, fontsize=10)
    _legend(figure, [h for axes in panels for h in axes.get_legend_handles_labels()[0]], 2)
    return figure


def serving_load(points: Sequence[Mapping[str, Any]], *, title: str = "A server under load") -> Figure:
    """Throughput, time to the first token and time between tokens over the load, one line a method.

    Args:
      points: of a record of `serve.load`: clients at once (`concurrency`), or requests a second (`rate`).

    Raises:
      ValueError: no points, or some with clients and some with rates.
    """
    if not points or len({point["rate"] is None for point in points}) != 1:
        raise ValueError("a picture of a load needs points, all with clients or all with rates")
    key, label = ("rate", "requests a second (Poisson)") if points[0]["rate"] else ("concurrency", "requests at once")
    figure = new_figure(WIDTH, 6.6)
    panels = figure.subplots(2, 2, sharex=True)
    measures = (
        ("output tokens a second, all requests", "tokens_per_second", None),
        ("time to first token, ms", "ttft_seconds", "p99"),
        ("ITL: time between chunks, ms", "itl_seconds", "p99"),
        ("time a token after the first, ms", "token_seconds", "p99"),
    )
    loads = sorted({point[key] for point in points})
    for axes, (name, what, tail) in zip(panels.flat, measures, strict=True):
        for i, method in enumerate(dict.fromkeys(point["method"] for point in points)):
            rows = sorted((p for p in points if p["method"] == method and p[what] is not None), key=lambda p: p[key])
            at, colour = [row[key] for row in rows], COLOURS[i % len(COLOURS)]
            middle = [row[what] if tail is None else 1e3 * row[what]["p50"] for row in rows]
            axes.plot(at, middle, "o-", markersize=4, color=colour, label=method)
            if tail is not None:
                axes.plot(at, [1e3 * row[what][tail] for row in rows], ":", color=colour, label=f"{method}, p99")
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_ylabel(name)
        style(axes)
    for axes in panels[1]:
        axes.set_xlabel(label)
    figure.suptitle(title, fontsize=10)
    # Of the panel that has both kinds of line.
    _legend(figure, panels[0][1].get_legend_handles_labels()[0], 3)
    return figure
