"""Draws docs/images/round.svg, the data flow of one round: `python tools/draw_round.py [FILE]`."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dflash_jax.plots import new_figure  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "round.svg"
WORK, KEPT = ("#d6e6f5", "#0072B2"), ("#fbe5c8", "#D55E00")
# name, second line, left, bottom, width, colours; in tenths of an inch
BOXES = (
    ("draft", "1 drafter pass", 4, 24, 15, WORK),
    ("tree", "B best prefixes", 24, 24, 14, WORK),
    ("verify", "1 target pass, N rows", 43, 24, 18, WORK),
    ("walk", "down the tree", 66, 24, 13, WORK),
    ("commit", "accepted path only", 84, 24, 16, WORK),
    ("draft KV", "drafter's context", 4, 8, 15, KEPT),
    ("pages, states", "KV, recurrent, conv", 43, 8, 18, KEPT),
    ("anchor, taps", "of the accepted rows", 84, 8, 16, KEPT),
)
# corners of a line, label, where it stands
ARROWS = (
    (((19, 27), (24, 27)), "marginals", (21.5, 31)),
    (((38, 27), (43, 27)), "tokens,\nmask", (40.5, 31.5)),
    (((61, 27), (66, 27)), "a token\na row", (63.5, 31.5)),
    (((79, 27), (84, 27)), "path,\nbonus", (81.5, 31.5)),
    (((52, 30), (52, 36), (92, 36), (92, 30)), "updates of all rows, taps (nothing is written yet)", (72, 37)),
    (((50, 14), (50, 24)), "reads", (47.5, 19)),
    (((88, 24), (88, 19), (55, 19), (55, 14)), "writes", (72, 20)),
    (((95, 24), (95, 14)), "", (0, 0)),
    (((11, 14), (11, 24)), "reads", (8.5, 19)),
    (((92, 8), (92, 3), (11, 3), (11, 8)), "next round: the taps become context, the anchor begins the block", (52, 4)),
)


def draw() -> Any:
    """The figure."""
    figure = new_figure(9.4, 3.8)
    axes = figure.subplots()
    for name, text, x, y, width, (face, edge) in BOXES:
        axes.add_patch(_rectangle(x, y, width, face, edge))
        axes.text(x + width / 2, y + 3.8, name, ha="center", va="center", fontsize=10, fontweight="bold")
        axes.text(x + width / 2, y + 1.7, text, ha="center", va="center", fontsize=8)
    for corners, label, (x, y) in ARROWS:
        xs, ys = zip(*corners, strict=True)
        axes.plot(xs[:-1], ys[:-1], color="#333333", linewidth=1.2)
        tip = {"arrowstyle": "-|>", "color": "#333333", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", corners[-1], corners[-2], arrowprops=tip)
        axes.text(x, y, label, ha="center", va="center", fontsize=8)
    axes.set_xlim(0, 102)
    axes.set_ylim(0, 39)
    axes.axis("off")
    return figure


def _rectangle(x: float, y: float, width: float, face: str, edge: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=1"
    return FancyBboxPatch((x, y), width, 6, boxstyle=shape, facecolor=face, edgecolor=edge, linewidth=1.4)


if __name__ == "__main__":
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "round"  # the same file each time
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    draw().savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"wrote {path}")
