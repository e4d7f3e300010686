"""Quantised safetensors folders, each against the format's definition, one value at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from convert import load_target, save_target, stored_dtype
from convert.keymap import module_names
from dflash_jax.config import parse_target_config
from dflash_jax.errors import UserError
from dflash_jax.sharding import make_mesh
from dflash_jax.target import Target

# Widths that are no multiple of a block of 16 where a format allows it, and rows that start within a packed word.
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 48, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
Tensors = dict[str, np.ndarray]
GROUP = 32


def packed(values: np.ndarray, bits: int = 4) -> np.ndarray:
    """Unsigned values along the last axis into int32, lowest bits first."""
    per = 32 // bits
    values = np.pad(values, [(0, 0), (0, -values.shape[1] % per)])
    words = np.zeros((values.shape[0], values.shape[1] // per), np.uint32)
    for column in range(values.shape[1]):
        words[:, column // per] |= values[:, column].astype(np.uint32) << np.uint32(bits * (column % per))
    return words.view(np.int32)


def field(words: np.ndarray, row: int, place: int, bits: int = 4) -> int:
    """Value number `place` of a packed row."""
    per = 32 // bits
    return (int(words[row, place // per]) >> (bits * (place % per))) & ((1 << bits) - 1)


class Fp8:
    """128 × 128 blocks in the wild; 24 × 40 here, which divides nothing."""

    settings: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]}  # noqa: RUF012

    def write(self, name: str, out: int, columns: int, rng: np.random.Generator) -> Tensors:
        scales = rng.uniform(0.5, 2, (-(-out // 24), -(-columns // 40))).astype(jnp.bfloat16)
        values = rng.normal(0, 30, (out, columns)).astype(jnp.float8_e4m3fn)
        return {f"{name}.weight": values, f"{name}.weight_scale_inv": scales}

    def read(self, parts: Tensors, row: int, column: int) -> float:
        return float(parts["weight"][row, column]) * float(parts["weight_scale_inv"][row // 24, column // 40])


class Packed:
    """compressed-tensors; asymmetric and with reordered groups where asked for."""

    def __init__(self, bits: int = 4, zeros: bool = False, reordered: bool = False):
        self.bits, self.zeros, self.reordered = bits, zeros, reordered
        weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, "group_size": GROUP}
        self.settings = {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }  # fmt: skip

    def write(self, name: str, out: int, columns: int, rng: np.random.Generator) -> Tensors:
        groups, top = columns // GROUP, 1 << self.bits
        tensors = {
            f"{name}.weight_packed": packed(rng.integers(0, top, (out, columns)), self.bits),
            f"{name}.weight_scale": rng.uniform(0.01, 0.1, (out, groups)).astype(jnp.bfloat16),
            f"{name}.weight_shape": np.array([out, columns], np.int64),
        }
        if self.zeros:
            points = packed(rng.integers(0, top, (groups, out)), self.bits)
            tensors[f"{name}.weight_zero_point"] = np.ascontiguousarray(points.T)
        if self.reordered:
            tensors[f"{name}.weight_g_idx"] = rng.permutation(columns).astype(np.int32) // GROUP
        return tensors

    def read(self, parts: Tensors, row: int, column: int) -> float:
        offset = 1 << (self.bits - 1)
        group = int(parts["weight_g_idx"][column]) if self.reordered else column // GROUP
        value = field(parts["weight_packed"], row, column, self.bits) - offset
        if self.zeros:
            value -= field(parts["weight_zero_point"].T.copy(), group, row, self.bits) - offset
        return value * float(parts["weight_scale"][row, group])


class Awq:
    settings: dict[str, Any] = {  # noqa: RUF012
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True
    }  # fmt: skip

    def write(self, name: str, out: int, columns: int, rng: np.random.Generator) -> Tensors:
        groups = columns // GROUP
        return {
            f"{name}.qweight": packed(rng.integers(0, 16, (columns, out))),
            f"{name}.qzeros": packed(rng.integers(0, 16, (groups, out))),
            f"{name}.scales": rng.uniform(0.01, 0.1, (groups, out)).astype(np.float16),
        }

    def read(self, parts: Tensors, row: int, column: int) -> float:
        place = 8 * (row // 8) + (0, 4, 1, 5, 2, 6, 3, 7)[row % 8]
        group = column // GROUP
        value = field(parts["qweight"], column, place) - field(parts["qzeros"], group, place)
        return value * float(parts["scales"][group, row])


class Gptq:
    def __init__(self, version: str | None = None, reordered: bool = False):
        self.version, self.reordered = version, reordered
        self.settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": reordered}
        if version is not None:
            self.settings["checkpoint_format"] = version

    def write(self, name: str, out: int, columns: int, rng: np.random.Generator) -> Tensors:
        groups = columns // GROUP
        weight = packed(rng.integers(0, 16, (out, columns)))
        tensors = {
            f"{name}.qweight": np.ascontiguousarray(weight.T),
            f"{name}.qzeros": packed(rng.integers(0, 16, (groups, out))),
            f"{name}.scales": rng.uniform(0.01, 0.1, (groups, out)).astype(np.float16),
        }
        if self.reordered:
            tensors[f"{name}.g_idx"] = rng.permutation(columns).astype(np.int32) // GROUP
        return tensors

    def read(self, parts: Tensors, row: int, column: int) -> float:
        group = int(parts["g_idx"][column]) if self.reordered else column // GROUP
        zero = field(parts["qzeros"], group, row)
        if self.version != "gptq_v2":
            zero = (zero + 1) % 16  # stored one less
        return (field(parts["qweight"].T.copy(), row, column) - zero) * float(parts["scales"][group, row])


FORMATS: dict[str, Callable[[], Any]] = {
    "fp8": Fp8,
    "packed": Packed,
    "packed with zero points": lambda: Packed(zeros=True),
    "packed and reordered": lambda: Packed(reordered=True),
    "packed, 8 bits": lambda: Packed(bits=8, zeros=True),
    "awq": Awq,
    "gptq": Gptq,
    "gptq_v2": lambda: Gptq("gptq_v2"),
    "gptq reordered": lambda: Gptq(reordered=True),
}


def write_folder(
    folder: Path, form: Any, change: Callable[[Tensors], object] = lambda tensors: None
) -> dict[str, np.ndarray]:
    """A quantised folder; returns what its weights are by definition, in fp32, by parameter name.

    `change` may spoil what is stored.
    """
    module = Target(parse_target_config(CONFIG), rngs=nnx.Rngs(0))
    save_target(folder, CONFIG, module)
    rng = np.random.default_rng(7)
    expected, stored = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        if "proj" not in name:
            stored[name] = expected[name] = rng.normal(size=value.shape).astype(np.float32)
            continue
        base = name.removesuffix(".weight")
        parts = form.write(base, *value.shape, rng)
        stored |= parts
        own = {key.removeprefix(f"{base}."): part for key, part in parts.items()}
        expected[name] = np.array(
            [[form.read(own, row, column) for column in range(value.shape[1])] for row in range(len(value))],
            np.float32,
        )
    change(stored)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": form.settings}))
    return {name.removeprefix("model."): value for name, value in expected.items()}


def loaded(folder: Path, dtype: Any = jnp.float32, mesh: jax.sharding.Mesh | None = None) -> dict[str, np.ndarray]:
    module = load_target(folder, dtype, mesh)[1]
    return {name: np.asarray(leaf.get_value()) for name, leaf in module_names(module).items()}


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_what_the_format_defines(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("convert.reader._CHUNK_VALUES", 64 * 11)  # 11 rows at a time, across words and blocks
    expected = write_folder(tmp_path, FORMATS[form]())
    assert stored_dtype(tmp_path) == jnp.bfloat16
    mesh = make_mesh(2)
    for found, rounded in (
        (loaded(tmp_path), np.float32),
        (loaded(tmp_path, mesh=mesh), np.float32),
        (loaded(tmp_path, jnp.bfloat16), jnp.bfloat16),
    ):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value.astype(rounded), err_msg=name)


def test_what_is_saved_is_plain(tmp_path: Path):
    write_folder(tmp_path / "quantised", Fp8())
    raw = json.loads((tmp_path / "quantised" / "config.json").read_text())
    save_target(tmp_path / "plain", raw, load_target(tmp_path / "quantised", jnp.float32)[1])
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert loaded(tmp_path / "plain").keys() == loaded(tmp_path / "quantised").keys()


def fails(folder: Path, *said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_target(folder, jnp.float32)
    assert "\n" not in str(caught.value)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported (supported: fp8,"),
        (Fp8.settings | {"weight_block_size": None}, "fp8 with weight_block_size = None"),
        (Fp8.settings | {"fmt": "e5m2"}, "fp8 with fmt = 'e5m2'"),
        (Packed().settings | {"format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized'"),
        (Packed(bits=2).settings, "num_bits = 2"),
        (Awq.settings | {"version": "gemv"}, "awq with version = 'gemv'"),
        (Gptq().settings | {"bits": 3}, "gptq with bits = 3"),
        (Gptq("marlin").settings, "gptq with checkpoint_format = 'marlin'"),
    ],
)
def test_other_variants_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], said: str):
    write_folder(tmp_path, Fp8())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": settings}))
    fails(tmp_path, str(tmp_path / "config.json"), said)


@pytest.mark.parametrize(
    ("form", "lost"), [(Fp8(), "weight_scale_inv"), (Packed(), "weight_scale"), (Awq(), "qzeros"), (Gptq(), "scales")]
)
def test_a_lost_part_is_named(tmp_path: Path, form: Any, lost: str):
    write_folder(tmp_path, form, lambda tensors: tensors.pop(f"model.layers.0.mlp.up_proj.{lost}"))
    fails(tmp_path, f"has no model.layers.0.mlp.up_proj.{lost}", form.settings["quant_method"])


@pytest.mark.parametrize(("form", "part"), [(Fp8(), "weight_scale_inv"), (Packed(), "weight_scale"), (Awq(), "scales")])
def test_a_part_of_another_shape_is_named(tmp_path: Path, form: Any, part: str):
    name = f"model.layers.0.mlp.up_proj.{part}"
    write_folder(tmp_path, form, lambda tensors: tensors.update({name: tensors[name][:1]}))
    fails(tmp_path, f"{name} is [1, ", "needs")
