"""Every notebook runs from top to bottom on a fresh kernel, shows what it should, and is committed as its source is."""

from pathlib import Path

import pytest

reason = "nbclient, nbformat and ipykernel are not installed (the extra 'notebooks')"
pytest.importorskip("ipykernel", reason=reason)
pytest.importorskip("nbclient", reason=reason)
nbformat = pytest.importorskip("nbformat", reason=reason)

from nbclient.exceptions import CellExecutionError  # noqa: E402

from notebooks.build import HERE, SOURCES, execute, make, silent_cells  # noqa: E402

FIGURES = {"01": 1, "02": 4, "03": 2, "04": 1, "05": 1, "06": 2}


def figures(notebook) -> int:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return sum("image/png" in out.get("data", {}) for out in outputs)


@pytest.mark.filterwarnings("ignore:.*TCP without encryption")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_runs(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DFLASH_MODEL", "DFLASH_DRAFT_MODEL", "DFLASH_TP"):
        monkeypatch.delenv(name, raising=False)
    notebook = make(source)
    execute(notebook, HERE)
    assert silent_cells(notebook) == []
    assert figures(notebook) == FIGURES[source.stem[:2]]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_committed_notebooks_are_those_of_their_sources(source: Path) -> None:
    """`python -m notebooks.build` was run after the last change; outputs are there and none is an error."""
    written = nbformat.read(HERE / f"{source.stem}.ipynb", as_version=4)
    fresh = make(source)
    assert [(c.cell_type, c.source) for c in written.cells] == [(c.cell_type, c.source) for c in fresh.cells]
    nbformat.validate(written)
    assert silent_cells(written) == []
    assert figures(written) == FIGURES[source.stem[:2]]
    outputs = [out for cell in written.cells for out in cell.get("outputs", [])]
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    assert "/home/" not in str(outputs) and "/tmp/" not in str(outputs)
    numbers = [cell.execution_count for cell in written.cells if cell.cell_type == "code"]
    assert numbers == list(range(1, len(numbers) + 1))


def test_no_notebook_is_without_a_source() -> None:
    assert sorted(path.stem for path in HERE.glob("*.ipynb")) == [source.stem for source in SOURCES]


@pytest.mark.filterwarnings("ignore:.*TCP without encryption")
def test_errors_and_silence_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text("# %% [markdown]\n# # Title\n#\n# Text\n\n# %%\nx = 1\n\n# %%\nx + 1\n\n# %%\nprint('')\n")
    notebook = make(source)
    assert notebook.cells[0].source == "# Title\n\nText"
    assert silent_cells(notebook) == ["x + 1", "print('')"]  # nothing has run yet
    execute(notebook, tmp_path)
    assert silent_cells(notebook) == [] and notebook.cells[2].outputs[0].data["text/plain"] == "2"
    source.write_text("# %%\nNone\n\n# %%\n1 / 0\n")
    notebook = make(source)
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(notebook, tmp_path)
    assert silent_cells(notebook)[0] == "None"
