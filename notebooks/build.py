"""Makes the notebooks from `notebooks/source/*.py` and runs them: `python -m notebooks.build [NAME ...]`.

A source is Python in cells: `# %% [markdown]` begins a text cell of comments, `# %%` a code cell, and `# %% setup`
stands for the cell that every notebook begins with, `source/_setup.py`. The notebooks are committed with their outputs;
a change of a source is followed by `python -m notebooks.build`.
"""

import argparse
import base64
import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

HERE = Path(__file__).parent
ROOT = HERE.parent
SOURCES = sorted(path for path in (HERE / "source").glob("*.py") if not path.name.startswith("_"))
_CELL = re.compile(r"^# %%(.*)\n", re.MULTILINE)


def setup_cell() -> str:
    """The code that every notebook begins with."""
    return (HERE / "source" / "_setup.py").read_text(encoding="utf-8").strip()


def make(source: Path) -> NotebookNode:
    """A notebook without outputs; ids and order of its cells follow from the source alone."""
    pieces = _CELL.split(source.read_text(encoding="utf-8"))
    cells = []
    for number, (kind, body) in enumerate(zip(pieces[1::2], pieces[2::2], strict=True)):
        kind, body = kind.strip(), body.strip()
        if kind == "[markdown]":
            text = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
            cell = nbformat.v4.new_markdown_cell(text)
        else:
            cell = nbformat.v4.new_code_cell(setup_cell() if kind == "setup" else body)
        cell["id"] = f"cell-{number:02d}"
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def execute(notebook: NotebookNode, folder: Path, timeout: int = 600) -> float:
    """Runs all cells on a fresh kernel, outputs into the notebook; returns the seconds it took.

    Args:
      notebook: changed in place.
      folder: the kernel's working folder.
      timeout: seconds that one cell may take.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "default"}
    began = time.monotonic()
    client = NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    for cell in notebook.cells:  # when it ran says nothing, and would change with every build
        cell.metadata.pop("execution", None)
    notebook.metadata.pop("language_info", None)
    return time.monotonic() - began


def silent_cells(notebook: NotebookNode) -> list[str]:
    """Code cells that show nothing though they should: all but those that only define or that end with `;`."""
    silent = []
    for cell in notebook.cells:
        if cell.cell_type != "code" or cell.outputs:
            continue
        last = cell.source.splitlines()[-1]
        shows = "print(" in cell.source or not (last.endswith(";") or last.startswith((" ", "assert ", ")", "#")))
        if shows and not re.match(r"[\w, .\[\]]+ = ", last):
            silent.append(cell.source)
    return silent


def copy_figure(notebook: NotebookNode, title: str, path: Path) -> None:
    """Writes the picture of the one code cell whose source has `title`."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and title in cell.source]
    (picture,) = [out.data["image/png"] for out in cell.outputs if "image/png" in out.get("data", {})]
    path.write_bytes(base64.b64decode(picture))


def main(argv: list[str] | None = None) -> int:
    """Makes and runs the notebooks named, or all; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.build", description=__doc__.splitlines()[0])
    names = [source.stem for source in SOURCES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)} (default: all)")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.names) - set(names))
    if unknown:
        parser.error(f"no notebook {unknown[0]} (there are: {', '.join(names)})")
    for source in SOURCES:
        if args.names and source.stem not in args.names:
            continue
        notebook = make(source)
        try:
            seconds = execute(notebook, HERE)
        except CellExecutionError as error:
            print(f"{source.stem}: {error}", file=sys.stderr)
            return 1
        path = HERE / f"{source.stem}.ipynb"
        nbformat.write(notebook, path)
        if source.stem.startswith("02"):
            copy_figure(notebook, "plots.token_tree(", ROOT / "docs" / "images" / "token_tree.png")
        print(f"{path.name}: {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
