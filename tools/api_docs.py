"""Writes docs/api.md from the docstrings of the public names: `python tools/api_docs.py`."""

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dflash_jax  # noqa: E402
from dflash_jax import plots, trace  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
_INTRO = """# API

Made from the docstrings by `python tools/api_docs.py`; a test fails when it is out of date. Shapes are in brackets: B
slots, L depths, N rows of a tree, V the vocabulary. How the parts fit is in [architecture.md](architecture.md).
"""


def public_members(owner: Any) -> list[tuple[str, Any]]:
    """Functions and properties of a class that its users call, in the order of the source."""
    return [
        (name, value)
        for name, value in vars(owner).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    ]


def signature(name: str, value: Any) -> str:
    """One line of Python without annotations of the result."""
    if isinstance(value, property) or (inspect.isclass(value) and issubclass(value, Exception)):
        return name
    parameters = inspect.signature(value).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters if p.name not in ("self", "cls")]
    return name + str(inspect.Signature(bare))


def section(title: str, value: Any, level: int) -> list[str]:
    """Heading, signature and docstring."""
    text = inspect.getdoc(value.fget if isinstance(value, property) else value)
    assert text, f"{title} has no docstring"
    return [f"{'#' * level} {title}", "", "```text", signature(title.rpartition(".")[2], value), "", text, "```", ""]


def page() -> str:
    """The whole of docs/api.md."""
    lines = [_INTRO, "## dflash_jax", ""]
    for name in dflash_jax.__all__:
        value = getattr(dflash_jax, name)
        lines += section(f"dflash_jax.{name}", value, 3)
        if inspect.isclass(value) and not issubclass(value, Exception):
            for member, function in public_members(value):
                lines += section(f"{name}.{member}", function, 4)
    for module in (trace, plots):
        lines += [f"## {module.__name__}", "", inspect.getdoc(module) or "", ""]
        for name, value in vars(module).items():
            own = getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
            if own and (inspect.isfunction(value) or dataclasses.is_dataclass(value)):
                lines += section(f"{module.__name__}.{name}", value, 3)
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
