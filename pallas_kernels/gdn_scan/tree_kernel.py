"""Pallas Triton kernel of the tree form: one program a (slot, value head, block of value dims), one launch.

A program loads its head's keys and queries, reads its block of the committed state once, and does the rest in
registers and shared memory: decays, the innovations and the outputs. Programs of one head repeat the products of its
keys. That costs no time while there are fewer programs than multiprocessors can hold, and a kernel of its own for them
would cost a launch and a trip through memory.

I + A is solved by forward substitution over tiles of rows, and in a tile by doubling (`dots.unit_lower_solve`). Small
tiles do less arithmetic and need fewer registers, large ones have fewer steps that wait for each other.

Rows are padded to a power of two that a matrix unit takes (16, 32, 64, 128). A padding row has no ancestors, not even
itself, and zero keys and values, hence zero innovations. It is never loaded nor stored.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ancestry import WORD, bit
from pallas_kernels.dispatch import compiled_once
from pallas_kernels.gdn_scan.configs import TreeConfig
from pallas_kernels.gdn_scan.dots import dot, held_back, unit_lower_solve

MAX_ROWS = 128


def padded(rows: int) -> int:
    """Rows of the matrices that a kernel multiplies: the next power of two, at least 16."""
    return max(16, 1 << max(rows - 1, 0).bit_length())


def _kernel(
    layer_ref,  # [1]
    q_ref,  # [B, N, Hk, dk]
    k_ref,  # [B, N, Hk, dk]
    v_ref,  # [B, N, Hv, dv]
    beta_ref,  # [B, N, Hv]
    total_ref,  # [B, N, Hv]
    state_ref,  # [L, B, Hv, dk, dv]
    ancestors_ref,  # [B, N, S]
    out_ref,  # [B, N, Hv, dv]
    u_ref,  # [B, N, Hv, dv]
    *,
    config: TreeConfig,
    interpret: bool,
):
    _, rows, key_heads, key_dim = q_ref.shape
    value_heads = v_ref.shape[2]
    size = min(config.tile, padded(rows))
    tiles = range(padded(rows) // size)
    part, head, slot = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key_head = head // (value_heads // key_heads)
    product = functools.partial(dot, mode=config.dot, largest_first=True, interpret=interpret)

    places = [t * size + jnp.arange(size) for t in tiles]
    # In bounds even where masked: an interpreter reads before it masks.
    indices = [jnp.minimum(place, rows - 1) for place in places]
    value_dims = part * config.block_dv + jnp.arange(config.block_dv)
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)

    def rows_of(ref, tile, head, dims):
        mask = jnp.broadcast_to((places[tile] < rows)[:, None], (size, dims.shape[0]))
        return plgpu.load(ref.at[slot, indices[tile][:, None], head, dims[None, :]], mask=mask, other=0)

    def gate_of(ref, tile):
        return plgpu.load(ref.at[slot, indices[tile], head], mask=places[tile] < rows, other=0.0)

    layer = layer_ref[0]
    pairs = [(i, j) for i in tiles for j in tiles if j <= i]
    steps = key_dim // config.block_dk

    @functools.cache
    def word(i, number):
        return plgpu.load(ancestors_ref.at[slot, indices[i], number], mask=places[i] < rows, other=0)

    def sees(i, j):
        # Tiles divide words.
        return bit(word(i, j * size // WORD)[:, None], places[j][None, :])

    @functools.cache
    def gates():
        return [[gate_of(ref, t) for t in tiles] for ref in (total_ref, beta_ref)]

    @functools.cache
    def values(tile):
        return rows_of(v_ref, tile, head, value_dims)

    if config.ahead:
        # Reads of memory keep the order of their first call: where all come first they are waited for once.
        gates(), [sees(*pair) for pair in pairs], [values(t) for t in tiles]

    def sweep(*refs):
        """For keys, queries or both: their products with the keys (pairs of tiles) and with the state (tiles).

        One pass over blocks of key dims: operands of all of them at once would not fit the registers.
        """

        def key_block(step, carry):
            dims = step * config.block_dk + jnp.arange(config.block_dk)
            keys = [rows_of(k_ref, t, key_head, dims) for t in tiles]
            queries = [rows_of(q_ref, t, key_head, dims) for t in tiles] if config.ahead else None
            state = state_ref[layer, slot, head, dims[:, None], value_dims[None, :]]
            if config.ahead:
                keys = [held_back(x, place < rows) for x, place in zip(keys, places, strict=True)]
            new = []
            for ref, (by_key, by_state) in zip(refs, carry, strict=True):
                left = keys if ref is k_ref else queries or [rows_of(ref, t, key_head, dims) for t in tiles]
                if rows > 1 or ref is q_ref:
                    by_key = {
                        (i, j): product(left[i], keys[j], onto=by_key[i, j], contract=(1, 1)) for i, j in pairs
                    }
                new.append((by_key, [product(left[t], state, onto=by_state[t]) for t in tiles]))
            return new

        square, tall = jnp.zeros((size, size), jnp.float32), jnp.zeros((size, config.block_dv), jnp.float32)
        carry = [(dict.fromkeys(pairs, square), [tall for _ in tiles]) for _ in refs]
        return key_block(0, carry) if steps == 1 else jax.lax.fori_loop(0, steps, key_block, carry)

    swept = sweep(k_ref) if config.two_sweeps else sweep(k_ref, q_ref)
    similar, read_k = swept[0]

    total, beta = gates()
    # Masked before exp: off the path the difference may be positive and overflow.
    decay = {
        (i, j): jnp.exp(jnp.where(sees(i, j), total[i][:, None] - total[j][None, :], -jnp.inf)) for i, j in pairs
    }

    def coupling(i, j):
        return beta[i][:, None] * decay[i, j] * similar[i, j]

    def right(i):
        rise = jnp.exp(total[i])[:, None]
        return beta[i][:, None] * (values(i).astype(jnp.float32) - rise * read_k[i])

    # Forward substitution: what earlier tiles wrote, then the tile's own system.
    u = []
    for i in tiles:
        left = right(i)
        for j in range(i):
            left = product(-coupling(i, j), u[j], onto=left)
        if rows > 1:
            left = unit_lower_solve(coupling(i, i), left, row, column, config.dot, interpret=interpret)
        u.append(left)

    scores, read_q = sweep(q_ref)[0] if config.two_sweeps else swept[1]
    for i in tiles:
        out = jnp.exp(total[i])[:, None] * read_q[i]
        for j in range(i + 1):
            out = product(decay[i, j] * scores[i, j], u[j], onto=out)
        stored = jnp.broadcast_to((places[i] < rows)[:, None], (size, config.block_dv))
        # Unclamped: two rows of one store must not name the same place, even where one is masked.
        cell = (slot, places[i][:, None], head, value_dims[None, :])
        plgpu.store(u_ref.at[cell], u[i], mask=stored)
        plgpu.store(out_ref.at[cell], key_dim**-0.5 * out, mask=stored)


@compiled_once("config", "interpret")
def tree_delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    beta: Float[Array, "B N Hv"],
    path_decay: Float[Array, "B N Hv"],
    state: Float[Array, "L B Hv dk dv"],
    layer: Int[Array, " 1"],
    ancestors: Int[Array, "B N S"],
    *,
    config: TreeConfig,
    interpret: bool = False,
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B N Hv dv"]]:
    """See `pallas_kernels.gdn_scan.api.tree_delta_rule`.

    `state` is that of all layers, `layer` which to read, and the mask is `packed`.
    """
    batch, rows, value_heads, value_dim = v.shape
    config = config.fit(q.shape[3], value_dim)
    rows_shape = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, config=config, interpret=interpret),
        grid=(value_dim // config.block_dv, value_heads, batch),
        out_shape=(rows_shape, rows_shape),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name=f"gdn_tree_{padded(rows)}",
    )(layer, q, k, v, beta, path_decay, state, ancestors)
