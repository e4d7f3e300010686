"""The target's training forward: a scan over identical groups of layers.

A hybrid repeats one pattern (three Gated DeltaNet layers, one attention layer). Training stacks the parameters of the
same place in every group, [G, …], and scans over the groups: compilation then costs one group, and the optimiser
updates a quarter of the arrays. `Target.__call__` remains the definition; a test holds the two equal.
"""


import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import LINEAR, TargetConfig
from dflash_jax.layers import rope_tables
from dflash_jax.target import Target
from dflash_jax.train.mixers import AttentionKind, attention_mixer, linear_mixer

# Parameters that stay fp32 in a bf16 pass: the gates' and the gated norm's (see `deltanet`).
_ALWAYS_FP32 = ("A_log", "dt_bias", "linear_attn.norm.weight")


@struct.dataclass
class GroupedParams:
    """A target's parameters by place in the group.

    Attributes:
      embed: token table. head: output table, None where tied. norm: final norm.
      places: one tree a place in the group, {"dotted.name": [G, …]}.
    """

    embed: Float[Array, "V D"]
    head: Float[Array, "V D"] | None
    norm: Float[Array, " D"]
    places: tuple[dict[str, Array], ...]


def period(layer_types: tuple[str, ...]) -> int:
    """Length of the shortest pattern that the stack repeats."""
    count = len(layer_types)
    return next(
        p for p in range(1, count + 1) if count % p == 0 and layer_types == layer_types[:p] * (count // p)
    )


def _flat(module: nnx.Module) -> dict[str, Array]:
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): leaf[...] for path, leaf in state}


def group(target: Target) -> GroupedParams:
    """Copies a target's parameters into grouped form."""
    size = period(target.config.layer_types)
    flat = [_flat(layer) for layer in target.layers]
    places = tuple(
        {name: jnp.stack([layer[name] for layer in flat[place::size]]) for name in flat[place]}
        for place in range(size)
    )
    head = None if target.config.tie_word_embeddings else target.lm_head.weight[...]
    return GroupedParams(target.embed_tokens.weight[...], head, target.norm.weight[...], places)


def ungroup(params: GroupedParams, config: TargetConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Target:
    """A target with these parameters in `dtype`."""
    params = cast(params, dtype)
    size = period(config.layer_types)
    values = {"embed_tokens.weight": params.embed, "norm.weight": params.norm}
    if params.head is not None:
        values["lm_head.weight"] = params.head
    for index in range(config.num_layers):
        for name, leaf in params.places[index % size].items():
            values[f"layers.{index}.{name}"] = leaf[index // size]
    return _with_values(_skeleton(config, dtype), values)


def _skeleton(config: TargetConfig, dtype: jax.typing.DTypeLike) -> Target:
    """A target of shapes without arrays."""
    return nnx.eval_shape(lambda: Target(config, dtype=dtype, rngs=nnx.Rngs(0)))


def _with_values(module: Any, values: dict[str, Array]) -> Any:
    """A copy of the module whose parameters, by dotted name, are these arrays."""
    graph, state = nnx.split(module)
    flat = nnx.to_flat_state(state)
    return nnx.merge(
        graph, nnx.from_flat_state([(path, nnx.Param(values[".".join(map(str, path))])) for path, _ in flat])
    )


def is_matrix(params: GroupedParams) -> Any:
    """True for weight matrices: two axes besides the groups' one."""
    # The tree of the parameters with booleans for leaves, as optax wants its masks.
    flags: dict[str, Any] = {
        "embed": True,
        "head": None if params.head is None else True,
        "norm": False,
        "places": tuple({name: leaf.ndim == 3 for name, leaf in place.items()} for place in params.places),
    }
    return GroupedParams(**flags)


def cast(params: GroupedParams, dtype: jax.typing.DTypeLike) -> GroupedParams:
    """The weights as a pass in `dtype` wants them; gates stay fp32."""
    places = tuple(
        {name: leaf if name.endswith(_ALWAYS_FP32) else leaf.astype(dtype) for name, leaf in place.items()}
        for place in params.places
    )
    head = None if params.head is None else params.head.astype(dtype)
    return GroupedParams(params.embed.astype(dtype), head, params.norm.astype(dtype), places)


@jax.custom_vjp
def embed_lookup(table: Float[Array, "V D"], tokens: Int[Array, "B N"]) -> Float[Array, "B N D"]:
    """Rows of the table. Its gradient is a product with one-hot rows, accumulated in fp32.

    The plain gradient is a scatter that adds tens of thousands of rows in the table's dtype and in no fixed order.
    """
    return table.at[tokens].get(mode="clip")


def _embed_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return embed_lookup(table, tokens), (tokens, table[:, :0])


def _embed_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    tokens, table = saved
    rows = jax.nn.one_hot(tokens.reshape(-1), table.shape[0], dtype=grad.dtype)
    out = jax.lax.dot_general(
        rows, grad.reshape(-1, grad.shape[-1]), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return out.astype(table.dtype), None


embed_lookup.defvjp(_embed_forward, _embed_backward)


def forward(
    params: GroupedParams,
    config: TargetConfig,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"] | None = None,
    *,
    taps: tuple[int, ...] = (),
    remat: bool = False,
    unroll: bool = False,
    attention: AttentionKind = "xla",
) -> tuple[Float[Array, "B N D"], Float[Array, "B N F"] | None]:
    """Normed hidden states (and taps) of sequences that start at position 0; see `Target.__call__`.

    The mixers are those of `mixers`. Weights are used as given: `cast` first. With `remat` only the layers' inputs are
    kept for the backward pass: this saves traffic, not just memory, and is the faster choice at these widths.
    """
    batch, rows = tokens.shape
    size = period(config.layer_types)
    valid = jnp.ones((batch, rows), bool) if valid is None else valid
    # A skeleton of every place: module objects whose parameters come from `params`.
    skeleton = _skeleton(config, params.embed.dtype)
    positions = jnp.broadcast_to(jnp.arange(rows), (batch, rows))
    cos, sin = rope_tables(config.rope, positions)
    tapped_places = sorted({tap % size for tap in taps})

    def run_layer(place: int, x: Array, values: dict[str, Array]) -> Array:
        layer = _with_values(skeleton.layers[place], values)
        normed = layer.input_layernorm(x)
        if config.layer_types[place] == LINEAR:
            mixed = linear_mixer(layer.linear_attn, normed, valid)
        else:
            mixed = attention_mixer(layer.self_attn, normed, cos, sin, attention)
        x = x + mixed
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def body(x: Array, places: tuple[dict[str, Array], ...]) -> tuple[Array, dict[int, Array]]:
        tapped = {}
        for place, values in enumerate(places):
            layer = functools.partial(run_layer, place)
            x = (jax.checkpoint(layer) if remat else layer)(x, values)
            if place in tapped_places:
                tapped[place] = x
        return x, tapped

    x = embed_lookup(params.embed, tokens)
    groups = len(config.layer_types) // size
    x, tapped = jax.lax.scan(body, x, params.places, unroll=groups if unroll else 1)
    final = _with_values(skeleton.norm, {"weight": params.norm})
    features = [tapped[tap % size][tap // size] for tap in taps]
    return final(x), jnp.concatenate(features, axis=-1) if features else None


@jax.custom_vjp
def cross_entropy(
    hidden: Float[Array, "N D"], table: Float[Array, "V D"], labels: Int[Array, " N"], weights: Float[Array, " N"]
) -> tuple[Float[Array, ""], Int[Array, " N"]]:
    """Σ weights · CE of fp32 logits hidden·tableᵀ, and the argmax of every row.

    The logits are recomputed in the backward pass, whose products take the weights' dtype.
    """
    return _ce_forward(hidden, table, labels, weights)[0]


def _logits(hidden: Array, table: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if table.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        hidden, table, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _ce_forward(hidden: Array, table: Array, labels: Array, weights: Array) -> Any:
    logits = _logits(hidden, table)
    total = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    loss = jnp.sum(weights * (total - right))
    return (loss, jnp.argmax(logits, axis=-1)), (hidden, table, labels, weights, total)


def _ce_backward(saved: Any, grads: Any) -> Any:
    hidden, table, labels, weights, total = saved
    precision = jax.lax.Precision.HIGHEST if table.dtype == jnp.float32 else None
    probabilities = jnp.exp(_logits(hidden, table) - total[:, None])
    hit = jnp.arange(table.shape[0]) == labels[:, None]
    grad = ((probabilities - hit) * (weights * grads[0])[:, None]).astype(table.dtype)
    dot = lambda a, b, dims: jax.lax.dot_general(  # noqa: E731
        a, b, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    return (
        dot(grad, table, ((1,), (0,))).astype(hidden.dtype),
        dot(grad, hidden, ((0,), (0,))).astype(table.dtype),
        None,
        None,
    )


cross_entropy.defvjp(_ce_forward, _ce_backward)
