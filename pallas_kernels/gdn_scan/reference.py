"""XLA reference of the gated delta rule in its chunk and tree forms (WY representation, fp32).

Both forms solve (I + A) X = R with A strictly lower triangular. The inverse is built by doubling diagonal blocks,
    [L11 0; L21 L22]⁻¹ = [L11⁻¹ 0; −L22⁻¹ L21 L11⁻¹ L22⁻¹],
which takes 2·log2(N) small batched products and, unlike a product of powers (I−A)(I+A²)(I+A⁴)…, never forms
intermediate powers whose size makes fp32 cancel when keys are near parallel (a prompt of one repeated token).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST


def unit_lower_inverse(
    a: Float[Array, "... N N"], precision: jax.lax.Precision | None = HIGHEST
) -> Float[Array, "... N N"]:
    """(I + a)⁻¹ for strictly lower triangular `a`."""
    rows = a.shape[-1]
    lead = a.shape[:-2]
    size = 1 << max(rows - 1, 0).bit_length()
    if size != rows:
        a = jnp.pad(a, [(0, 0)] * len(lead) + [(0, size - rows)] * 2)
    inverse = jnp.ones((*lead, size, 1, 1), a.dtype)
    width = 1
    while width < size:
        pairs = size // (2 * width)
        blocks = a.reshape(*lead, pairs, 2 * width, pairs, 2 * width)
        blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        lower = blocks[..., width:, :width]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        if width == 1:
            corner = -lower
        else:
            corner = -jnp.matmul(
                second, jnp.matmul(lower, first, precision=precision), precision=precision
            )
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse.reshape(*lead, size, size)[..., :rows, :rows]


def _expand_heads(x: Float[Array, "B N Hk d"], value_heads: int) -> Float[Array, "B Hv N d"]:
    """Repeats key heads for their value heads (consecutively) and puts heads before rows."""
    return jnp.repeat(x, value_heads // x.shape[2], axis=2).swapaxes(1, 2)


def chunk_delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    beta: Float[Array, "B N Hv"],
    g: Float[Array, "B N Hv"],
    state: Float[Array, "B Hv dk dv"],
    *,
    chunk: int = 64,
    precise: bool = True,
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B Hv dk dv"]]:
    """See `pallas_kernels.gdn_scan.api.chunk_delta_rule`."""
    batch, rows, value_heads, value_dim = v.shape
    key_dim = q.shape[-1]
    precision = HIGHEST if precise else None
    chunk = min(chunk, 1 << max(rows - 1, 0).bit_length())
    chunks = -(-rows // chunk)
    pad = chunks * chunk - rows

    def by_chunk(x: Array) -> Array:
        """[B, H, N, ...] -> [C, B, H, chunk, ...], zero padded (β = g = 0 leaves the state alone)."""
        x = jnp.pad(x, [(0, 0), (0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 3))
        return jnp.moveaxis(x.reshape(*x.shape[:2], chunks, chunk, *x.shape[3:]), 2, 0)

    dot = functools.partial(jnp.einsum, precision=precision)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    queries = by_chunk(_expand_heads(q, value_heads)) * key_dim**-0.5
    keys = by_chunk(_expand_heads(k, value_heads))
    values = by_chunk(v.swapaxes(1, 2))
    beta = by_chunk(beta.swapaxes(1, 2))[..., None]
    total = jnp.cumsum(by_chunk(g.swapaxes(1, 2)), axis=-1)

    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    # Mask before exp: above the diagonal the difference is positive and could overflow.
    decay = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
    strict = jnp.tril(jnp.ones((chunk, chunk), bool), -1)
    a = jnp.where(strict, beta * decay * dot("cbhid,cbhjd->cbhij", keys, keys), 0.0)
    inverse = unit_lower_inverse(a, precision)
    u = dot("cbhij,cbhjd->cbhid", inverse, beta * values)
    w = dot("cbhij,cbhjd->cbhid", inverse, beta * jnp.exp(total)[..., None] * keys)
    scores = decay * dot("cbhid,cbhjd->cbhij", queries, keys)
    to_end = jnp.exp(total[..., -1:] - total)[..., None] * keys
    from_start = jnp.exp(total)[..., None] * queries

    def step(s: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        u, w, scores, to_end, from_start, last = xs
        fresh = u - dot("bhik,bhkv->bhiv", w, s)
        out = dot("bhik,bhkv->bhiv", from_start, s) + dot("bhij,bhjv->bhiv", scores, fresh)
        s = jnp.exp(last)[..., None, None] * s + dot("bhik,bhiv->bhkv", to_end, fresh)
        return s, out

    final, out = jax.lax.scan(step, state, (u, w, scores, to_end, from_start, total[..., -1]))
    out = jnp.moveaxis(out, 0, 2).reshape(batch, value_heads, chunks * chunk, value_dim)
    return out[:, :, :rows].swapaxes(1, 2), final


def tree_delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    beta: Float[Array, "B N Hv"],
    path_decay: Float[Array, "B N Hv"],
    state: Float[Array, "B Hv dk dv"],
    ancestors: Bool[Array, "B N N"],
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B N Hv dv"]]:
    """See `pallas_kernels.gdn_scan.api.tree_delta_rule`."""
    rows, value_heads = v.shape[1:3]
    dot = functools.partial(jnp.einsum, precision=HIGHEST)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    queries = _expand_heads(q, value_heads) * q.shape[-1] ** -0.5
    keys = _expand_heads(k, value_heads)
    total = path_decay.swapaxes(1, 2)
    rise = jnp.exp(total)[..., None]
    beta = beta.swapaxes(1, 2)[..., None]
    mask = ancestors[:, None]
    decay = jnp.exp(jnp.where(mask, total[..., :, None] - total[..., None, :], -jnp.inf))

    right = beta * (v.swapaxes(1, 2) - rise * dot("bhik,bhkv->bhiv", keys, state))
    if rows == 1:
        u = right
    else:
        strict = ancestors & ~jnp.eye(rows, dtype=bool)
        a = jnp.where(strict[:, None], beta * decay * dot("bhid,bhjd->bhij", keys, keys), 0.0)
        u = dot("bhij,bhjv->bhiv", unit_lower_inverse(a), right)
    scores = decay * dot("bhid,bhjd->bhij", queries, keys)
    out = rise * dot("bhik,bhkv->bhiv", queries, state) + dot("bhij,bhjv->bhiv", scores, u)
    return out.swapaxes(1, 2), u.swapaxes(1, 2)


def commit_path(
    state: Float[Array, "L B Hv dk dv"],
    k: Float[Array, "L B N Hk dk"],
    u: Float[Array, "L B N Hv dv"],
    path_decay: Float[Array, "L B N Hv"],
    path: Int[Array, "B D"],
    count: Int[Array, " B"],
) -> Float[Array, "L B Hv dk dv"]:
    """See `pallas_kernels.gdn_scan.api.commit_path`."""
    value_heads = u.shape[3]
    slot = jnp.arange(path.shape[0])[:, None]
    used = jnp.arange(path.shape[1]) < count[:, None]
    keys = jnp.repeat(k[:, slot, path], value_heads // k.shape[3], axis=3)
    fresh, total = u[:, slot, path], path_decay[:, slot, path]
    last = jnp.take_along_axis(total, jnp.maximum(count - 1, 0)[None, :, None, None], axis=2)
    # Masked before exp; a row that is not on the path contributes exactly nothing, whatever it holds.
    share = jnp.exp(jnp.where(used[None, :, :, None], last - total, -jnp.inf))[..., None]
    keys = jnp.where(used[None, :, :, None, None], keys, 0.0).astype(jnp.float32)
    fresh = jnp.where(used[None, :, :, None, None], fresh, 0.0)
    update = jnp.einsum("lbnhk,lbnhv->lbhkv", share * keys, fresh, precision=HIGHEST)
    new = jnp.exp(last[:, :, 0])[..., None, None] * state + update
    return jnp.where((count > 0)[None, :, None, None, None], new, state)
