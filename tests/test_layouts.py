"""The key map on the layouts of published checkpoints: names and shapes written from their configs, no bytes."""

import math
from typing import Any

import pytest

from benchmarks import published
from convert import match_drafter, match_target
from dflash_jax.config import parse_drafter_config, parse_target_config
from dflash_jax.errors import UserError

Shapes = dict[str, tuple[int, ...]]


def mlp(c: dict[str, Any]) -> Shapes:
    hidden = c["hidden_size"]
    inner = c.get("shared_expert_intermediate_size") or c["intermediate_size"]
    dense: Shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if "num_experts" not in c:
        return {f"mlp.{name}": shape for name, shape in dense.items()}
    router: Shapes = {"mlp.gate": (c["num_experts"], hidden), "mlp.shared_expert_gate": (1, hidden)}
    return router | {f"mlp.shared_expert.{name}": shape for name, shape in dense.items()}


def experts(c: dict[str, Any]) -> Shapes:
    """Tensors without the ending `.weight`."""
    if "num_experts" not in c:
        return {}
    count, hidden, inner = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
    return {"mlp.experts.gate_up_proj": (count, 2 * inner, hidden), "mlp.experts.down_proj": (count, hidden, inner)}


def attention(c: dict[str, Any], gated: bool, normed: bool) -> Shapes:
    hidden, heads, kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim", hidden // heads)
    shapes: Shapes = {
        "self_attn.q_proj": (heads * dim * (1 + gated), hidden), "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden), "self_attn.o_proj": (hidden, heads * dim),
    }  # fmt: skip
    return shapes | ({"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)} if normed else {})


def layer(c: dict[str, Any], gated: bool = False, normed: bool = True) -> Shapes:
    norms: Shapes = {"input_layernorm": (c["hidden_size"],), "post_attention_layernorm": (c["hidden_size"],)}
    return {f"{name}.weight": s for name, s in (attention(c, gated, normed) | mlp(c) | norms).items()} | experts(c)


def linear_layer(c: dict[str, Any]) -> Shapes:
    hidden, values = c["hidden_size"], c["linear_num_value_heads"]
    inner = values * c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + inner
    mixer = {
        "in_proj_qkv.weight": (channels, hidden), "in_proj_z.weight": (inner, hidden),
        "in_proj_b.weight": (values, hidden), "in_proj_a.weight": (values, hidden),
        "conv1d.weight": (channels, 1, c["linear_conv_kernel_dim"]), "A_log": (values,), "dt_bias": (values,),
        "norm.weight": (c["linear_value_head_dim"],), "out_proj.weight": (hidden, inner),
    }  # fmt: skip
    rest = {name: shape for name, shape in layer(c).items() if "self_attn" not in name}
    return {f"linear_attn.{name}": s for name, s in mixer.items()} | rest


def target(config: dict[str, Any]) -> tuple[Shapes, Shapes]:
    """Tensors of the text model and of its draft head."""
    c = config.get("text_config", config)
    hybrid = "text_config" in config
    root = "model.language_model." if hybrid else "model."
    table = (c["vocab_size"], c["hidden_size"])
    text: Shapes = {f"{root}embed_tokens.weight": table, f"{root}norm.weight": table[1:]}
    if not c["tie_word_embeddings"]:
        text["lm_head.weight"] = table
    full = layer(c, gated=hybrid, normed=c["model_type"] != "llama")
    for i in range(c["num_hidden_layers"]):
        parts = linear_layer(c) if hybrid and (i + 1) % 4 else full
        text |= {f"{root}layers.{i}.{name}": shape for name, shape in parts.items()}
    if not hybrid:
        return text, {}
    head: Shapes = {"mtp.fc.weight": (c["hidden_size"], 2 * c["hidden_size"])}
    head |= {f"mtp.{n}.weight": table[1:] for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return text, head | {f"mtp.layers.0.{name}": shape for name, shape in full.items()}


def drafter(c: dict[str, Any]) -> Shapes:
    hidden, taps = c["hidden_size"], len(c["dflash_config"]["target_layer_ids"])
    shapes: Shapes = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer(c).items()}
    return shapes


def values(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


# Parameters as published, where the vision tower is not among them: model cards, and for Qwen3.6-27B the index's
# total_size (all of it bf16) less the vision tower.
PUBLISHED = {
    "QWEN3_8B": 8_190_735_360,
    "QWEN3_4B": 4_022_468_096,
    "LLAMA31_8B": 8_030_261_248,
    "SMOLLM2_135M": 134_515_008,
    "QWEN36_27B": 55_562_855_904 // 2 - 460_730_096,
    "QWEN35_27B": 55_562_855_904 // 2 - 460_730_096,
    "QWEN35_9B": None,
    "QWEN35_4B": None,
    "QWEN35_0_8B": None,
    "QWEN36_35B_A3B": None,
}
DRAFTERS = {
    "QWEN36_27B_DFLASH": 1_730_213_120, "QWEN35_27B_DFLASH": 1_730_213_120, "QWEN3_8B_DFLASH": 1_048_626_432
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_targets_have_nothing_missing_and_nothing_left_over(name: str):
    config = getattr(published, name)
    text, head = target(config)
    total = PUBLISHED[name]
    assert total is None or values(text) + values(head) == total
    keys = match_target(parse_target_config(config), text | head)
    assert sorted(keys.weights.values()) == sorted(text)
    assert sorted(keys.mtp.values()) == sorted(head)
    assert keys.skipped == ()


def test_experts_add_up_to_the_name():
    """35.95 billion with the vision tower and the draft head, of which 3 billion are active."""
    text, head = target(published.QWEN36_35B_A3B)
    assert 35.4e9 < values(text) + values(head) < 35.95e9
    routed = sum(math.prod(shape) for name, shape in text.items() if ".experts." in name)
    assert 2.8e9 < values(text) - routed * (1 - 8 / 256) - 248320 * 2048 < 3.2e9


@pytest.mark.parametrize("name", ["QWEN3_4B", "LLAMA31_8B"])
def test_one_tensor_more_or_less_is_named(name: str):
    config = getattr(published, name)
    text, _ = target(config)
    lost = "model.layers.1.mlp.up_proj.weight"
    del text[lost]
    text["model.layers.1.self_attn.q_proj.bias"] = (4096,)
    with pytest.raises(UserError, match=f"1 missing: {lost}; 1 unknown: model.layers.1.self_attn.q_proj.bias$"):
        match_target(parse_target_config(config), text)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_have_nothing_missing_and_nothing_left_over(name: str):
    tensors = drafter(getattr(published, name))
    config, notes = parse_drafter_config(getattr(published, name))
    assert (len(tensors), values(tensors), notes) == (58, DRAFTERS[name], [])
    assert sorted(match_drafter(config, tensors).weights) == sorted(tensors)
