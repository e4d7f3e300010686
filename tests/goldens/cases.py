"""The parity cases: configs as config.json holds them, inputs, and which positions the goldens keep."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.goldens import weights

FOLDER = Path(__file__).parent

# Prompts of different lengths; the longest spans three chunks of 64, and none is a multiple of one.
LENGTHS = (150, 97, 41)
# Positions of the longest prompt whose hidden states are kept, both sides of every chunk edge that the tests use.
TAP_POSITIONS = (0, 1, 2, 3, 6, 7, 8, 13, 14, 40, 63, 64, 65, 99, 100, 101, 127, 128, 148, 149)

_HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
TARGETS: dict[str, dict[str, Any]] = {
    "hybrid": {**_HYBRID, "tie_word_embeddings": False},
    "hybrid_tied": {**_HYBRID, "tie_word_embeddings": True},
    "dense": {**_DENSE, "tie_word_embeddings": False},
    "dense_tied": {**_DENSE, "tie_word_embeddings": True},
}
TARGET_SEEDS = {"hybrid": 11, "hybrid_tied": 12, "dense": 13, "dense_tied": 14}

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# Ratios of heads, dims of heads, biases and rotary scalings that the four above leave out. Scalings are set so that
# 150 tokens are far past the original context.
PLAINS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "rope_theta": 5e5, "rope_scaling": None},
    "llama3": {
        **_LLAMA,
        "num_attention_heads": 8,
        "head_dim": 24,  # not hidden_size / heads
        "attention_bias": True,
        "rope_theta": 1e3,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama_linear": {
        **_LLAMA,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
    "llama_yarn": {
        **_LLAMA,
        "num_key_value_heads": 4,
        "mlp_bias": True,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
    },
    "dense_bias": {
        **_DENSE,
        "num_hidden_layers": 4,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e6,
            "original_max_position_embeddings": 64,
        },
    },
}
PLAINS["moe"] = {
    **_HYBRID,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    "num_experts": 24,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
TARGET_SEEDS |= {name: 51 + place for place, name in enumerate(PLAINS)}


def config_of(case: str) -> dict[str, Any]:
    """The config.json of a target case."""
    return (TARGETS | PLAINS)[case]


def target_weights(case: str) -> dict[str, np.ndarray]:
    """State dict of a target case, names without the prefix `model.`."""
    config = config_of(case)
    hybrid = config["model_type"].startswith("qwen3_5")
    return weights.state_dict(weights.target_shapes(config), TARGET_SEEDS[case], zero_centered=hybrid)


def prompts(case: str) -> list[np.ndarray]:
    """Token ids of a target case, one array a length."""
    seed = TARGET_SEEDS[case]
    return [weights.integers(seed, f"prompt {length}", length, 256) for length in LENGTHS]


MASK_TOKEN = 255
_DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not hidden_size / heads: the geometry is the draft config's own
    "num_target_layers": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_SLIDING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 4,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Older files hold block_size and the rotary fields at top level, newer ones nested.
DRAFTERS: dict[str, dict[str, Any]] = {
    "full": {
        **_DRAFTER,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "block_size": 16,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 5]},
    },
    "full_causal": {
        **_DRAFTER,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "is_causal": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 5], "block_size": 8},
    },
    "sliding": {
        **_DRAFTER,
        **_SLIDING,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        # The outer block size is what a wrong precedence would read.
        "block_size": 4,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 5, 6], "block_size": 16},
    },
    "sliding_b8": {
        **_DRAFTER,
        **_SLIDING,
        "rope_theta": 1e7,
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 5, 6]},
    },
    "sliding_small": {
        **_DRAFTER,
        **_SLIDING,
        "sliding_window": 5,  # shorter than the block
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 5, 6], "block_size": 16},
    },
    "sliding_bidirectional": {
        **_DRAFTER,
        **_SLIDING,
        "sliding_window": 5,
        "is_causal": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 5, 6], "block_size": 16},
    },
    "yarn": {
        **_DRAFTER,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3,
        "rope_theta": 1e6,
        "max_position_embeddings": 128,
        "rope_scaling": _YARN,
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 5]},
    },
    "yarn_v5": {
        **_DRAFTER,
        **_SLIDING,
        "max_position_embeddings": 128,
        "rope_parameters": {
            **_YARN,
            "rope_theta": 1e6,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.2,
        },
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 5, 6], "block_size": 8},
    },
}
DRAFTER_SEEDS = {name: 31 + place for place, name in enumerate(DRAFTERS)}

# Context before each round, shorter and longer than the window of 16. Each list holds the context tokens that come with
# a round: the prompt's, then those accepted by the round before.
ROUNDS = {"short": (8, 5, 1), "long": (70, 16, 3)}


def block_size(case: str) -> int:
    """Block size that a drafter case asks for (the nested one wins)."""
    config = DRAFTERS[case]
    return config["dflash_config"].get("block_size", config.get("block_size"))


def drafter_weights(case: str) -> dict[str, np.ndarray]:
    """State dict of a drafter case."""
    return weights.state_dict(
        weights.drafter_shapes(DRAFTERS[case]), DRAFTER_SEEDS[case], zero_centered=False
    )


def drafter_embedding(case: str) -> np.ndarray:
    """The target's token table [256, 64] of a drafter case."""
    return weights.normal(DRAFTER_SEEDS[case], "embedding", (256, 64), 0.02)


def drafter_taps(case: str, context: str) -> np.ndarray:
    """Taps of all context tokens of all rounds, [tokens, taps · 64]; of the size of a residual stream."""
    width = 64 * len(DRAFTERS[case]["dflash_config"]["target_layer_ids"])
    return weights.normal(DRAFTER_SEEDS[case], f"taps {context}", (sum(ROUNDS[context]), width), 0.1)


def anchors(case: str, context: str) -> list[int]:
    """Anchor token of each round."""
    return weights.integers(DRAFTER_SEEDS[case], f"anchors {context}", len(ROUNDS[context]), 255).tolist()


# A hybrid target with the drafter of this case on top, end to end.
PAIR = {"target": "hybrid", "drafter": "sliding", "prompt": 1, "accepted": (60, 11)}

# The target's own draft head: text after each prompt, and drafts behind every place in it.
MTP_TARGET, MTP_SEED, MTP_TEXT, MTP_STEPS = "hybrid", 41, 10, 3


def mtp_weights() -> dict[str, np.ndarray]:
    """State dict of the head, names without the prefix `mtp.`."""
    shapes = weights.mtp_shapes(TARGETS[MTP_TARGET])
    return weights.state_dict(shapes, MTP_SEED, zero_centered=True)


def mtp_prompts() -> list[np.ndarray]:
    """The two shorter prompts of the target."""
    return prompts(MTP_TARGET)[1:]
