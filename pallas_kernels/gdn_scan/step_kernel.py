"""Pallas Triton kernel of one row: the recurrence itself, with no matrix of rows to invert and none to multiply.

Autoregressive decoding reads the state and little else. A program has a (slot, value head, block of value dims), loads
its block of the state once and sums over key dims in fp32.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import compiled_once
from pallas_kernels.gdn_scan.configs import StepConfig


def _kernel(
    layer_ref,  # [1]
    q_ref,  # [B, 1, Hk, dk]
    k_ref,  # [B, 1, Hk, dk]
    v_ref,  # [B, 1, Hv, dv]
    beta_ref,  # [B, 1, Hv]
    g_ref,  # [B, 1, Hv]
    state_ref,  # [L, B, Hv, dk, dv]
    out_ref,  # [B, 1, Hv, dv]
    u_ref,  # [B, 1, Hv, dv]
    *,
    block_dv: int,
):
    key_heads, key_dim = q_ref.shape[2:]
    part, head, slot = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key_head = head // (v_ref.shape[2] // key_heads)
    key_dims = jnp.arange(key_dim)
    value_dims = part * block_dv + jnp.arange(block_dv)
    state = state_ref[layer_ref[0], slot, head, key_dims[:, None], value_dims[None, :]]
    q, k = (ref[slot, 0, key_head, key_dims].astype(jnp.float32) for ref in (q_ref, k_ref))
    v = v_ref[slot, 0, head, value_dims].astype(jnp.float32)
    decay = jnp.exp(g_ref[slot, 0, head])
    u = beta_ref[slot, 0, head] * (v - decay * jnp.sum(k[:, None] * state, axis=0))
    out = decay * jnp.sum(q[:, None] * state, axis=0) + jnp.sum(q * k) * u
    u_ref[slot, 0, head, value_dims] = u
    out_ref[slot, 0, head, value_dims] = key_dim**-0.5 * out


@compiled_once("config", "interpret")
def step_delta_rule(
    q: Float[Array, "B 1 Hk dk"],
    k: Float[Array, "B 1 Hk dk"],
    v: Float[Array, "B 1 Hv dv"],
    beta: Float[Array, "B 1 Hv"],
    path_decay: Float[Array, "B 1 Hv"],
    state: Float[Array, "L B Hv dk dv"],
    layer: Int[Array, " 1"],
    *,
    config: StepConfig,
    interpret: bool = False,
) -> tuple[Float[Array, "B 1 Hv dv"], Float[Array, "B 1 Hv dv"]]:
    """See `pallas_kernels.gdn_scan.api.tree_delta_rule`; a tree of one row, whose path sum is its own g."""
    batch, _, value_heads, value_dim = v.shape
    block_dv = min(config.block_dv, value_dim)
    row = jax.ShapeDtypeStruct(v.shape, jnp.float32)

    def kernel(*refs):
        _kernel(*refs, block_dv=block_dv)

    return pl.pallas_call(
        kernel,
        grid=(value_dim // block_dv, value_heads, batch),
        out_shape=(row, row),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_step",
    )(layer, q, k, v, beta, path_decay, state)
