"""The loss of a multi-token-prediction head: all chains of a sequence at once, each step fed by the head itself.

A chain that starts at slot i runs slots i, i + 1, …: step 1 reads the target's hidden state of token i, step j the
head's own output of step j − 1, as in decoding (training-time test, EAGLE-3, arXiv 2503.01840, section 3.2). Tokens are
those of the sequence: where a draft is wrong, what follows it is never used. Row p of step j holds slot p of the chain
that started at slot p − j + 1; it sees step 1's slots up to that start and one slot of each later step.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.layers import rope_tables
from dflash_jax.mtp import MTP
from pallas_kernels.linear.reference import matmul_precision


def delayed(x: Float[Array, "B T ..."], rows: int) -> Float[Array, "B T ..."]:
    """Row p holds what was in row p − `rows`; zeros before the first."""
    return jnp.pad(x, [(0, 0), (rows, 0)] + [(0, 0)] * (x.ndim - 2))[:, : x.shape[1]]


def _attend(
    q: Float[Array, "B T H d"], steps: list[Float[Array, "B T 2 K d"]], scale: float
) -> Float[Array, "B T H d"]:
    """Attention of the newest step's rows over their chains (see the module's docstring)."""
    share, rows, later = q.shape[2] // steps[0].shape[3], q.shape[1], len(steps) - 1
    precision = matmul_precision(q.dtype)

    def dot(spec: str, a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

    keys, values = (jnp.repeat(steps[0][:, :, i], share, axis=2) for i in (0, 1))
    index = jnp.arange(rows)
    logits = jnp.where(index[:, None] - later >= index, dot("bthd,bshd->bhts", q, keys), -jnp.inf)
    # Of each later step a row sees one slot alone: no product of all rows with all.
    single = [jnp.repeat(delayed(kv, later - step), share, axis=3) for step, kv in enumerate(steps[1:], 1)]
    logits = [logits, *(dot("bthd,bthd->bht", q, kv[:, :, 0])[..., None] for kv in single)]
    weights = jax.nn.softmax(jnp.concatenate(logits, axis=-1) * scale, axis=-1).astype(q.dtype)
    out = dot("bhts,bshd->bthd", weights[..., :rows], values)
    for step, kv in enumerate(single):
        out = out + dot("bht,bthd->bthd", weights[..., rows + step], kv[:, :, 1])
    return out.astype(q.dtype)


def chain_hidden(
    mtp: MTP, embeddings: Float[Array, "B T D"], hidden: Float[Array, "B T D"], steps: int
) -> Float[Array, "J B T D"]:
    """The head's hidden states in steps 1 … `steps` of all chains.

    Args:
      embeddings: row p has the embedding of token p + 1.
      hidden: the target's hidden states, after its final norm.

    Returns:
      Row p of step j is slot p of the chain that began at slot p − j + 1 and predicts token p + 2; rows p < j − 1,
      whose chain would have begun before the sequence, mean nothing.
    """
    layer, config = mtp.layers[0], mtp.config
    batch, rows = hidden.shape[:2]
    cos, sin = rope_tables(config.rope, jnp.broadcast_to(jnp.arange(rows), (batch, rows)))
    kvs: list[Array] = []
    outputs: list[Array] = []
    for step in range(steps):
        x = mtp.join(embeddings, delayed(outputs[-1], 1) if step else hidden)
        normed = layer.input_layernorm(x)
        q, gate = layer.self_attn.project_q(normed, cos, sin)
        kvs.append(layer.self_attn.project_kv(normed, cos, sin))
        x = x + layer.self_attn.output(_attend(q, kvs, config.head_dim**-0.5), gate)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        outputs.append(mtp.norm(x))
    return jnp.stack(outputs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chains:
    """What the rows of `chain_hidden` are to predict.

    Attributes:
      labels: token p + 2 in row p (0 past the end). counted: rows that the loss may use.
    """

    labels: Int[Array, "B T"]
    counted: Bool[Array, "J B T"]


def make_chains(tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], steps: int) -> Chains:
    """Labels, and the rows whose label and whose chain's anchor (token p − j + 2) are tokens of an answer."""

    def following(x: Array, count: int) -> Array:
        return jnp.pad(x[:, count:], ((0, 0), (0, count)))

    counted = [following(mask, 2) & delayed(following(mask, 1), step) for step in range(steps)]
    return Chains(following(tokens, 2), jnp.stack(counted))


def chain_agreement(chains: Chains, predicted: Int[Array, "J B T"]) -> dict[str, Array]:
    """How well argmax drafts agree with the sequences, by step.

    Returns:
      `accuracy` [J]: share of the counted rows of a step predicted right; `chain_accuracy` [J]: of all chains, the
      share whose steps 1 … j are all right; `tau`: mean over chains of 1 + (length of that leading run), what the chain
      would emit a round. Steps past the end of an answer count as wrong.
    """
    right = (predicted == chains.labels) & chains.counted
    # Step j of the chain from slot i stands in row i + j − 1.
    run = jnp.cumprod(jnp.stack([jnp.roll(r, -j, axis=1) for j, r in enumerate(right)]).astype(jnp.int32), axis=0)
    total = jnp.maximum(jnp.sum(chains.counted[0]), 1)
    chain = jnp.sum(run, axis=(1, 2)) / total
    return {
        "accuracy": jnp.sum(right, axis=(1, 2)) / jnp.maximum(jnp.sum(chains.counted, axis=(1, 2)), 1),
        "chain_accuracy": chain,
        "tau": 1.0 + jnp.sum(chain),
    }
