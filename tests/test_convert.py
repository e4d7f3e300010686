"""Checkpoints: the key map on full-size layouts, loading, saving, Orbax, and the ways a folder can be wrong."""

import json
import logging
import math
import shutil
import struct
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from convert import (
    abstract_target,
    load_drafter,
    load_mtp,
    load_target,
    match_drafter,
    match_target,
    resolve_model,
    save_drafter,
    save_target,
    stored_dtype,
)
from convert.__main__ import main
from convert.keymap import module_names
from dflash_jax.config import parse_drafter_config, parse_target_config
from dflash_jax.drafter import Drafter
from dflash_jax.errors import UserError
from dflash_jax.mtp import MTP
from dflash_jax.target import Target

TARGET = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_target_layers": 4,
    "block_size": 8,
    "rope_theta": 1e7,
    "dflash_config": {"mask_token_id": 47, "target_layer_ids": [1, 2]},
}
# The published layouts, written down from their documentation and not from our modules.
FULL_TARGET = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262144,
        "output_gate_type": "swish",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}
FULL_DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 64,
    "block_size": 16,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "sliding_window": 2048,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}


def full_attention_27b(prefix: str) -> dict[str, tuple[int, ...]]:
    attention = {
        "q_proj": (12288, 5120),
        "k_proj": (1024, 5120),
        "v_proj": (1024, 5120),
        "o_proj": (5120, 6144),
    }
    attention |= {"q_norm": (256,), "k_norm": (256,)}
    return {f"{prefix}self_attn.{k}.weight": s for k, s in attention.items()} | common_27b(prefix)


def common_27b(prefix: str) -> dict[str, tuple[int, ...]]:
    mlp: dict[str, tuple[int, ...]] = {
        "gate_proj": (17408, 5120),
        "up_proj": (17408, 5120),
        "down_proj": (5120, 17408),
    }
    norms = {f"{prefix}{k}.weight": (5120,) for k in ("input_layernorm", "post_attention_layernorm")}
    return {f"{prefix}mlp.{k}.weight": s for k, s in mlp.items()} | norms


def linear_attention_27b(prefix: str) -> dict[str, tuple[int, ...]]:
    names = {
        "in_proj_qkv.weight": (10240, 5120), "in_proj_z.weight": (6144, 5120), "in_proj_b.weight": (48, 5120),
        "in_proj_a.weight": (48, 5120), "conv1d.weight": (10240, 1, 4), "A_log": (48,), "dt_bias": (48,),
        "norm.weight": (128,), "out_proj.weight": (5120, 6144),
    }  # fmt: skip
    return {f"{prefix}linear_attn.{k}": s for k, s in names.items()} | common_27b(prefix)


def text_27b() -> dict[str, tuple[int, ...]]:
    root = "model.language_model."
    names: dict[str, tuple[int, ...]] = {
        f"{root}embed_tokens.weight": (248320, 5120),
        "lm_head.weight": (248320, 5120),
    }
    names[f"{root}norm.weight"] = (5120,)
    for layer in range(64):
        names |= (full_attention_27b if layer % 4 == 3 else linear_attention_27b)(f"{root}layers.{layer}.")
    return names


def mtp_27b() -> dict[str, tuple[int, ...]]:
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    names = {"mtp.fc.weight": (5120, 10240)} | {f"mtp.{k}.weight": (5120,) for k in norms}
    return names | full_attention_27b("mtp.layers.0.")


def drafter_27b() -> dict[str, tuple[int, ...]]:
    names: dict[str, tuple[int, ...]] = {
        "fc.weight": (5120, 25600),
        "hidden_norm.weight": (5120,),
        "norm.weight": (5120,),
    }
    attention = {
        "q_proj": (4096, 5120),
        "k_proj": (1024, 5120),
        "v_proj": (1024, 5120),
        "o_proj": (5120, 4096),
    }
    attention |= {"q_norm": (128,), "k_norm": (128,)}
    for layer in range(5):
        names |= {f"layers.{layer}.self_attn.{k}.weight": s for k, s in attention.items()}
        names |= common_27b(f"layers.{layer}.")
    return names


def values(tensors: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in tensors.values())


def test_full_size_target_layout_has_nothing_missing_and_nothing_left_over():
    text, mtp = text_27b(), mtp_27b()
    vision = {f"model.visual.blocks.{i}.weight": (1,) for i in range(333)}
    # The published total counts the vision tower, whose 460,730,096 values are what the other two leave.
    assert (len(text), len(mtp)) == (851, 15)
    assert values(text) + values(mtp) + 460_730_096 == 27_781_427_952
    keys = match_target(parse_target_config(FULL_TARGET), text | mtp | vision)
    assert (len(keys.weights), len(keys.mtp), len(keys.skipped)) == (851, 15, 333)
    assert sorted(keys.weights.values()) == sorted(text)
    assert sorted(keys.mtp.values()) == sorted(mtp)


def test_full_size_drafter_layout_has_nothing_missing_and_nothing_left_over():
    tensors = drafter_27b()
    config, notes = parse_drafter_config(FULL_DRAFTER)
    assert (len(tensors), values(tensors), notes) == (58, 1_730_213_120, [])
    assert sorted(match_drafter(config, tensors).weights) == sorted(tensors)


@pytest.mark.parametrize("name", ["model.language_model.layers.3.self_attn.q_norm.weight", "mtp.fc.weight"])
def test_full_size_layout_notices_one_missing_tensor(name):
    tensors = text_27b() | mtp_27b()
    del tensors[name]
    with pytest.raises(UserError, match=f"1 missing: {name}"):
        match_target(parse_target_config(FULL_TARGET), tensors)


@pytest.fixture(scope="module")
def target() -> Target:
    """A bf16 target whose every parameter differs from every other and from the constructor's defaults."""
    module = Target(parse_target_config(TARGET), dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    return scrambled(module, 2)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    config, _ = parse_drafter_config(DRAFTER)
    return scrambled(Drafter(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(1)), 3)


@pytest.fixture(scope="module")
def mtp(target) -> MTP:
    return scrambled(MTP(target.config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), 4)


def scrambled(module, seed: int):
    rng = np.random.default_rng(seed)
    for leaf in module_names(module).values():
        leaf.set_value(jnp.asarray(rng.standard_normal(leaf.get_value().shape), leaf.get_value().dtype))
    return module


def arrays(module) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf.get_value()) for name, leaf in module_names(module).items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert np.asarray(found[name]).tobytes() == np.asarray(array).tobytes(), name


@pytest.fixture
def folder(tmp_path, target) -> Path:
    save_target(tmp_path / "target", TARGET, target)
    return tmp_path / "target"


@pytest.fixture
def draft_folder(tmp_path, drafter) -> Path:
    save_drafter(tmp_path / "drafter", DRAFTER, drafter)
    return tmp_path / "drafter"


def rewrite(folder: Path, change) -> None:
    """Passes all tensors of a single-file folder through `change`."""
    save_file(
        change(load_file(folder / "model.safetensors")),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def reconfigure(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def fails(folder: Path, *parts: str) -> None:
    """Loading a target says, in one line, all of `parts`."""
    with pytest.raises(UserError) as caught:
        load_target(folder, jnp.bfloat16)
    one_line(caught.value, *parts)


def one_line(error: Exception, *parts: str) -> None:
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)


def test_target_round_trip_is_bit_exact(folder, target):
    config, loaded = load_target(folder, jnp.bfloat16)
    assert config == target.config
    same(arrays(loaded), arrays(target))
    assert stored_dtype(folder) == jnp.bfloat16
    stored = load_file(folder / "model.safetensors")
    assert {"model.embed_tokens.weight", "model.layers.0.linear_attn.A_log", "lm_head.weight"} <= set(stored)
    header = (folder / "model.safetensors").read_bytes()
    assert json.loads(header[8 : 8 + struct.unpack("<Q", header[:8])[0]])["__metadata__"] == {"format": "pt"}


def test_loaded_modules_compute(folder, draft_folder, target, drafter):
    config, loaded = load_target(folder, jnp.float32)
    hidden = jnp.ones((1, 2, 32))
    expected = np.asarray(target.lm_head.weight[...], np.float32).sum(1)
    np.testing.assert_allclose(loaded.logits(hidden)[0, 1], expected, rtol=1e-5, atol=1e-5)
    _, draft, notes = load_drafter(draft_folder, config, jnp.bfloat16)
    assert notes == []
    taps = jnp.ones((1, 3, 64), jnp.bfloat16)
    np.testing.assert_array_equal(draft.context_feature(taps), drafter.context_feature(taps))


def test_drafter_round_trip_is_bit_exact(draft_folder, drafter):
    config, loaded, _ = load_drafter(draft_folder, None, jnp.bfloat16)
    assert config == drafter.config
    same(arrays(loaded), arrays(drafter))


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_prefixes_vision_and_order(folder, target, prefix):
    def change(tensors):
        # Reversed and renamed: neither the order of tensors nor the layout of names may matter.
        renamed = {k.replace("model.", prefix, 1): v for k, v in reversed(tensors.items())}
        return {"model.visual.patch_embed.weight": np.zeros((3, 2), np.int8)} | renamed

    rewrite(folder, change)
    same(arrays(load_target(folder, jnp.bfloat16)[1]), arrays(target))


def test_shards_equal_the_single_file_and_replace_each_other(folder, target):
    save_target(folder, TARGET, target, max_shard_bytes=8192)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert not (folder / "model.safetensors").exists()
    assert all(sum(a.nbytes for a in load_file(shard).values()) <= 8192 for shard in shards)
    same(arrays(load_target(folder, jnp.bfloat16)[1]), arrays(target))
    save_target(folder, TARGET, target)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("stored", [np.float16, np.float32])
def test_other_float_dtypes_are_cast(folder, target, stored):
    rewrite(folder, lambda tensors: {k: v.astype(stored) for k, v in tensors.items()})
    loaded = arrays(load_target(folder, jnp.bfloat16)[1])
    assert stored_dtype(folder) == jnp.float32
    for name, array in arrays(target).items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array.astype(stored).astype(array.dtype))


def test_gates_stay_float32():
    config = parse_target_config(TARGET)
    kept = {name for name, leaf in abstract_target(config, jnp.bfloat16).items() if leaf.dtype == jnp.float32}
    gates = ("A_log", "dt_bias", "norm.weight")
    assert kept == {f"layers.{layer}.linear_attn.{gate}" for layer in range(3) for gate in gates}


def test_saving_in_another_dtype_keeps_the_gates(tmp_path, target):
    save_target(tmp_path / "wide", TARGET, target, dtype=jnp.float32)
    assert {array.dtype for array in load_file(tmp_path / "wide/model.safetensors").values()} == {
        np.dtype("float32")
    }
    _, wide = load_target(tmp_path / "wide", jnp.float32)
    save_target(tmp_path / "narrow", TARGET, wide, dtype=jnp.bfloat16)
    same(arrays(load_target(tmp_path / "narrow", jnp.bfloat16)[1]), arrays(target))


def test_saving_refuses_a_config_of_another_model(tmp_path, target):
    with pytest.raises(UserError, match="mis-shaped"):
        save_target(tmp_path / "wrong", TARGET | {"intermediate_size": 48}, target)
    assert not (tmp_path / "wrong").exists()


def test_tied_head(tmp_path):
    config = TARGET | {"tie_word_embeddings": True}
    module = scrambled(Target(parse_target_config(config), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), 5)
    save_target(tmp_path / "tied", config, module)
    assert "lm_head.weight" not in load_file(tmp_path / "tied/model.safetensors")
    same(arrays(load_target(tmp_path / "tied", jnp.bfloat16)[1]), arrays(module))
    rewrite(tmp_path / "tied", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
    same(arrays(load_target(tmp_path / "tied", jnp.bfloat16)[1]), arrays(module))
    rewrite(tmp_path / "tied", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"][:-1]})
    fails(tmp_path / "tied", "1 mis-shaped", "lm_head.weight is [47, 32]")


def test_mtp_is_kept_and_loaded_on_request(tmp_path, target, mtp):
    save_target(tmp_path / "with", TARGET, target, mtp=mtp)
    same(arrays(load_mtp(tmp_path / "with", jnp.bfloat16)), arrays(mtp))
    same(arrays(load_target(tmp_path / "with", jnp.bfloat16)[1]), arrays(target))
    rewrite(tmp_path / "with", lambda t: {k: v for k, v in t.items() if k != "mtp.norm.weight"})
    fails(tmp_path / "with", "1 missing: mtp.norm.weight")
    save_target(tmp_path / "without", TARGET, target)
    assert load_mtp(tmp_path / "without", jnp.bfloat16) is None


def test_tensor_parallel_placement(folder, draft_folder, target, drafter, tmp_path):
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def rule(name, shape):
        rows = name.endswith(("gate_proj.weight", "q_proj.weight", "fc.weight"))
        return NamedSharding(mesh, PartitionSpec("tp") if rows else PartitionSpec())

    assert main([str(folder), str(tmp_path / "orbax"), "--quiet"]) == 0
    for source in (folder, tmp_path / "orbax"):
        _, loaded = load_target(source, jnp.bfloat16, rule)
        same(arrays(loaded), arrays(target))
        gate = loaded.layers[0].mlp.gate_proj.weight.get_value()
        assert [shard.data.shape for shard in gate.addressable_shards] == [(20, 32), (20, 32)]
        assert loaded.norm.weight.get_value().sharding.is_fully_replicated
    _, draft, _ = load_drafter(draft_folder, target.config, jnp.bfloat16, rule)
    same(arrays(draft), arrays(drafter))
    assert [s.data.shape for s in draft.fc.weight.get_value().addressable_shards] == [(16, 64)] * 2


def test_orbax_round_trip(tmp_path, folder, target, mtp, capsys):
    save_target(folder, TARGET, target, mtp=mtp, max_shard_bytes=20000)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("hello")
    assert main([str(folder), str(tmp_path / "orbax")]) == 0
    total = sum(a.nbytes for a in arrays(target).values()) + sum(a.nbytes for a in arrays(mtp).values())
    assert f"{total:,} bytes in " in capsys.readouterr().out
    shutil.rmtree(folder)
    config, loaded = load_target(tmp_path / "orbax", jnp.bfloat16)
    assert config.eos_token_ids == (5, 6)
    same(arrays(loaded), arrays(target))
    same(arrays(load_mtp(tmp_path / "orbax", jnp.bfloat16)), arrays(mtp))
    names = {path.name for path in (tmp_path / "orbax").iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert not {"model.safetensors.index.json"} & names
    assert [path.name for path in tmp_path.iterdir()] == ["orbax"]  # no working folder left
    assert stored_dtype(tmp_path / "orbax") == jnp.bfloat16


def test_orbax_drafter_dtype_and_overwrite(tmp_path, draft_folder, drafter, target, capsys):
    out = tmp_path / "orbax"
    assert main([str(draft_folder), str(out)]) == 0
    same(arrays(load_drafter(out, target.config, jnp.bfloat16)[1]), arrays(drafter))
    assert main([str(draft_folder), str(out), "--dtype", "float32"]) == 2
    one_line(Exception(capsys.readouterr().err.strip()), f"{out}: exists", "--overwrite")
    assert stored_dtype(out) == jnp.bfloat16
    assert main([str(draft_folder), str(out), "--dtype", "float32", "--overwrite"]) == 0
    assert stored_dtype(out) == jnp.float32
    same(arrays(load_drafter(out, target.config, jnp.bfloat16)[1]), arrays(drafter))
    assert main([str(out), str(out), "--overwrite"]) == 2


@pytest.mark.parametrize("lost", ["state", "state/_METADATA"])
def test_damaged_orbax_folder(tmp_path, folder, caplog, lost):
    assert main([str(folder), str(tmp_path / "orbax"), "--quiet"]) == 0
    (tmp_path / "orbax" / lost).rename(tmp_path / "lost")
    caplog.clear()
    fails(tmp_path / "orbax", "orbax: Orbax cannot read this checkpoint")
    assert not caplog.records  # the error is the only line


def test_orbax_warnings_stay_off_stderr(tmp_path, folder, caplog, monkeypatch):
    # What Orbax does about lost data files: it logs a long warning and returns nothing.
    def metadata(path):
        logging.getLogger("absl").warning("many\nlines")
        return types.SimpleNamespace(metadata=None)

    assert main([str(folder), str(tmp_path / "orbax"), "--quiet"]) == 0
    monkeypatch.setattr("convert.orbax_io.ocp.metadata", metadata)
    fails(tmp_path / "orbax", "orbax: Orbax cannot read this checkpoint")
    assert not caplog.records


def test_failed_conversion_leaves_nothing(tmp_path, folder, capsys):
    rewrite(folder, lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"})
    assert main([str(folder), str(tmp_path / "orbax")]) == 2
    one_line(Exception(capsys.readouterr().err.strip()), "1 missing: model.norm.weight")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_every_misfit_is_named_in_one_line(folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.gate.bias"] = np.zeros(2, np.float32)
        tensors["model.lm_head.weight"] = np.zeros(2, np.float32)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1]
        tensors["model.language_model.layers.1.mlp.up_proj.weight"] = tensors[
            "model.layers.1.mlp.up_proj.weight"
        ]
        return tensors

    rewrite(folder, change)
    fails(
        folder,
        "1 missing: model.norm.weight",
        "2 unknown: ",
        "model.layers.0.mlp.gate.bias",
        "model.lm_head.weight",
        "1 doubled: ",
        "model.language_model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "1 mis-shaped: model.embed_tokens.weight is [47, 32], config.json gives [48, 32]",
    )


def test_long_lists_are_cut(folder):
    rewrite(folder, lambda t: {k: v for k, v in t.items() if ".mlp." not in k})
    fails(folder, "12 missing: ", " and 4 more")


def test_tensor_in_two_shards(folder, target):
    save_target(folder, TARGET, target, max_shard_bytes=20000)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    both = load_file(first) | load_file(second)
    save_file(both, second)
    fails(folder, "doubled: ", next(iter(load_file(first))))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_quantised_weights_are_refused_by_name(folder, dtype):
    # The same bytes under another dtype; safetensors itself has no writer for every one of them.
    data = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    tensors = {k: v for k, v in header.items() if k != "__metadata__"}
    position, body = 0, b""
    for name, entry in tensors.items():
        begin, end = entry["data_offsets"]
        chunk = data[8 + length + begin : 8 + length + end]
        if name == "model.layers.0.mlp.up_proj.weight":
            entry["dtype"], chunk = dtype, chunk[::2]
        entry["data_offsets"] = [position, position + len(chunk)]
        position += len(chunk)
        body += chunk
    text = json.dumps(tensors).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    fails(folder, f"model.layers.0.mlp.up_proj.weight is {dtype}", "quantised")


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_file(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    fails(folder, f"{path}: truncated safetensors file")


def test_damaged_files(folder):
    path = folder / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good + b"\0")
    fails(folder, str(path), "1 bytes past its last tensor")
    path.write_bytes(good[:8] + b"[" + good[9:])
    fails(folder, str(path), "not a safetensors file")
    path.write_bytes(good.replace(b'"shape":[48,32]', b'"shape":[48,31]', 1))
    fails(folder, str(path), "damaged safetensors header")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    fails(folder, str(path), "Git LFS pointer")


def test_shards_and_index_that_disagree(folder, target):
    save_target(folder, TARGET, target, max_shard_bytes=20000)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    files = sorted(folder.glob("*.safetensors"))

    index.write_text(json.dumps(good | {"weight_map": good["weight_map"] | {"model.extra": files[0].name}}))
    fails(folder, str(index), f"model.extra in {files[0].name}")
    index.write_text(
        json.dumps(good | {"weight_map": good["weight_map"] | {"model.extra": "../x.safetensors"}})
    )
    fails(folder, str(index), "'../x.safetensors'")
    index.write_text(json.dumps(good))
    shutil.copy(files[0], folder / "model.safetensors")
    fails(folder, "both model.safetensors and model.safetensors.index.json")
    (folder / "model.safetensors").unlink()
    files[1].unlink()
    fails(folder, str(folder), files[1].name, "missing")


def test_folders_that_are_no_models(tmp_path, folder):
    fails(tmp_path / "nowhere", f"{tmp_path / 'nowhere'}: no such folder")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "not a model folder (no config.json)")
    fails(folder / "config.json", "a file; expected the folder")
    (folder / "model.safetensors").unlink()
    fails(folder, "no weights")


def test_unknown_model_type(folder):
    reconfigure(folder, model_type="gpt2")
    fails(folder, "config.json", "'gpt2' is not supported")


def test_drafter_given_as_target(draft_folder):
    fails(draft_folder, "DFlash drafter", "--draft-model")


def draft_fails(folder: Path, target: Target, *parts: str) -> None:
    with pytest.raises(UserError) as caught:
        load_drafter(folder, target.config, jnp.bfloat16)
    one_line(caught.value, *parts)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_target_layers": 8}, "made for 8 layers"),
        ({"vocab_size": 64}, "vocabulary 64"),
        ({"hidden_size": 64}, "hidden_size 64"),
        (
            {"dflash_config": {"mask_token_id": 47, "target_layer_ids": [0, 1, 2]}},
            "fc.weight takes 64 features",
        ),
    ],
)
def test_drafter_of_another_target(draft_folder, target, fields, said):
    reconfigure(draft_folder, **fields)
    draft_fails(draft_folder, target, str(draft_folder), said)


def test_drafter_misfit_is_named(draft_folder, target):
    rewrite(draft_folder, lambda t: {f"model.{k}" if k == "norm.weight" else k: v for k, v in t.items()})
    draft_fails(draft_folder, target, "1 missing: norm.weight", "1 unknown: model.norm.weight")


def test_second_generation_drafter_is_refused_before_its_weights(draft_folder, target):
    reconfigure(draft_folder, architectures=["DFlash2DraftModel"], dflash_config={"mask_token_id": 47})
    (draft_folder / "model.safetensors").write_bytes(b"")
    draft_fails(draft_folder, target, "DFlash2DraftModel is not supported")


def test_missing_taps_are_inferred_and_said(draft_folder, target):
    reconfigure(draft_folder, dflash_config={"mask_token_id": 47})
    # Two taps of four layers by the default rule: round(1 + i · 0) is 1 twice, which is refused; of eight: 1 and 5.
    draft_fails(draft_folder, target, "target_layer_ids")
    reconfigure(draft_folder, num_target_layers=8)
    config, _, notes = load_drafter(draft_folder, None, jnp.bfloat16)
    assert config.target_layer_ids == (1, 5)
    assert len(notes) == 1
    assert "[1, 5]" in notes[0]


def test_resolve_model(tmp_path, monkeypatch):
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match="no such folder"):
        resolve_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no such folder"):
        resolve_model("./no/where")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file"):
        resolve_model(tmp_path / "file")

    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("some-org/some-model", "v1") == tmp_path
    assert asked == [("some-org/some-model", "v1", ["*.safetensors", "*.json", "*.jinja"])]


def test_hub_failure_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as caught:
        resolve_model("some-org/no-such-model")
    one_line(caught.value, "some-org/no-such-model: no such folder, and fetching it from the Hub failed: ")


def test_command_line_errors(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    one_line(Exception(captured.err.strip()), "error: ", "no such folder")
