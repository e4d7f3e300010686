"""Random weights and inputs of the parity cases, bit for bit the same for the oracle and for the tests.

Only a seed and a config are stored, no weights. Numpy may change the streams of its `Generator` methods between
versions, and `log` or `cos` may differ in the last bit between builds, so nothing here uses them: values are sums of
16-bit pieces of raw PCG64 output, whose stream numpy guarantees, scaled by one multiplication.

The scales keep fp32 well conditioned (the gated norm of a Gated DeltaNet layer amplifies heads whose output is nearly
zero) and the logits sensitive: every part of the model moves them by far more than the tolerance of the tests.
"""

import hashlib
import zlib
from typing import Any

import numpy as np

# Standard deviation of one 16-bit piece, uniform on 0 … 2^16 - 1, times that of a sum of four.
_SUM_STD = 2.0 * ((2.0**32 - 1.0) / 12.0) ** 0.5


def normal(seed: int, name: str, shape: tuple[int, ...], std: float = 1.0, mean: float = 0.0) -> np.ndarray:
    """Bell-shaped fp32 values (a sum of four uniforms, so within 3.5 standard deviations) for one named tensor."""
    count = int(np.prod(shape))
    raw = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(count)
    pieces = raw[:, None] >> np.arange(0, 64, 16, dtype=np.uint64) & np.uint64(0xFFFF)
    centred = pieces.sum(axis=1).astype(np.float64) - 2.0 * 65535.0
    return (centred * (std / _SUM_STD) + mean).astype(np.float32).reshape(shape)


def integers(seed: int, name: str, count: int, bound: int) -> np.ndarray:
    """Token ids below `bound` (which divides 2^64 nearly enough), int64."""
    raw = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(count)
    return (raw % np.uint64(bound)).astype(np.int64)


def attention_shapes(prefix: str, config: dict[str, Any], gated: bool) -> dict[str, tuple[int, ...]]:
    """Names and [out, in] shapes of one attention mixer."""
    hidden, heads, kv_heads = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = config.get("head_dim", hidden // heads)
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.q_proj.weight": (heads * dim * (2 if gated else 1), hidden),
        f"{prefix}.k_proj.weight": (kv_heads * dim, hidden),
        f"{prefix}.v_proj.weight": (kv_heads * dim, hidden),
        f"{prefix}.o_proj.weight": (hidden, heads * dim),
    }
    if config.get("attention_bias"):
        shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
    if config["model_type"] == "llama":
        return shapes
    return shapes | {f"{prefix}.q_norm.weight": (dim,), f"{prefix}.k_norm.weight": (dim,)}


def deltanet_shapes(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one Gated DeltaNet mixer."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    return {
        f"{prefix}.in_proj_qkv.weight": (2 * keys + values, hidden),
        f"{prefix}.in_proj_z.weight": (values, hidden),
        f"{prefix}.in_proj_b.weight": (heads, hidden),
        f"{prefix}.in_proj_a.weight": (heads, hidden),
        f"{prefix}.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        f"{prefix}.A_log": (heads,),
        f"{prefix}.dt_bias": (heads,),
        f"{prefix}.norm.weight": (config["linear_value_head_dim"],),
        f"{prefix}.out_proj.weight": (hidden, values),
    }


def block_shapes(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what every decoder layer has beside its mixer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if "num_experts" in config:
        inner = config["shared_expert_intermediate_size"]
    mlp: dict[str, tuple[int, ...]] = {
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }
    if "num_experts" in config:
        count, width = config["num_experts"], config["moe_intermediate_size"]
        mlp = {name.replace(".mlp.", ".mlp.shared_expert."): shape for name, shape in mlp.items()} | {
            f"{prefix}.mlp.gate.weight": (count, hidden),
            f"{prefix}.mlp.experts.gate_up_proj": (count, 2 * width, hidden),
            f"{prefix}.mlp.experts.down_proj": (count, hidden, width),
            f"{prefix}.mlp.shared_expert_gate.weight": (1, hidden),
        }
    if config.get("mlp_bias"):
        mlp |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in mlp.items()}
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        **mlp,
    }


def target_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names (without the prefix `model.`) and shapes of a target's tensors."""
    hybrid = config["model_type"].startswith("qwen3_5")
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], config["hidden_size"])
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= block_shapes(f"layers.{i}", config)
        if hybrid and (i + 1) % config["full_attention_interval"]:
            shapes |= deltanet_shapes(f"layers.{i}.linear_attn", config)
        else:
            shapes |= attention_shapes(f"layers.{i}.self_attn", config, gated=hybrid)
    shapes["norm.weight"] = (config["hidden_size"],)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], config["hidden_size"])
    return shapes


def mtp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names (without the prefix `mtp.`) and shapes of a target's multi-token-prediction head."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes |= attention_shapes("layers.0.self_attn", config, gated=True)
    return shapes | block_shapes("layers.0", config)


def drafter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a DFlash drafter's tensors."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= block_shapes(f"layers.{i}", config)
        shapes |= attention_shapes(f"layers.{i}.self_attn", config, gated=False)
    return shapes


def state_dict(shapes: dict[str, tuple[int, ...]], seed: int, zero_centered: bool) -> dict[str, np.ndarray]:
    """Random fp32 tensors. `zero_centered`: all norms but the Gated DeltaNet's own scale by 1 + weight."""
    values = {}
    for name, shape in shapes.items():
        std, mean = 0.02, 0.0
        if name.endswith("A_log"):
            std, mean = 1.0, -1.15  # A within about (0.01, 10), mostly (0.05, 2)
        elif name.endswith("dt_bias"):
            std, mean = 0.5, -3.0
        elif name.endswith("conv1d.weight"):
            std = 0.3
        elif name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
            std = 0.1
        elif name.endswith(".bias") or "mlp.gate.weight" in name:
            std = 0.2
        elif ".experts." in name or "shared_expert" in name:
            std = 0.1
        elif name.endswith(("q_proj.weight", "k_proj.weight")) and not any("q_norm" in n for n in shapes):
            std = 0.2  # no norm makes queries and keys large enough for attention to choose
        elif name.endswith("norm.weight"):
            plain = name.endswith("linear_attn.norm.weight") or not zero_centered
            std, mean = 0.1, 1.0 if plain else 0.0
        values[name] = normal(seed, name, shape, std, mean)
    return values


def digest(values: dict[str, np.ndarray]) -> str:
    """SHA-256 over names, shapes and bytes: the goldens say with which weights they were made."""
    total = hashlib.sha256()
    for name in sorted(values):
        array = np.ascontiguousarray(values[name])
        total.update(f"{name}{array.shape}{array.dtype.str}".encode())
        total.update(array.tobytes())
    return total.hexdigest()
