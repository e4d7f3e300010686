"""The config.json that a GGUF file stands for, from its metadata and the names of its tensors.

llama.cpp's converter wrote the metadata from such a config; `parse_target_config` then checks it as it does any other.
"""

import math
from typing import Any

import numpy as np

from convert.gguf_file import GGUFFile
from dflash_jax.errors import UserError

# GGUF's architecture -> model_type.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen35": "qwen3_5_text"}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen35": "Qwen3_5ForCausalLM"}
# llama.cpp's own, where a file names none.
_DEFAULT_ROPE_BASE = 10000.0
# Llama 3.x: (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings) of the published models.
_LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


def config_json(file: GGUFFile) -> dict[str, Any]:
    """What the model's config.json says, as far as shapes and arithmetic depend on it.

    Raises:
      UserError: another architecture, or a feature that no config.json of these has.
    """
    kind = file.architecture
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{file.path}: GGUF architecture {kind!r} is not supported (supported: {known})")
    for key in ("expert_count", "nextn_predict_layers"):
        if file.get(key):
            raise UserError(f"{file.path}: '{kind}.{key}' = {file.get(key)} is not supported")
    names = {tensor.name for tensor in file.tensors}
    table = next((tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None)
    if table is None:
        raise UserError(f"{file.path}: no token_embd.weight; not the whole model")
    heads = file.get("attention.head_count")
    hidden = file.get("embedding_length")
    # A hybrid's file may list heads layer by layer, 0 where there is no attention.
    kv_heads = file.get("attention.head_count_kv", heads)
    kv_heads = max(kv_heads) if isinstance(kv_heads, list) else kv_heads
    head_dim = file.get("attention.key_length") or (hidden // heads if hidden and heads else None)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": ARCHITECTURES[kind],
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.get("feed_forward_length"),
        "num_hidden_layers": file.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": file.get("context_length"),
        "rms_norm_eps": _short(file.get("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file, head_dim),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        **_special_ids(file),
    }
    if kind == "qwen35":
        values = file.get("ssm.time_step_rank")
        config |= {
            "full_attention_interval": file.get("full_attention_interval", 4),
            "linear_conv_kernel_dim": file.get("ssm.conv_kernel"),
            "linear_key_head_dim": file.get("ssm.state_size"),
            "linear_num_key_heads": file.get("ssm.group_count"),
            "linear_num_value_heads": values,
            "linear_value_head_dim": (file.get("ssm.inner_size") or 0) // (values or 1),
        }
    return config


def _short(value: float | None) -> float | None:
    """A number that was written in fp32 as it was meant: 9.99999974e-06 is 1e-05."""
    return None if value is None else float(f"{value:.6g}")


def _rope(file: GGUFFile, head_dim: int | None) -> dict[str, Any]:
    base = _short(file.get("rope.freq_base", _DEFAULT_ROPE_BASE))
    rotated = file.get("rope.dimension_count", head_dim)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if head_dim and rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = file.get("rope.scaling.type", "none")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": file.get("rope.scaling.factor")}
        if file.get("rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = file.get("rope.scaling.original_context_length")
        return rope
    factors = next((tensor for tensor in file.tensors if tensor.name == "rope_freqs.weight"), None)
    return rope if factors is None else rope | _llama3(file, factors.rows(slice(None)), base or 0.0, rotated)


def _llama3(file: GGUFFile, factors: np.ndarray, base: float, rotated: int) -> dict[str, Any]:
    """The llama3 scaling whose divisors of the frequencies are `rope_freqs.weight`: all that a file keeps of it."""
    for factor, low, high, original in _LLAMA3:
        turns = original * base ** (-np.arange(0, rotated, 2) / rotated) / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1)
        if np.allclose(factors, 1 / ((1 - keep) / factor + keep), rtol=1e-4):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise UserError(f"{file.path}: rope_freqs.weight is not the scaling of a published Llama 3 model")


def _special_ids(file: GGUFFile) -> dict[str, Any]:
    keys = {name: f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "padding")}
    ids = {name: file.metadata.get(key) for name, key in keys.items()}
    stops = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    tokens = file.metadata.get("tokenizer.ggml.tokens") or []
    if file.architecture.startswith("qwen") and "<|endoftext|>" in tokens:
        # These models stop on either; a file names one.
        stops.append(tokens.index("<|endoftext|>"))
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(stops))}
    return found | {
        key: ids[name] for key, name in (("bos_token_id", "bos"), ("pad_token_id", "padding")) if ids[name] is not None
    }
