"""Small random models shared by tests: well-conditioned, and random enough that text and trees vary."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from convert import save_drafter, save_target
from dflash_jax.config import (
    FULL,
    LINEAR,
    DrafterConfig,
    RopeConfig,
    TargetConfig,
    parse_drafter_config,
    parse_target_config,
)
from dflash_jax.drafter import Drafter
from dflash_jax.loading import BUNDLED_DRAFTER, BUNDLED_TARGET
from dflash_jax.mtp import MTP
from dflash_jax.target import Target

VOCAB = 96


def hybrid_config(layers: int = 4, **changes: object) -> TargetConfig:
    """Three Gated DeltaNet layers and one attention layer, repeated."""
    values: dict = {
        "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_layers": layers, "layer_types": tuple(FULL if i % 4 == 3 else LINEAR for i in range(layers)),
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope": RopeConfig(1e4, 4), "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attn_output_gate": True, "zero_centered_norm": True,
        "max_position_embeddings": 1024, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
        "eos_token_ids": (1,),
    }  # fmt: skip
    return TargetConfig(**(values | changes))


def drafter_config(target: TargetConfig, **changes: object) -> DrafterConfig:
    """Two layers, one of them sliding and causal."""
    values: dict = {
        "vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "intermediate_size": 48,
        "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope": RopeConfig(1e4, 16),
        "rms_norm_eps": 1e-6, "block_size": 8, "mask_token_id": 2, "target_layer_ids": (0, 2),
        "num_target_layers": target.num_layers, "layer_windows": (None, 12), "layer_causal": (False, True),
        "max_position_embeddings": 1024,
    }  # fmt: skip
    return DrafterConfig(**(values | changes))


def randomise(module: nnx.Module, seed: int, std: float = 0.15) -> None:
    """Gives every weight a random value; norms and gates stay near where trained models have them."""
    key = jax.random.key(seed)
    for index, (path, leaf) in enumerate(
        sorted(nnx.to_flat_state(nnx.state(module)), key=lambda item: str(item[0]))
    ):
        noise = jax.random.normal(jax.random.fold_in(key, index), leaf.shape, jnp.float32)
        name = ".".join(map(str, path))
        if name.endswith("A_log"):
            value = 0.5 * noise - 1.0
        elif name.endswith("dt_bias"):
            value = 0.5 * noise - 2.0
        elif "norm" in name:
            value = leaf[...] + 0.1 * noise
        elif name.startswith(("embed_tokens", "lm_head")):
            value = noise
        else:
            value = std * noise
        leaf[...] = value.astype(leaf.dtype)


def random_target(seed: int = 0, **changes: object) -> Target:
    """A target in fp32."""
    config = hybrid_config(**changes)  # type: ignore[arg-type]
    target = Target(config, rngs=nnx.Rngs(0))
    randomise(target, seed)
    return target


def random_drafter(target: Target, seed: int = 1, **changes: object) -> Drafter:
    """A drafter for it in fp32."""
    drafter = Drafter(drafter_config(target.config, **changes), rngs=nnx.Rngs(0))
    randomise(drafter, seed)
    return drafter


def random_mtp(target: Target, seed: int = 2) -> MTP:
    """A multi-token-prediction head for it in fp32."""
    mtp = MTP(target.config, rngs=nnx.Rngs(0))
    randomise(mtp, seed)
    return mtp


def llama_json(target: dict) -> dict:
    """A small Llama with all biases, of the vocabulary and special tokens of another config.json."""
    kept = ("vocab_size", "eos_token_id", "pad_token_id", "dtype")
    return {key: target[key] for key in kept if key in target} | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True, "rope_theta": 1e4, "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }  # fmt: skip


HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")


def save_random_pair(
    folder: Path, seed: int = 0, heads: int = 1, architecture: str = "hybrid"
) -> tuple[Path, Path]:
    """Folders of a small random pair in fp32: the bundled pair's configs, cut down, and its tokenizer.

    `heads` multiplies all numbers of heads, for meshes that share them. `architecture`: hybrid, dense, llama or moe.
    """
    raw = json.loads((BUNDLED_TARGET / "config.json").read_text())
    raw |= {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL], "hidden_size": 64, "dtype": "float32"}
    if architecture in ("dense", "llama"):
        raw = llama_json(raw)
    if architecture == "moe":
        raw |= {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 8}
        raw |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}
    if architecture == "dense":
        raw |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "mlp_bias": False}
    draft = json.loads((BUNDLED_DRAFTER / "config.json").read_text())
    draft |= {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_target_layers": 2,
        "dtype": "float32",
        "block_size": 4,
    }
    draft |= {"num_hidden_layers": 1, "layer_types": draft["layer_types"][:1], "max_window_layers": 1}
    draft["dflash_config"]["target_layer_ids"] = [0, 1]
    for config in (raw, draft):
        config.update({name: heads * config[name] for name in HEADS if name in config})
    target = Target(parse_target_config(raw), rngs=nnx.Rngs(0))
    drafter = Drafter(parse_drafter_config(draft)[0], rngs=nnx.Rngs(0))
    randomise(target, seed)
    randomise(drafter, seed + 1)
    save_target(folder / "target", raw, target)
    save_drafter(folder / "drafter", draft, drafter)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_TARGET / name, folder / "target")
    return folder / "target", folder / "drafter"
