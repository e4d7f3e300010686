"""Model folders -> modules: config first, names and shapes next, bytes last and straight to their devices."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from convert import gguf_tokenizer
from convert.gguf_config import config_json
from convert.gguf_file import SUFFIX, open_gguf
from convert.gguf_source import GGUFSource
from convert.keymap import (
    MTP_PREFIX,
    Abstract,
    KeyMap,
    abstract_drafter_module,
    abstract_mtp,
    abstract_mtp_module,
    abstract_target_module,
    match_drafter,
    match_target,
    module_names,
    module_shapes,
)
from convert.orbax_io import OrbaxSource, is_orbax
from convert.quantised import dequantised
from convert.safetensors_source import SafetensorsSource
from convert.source import Sharding, Source, nbytes, place, progress_bar, refuse_dtypes, shapes_of
from dflash_jax.config import (
    DrafterConfig,
    TargetConfig,
    check_pair,
    parse_drafter_config,
    parse_target_config,
    read_json,
)
from dflash_jax.drafter import Drafter
from dflash_jax.errors import UserError
from dflash_jax.mtp import MTP
from dflash_jax.sharding import check_divides, parameter_spec, row_order
from dflash_jax.target import Target
from dflash_jax.tokenizer import Tokenizer

_DRAFTER_ARCHITECTURE = "DFlashDraftModel"


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a model folder, or what stands for it in a GGUF file."""
    if folder.suffix == SUFFIX and folder.is_file():
        return config_json(open_gguf(folder))
    if not folder.exists():
        raise UserError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise UserError(f"{folder}: a file; expected the folder of a model")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: not a model folder (no config.json)")
    return read_json(folder / "config.json")


def read_target_config(folder: Path) -> TargetConfig:
    """The target's config, with generation_config.json where there is one."""
    raw = read_config(folder)
    if folder.is_file():
        return parse_target_config(raw, None, str(folder))
    generation = folder / "generation_config.json"
    extra = read_json(generation) if generation.is_file() else None
    return parse_target_config(raw, extra, str(folder / "config.json"))


def open_source(folder: Path) -> Source:
    """The weights of a model folder (Orbax or safetensors) or GGUF file, quantised ones dequantised.

    Reads names and shapes only.
    """
    if folder.is_file():
        return GGUFSource(folder)
    if is_orbax(folder):
        return OrbaxSource(folder)
    source = SafetensorsSource(folder)
    config = folder / "config.json"
    return dequantised(source, read_json(config)) if config.is_file() else source


def is_drafter(raw: dict[str, Any]) -> bool:
    """Whether a config.json is that of a DFlash drafter of any generation."""
    return any("DFlash" in str(name) for name in raw.get("architectures") or [])


def open_drafter(
    folder: Path, target: TargetConfig | None
) -> tuple[DrafterConfig, Source, KeyMap, list[str]]:
    """Config, weights and key map of a drafter, checked against its target where one is given."""
    raw = read_config(folder)
    name = str(folder / "config.json")
    notes: list[str] = []
    given = (raw.get("dflash_config") or {}).get("target_layer_ids", raw.get("target_layer_ids"))
    # What config.json alone refuses (another architecture, DFlash2) is said before the weights are looked at.
    if given is not None or _DRAFTER_ARCHITECTURE not in (raw.get("architectures") or []):
        config, notes = parse_drafter_config(raw, name)
        source = open_source(folder)
        width = _fc_width(source)
    else:
        source = open_source(folder)
        width = _fc_width(source)
        config, notes = parse_drafter_config(raw, name, width)
    if target is not None:
        check_pair(target, config, str(folder), width)
    return config, source, match_drafter(config, shapes_of(source), str(folder)), notes


def _fc_width(source: Source) -> int | None:
    return next((i.shape[1] for i in source.tensors if i.name == "fc.weight" and len(i.shape) == 2), None)


def stored_dtype(folder: Path) -> jnp.dtype:
    """The dtype to run in that loses nothing: bfloat16 where most stored values are bfloat16, float32 otherwise.

    Float16 keeps three more bits of mantissa than bfloat16, so it needs float32.
    """
    sizes: dict[str, int] = {}
    for info in open_source(Path(folder)).tensors:
        sizes[info.dtype] = sizes.get(info.dtype, 0) + int(np.prod(info.shape, dtype=np.int64))
    most = max(sizes, key=lambda name: sizes[name], default="")
    return jnp.dtype(jnp.bfloat16 if most == "BF16" else jnp.float32)


def read_tensors(
    source: Source,
    names: dict[str, str],
    abstract: Abstract,
    sharding: Sharding,
    progress: bool | None,
    text: str,
) -> dict[str, jax.Array]:
    """Reads tensors by parameter name.

    Args:
      source: the checkpoint.
      names: parameter name -> tensor name.
      abstract: parameter name -> shape and dtype wanted.
      sharding: where each goes.
      progress: show a bar; None only on a terminal.
      text: the bar's label.
    """
    refuse_dtypes(source, names.values())
    parameter = {tensor: name for name, tensor in names.items()}
    requests = {tensor: place(name, abstract[name], sharding) for name, tensor in names.items()}
    total = sum(map(nbytes, requests.values()))
    with progress_bar(total, text, progress) as advance:
        return {parameter[tensor]: array for tensor, array in source.read(requests, advance)}


def fill(module: nnx.Module, values: dict[str, jax.Array]) -> None:
    """Puts arrays into an abstract module's parameters, in place; every parameter must be given."""
    for name, leaf in module_names(module).items():
        leaf.set_value(values[name])


def load_target(
    folder: str | Path,
    dtype: jax.typing.DTypeLike,
    sharding: Sharding | Mesh = None,
    *,
    progress: bool | None = None,
) -> tuple[TargetConfig, Target]:
    """Loads a target from a Hugging Face or Orbax folder, or from a GGUF file.

    On a mesh, the module is one device's part (see `dflash_jax.sharding`) and its parameters are those of the whole
    model, spread over the devices, each read by none but its own.

    Args:
      folder: the model's folder (see `convert.hub.resolve_model` for Hub ids).
      dtype: of weights and activations; the recurrence's gates stay float32.
      sharding: None (the default device), one sharding for all, a rule (parameter name, shape) -> sharding, or a mesh
        for tensor parallelism.
      progress: show a bar on stderr; None only on a terminal.

    Raises:
      UserError: one line that names the file or the tensors and says what is wrong.
    """
    folder = Path(folder)
    config = read_target_config(folder)
    source = open_source(folder)
    keys = match_target(config, shapes_of(source), str(folder))
    mesh, sharding = _on_mesh(sharding)
    if mesh is not None:
        check_divides(config, None, mesh.size)
    shapes = module_shapes(abstract_target_module(config, jnp.dtype(dtype)))
    values = read_tensors(source, keys.weights, shapes, sharding, progress, "target")
    if mesh is not None:
        values = {name: _own_rows(name, array, config, mesh) for name, array in values.items()}
    module = abstract_target_module(config, jnp.dtype(dtype), 1 if mesh is None else mesh.size)
    fill(module, values)
    return config, module


def _on_mesh(sharding: Sharding | Mesh) -> tuple[Mesh | None, Sharding]:
    """The mesh, if one is asked for, and where each parameter goes."""
    if not isinstance(sharding, Mesh):
        return None, sharding
    mesh = sharding
    return mesh, lambda name, shape: NamedSharding(mesh, parameter_spec(name))


def _own_rows(name: str, array: jax.Array, config: TargetConfig, mesh: Mesh) -> jax.Array:
    """Rows in the order of the devices that need them, exchanged between devices."""
    order = row_order(name, config, mesh.size)
    if order is None:
        return array
    axis = array.ndim - 2 if array.ndim == 3 and "experts" in name else 0
    return jax.jit(lambda rows: jnp.take(rows, order, axis=axis), out_shardings=array.sharding)(array)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder or of a GGUF file."""
    folder = Path(folder)
    return gguf_tokenizer.load_tokenizer(folder) if folder.is_file() else Tokenizer.from_folder(folder)


def load_drafter(
    folder: str | Path,
    target_config: TargetConfig | None,
    dtype: jax.typing.DTypeLike,
    sharding: Sharding | Mesh = None,
    *,
    progress: bool | None = None,
) -> tuple[DrafterConfig, Drafter, list[str]]:
    """Loads a drafter; arguments as in `load_target`. The third value says what had to be inferred.

    With a target's config the pair is checked (layers, vocabulary, width, taps) before any weight is read.
    """
    config, source, keys, notes = open_drafter(Path(folder), target_config)
    mesh, sharding = _on_mesh(sharding)
    if mesh is not None and target_config is not None:
        check_divides(target_config, config, mesh.size)
    shapes = module_shapes(abstract_drafter_module(config, jnp.dtype(dtype)))
    module = abstract_drafter_module(config, jnp.dtype(dtype), 1 if mesh is None else mesh.size)
    fill(module, read_tensors(source, keys.weights, shapes, sharding, progress, "drafter"))
    return config, module, notes


def has_head(folder: Path) -> bool:
    """Whether the weights in a target's folder include the multi-token-prediction head."""
    return any(tensor.name.startswith(MTP_PREFIX) for tensor in open_source(folder).tensors)


def load_mtp(
    folder: str | Path,
    dtype: jax.typing.DTypeLike,
    sharding: Sharding | Mesh = None,
    *,
    progress: bool | None = None,
) -> MTP | None:
    """The multi-token-prediction head of a target's folder; None where it has none. Arguments as in `load_target`."""
    folder = Path(folder)
    config = read_target_config(folder)
    source = open_source(folder)
    keys = match_target(config, shapes_of(source), str(folder))
    if not keys.mtp:
        return None
    mesh, sharding = _on_mesh(sharding)
    module = abstract_mtp_module(config, jnp.dtype(dtype), 1 if mesh is None else mesh.size)
    values = read_tensors(source, keys.mtp, abstract_mtp(config, jnp.dtype(dtype)), sharding, progress, "mtp head")
    fill(module, {name.removeprefix(MTP_PREFIX): array for name, array in values.items()})
    return module
