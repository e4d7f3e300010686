"""Which products run with the Pallas kernel, and in which config: measured, a file a kind of device, nothing else.

A product of a few rows takes as long as its weights take to be read, so a kernel wins or loses by a few per cent, and
by how much depends on the device and on the shape. What no file names is XLA's. Files of measured devices come with the
package; `python -m benchmarks.tune` measures the products of a model on the device at hand and keeps them in the user's
cache folder, where they take precedence (in runs of one process).
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import jax

from pallas_kernels.linear.configs import Config

SHIPPED = Path(__file__).parent / "tables"
# Rows that a product's tiles are cut for, and a single one, for which XLA has kernels without tiles.
ROWS = (1, 16, 32, 64)


@dataclasses.dataclass(frozen=True, order=True)
class Product:
    """A product as tables know it, in bfloat16.

    Attributes:
      rows: of x, rounded up to one of `ROWS`.
      out: rows of the weights (of a half, with SwiGLU).
      columns: of the weights.
      swiglu: see `linear`.
    """

    rows: int
    out: int
    columns: int
    swiglu: bool = False

    @classmethod
    def of(cls, rows: int, out: int, columns: int, swiglu: bool) -> "Product":
        """With any number of rows up to the last of `ROWS`."""
        return cls(next(r for r in ROWS if r >= rows), out, columns, swiglu)


def user_folder() -> Path:
    """Where `python -m benchmarks.tune` keeps what it has measured."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "dflash-jax" / "linear"


def file_name(device_kind: str) -> str:
    """Of the table of a kind of device."""
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") + ".json"


def read(path: Path) -> dict[Product, Config | None]:
    """A table's products, with None for those that are left to XLA.

    Raises:
      ValueError: the file is not a table.
    """
    try:
        entries = json.loads(path.read_text())["products"]
        return {
            Product(*entry["product"]): None if entry["config"] is None else Config(*entry["config"])
            for entry in entries
        }
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a table of products ({error}); remove it") from error


def write(path: Path, found: Mapping[Product, Config | None], notes: Mapping[str, object]) -> None:
    """Writes a table; `notes` say what measured it."""
    entries = [
        {"product": dataclasses.astuple(p), "config": None if c is None else dataclasses.astuple(c)}
        for p, c in sorted(found.items())
    ]
    lines = ",\n".join("    " + json.dumps(entry) for entry in entries)
    head = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in notes.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n  {head},\n  "products": [\n{lines}\n  ]\n}}\n')


@functools.cache
def _table(device_kind: str) -> dict[Product, Config | None]:
    found: dict[Product, Config | None] = {}
    # Processes of one run must make the same program, and have homes of their own.
    for folder in (SHIPPED, user_folder()) if jax.process_count() == 1 else (SHIPPED,):
        path = folder / file_name(device_kind)
        if path.is_file():
            found |= read(path)
    return found


def forget() -> None:
    """Files are read again."""
    _table.cache_clear()


def digest(device_kind: str) -> str:
    """Stands for all that programs take from tables."""
    return repr(sorted((p, c and dataclasses.astuple(c)) for p, c in _table(device_kind).items()))


def lookup(device_kind: str, product: Product) -> Config | None:
    """The config of a product that the kernel serves best on this kind of device.

    A single row that has not been measured is taken for a few.
    """
    found = _table(device_kind)
    if product.rows == 1 and product not in found:
        product = dataclasses.replace(product, rows=ROWS[1])
    return found.get(product)
