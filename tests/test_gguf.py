"""GGUF files: every block format against its definition, and what llama.cpp's converter changes, undone."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind

from convert import load_target, load_tokenizer, resolve_model, stored_dtype
from convert.__main__ import main
from convert.gguf_source import parameter_name
from convert.keymap import module_names
from dflash_jax.config import parse_target_config
from dflash_jax.errors import UserError
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.sharding import make_mesh
from dflash_jax.target import Target
from dflash_jax.tokenizer import Tokenizer

# Rows of 256, which is a block of the K formats.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "eos_token_id": [2, 5], "bos_token_id": 1,
    "pad_token_id": 3,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    **LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True
}  # fmt: skip
QWEN35: dict[str, Any] = {
    **LLAMA, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4,
    "head_dim": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
ARCHITECTURE = {"llama": "llama", "qwen3": "qwen3", "qwen3_5_text": "qwen35"}
Tensors = dict[str, np.ndarray]


def parameters(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Random values of all parameters of a model."""
    rng = np.random.default_rng(seed)
    names = module_names(Target(parse_target_config(config), rngs=nnx.Rngs(0)))
    return {name: rng.normal(size=leaf.get_value().shape).astype(np.float32) for name, leaf in names.items()}


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does with q and k of a Llama, head by head: rows i and i + half side by side."""
    out = []
    for head in np.split(rows, heads):
        half = len(head) // 2
        out += [part for i in range(half) for part in (head[i], head[half + i])]
    return np.stack(out)


def tiled(rows: np.ndarray, keys: int, heads: int) -> np.ndarray:
    """... with value heads of a Gated DeltaNet layer: first those that are first of their key head, and so on."""
    parts = np.split(rows, heads)
    ratio = heads // keys
    return np.concatenate([parts[key * ratio + r] for r in range(ratio) for key in range(keys)])


def converted(config: dict[str, Any], values: Tensors) -> Tensors:
    """Tensors as llama.cpp's converter writes them, by GGUF's own map of names."""
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURE[config["model_type"]].upper())
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    found = {}
    for name, value in values.items():
        if config["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = neighbours(value, config["num_attention_heads" if ".q_" in name else "num_key_value_heads"])
        if config["model_type"] == "qwen3_5_text":
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                value = value + 1
            keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
            first = 2 * keys * config["linear_key_head_dim"]
            part = name.rpartition(".linear_attn.")[2]
            if part in ("in_proj_qkv.weight", "conv1d.weight"):
                value = np.concatenate([value[:first], tiled(value[first:], keys, heads)])
                value = value.reshape(len(value), -1)
            elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log"):
                value = tiled(value, keys, heads)
                value = -np.exp(value) if part == "A_log" else value
            elif part == "out_proj.weight":
                value = tiled(value.T, keys, heads).T
        whole = name if name.startswith("lm_head") else f"model.{name}"
        whole = whole.replace("dt_bias", "dt_proj.bias")
        stored = names.get_name(whole, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        found[stored] = np.ascontiguousarray(value)
    return found


def write(
    path: Path,
    config: dict[str, Any],
    tensors: Tensors,
    kind: Kind = Kind.F32,
    extra: dict[str, Any] | None = None,
    vocabulary: Path | None = None,
) -> Path:
    """A GGUF file; `kind` of matrices, whose bytes are given where the package cannot quantise."""
    name = ARCHITECTURE[config["model_type"]]
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1)))
    if "head_dim" in config:
        writer.add_key_length(dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if name == "qwen35":
        writer.add_full_attention_interval(config["full_attention_interval"])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    for key, value in (extra or {}).items():
        adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        adders[type(value)](key, value)
    if vocabulary is not None:
        add_vocabulary(writer, vocabulary)
    else:
        writer.add_bos_token_id(config["bos_token_id"])
        writer.add_eos_token_id(config["eos_token_id"][0])
        writer.add_eot_token_id(config["eos_token_id"][1])
        writer.add_pad_token_id(config["pad_token_id"])
    for key, value in tensors.items():
        if value.dtype == np.uint8:
            writer.add_tensor(key, value, raw_dtype=kind)
        elif value.ndim == 2 and "conv1d" not in key and kind != Kind.F32:
            writer.add_tensor(key, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The tokenizer of a Hugging Face folder, as the converter writes it."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    added = {entry["id"]: entry for entry in raw["added_tokens"]}
    tokens = {number: token for token, number in raw["model"]["vocab"].items()}
    tokens |= {number: entry["content"] for number, entry in added.items()}
    kinds = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([tokens[i] for i in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    of = {token: number for number, token in tokens.items()}
    writer.add_eos_token_id(of[config["eos_token"]])
    writer.add_pad_token_id(of[config["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def loaded(path: Path, dtype: Any = jnp.float32, mesh: Any = None) -> Tensors:
    return {k: np.asarray(leaf.get_value()) for k, leaf in module_names(load_target(path, dtype, mesh)[1]).items()}


# --- block formats, a value at a time ------------------------------------------------------------------------------


def half(raw: np.ndarray) -> float:
    return float(raw.view(np.float16)[0])


def q8_0(b: np.ndarray, i: int) -> float:
    return half(b[:2]) * int(b[2 + i].view(np.int8))


def q4_0(b: np.ndarray, i: int) -> float:
    return half(b[:2]) * ((int(b[2 + i % 16]) >> (4 * (i // 16)) & 15) - 8)


def q4_1(b: np.ndarray, i: int) -> float:
    return np.float32(half(b[:2])) * np.float32(int(b[4 + i % 16]) >> (4 * (i // 16)) & 15) + np.float32(half(b[2:4]))


def q4_k(b: np.ndarray, i: int) -> float:
    """Eight groups of 32 with 6-bit scales and minima in twelve bytes."""
    group, packed = i // 32, b[4:16].astype(int)
    if group < 4:
        scale, low = packed[group] & 63, packed[group + 4] & 63
    else:
        scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
        low = packed[group + 4] >> 4 | packed[group] >> 6 << 4
    nibble = int(b[16 + 32 * (group // 2) + i % 32]) >> (4 * (group % 2)) & 15
    d, m = np.float32(half(b[:2])) * np.float32(scale), np.float32(half(b[2:4])) * np.float32(low)
    return d * np.float32(nibble) - m


def q6_k(b: np.ndarray, i: int) -> float:
    """Sixteen groups of 16 with 8-bit scales; four low and two high bits apart."""
    part, place = i // 128, i % 128
    low = int(b[64 * part + place % 64]) >> (4 * (place // 64)) & 15
    high = int(b[128 + 32 * part + place % 32]) >> (2 * (place // 32)) & 3
    scale = int(b[192 + i // 16].view(np.int8))
    return np.float32(half(b[208:210])) * np.float32(scale) * np.float32((low | high << 4) - 32)


# Bytes and values a block, where its half-precision numbers are, and the definition.
BLOCKS = {
    Kind.Q8_0: (34, 32, (0,), q8_0),
    Kind.Q4_0: (18, 32, (0,), q4_0),
    Kind.Q4_1: (20, 32, (0, 2), q4_1),
    Kind.Q4_K: (144, 256, (0, 2), q4_k),
    Kind.Q6_K: (210, 256, (208,), q6_k),
}


def random_blocks(kind: Kind, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    size, values, halves, _ = BLOCKS[kind]
    blocks = rng.integers(0, 256, (rows, columns // values, size), np.uint8)
    for place in halves:
        numbers = rng.uniform(0.001, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_quantised_matrices_are_what_the_format_defines(tmp_path: Path, kind: Kind):
    rng = np.random.default_rng(3)
    config = QWEN3 | {"num_hidden_layers": 1}
    values = parameters(config)
    stored, expected = converted(config, values), dict(values)
    size, count, _, define = BLOCKS[kind]
    for name in [n for n, value in stored.items() if value.ndim == 2]:
        shape = stored[name].shape
        raw = stored[name] = random_blocks(kind, *shape, rng)
        whole = parameter_name(name).removeprefix("model.")
        expected[whole] = np.array(
            [[define(row[c // count * size :], c % count) for c in range(shape[1])] for row in raw], np.float32
        )
    path = write(tmp_path / "model.gguf", config, stored, kind)
    assert stored_dtype(path) == jnp.bfloat16
    for found in (loaded(path), loaded(path, mesh=make_mesh(2))):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)
    narrow = loaded(path, jnp.bfloat16)
    np.testing.assert_array_equal(narrow["norm.weight"], expected["norm.weight"].astype(jnp.bfloat16))
    table = expected["embed_tokens.weight"].astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(narrow["embed_tokens.weight"].astype(np.float32), table, rtol=1e-2)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_floats_are_read_as_they_are(tmp_path: Path, kind: Kind):
    values = parameters(LLAMA)
    path = write(tmp_path / "model.gguf", LLAMA, converted(LLAMA, values), kind)
    assert stored_dtype(path) == (jnp.bfloat16 if kind == Kind.BF16 else jnp.float32)
    rounded = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.BF16: jnp.bfloat16}[kind]
    found = loaded(path)
    for name, value in values.items():
        expected = value.astype(rounded).astype(np.float32) if value.ndim == 2 else value
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


# --- what the converter changes ------------------------------------------------------------------------------------

SCALED = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [LLAMA, LLAMA | {"attention_bias": True, "mlp_bias": True}, QWEN3, QWEN35]
    + [LLAMA | {"rope_parameters": rope} for rope in SCALED.values()],
    ids=["llama", "llama with biases", "qwen3", "qwen35", *SCALED],
)
def test_config_and_weights_are_those_converted(tmp_path: Path, config: dict[str, Any]):
    values = parameters(config)
    path = write(tmp_path / "model.gguf", config, converted(config, values))
    found, _ = load_target(path, jnp.float32)
    assert found == parse_target_config(config)
    for name, value in loaded(path).items():
        np.testing.assert_allclose(value, values[name], rtol=1e-5, atol=2e-7, err_msg=name)


def test_quantised_rows_and_columns_are_reordered_too(tmp_path: Path):
    """Values that Q8_0 holds exactly, so that a wrong place cannot hide in rounding."""
    values = parameters(QWEN35)
    rng = np.random.default_rng(5)
    for name, value in values.items():
        if value.ndim == 2 and min(value.shape) >= 32:
            values[name] = rng.integers(-127, 128, value.shape).astype(np.float32)
            values[name][:, ::32] = 127
    tensors = converted(QWEN35, values)
    tensors = {k: gguf.quants.quantize(v, Kind.Q8_0) if np.abs(v).max() == 127 else v for k, v in tensors.items()}
    found = loaded(write(tmp_path / "model.gguf", QWEN35, tensors, Kind.Q8_0))
    exact = [name for name, value in values.items() if value.max() == 127]
    assert any("out_proj" in name for name in exact) and any("in_proj_qkv" in name for name in exact)
    for name in exact:
        np.testing.assert_array_equal(found[name], values[name], err_msg=name)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_in_its_divisors(tmp_path: Path, factor: float):
    scaling = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LLAMA | {"rope_parameters": scaling}
    tensors = converted(config, parameters(config))
    divisors = []
    for i in range(0, 32, 2):  # transformers, `_compute_llama3_parameters`, one frequency at a time
        length = 2 * np.pi * 5e5 ** (i / 32)
        smooth = (8192 / length - 1) / 3
        divisors.append(factor if length > 8192 else 1 if length < 2048 else 1 / ((1 - smooth) / factor + smooth))
    tensors["rope_freqs.weight"] = np.array(divisors, np.float32)
    path = write(tmp_path / "model.gguf", config, tensors)
    assert load_target(path, jnp.float32)[0].rope == parse_target_config(config).rope
    tensors["rope_freqs.weight"][-1] = 7
    other = write(tmp_path / "other.gguf", config, tensors)
    fails(other, "rope_freqs.weight is not the scaling of a published Llama 3 model")


TEXTS = (
    "Hello, world! It's 12345 o'clock.", "  indented\n\n\tcode = x[1:-1]  # ok\r\n",
    "Grüße, 世界 ناس ক্ষ e\u0301 \U0001f600",
    "<|im_start|>user\nHi<|im_end|>\n", "", " ", "DON'T 3.14e-10",
)  # fmt: skip


def test_tokenizer_and_template_are_those_of_the_folder(tmp_path: Path):
    config = QWEN35 | {"vocab_size": 2048}
    path = write(tmp_path / "model.gguf", config, converted(config, parameters(config)), vocabulary=BUNDLED_TARGET)
    found, expected = load_tokenizer(path), Tokenizer.from_folder(BUNDLED_TARGET)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text), text
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert found.special_ids == expected.special_ids and found.vocab_size == expected.vocab_size
    assert (found.eos_token_id, found.pad_token_id) == (expected.eos_token_id, expected.pad_token_id)
    chat = [{"role": "user", "content": "Hi"}]
    assert found.apply_chat_template(chat) == expected.apply_chat_template(chat)
    # The model stops on its end of turn and on its end of text, of which the file names one.
    eos = expected.token_to_id("<|im_end|>"), expected.token_to_id("<|endoftext|>")
    assert load_target(path, jnp.float32)[0].eos_token_ids == eos

    assert main([str(path), str(tmp_path / "orbax"), "--quiet"]) == 0
    assert Tokenizer.from_folder(tmp_path / "orbax").encode(TEXTS[0]) == expected.encode(TEXTS[0])
    again, first = loaded(tmp_path / "orbax"), loaded(path)
    assert all(np.array_equal(again[name], first[name]) for name in first)


def pieces(path: Path, rule: str, text: str) -> list[str]:
    """The pieces that a rule splits a text into, with a vocabulary of single bytes and one merge."""
    alphabet = sorted(Tokenizer.from_folder(BUNDLED_TARGET).backend.get_vocab(), key=len)[:256]
    assert all(len(token) == 1 for token in alphabet)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([*alphabet, "ab", "<s>"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    backend = load_tokenizer(path).backend
    return [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("smollm", ["It", "'s", " ", "2", "0", "2", "5", "!", "\n\n  ", " ok"]),
        ("llama-bpe", ["It", "'s", " ", "202", "5", "!\n\n", "  ", " ok"]),
        ("qwen2", ["It", "'s", " ", "2", "0", "2", "5", "!\n\n", "  ", " ok"]),
    ],
)
def test_rules_that_split_text(tmp_path: Path, rule: str, expected: list[str]):
    assert pieces(tmp_path / "vocabulary.gguf", rule, "It's 2025!\n\n   ok") == expected


# --- what is refused -----------------------------------------------------------------------------------------------


def fails(path: Path, *said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_target(path, jnp.float32)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    for part in said:
        assert part in str(caught.value)


def test_unsupported_files_are_refused_by_name(tmp_path: Path):
    tensors = converted(LLAMA, parameters(LLAMA))
    number = iter(range(99))

    def refused(*said: str, change: Tensors | None = None, **extra: Any) -> None:
        path = tmp_path / f"{next(number)}.gguf"
        fails(write(path, LLAMA, {**tensors, **(change or {})}, extra=extra), *said)

    known = "(supported: llama, qwen3, qwen35)"
    refused(f"architecture 'gemma3' is not supported {known}", **{"general.architecture": "gemma3"})
    refused("'llama.expert_count' = 8 is not supported", **{"llama.expert_count": 8})
    refused("one part of a split GGUF file", **{"split.count": 2})
    refused("rope scaling type 'longrope'", **{"llama.rope.scaling.type": "longrope"})
    refused("1 unknown: blk.0.attn_sinks.weight", change={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    numbers = {"output.weight": np.ones((40, 256), np.int32)}
    refused("tensors of type I32, which the package gguf cannot", change=numbers)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(40))
    fails(damaged, "not a readable GGUF file")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model 'llama' is not supported (supported: 'gpt2')"),
        ("tokenizer.ggml.pre", "falcon", "tokenizer.ggml.pre 'falcon' is not supported (supported: smollm"),
    ],
)
def test_unsupported_tokenizers_are_refused_by_name(tmp_path: Path, key: str, value: str, said: str):
    extra = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"} | {key: value}
    path = write(tmp_path / "model.gguf", LLAMA, {"token_embd.weight": np.ones((40, 256), np.float32)}, extra=extra)
    with pytest.raises(UserError) as caught:
        load_tokenizer(path)
    assert said in str(caught.value)


def test_files_and_folders_of_files_resolve(tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve_model(tmp_path / "a.gguf") == tmp_path / "a.gguf" == resolve_model(tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 GGUF files; name one of them: a\.gguf, b\.gguf"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path  # another kind of model
