"""config.json -> frozen dataclasses.

Reads the layouts that transformers v4 and v5 write: flat text configs and the multimodal wrapper with a
`text_config`; rotary fields at top level (`rope_theta`, `rope_scaling`) or inside `rope_parameters`. Anything that
this code does not implement, or two fields that contradict each other, is a `UserError`: a wrong guess here shows up
only as quietly worse text.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from dflash_jax.errors import UserError

LINEAR, FULL = "linear_attention", "full_attention"
SLIDING = "sliding_attention"
MOE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
HYBRID_TYPES = ("qwen3_5", "qwen3_5_text", *MOE_TYPES)
DENSE_TYPES = ("qwen3", "llama")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, number of rotated leading dims of a head, and how frequencies are scaled (None: not)."""

    theta: float
    rotary_dim: int
    scaling: "LinearScaling | YarnConfig | Llama3Scaling | None" = None


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): every frequency divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling, named as Hugging Face names it (`rope_type` "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """YaRN (arXiv 2309.00071), named as Hugging Face names it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A decoder stack: Qwen3.5/3.6 hybrid, or the same with plain norms and no gates: dense Qwen3, and Llama, which
    has no norms of queries and keys and may have biases.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    attn_output_gate: bool
    zero_centered_norm: bool
    max_position_embeddings: int
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    mtp_num_layers: int = 0
    qk_norm: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    # Experts in the place of every MLP; 0 for none. `intermediate_size` is then the shared expert's.
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep attention KV."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the Gated DeltaNet layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: q | k | v."""
        return (
            2 * self.linear_num_key_heads * self.linear_key_head_dim
            + self.linear_num_value_heads * self.linear_value_head_dim
        )


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A DFlash block-diffusion drafter (arXiv 2602.06036 and the published checkpoints)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    # One entry a layer: the window W (self included) or None for all of the context ...
    layer_windows: tuple[int | None, ...]
    # ... and whether a block row sees only block rows up to itself.
    layer_causal: tuple[bool, ...]
    max_position_embeddings: int


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The published default taps: evenly spaced from layer 1 to layer N-3.

    `round` is Python's (half to even), which is what the published configs were made with (N = 36, 64, 32, 40).
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_taps - 1)
    return tuple(round(1 + i * step) for i in range(num_taps))


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object from a file, or raises `UserError` naming it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a Hugging Face model folder has one") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class _Fields:
    """Reads typed fields of one config file; every failure names the file and the key."""

    def __init__(self, values: dict[str, Any], source: str):
        self.values = values
        self.source = source

    def fail(self, message: str) -> UserError:
        return UserError(f"{self.source}: {message}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.fail(f"'{key}' must be a positive integer, found {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(f"'{key}' must be a number, found {value!r}")
        return float(value)

    def refuse_unless(self, key: str, allowed: tuple[Any, ...]) -> None:
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            raise self.fail(
                f"'{key}' = {value!r} is not supported (supported: {', '.join(map(repr, allowed))})"
            )


def _rope(fields: _Fields, head_dim: int, default_partial: float) -> RopeConfig:
    values = fields.values
    parameters = dict(values.get("rope_parameters") or {})
    # transformers v5 may nest one set a layer type; the models here use one for all full-attention layers.
    if FULL in parameters and isinstance(parameters[FULL], dict):
        parameters = dict(parameters[FULL])
    scaling = {**(values.get("rope_scaling") or {}), **parameters}
    nested = _Fields({**values, **scaling}, fields.source)
    if scaling.get("rope_theta") is None and values.get("rope_theta") is None:
        raise fields.fail(
            "no 'rope_theta' (top level or in 'rope_parameters'); the rotary base cannot be guessed"
        )
    theta = nested.number("rope_theta", 0.0)
    partial = nested.number("partial_rotary_factor", default_partial)
    rotary_dim = int(head_dim * partial)
    if theta <= 0 or rotary_dim <= 0 or rotary_dim % 2 or rotary_dim > head_dim:
        raise fields.fail(
            f"rope_theta {theta}, partial_rotary_factor {partial} do not fit head_dim {head_dim}"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "mrope"):
        # Interleaved M-RoPE equals plain rotary on text, where the three position streams coincide.
        return RopeConfig(theta, rotary_dim)
    if kind in ("linear", "yarn", "llama3") and nested.number("factor", 0.0) < 1.0:
        raise fields.fail(f"{kind} 'factor' must be at least 1, found {scaling.get('factor')!r}")
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, LinearScaling(nested.number("factor", 0.0)))
    if kind == "llama3":
        llama3 = Llama3Scaling(
            factor=nested.number("factor", 0.0),
            low_freq_factor=nested.number("low_freq_factor", 0.0),
            high_freq_factor=nested.number("high_freq_factor", 0.0),
            original_max_position_embeddings=nested.integer("original_max_position_embeddings"),
        )
        if not 0 < llama3.low_freq_factor < llama3.high_freq_factor:
            raise fields.fail("llama3 scaling needs 0 < 'low_freq_factor' < 'high_freq_factor'")
        return RopeConfig(theta, rotary_dim, llama3)
    if kind != "yarn":
        known = "'default', 'linear', 'yarn', 'llama3'"
        raise fields.fail(f"rope scaling type {kind!r} is not supported (supported: {known})")
    if any(scaling.get(key) for key in ("mscale", "mscale_all_dim")):
        raise fields.fail("yarn with 'mscale' is not supported")
    yarn = YarnConfig(
        factor=nested.number("factor", 0.0),
        original_max_position_embeddings=nested.integer(
            "original_max_position_embeddings", values.get("max_position_embeddings")
        ),
        beta_fast=nested.number("beta_fast", 32.0),
        beta_slow=nested.number("beta_slow", 1.0),
        attention_factor=scaling.get("attention_factor"),
        truncate=bool(scaling.get("truncate", True)),
    )
    return RopeConfig(theta, rotary_dim, yarn)


def _token_ids(*sources: Any) -> tuple[int, ...]:
    """Union, in order, of token ids given as an int, a list, or nothing."""
    found: dict[int, None] = {}
    for source in sources:
        for value in source if isinstance(source, list) else [source]:
            if isinstance(value, int) and not isinstance(value, bool):
                found.setdefault(value)
    return tuple(found)


def _layer_types(
    fields: _Fields, num_layers: int, allowed: tuple[str, ...], default: list[str]
) -> tuple[str, ...]:
    kinds = fields.values.get("layer_types") or default
    if len(kinds) != num_layers:
        raise fields.fail(f"'layer_types' has {len(kinds)} entries for num_hidden_layers {num_layers}")
    for kind in kinds:
        if kind not in allowed:
            raise fields.fail(f"'layer_types' has {kind!r}; this model may have {', '.join(allowed)}")
    return tuple(kinds)


def parse_target_config(
    raw: dict[str, Any], generation: dict[str, Any] | None = None, source: str = "config.json"
) -> TargetConfig:
    """Builds a `TargetConfig` from the parsed config.json and generation_config.json of a target."""
    generation = generation or {}
    outer = _Fields(raw, source)
    model_type = raw.get("model_type")
    if any("DFlash" in name for name in raw.get("architectures") or []):
        raise outer.fail("this is a DFlash drafter; give it as --draft-model and its target as --model")
    if model_type not in HYBRID_TYPES + DENSE_TYPES:
        known = ", ".join(HYBRID_TYPES + DENSE_TYPES)
        raise outer.fail(f"model_type {model_type!r} is not supported (supported: {known})")
    values = {**raw, **(raw.get("text_config") or {})}
    fields = _Fields(values, source)
    hybrid = model_type in HYBRID_TYPES
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("attention_bias", (False, None) if hybrid else (False, None, True))
    fields.refuse_unless("mlp_bias", (False, None, True) if model_type == "llama" else (False, None))
    fields.refuse_unless("mtp_num_hidden_layers", (0, 1, None))
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", 256 if hybrid else max(hidden // heads, 1))
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    linear: dict[str, int] = {}
    if hybrid:
        fields.refuse_unless("output_gate_type", ("swish", "silu", None))
        fields.refuse_unless("attn_output_gate", (True,))
        interval = fields.integer("full_attention_interval", 4)
        default = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)]
        layer_types = _layer_types(fields, num_layers, (LINEAR, FULL), default)
        for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"):
            linear[f"linear_{key}"] = fields.integer(f"linear_{key}")
        if linear["linear_num_value_heads"] % linear["linear_num_key_heads"]:
            raise fields.fail("linear_num_value_heads is not a multiple of linear_num_key_heads")
    else:
        if values.get("use_sliding_window"):
            raise fields.fail("'use_sliding_window' = true is not supported for a target")
        layer_types = _layer_types(fields, num_layers, (FULL,), [FULL] * num_layers)
    experts: dict[str, int] = {}
    if model_type in MOE_TYPES:
        fields.refuse_unless("mlp_only_layers", (None, []))
        fields.refuse_unless("decoder_sparse_step", (None, 1))
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
            experts[key] = fields.integer(key)
        if experts["num_experts_per_tok"] > experts["num_experts"]:
            raise fields.fail("num_experts_per_tok is more than num_experts")
    tied = (
        values["tie_word_embeddings"]
        if "tie_word_embeddings" in values
        else raw.get("tie_word_embeddings", False)
    )
    return TargetConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("shared_expert_intermediate_size" if experts else "intermediate_size"),
        num_layers=num_layers,
        layer_types=layer_types,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_rope(fields, head_dim, 0.25 if hybrid else 1.0),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(tied),
        attn_output_gate=hybrid,
        zero_centered_norm=hybrid,
        max_position_embeddings=fields.integer("max_position_embeddings", 32768),
        eos_token_ids=_token_ids(
            generation.get("eos_token_id"), values.get("eos_token_id"), raw.get("eos_token_id")
        ),
        bos_token_id=next(iter(_token_ids(generation.get("bos_token_id"), values.get("bos_token_id"))), None),
        pad_token_id=next(iter(_token_ids(generation.get("pad_token_id"), values.get("pad_token_id"))), None),
        mtp_num_layers=int(values.get("mtp_num_hidden_layers") or 0),
        qk_norm=model_type != "llama",
        attention_bias=bool(values.get("attention_bias")),
        mlp_bias=bool(values.get("mlp_bias")),
        **linear,
        **experts,
    )


def parse_drafter_config(
    raw: dict[str, Any], source: str = "config.json", fc_width: int | None = None
) -> tuple[DrafterConfig, list[str]]:
    """Builds a `DrafterConfig`; the second value lists what had to be inferred, to be said to the user.

    Args:
      raw: the drafter's parsed config.json; `block_size` and `mask_token_id` may be at top level (older files) or in
        `dflash_config` (newer; the nested one wins, as in the published package).
      source: the file's name, for errors.
      fc_width: input width of `fc.weight`, from the weights; needed only where `target_layer_ids` is absent.
    """
    fields = _Fields(raw, source)
    architectures = raw.get("architectures") or []
    if "DFlash2DraftModel" in architectures:
        raise fields.fail("DFlash2DraftModel is not supported; use a DFlash (first generation) drafter")
    if "DFlashDraftModel" not in architectures:
        raise fields.fail(
            f"architectures {architectures!r} is no DFlash drafter (expected 'DFlashDraftModel')"
        )
    nested = raw.get("dflash_config") or {}
    merged = _Fields({**raw, **nested}, source)
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("attention_bias", (False, None))
    for key in ("draft_vocab_size", "final_logit_softcapping", "output_multiplier", "input_embedding_scale"):
        if merged.values.get(key) not in (None, 1, 1.0) and not (
            key == "draft_vocab_size" and merged.values[key] == raw.get("vocab_size")
        ):
            raise fields.fail(f"'{key}' = {merged.values[key]!r} is not supported")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", max(hidden // heads, 1))
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    num_target_layers = merged.integer("num_target_layers")
    mask = merged.values.get("mask_token_id")
    if isinstance(mask, bool) or not isinstance(mask, int) or mask < 0:
        raise fields.fail(
            f"'mask_token_id' (top level or in 'dflash_config') must be a token id, found {mask!r}"
        )
    block_size = merged.integer("block_size")
    if block_size < 2:
        raise fields.fail(f"'block_size' must be at least 2 (anchor + one mask), found {block_size}")
    if not 0 <= mask < fields.integer("vocab_size"):
        raise fields.fail(f"'mask_token_id' {mask} is outside the vocabulary of {raw['vocab_size']}")

    notes: list[str] = []
    taps = merged.values.get("target_layer_ids")
    if taps is None:
        width = merged.values.get("target_hidden_size") or hidden
        if fc_width is None or fc_width % width:
            raise fields.fail(
                f"no 'target_layer_ids', and fc.weight's width {fc_width} is no multiple of {width}"
            )
        taps = default_target_layer_ids(num_target_layers, fc_width // width)
        notes.append(
            f"{source}: no 'target_layer_ids'; using the default {list(taps)} for {fc_width // width} taps of "
            f"{num_target_layers} layers"
        )
    if (
        not taps
        or list(taps) != sorted(set(taps))
        or not all(isinstance(i, int) and 0 <= i < num_target_layers for i in taps)
    ):
        raise fields.fail(
            f"'target_layer_ids' {taps!r} must be ascending layer numbers below {num_target_layers}"
        )

    kinds = _layer_types(fields, num_layers, (FULL, SLIDING), [FULL] * num_layers)
    window = merged.values.get("sliding_window")
    if SLIDING in kinds and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise fields.fail(f"'layer_types' has sliding layers but 'sliding_window' is {window!r}")
    # Precedence as vLLM documents it: top-level is_causal, then dflash_config.causal, then the layer's own type.
    causal = raw.get("is_causal", nested.get("is_causal", nested.get("causal")))
    layer_causal = tuple(kind == SLIDING if causal is None else bool(causal) for kind in kinds)
    config = DrafterConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_rope(fields, head_dim, 1.0),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        block_size=block_size,
        mask_token_id=mask,
        target_layer_ids=tuple(taps),
        num_target_layers=num_target_layers,
        layer_windows=tuple(window if kind == SLIDING else None for kind in kinds),
        layer_causal=layer_causal,
        max_position_embeddings=fields.integer("max_position_embeddings", 32768),
    )
    return config, notes


def check_pair(
    target: TargetConfig, drafter: DrafterConfig, source: str = "drafter", fc_width: int | None = None
) -> None:
    """Raises `UserError` unless the drafter was made for a target of this shape."""
    if drafter.num_target_layers != target.num_layers:
        raise UserError(
            f"{source}: drafter of another target: made for {drafter.num_target_layers} layers, "
            f"this target has {target.num_layers}"
        )
    if drafter.vocab_size != target.vocab_size:
        raise UserError(
            f"{source}: drafter of another target: vocabulary {drafter.vocab_size}, this target has {target.vocab_size}"
        )
    if drafter.hidden_size != target.hidden_size:
        raise UserError(
            f"{source}: drafter of another target: hidden_size {drafter.hidden_size}, the target's embedding has "
            f"{target.hidden_size}"
        )
    taps = len(drafter.target_layer_ids)
    if fc_width is not None and fc_width != taps * target.hidden_size:
        raise UserError(
            f"{source}: fc.weight takes {fc_width} features, but {taps} taps of this target give "
            f"{taps * target.hidden_size}"
        )
