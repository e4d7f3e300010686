"""Quantised safetensors folders as sources of plain weights, dequantised while they are read.

`quantization_config` in config.json names the format; which weights are quantised is read off the tensors themselves.

    fp8                  X.weight (F8_E4M3), X.weight_scale_inv
    compressed-tensors   X.weight_packed, X.weight_scale, X.weight_shape [, X.weight_zero_point, X.weight_g_idx]
    awq                  X.qweight, X.qzeros, X.scales
    gptq                 X.qweight, X.qzeros, X.scales [, X.g_idx]

All become X.weight, [out, in]. Anything else is refused by its name.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from convert import dequantise
from convert.reader import FileSource, Quantised
from convert.safetensors_source import SafetensorsSource
from convert.source import TensorInfo
from dflash_jax.errors import UserError

# Where config.json says so; the second is older.
QUANTISATION = ("quantization_config", "compression_config")
# Method -> the ending of the tensor that stands for a weight, and those that belong to it, "?" for what may be absent.
_PARTS = {
    "fp8": ("weight", ("weight_scale_inv", "input_scale?")),
    "compressed-tensors": (
        "weight_packed",
        ("weight_scale", "weight_shape", "weight_zero_point?", "weight_g_idx?"),
    ),
    "awq": ("qweight", ("qzeros", "scales")),
    "gptq": ("qweight", ("qzeros", "scales", "g_idx?")),
}
# Dequantised weights run in bfloat16 unless more is asked for.
_DTYPE = "BF16"


def dequantised(source: SafetensorsSource, raw: dict[str, Any]) -> FileSource:
    """The source as one of plain weights; itself where config.json has no `quantization_config`.

    Raises:
      UserError: the format, or a variant of it, is not supported, or a part of a weight is missing.
    """
    settings = next((raw[key] for key in QUANTISATION if raw.get(key)), None)
    return QuantisedSource(source, settings) if settings else source


class QuantisedSource(FileSource):
    """A quantised safetensors folder; `tensors` are those of the plain checkpoint."""

    def __init__(self, source: SafetensorsSource, settings: dict[str, Any]):
        self.folder = source.folder
        self._source = source
        self._settings = settings
        self._method = _supported(settings, f"{source.folder / 'config.json'}: 'quantization_config'")
        self._weights: dict[str, dict[str, TensorInfo]] = {}
        stored = {info.name: info for info in source.tensors}
        main, others = _PARTS[self._method]
        taken: set[str] = set()
        for name, info in stored.items():
            base, _, ending = name.rpartition(".")
            if ending != main or (self._method == "fp8" and info.dtype != "F8_E4M3"):
                continue
            parts = {main: info}
            for other in others:
                key = f"{base}.{other.removesuffix('?')}"
                if key in stored:
                    parts[other.removesuffix("?")] = stored[key]
                elif not other.endswith("?"):
                    raise UserError(f"{self.folder}: {name} has no {key} ({self._method})")
            self._weights[f"{base}.weight"] = parts
            taken |= {part.name for part in parts.values()}
        plain = [info for info in source.tensors if info.name not in taken]
        weights = [TensorInfo(name, self._shape(name), _DTYPE) for name in self._weights]
        self.tensors = tuple(plain + weights)

    def _shape(self, name: str) -> tuple[int, ...]:
        """[out, in] of a dequantised weight."""
        parts = self._weights[name]
        match self._method:
            case "fp8":
                return parts["weight"].shape
            case "compressed-tensors":
                out, columns = (int(n) for n in self._stored(parts["weight_shape"]))
                return out, columns
            case "awq":
                inputs, words = parts["qweight"].shape
                return 8 * words, inputs
            case _:
                words, out = parts["qweight"].shape
                return out, 8 * words

    def _stored(self, info: TensorInfo) -> np.ndarray:
        return self._source._view(info.name, info.shape)

    def _place_of(self, name: str) -> Any:
        parts = self._weights.get(name)
        return self._source._place_of(name if parts is None else next(iter(parts.values())).name)

    def _view(self, name: str, shape: tuple[int, ...]) -> np.ndarray | Quantised:
        if name not in self._weights:
            return self._source._view(name, shape)
        arrays = {ending: self._stored(info) for ending, info in self._weights[name].items()}
        builders: dict[str, Callable[[str, tuple[int, ...], dict[str, np.ndarray]], dequantise.Rows]] = {
            "fp8": self._fp8, "compressed-tensors": self._packed, "awq": self._awq, "gptq": self._gptq,
        }  # fmt: skip
        return Quantised(shape, builders[self._method](name, shape, arrays))

    def _fp8(self, name: str, shape: tuple[int, ...], parts: dict[str, np.ndarray]) -> dequantise.Rows:
        high, wide = self._settings["weight_block_size"]
        scales = parts["weight_scale_inv"]
        expected = (-(-shape[0] // high), -(-shape[1] // wide))
        if scales.shape != expected:
            raise self._misfit(f"{name}_scale_inv", scales.shape, expected)
        return dequantise.fp8_blocks(parts["weight"], scales, (high, wide))

    def _packed(self, name: str, shape: tuple[int, ...], parts: dict[str, np.ndarray]) -> dequantise.Rows:
        packed, scales = parts["weight_packed"], parts["weight_scale"]
        bits = next(group["weights"]["num_bits"] for group in self._settings["config_groups"].values())
        expected = (shape[0], -(-shape[1] * bits // 32))
        if packed.shape != expected:
            raise self._misfit(f"{name}_packed", packed.shape, expected)
        if scales.ndim != 2 or len(scales) != shape[0] or shape[1] % scales.shape[1]:
            raise self._misfit(f"{name}_scale", scales.shape, (shape[0], "groups"))
        groups = parts.get("weight_g_idx", np.arange(shape[1]) // (shape[1] // scales.shape[1]))
        return dequantise.pack_quantized(packed, scales, parts.get("weight_zero_point"), groups, bits)

    def _awq(self, name: str, shape: tuple[int, ...], parts: dict[str, np.ndarray]) -> dequantise.Rows:
        groups = self._groups(name, shape, parts["scales"])
        return dequantise.awq(parts["qweight"], parts["qzeros"], parts["scales"], groups)

    def _gptq(self, name: str, shape: tuple[int, ...], parts: dict[str, np.ndarray]) -> dequantise.Rows:
        groups = parts.get("g_idx", self._groups(name, shape, parts["scales"]))
        offset = 0 if self._settings.get("checkpoint_format") == "gptq_v2" else 1
        return dequantise.gptq(parts["qweight"], parts["qzeros"], parts["scales"], groups, offset)

    def _groups(self, name: str, shape: tuple[int, ...], scales: np.ndarray) -> np.ndarray:
        """The group of each input; `group_size` −1 is one group for all."""
        size = self._settings.get("group_size", 128)
        size = shape[1] if size == -1 else size
        expected = (-(-shape[1] // size), shape[0])
        if scales.shape != expected:
            raise self._misfit(f"{name.removesuffix('weight')}scales", scales.shape, expected)
        return np.arange(shape[1]) // size

    def _misfit(self, name: str, found: tuple[int, ...], expected: tuple[Any, ...]) -> UserError:
        return UserError(
            f"{self.folder}: {name} is {list(found)}, its weight needs {list(expected)} ({self._method})"
        )


def _supported(settings: dict[str, Any], where: str) -> str:
    """The method, if this variant of it can be read; `UserError` naming what cannot."""
    method = settings.get("quant_method")
    if method not in _PARTS:
        raise UserError(f"{where}: quant_method {method!r} is not supported (supported: {', '.join(_PARTS)})")

    def check(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
        if value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise UserError(f"{where}: {method} with {key} = {value!r} is not supported (supported: {known})")

    match method:
        case "fp8":
            check("fmt", settings.get("fmt", "e4m3"), ("e4m3",))
            block = settings.get("weight_block_size")
            if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
                raise UserError(
                    f"{where}: fp8 with weight_block_size = {block!r} is not supported (needs two lengths)"
                )
        case "compressed-tensors":
            check("format", settings.get("format"), ("pack-quantized",))
            weights = [(g or {}).get("weights") or {} for g in (settings.get("config_groups") or {}).values()]
            if not weights:
                raise UserError(f"{where}: compressed-tensors without 'config_groups'")
            for group in weights:
                check("type", group.get("type"), ("int",))
                check("num_bits", group.get("num_bits"), (4, 8))
            bits = sorted({group["num_bits"] for group in weights})
            if len(bits) > 1:
                raise UserError(f"{where}: compressed-tensors with num_bits {bits} in one checkpoint is not supported")
        case _:
            check("bits", settings.get("bits"), (4,))
            if method == "awq":
                check("version", str(settings.get("version", "gemm")).lower(), ("gemm",))
            else:
                check("checkpoint_format", settings.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
    return method
