"""The config.json files of published models, for benchmarks and compile checks; imports neither JAX nor PyTorch.

Sources: the Hugging Face repositories Qwen/Qwen3.6-27B, z-lab/Qwen3.6-27B-DFlash, Qwen/Qwen3-8B and
z-lab/Qwen3-8B-DFlash-b16; only what fixes shapes and arithmetic is kept.
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
