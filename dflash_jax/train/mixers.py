"""The target's mixers as training runs them: whole sequences from position 0, nothing cached, in 16-bit products.

Same parameters and same mathematics as `deltanet.GatedDeltaNet` and `attention.Attention`, which a test holds them to.
What differs is what reaches memory. Training a small model is bound by the traffic of intermediates, above all the
delta rule's; here they are kept in the activations' dtype, key heads are not repeated before their products, and the
gradient of the triangular inverse is taken in closed form.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dflash_jax.attention import Attention
from dflash_jax.deltanet import GatedDeltaNet, l2norm
from dflash_jax.train.settings import AttentionKind
from pallas_kernels.gdn_scan.reference import unit_lower_inverse


@jax.custom_vjp
def triangular_inverse(a: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """(I + a)⁻¹ of strictly lower triangular `a`. Its gradient is −Xᵀ·dX·Xᵀ: two products instead of a replay."""
    return unit_lower_inverse(a, precision=None)


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    inverse = triangular_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: Array, grad: Array) -> tuple[Array]:
    # The part on and above the diagonal is dropped where `a` is masked.
    return (-(inverse.mT @ grad @ inverse.mT),)


triangular_inverse.defvjp(_inverse_forward, _inverse_backward)


def delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    beta: Float[Array, "B N Hv"],
    g: Float[Array, "B N Hv"],
    chunk: int = 64,
) -> Float[Array, "B N Hv dv"]:
    """The chunk rule from an empty state; see `pallas_kernels.gdn_scan.chunk_delta_rule`, whose outputs it gives.

    Operands of products have v's dtype; decays, the triangular inverse and the carried state are fp32.
    """
    batch, rows, value_heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    share, dtype = value_heads // key_heads, v.dtype
    chunk = min(chunk, 1 << max(rows - 1, 0).bit_length())
    pad = -rows % chunk

    def by_chunk(x: Array, *heads: int) -> Array:
        """[B, N, H, …] -> [chunks, B, *heads, chunk, …], zero padded (β = g = 0 leaves the state alone)."""
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, chunk, *heads, *x.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 2 + len(heads))

    queries, keys = by_chunk(q * key_dim**-0.5, key_heads), by_chunk(k, key_heads)
    values = by_chunk(v, key_heads, share)
    strength, total = by_chunk(beta, key_heads, share), jnp.cumsum(by_chunk(g, key_heads, share), axis=-1)
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    strict = jnp.tril(jnp.ones((chunk, chunk), bool), -1)
    # Masked before exp: above the diagonal the difference is positive and could overflow.
    decay = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
    overlap = (keys @ keys.mT)[:, :, :, None]
    a = jnp.where(strict, strength[..., None] * decay * overlap, 0.0)
    inverse = triangular_inverse(a).astype(dtype)
    u = inverse @ (strength[..., None] * values).astype(dtype)
    w = inverse @ ((strength * jnp.exp(total))[..., None] * keys[:, :, :, None]).astype(dtype)
    scores = (decay * (queries @ keys.mT)[:, :, :, None]).astype(dtype)

    def step(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        u, w, scores, queries, keys, total = xs
        held = state.astype(dtype)
        fresh = u - w @ held
        from_start = (jnp.exp(total)[..., None] * queries[:, :, None]).astype(dtype)
        out = from_start @ held + scores @ fresh
        last = total[..., -1:]
        to_end = (jnp.exp(last - total)[..., None] * keys[:, :, None]).astype(dtype)
        state = jnp.exp(last)[..., None] * state + (to_end.mT @ fresh).astype(jnp.float32)
        return state, out

    empty = jnp.zeros((batch, key_heads, share, key_dim, value_dim), jnp.float32)
    _, out = jax.lax.scan(step, empty, (u, w, scores, queries, keys, total))
    # [chunks, B, Hk, share, chunk, dv] -> [B, N, Hv, dv]
    out = jnp.moveaxis(jnp.moveaxis(out, 4, 2), 0, 1).reshape(batch, -1, value_heads, value_dim)
    return out[:, :rows]


def linear_mixer(
    mixer: GatedDeltaNet, x: Float[Array, "B N D"], valid: Bool[Array, "B N"]
) -> Float[Array, "B N D"]:
    """`GatedDeltaNet.__call__` on causal rows from an empty state."""
    batch, rows = x.shape[:2]
    dtype = x.dtype
    x = jnp.where(valid[..., None], x, 0)
    inputs = mixer.in_proj_qkv(x)
    z = mixer.in_proj_z(x)
    beta = jax.nn.sigmoid(mixer.in_proj_b(x).astype(jnp.float32))
    g = -jnp.exp(mixer.A_log[...]) * jax.nn.softplus(mixer.in_proj_a(x).astype(jnp.float32) + mixer.dt_bias[...])
    beta = jnp.where(valid[..., None], beta, 0.0)
    g = jnp.where(valid[..., None], g, 0.0)
    window = jnp.zeros((batch, mixer.conv1d.weight.shape[-1] - 1, inputs.shape[-1]), dtype)
    mixed = mixer.convolve(inputs, window, None)
    width = mixer.key_heads * mixer.key_dim
    shape = (batch, rows, mixer.key_heads, mixer.key_dim)
    q = l2norm(mixed[..., :width].reshape(shape)).astype(dtype)
    k = l2norm(mixed[..., width : 2 * width].reshape(shape)).astype(dtype)
    v = mixed[..., 2 * width :].reshape(batch, rows, mixer.value_heads, mixer.value_dim)
    out = delta_rule(q, k, v, beta, g)
    return mixer.out_proj(mixer.norm(out, z).reshape(batch, rows, -1))


def attention_mixer(
    mixer: Attention,
    x: Float[Array, "B N D"],
    cos: Float[Array, "B N h"],
    sin: Float[Array, "B N h"],
    kind: AttentionKind,
) -> Float[Array, "B N D"]:
    """`Attention.__call__` on causal rows without a context. Padding on the right needs no mask.

    "cudnn" is the fused kernel of NVIDIA's library (16-bit dtypes on a GPU alone); "xla" runs anywhere.
    """
    q, gate = mixer.project_q(x, cos, sin)
    kv = mixer.project_kv(x, cos, sin)
    scale = mixer.head_dim**-0.5
    if kind == "cudnn":
        out = jax.nn.dot_product_attention(
            q, kv[:, :, 0], kv[:, :, 1], scale=scale, is_causal=True, implementation="cudnn"
        )
        return mixer.output(out, gate)
    # Heads before rows and keys repeated for their queries: one plain batched product, whatever the grouping.
    share = mixer.heads // mixer.kv_heads
    keys, values = (jnp.repeat(kv[:, :, i].swapaxes(1, 2), share, axis=1) for i in (0, 1))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    logits = jnp.einsum(
        "bhnd,bhsd->bhns", q.swapaxes(1, 2), keys, precision=precision, preferred_element_type=jnp.float32
    )
    rows = x.shape[1]
    logits = jnp.where(jnp.tril(jnp.ones((rows, rows), bool)), logits * scale, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
    out = jnp.einsum("bhns,bhsd->bhnd", weights, values, precision=precision)
    return mixer.output(out.swapaxes(1, 2), gate)
