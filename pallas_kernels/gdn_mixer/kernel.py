"""Pallas Triton kernels of the front and the gated norm: one launch each, every input read once.

The front has a program a (block of rows, head, slot), the heads being those of queries, keys and values in the order
of the channels; a head's width is what an l2 norm needs to see. After them come programs of their own for the gates of
each value head, which else would wait for its values. Where g is summed along the paths of a tree, each of them makes
the g of every row.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.ancestry import WORD, bit
from pallas_kernels.dispatch import compiled_once
from pallas_kernels.gdn_mixer.configs import Config
from pallas_kernels.gdn_mixer.reference import L2_EPS


def _front_kernel(
    *refs,  # layer [1], inputs [B, N, ≥ C], window [L, B, W, C], taps [B, N, W] unless causal, ancestors [B, N, S] if
    # g is summed, weight [C, 1, K], strength and decay [B, N, ≥ Hv], a_log and dt_bias [Hv], valid [B, N];
    # then q and k [B, N, Hk, d], v [B, N, Hv, d], beta and g [B, N, Hv]
    causal: bool,
    summed: bool,
    block_rows: int,
    starts: tuple[int, int],
):
    taps_ref, ancestors_ref = None if causal else refs[3], refs[4] if summed else None
    layer_ref, inputs_ref, window_ref = refs[:3]
    weight_ref, strength_ref, decay_ref, a_log_ref, dt_bias_ref, valid_ref = refs[-11:-5]
    q_ref, k_ref, v_ref, beta_ref, g_ref = refs[-5:]
    rows, width = inputs_ref.shape[1], window_ref.shape[2]
    key_heads, dim = q_ref.shape[2:]
    heads = 2 * key_heads + v_ref.shape[2]
    head, slot = pl.program_id(1), pl.program_id(2)

    row = pl.program_id(0) * block_rows + jnp.arange(block_rows)
    live = row < rows
    # In bounds even where masked: an interpreter reads before it masks.
    index = jnp.minimum(row, rows - 1)

    @pl.when(head < heads)
    def _():
        dims = jnp.arange(dim)
        channels = head * dim + dims
        tile = (block_rows, dim)
        layer = layer_ref[0]

        def rows_of(ref, place, mask):
            place = jnp.clip(place, 0, ref.shape[-2] - 1)
            mask = jnp.broadcast_to(mask[:, None], tile)
            cell = (slot, place[:, None], channels[None, :])
            value = plgpu.load(ref.at[cell if ref is inputs_ref else (layer, *cell)], mask=mask, other=0)
            return value.astype(jnp.float32)

        def factor(tap):
            return weight_ref[channels, 0, tap].astype(jnp.float32)[None, :]

        total = rows_of(inputs_ref, index, live) * factor(width)
        for j in range(width):
            if taps_ref is None:
                tap = row - 1 - j
            else:
                tap = plgpu.load(taps_ref.at[slot, index, j], mask=live, other=0)
            earlier = rows_of(inputs_ref, tap, live & (tap >= 0)) + rows_of(window_ref, tap + width, live & (tap < 0))
            total += earlier * factor(width - 1 - j)
        # Rounded to the activations' dtype before the norm, as a convolution of its own would leave it.
        mixed = (total * jax.lax.logistic(total)).astype(inputs_ref.dtype)

        def store(ref, head, value):
            mask = jnp.broadcast_to(live[:, None], tile)
            plgpu.store(ref.at[slot, row[:, None], head, dims[None, :]], value.astype(ref.dtype), mask=mask)

        @pl.when(head < 2 * key_heads)
        def _():
            x = mixed.astype(jnp.float32)
            x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=1) + L2_EPS)[:, None]
            pl.when(head < key_heads)(lambda: store(q_ref, head, x))
            pl.when(head >= key_heads)(lambda: store(k_ref, head - key_heads, x))

        pl.when(head >= 2 * key_heads)(lambda: store(v_ref, head - 2 * key_heads, mixed))

    @pl.when(head >= heads)
    def _():
        value_head = head - heads

        def gate(ref, start, index, live):
            """What the projection says of these rows, and which of them are valid."""
            value = plgpu.load(ref.at[slot, index, start + value_head], mask=live, other=0).astype(jnp.float32)
            return value, plgpu.load(valid_ref.at[slot, index], mask=live, other=0) != 0

        def log_decay(index, live):
            decay, valid = gate(decay_ref, starts[1], index, live)
            decay += dt_bias_ref[value_head]
            softplus = jnp.maximum(decay, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(decay)))
            return jnp.where(valid, -jnp.exp(a_log_ref[value_head]) * softplus, 0.0)

        strength, valid = gate(strength_ref, starts[0], index, live)
        beta = jnp.where(valid, jax.lax.logistic(strength), 0.0)
        if ancestors_ref is None:
            g = log_decay(index, live)
        else:
            place = jnp.arange(pl.next_power_of_2(rows))
            other = jnp.minimum(place, rows - 1)
            mask = live[:, None] & (place < rows)[None, :]
            words = plgpu.load(ancestors_ref.at[slot, index[:, None], (other // WORD)[None, :]], mask=mask, other=0)
            along = bit(words, place[None, :])
            g = jnp.sum(jnp.where(along, log_decay(other, place < rows)[None, :], 0.0), axis=1)
        plgpu.store(beta_ref.at[slot, row, value_head], beta, mask=live)
        plgpu.store(g_ref.at[slot, row, value_head], g, mask=live)


@compiled_once("key_heads", "key_dim", "config", "starts", "interpret")
def gdn_front(
    layer: Int[Array, " 1"],
    inputs: Float[Array, "B N I"],
    window: Float[Array, "L B W C"],
    taps: Int[Array, "B N W"] | None,
    weight: Float[Array, "C 1 K"],
    strength: Float[Array, "B N S"],
    decay: Float[Array, "B N D"],
    a_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    valid: Bool[Array, "B N"],
    ancestors: Int[Array, "B N S"] | None = None,
    *,
    key_heads: int,
    key_dim: int,
    config: Config,
    starts: tuple[int, int] = (0, 0),
    interpret: bool = False,
) -> tuple[
    Float[Array, "B N Hk dk"],
    Float[Array, "B N Hk dk"],
    Float[Array, "B N Hv dv"],
    Float[Array, "B N Hv"],
    Float[Array, "B N Hv"],
]:
    """See `pallas_kernels.gdn_mixer.api.gdn_front`.

    `window` is that of all layers, `layer` which to read. Of `inputs` the first C columns count, of `strength` and
    `decay` the Hv columns from `starts` on, so that all three may be one joined projection. The mask is `packed`.
    """
    batch, rows = inputs.shape[:2]
    value_heads = a_log.shape[0]
    keys = jax.ShapeDtypeStruct((batch, rows, key_heads, key_dim), inputs.dtype)
    values = jax.ShapeDtypeStruct((batch, rows, value_heads, key_dim), inputs.dtype)
    gates = jax.ShapeDtypeStruct((batch, rows, value_heads), jnp.float32)
    past = [x for x in (layer, inputs, window, taps, ancestors) if x is not None]
    causal, summed = taps is None, ancestors is not None
    return pl.pallas_call(
        functools.partial(
            _front_kernel, causal=causal, summed=summed, block_rows=config.block_rows, starts=starts
        ),
        grid=(pl.cdiv(rows, config.block_rows), 2 * (key_heads + value_heads), batch),
        out_shape=(keys, keys, values, gates, gates),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_front",
    )(*past, weight, strength, decay, a_log, dt_bias, valid)


def _norm_kernel(x_ref, z_ref, weight_ref, out_ref, *, block_rows: int, eps: float, start: int):
    (rows, dim), heads = x_ref.shape, x_ref.shape[0] // z_ref.shape[0]
    row = pl.program_id(0) * block_rows + jnp.arange(block_rows)
    dims = jnp.arange(dim)
    mask = jnp.broadcast_to((row < rows)[:, None], (block_rows, dim))
    index = jnp.minimum(row, rows - 1)
    x = plgpu.load(x_ref.at[index[:, None], dims[None, :]], mask=mask, other=0).astype(jnp.float32)
    columns = (start + index % heads * dim)[:, None] + dims[None, :]
    z = plgpu.load(z_ref.at[(index // heads)[:, None], columns], mask=mask, other=0).astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=1) / dim + eps)[:, None] * weight_ref[dims][None, :]
    out = (x * (z * jax.lax.logistic(z))).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row[:, None], dims[None, :]], out, mask=mask)


@compiled_once("eps", "config", "start", "interpret")
def gated_norm(
    x: Float[Array, "*R H d"],
    z: Float[Array, "*R Z"],
    weight: Float[Array, " d"],
    *,
    eps: float,
    config: Config,
    start: int = 0,
    interpret: bool = False,
) -> Float[Array, "*R H d"]:
    """See `pallas_kernels.gdn_mixer.api.gated_norm`; the gates of all heads are the columns of `z` from `start` on."""
    shape, dim = x.shape, x.shape[-1]
    rows = math.prod(shape[:-1])
    return pl.pallas_call(
        functools.partial(_norm_kernel, block_rows=config.block_rows, eps=eps, start=start),
        grid=(pl.cdiv(rows, config.block_rows),),
        out_shape=jax.ShapeDtypeStruct((rows, dim), z.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_gated_norm",
    )(x.reshape(rows, dim), z.reshape(-1, z.shape[-1]), weight).reshape(shape)
