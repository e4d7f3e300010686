"""Resumable checkpoints: one Orbax folder a step under one directory. The only module that calls Orbax."""

import shutil
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

_PREFIX = "step_"


def steps(directory: Path) -> list[int]:
    """Steps with a whole checkpoint, ascending. Orbax renames a folder into place only once it is written."""
    found = [path.name.removeprefix(_PREFIX) for path in directory.glob(f"{_PREFIX}*")]
    return sorted(int(name) for name in found if name.isdigit())


def save(directory: Path, step: int, state: Any, keep: int = 2) -> Path:
    """Writes a pytree of arrays for `step` and deletes all but the newest `keep` checkpoints."""
    path = (directory / f"{_PREFIX}{step}").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    ocp.save(path, _as_dict(state), overwrite=True)
    for old in steps(directory)[:-keep]:
        shutil.rmtree(directory / f"{_PREFIX}{old}")
    return path


def restore(directory: Path, like: Any) -> tuple[int, Any] | None:
    """The newest checkpoint as a tree like `like`, or None if there is none."""
    found = steps(directory)
    if not found:
        return None
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), _as_dict(like)
    )
    loaded = ocp.load((directory / f"{_PREFIX}{found[-1]}").resolve(), abstract)
    return found[-1], jax.tree.unflatten(jax.tree.structure(like), [loaded[key] for key in _names(like)])


def _names(tree: Any) -> list[str]:
    """One flat name a leaf, so that a checkpoint does not depend on how a library nests its state."""
    return [jax.tree_util.keystr(path).strip(".") for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _as_dict(tree: Any) -> dict[str, Any]:
    return dict(zip(_names(tree), jax.tree.leaves(tree), strict=True))
