"""Public entries of a Gated DeltaNet layer's elementwise parts (arXiv 2412.06464, as in Qwen3.5/3.6).

With the tree rule between them they are all of a layer that is not a product with weights: three launches.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, resolve, target_device
from pallas_kernels.gdn_mixer import kernel, reference
from pallas_kernels.gdn_mixer.configs import front_config, norm_config

DTYPES = (jnp.bfloat16, jnp.float32)
MAX_HEAD_DIM = 256


def _unsupported_dim(dim: int) -> str | None:
    if dim & (dim - 1) or dim > MAX_HEAD_DIM:
        return f"head dim {dim} is not a power of two of at most {MAX_HEAD_DIM}"
    return None


def unsupported_front(inputs: Float[Array, "B N C"], key_dim: int, value_dim: int) -> str | None:
    """Why the front's Pallas kernel cannot take these arrays, whatever the device; None if it can."""
    if inputs.dtype not in DTYPES:
        return f"dtype {inputs.dtype} is none of bfloat16, float32"
    if key_dim != value_dim:
        return f"key dim {key_dim} and value dim {value_dim} differ"
    return _unsupported_dim(key_dim)


def gdn_front(
    inputs: Float[Array, "B N C"],
    window: Float[Array, "B W C"],
    taps: Int[Array, "B N W"] | None,
    weight: Float[Array, "C 1 K"],
    strength: Float[Array, "B N Hv"],
    decay: Float[Array, "B N Hv"],
    a_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    valid: Bool[Array, "B N"],
    *,
    key_heads: int,
    key_dim: int,
    implementation: Implementation = "auto",
) -> tuple[
    Float[Array, "B N Hk dk"],
    Float[Array, "B N Hk dk"],
    Float[Array, "B N Hv dv"],
    Float[Array, "B N Hv"],
    Float[Array, "B N Hv"],
]:
    """From a layer's projections to the operands of the delta rule.

    silu of the causal depthwise convolution; its channels split into queries, keys and values; queries and keys
    l2-normalised; β = sigmoid(strength), g = −e^{a_log}·softplus(decay + dt_bias), both 0 in rows that are not valid.

    Args:
      inputs: raw projection, channels in the order queries, keys, values; zero in rows that are not valid.
      window: the last W = K − 1 raw inputs before row 0.
      taps: taps[b, i, j] is the row of the (j+1)-th ancestor of row i, or −m for the m-th last input of the window;
        None for causal rows.
      weight: of the convolution; the last tap is the row itself.
      strength, decay: raw projections of the gates.
      a_log, dt_bias: fp32 parameters of the decay.
      valid: False in padding rows.
      key_heads, key_dim: key heads and their width; the rest of the channels are values.
      implementation: "auto", "xla" or "pallas".

    Returns:
      q, k, v in the inputs' dtype; beta, g in fp32.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    value_heads = strength.shape[2]
    value_dim = (inputs.shape[2] - 2 * key_heads * key_dim) // value_heads
    reason = unsupported_front(inputs, key_dim, value_dim)
    arrays = (inputs, window, taps, weight, strength, decay, a_log, dt_bias, valid)
    if resolve("gdn_mixer", implementation, reason) == "xla":
        return reference.gdn_front(*arrays, key_heads=key_heads, key_dim=key_dim)
    config = front_config(target_device().device_kind, inputs.shape[1])
    return kernel.gdn_front(*arrays, key_heads=key_heads, key_dim=key_dim, config=config)


def gated_norm(
    x: Float[Array, "... d"],
    z: Float[Array, "... d"],
    weight: Float[Array, " d"],
    *,
    eps: float,
    implementation: Implementation = "auto",
) -> Float[Array, "... d"]:
    """RMSNorm of x over the last axis times `weight` and silu(z); computed in fp32, returned in z's dtype.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    if resolve("gdn_mixer", implementation, _unsupported_dim(x.shape[-1])) == "xla":
        return reference.gated_norm(x, z, weight, eps=eps)
    rows = x.size // x.shape[-1]
    return kernel.gated_norm(x, z, weight, eps=eps, config=norm_config(target_device().device_kind, rows))
