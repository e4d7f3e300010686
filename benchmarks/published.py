"""The config.json files of published models, for benchmarks and compile checks; imports neither JAX nor PyTorch.

Sources: the Hugging Face repositories Qwen/Qwen3.6-27B, z-lab/Qwen3.6-27B-DFlash, Qwen/Qwen3-8B,
z-lab/Qwen3-8B-DFlash-b16 and those named below; only what fixes shapes and arithmetic is kept. Qwen3.5-2B and the other
DFlash drafters are left out: no copy of their configs could be checked.
"""

from typing import Any

QWEN36_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "tie_word_embeddings": False, "mtp_num_hidden_layers": 1, "max_position_embeddings": 262144,
        "output_gate_type": "swish",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
QWEN36_27B_DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "num_target_layers": 64, "block_size": 16, "rope_theta": 1e7, "max_position_embeddings": 262144,
    "sliding_window": 2048, "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}  # fmt: skip
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_8B_DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "num_target_layers": 36, "block_size": 16, "rope_theta": 1e6, "max_position_embeddings": 40960,
    "layer_types": ["full_attention"] * 5,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip


def _qwen35(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, values: int, tied: bool) -> dict[str, Any]:
    """Qwen/Qwen3.5-…: what differs from size to size, over what does not."""
    text = {
        **QWEN36_27B["text_config"], "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "linear_num_value_heads": values,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    del text["output_gate_type"]
    return {**QWEN36_27B, "text_config": text}


QWEN35_0_8B = _qwen35(1024, 3584, 24, 8, 2, 16, True)
QWEN35_4B = _qwen35(2560, 9216, 32, 16, 4, 32, True)
QWEN35_9B = _qwen35(4096, 12288, 32, 16, 4, 32, False)
QWEN35_27B = _qwen35(5120, 17408, 64, 24, 4, 48, False)
# z-lab/Qwen3.5-27B-DFlash
QWEN35_27B_DFLASH = {k: v for k, v in QWEN36_27B_DFLASH.items() if k not in ("sliding_window", "layer_types")}
# Qwen/Qwen3.6-35B-A3B
QWEN36_35B_A3B: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1, "max_position_embeddings": 262144, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
# Qwen/Qwen3-4B
QWEN3_4B = {**QWEN3_8B, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
# meta-llama/Llama-3.1-8B-Instruct
LLAMA31_8B: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
# HuggingFaceTB/SmolLM2-135M-Instruct
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 8192, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": True,
}  # fmt: skip

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3.6-27b": (QWEN36_27B, QWEN36_27B_DFLASH),
    "qwen3-8b": (QWEN3_8B, QWEN3_8B_DFLASH),
}


def cut(target: dict[str, Any], drafter: dict[str, Any], layers: int) -> None:
    """Cuts a target to its first layers, in place; the drafter's taps move to what is left."""
    text = target.get("text_config", target)
    text["num_hidden_layers"] = drafter["num_target_layers"] = layers
    text.pop("layer_types", None)
    taps = len(drafter["dflash_config"]["target_layer_ids"])
    drafter["dflash_config"]["target_layer_ids"] = sorted({i * (layers - 1) // taps for i in range(taps)})
