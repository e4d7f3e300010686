"""Public entries of a Gated DeltaNet layer's elementwise parts (arXiv 2412.06464, as in Qwen3.5/3.6).

With the tree rule between them they are all of a layer that is not a product with weights: three launches.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.ancestry import packed, unpacked
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
    projected: Float[Array, "B N P"],
    window: Float[Array, "B W C"] | Float[Array, "L B W C"],
    taps: Int[Array, "B N W"] | None,
    weight: Float[Array, "C 1 K"],
    a_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    valid: Bool[Array, "B N"],
    *,
    key_heads: int,
    key_dim: int,
    ancestors: Bool[Array, "B N N"] | Int[Array, "B N S"] | None = None,
    layer: int | None = None,
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
    l2-normalised; β = sigmoid(strength), g = −e^{a_log}·softplus(decay + dt_bias), both 0 in rows that are not valid;
    of tree rows, the sums of g along their root paths.

    Args:
      projected: raw projections side by side: C channels (queries, keys, values), gates z (not used here), and last Hv
        strengths and Hv decays. A kernel reads them where they lie. Zero in rows that are not valid.
      window: the last W = K − 1 raw channels before row 0; of one layer, or of all layers with `layer` naming one.
      taps: taps[b, i, j] is the row of the (j+1)-th ancestor of row i, or −m for the m-th last input of the window;
        None for causal rows.
      weight: of the convolution; the last tap is the row itself.
      a_log, dt_bias: fp32 parameters of the decay.
      valid: False in padding rows.
      key_heads, key_dim: key heads and their width; the rest of the channels are values.
      ancestors: ancestor-or-self mask of tree rows, or its words (`ancestry.packed`), which spare kernels the packing;
        None exactly when `taps` is.
      layer: see `window`.
      implementation: "auto", "xla" or "pallas".

    Returns:
      q, k, v in the inputs' dtype; beta, and g or its path sums, in fp32.

    Raises:
      ValueError: of `taps` and `ancestors` one is None.
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    if (taps is None) != (ancestors is None):
        raise ValueError("rows are causal, without taps and ancestors, or a tree's, with both")
    value_heads, channels = a_log.shape[0], weight.shape[0]
    starts = projected.shape[2] - 2 * value_heads, projected.shape[2] - value_heads
    value_dim = (channels - 2 * key_heads * key_dim) // value_heads
    reason = unsupported_front(projected, key_dim, value_dim)
    if resolve("gdn_mixer", implementation, reason) == "xla":
        return reference.gdn_front(
            projected[..., :channels], window if layer is None else window[layer], taps, weight,
            projected[..., starts[0] : starts[1]], projected[..., starts[1] :], a_log, dt_bias, valid,
            key_heads=key_heads, key_dim=key_dim, ancestors=None if ancestors is None else unpacked(ancestors),
        )  # fmt: skip
    if layer is None:
        window, layer = window[None], 0
    config = front_config(target_device().device_kind, projected.shape[1])
    # The layer is an operand, not a constant, so that all layers run one compiled kernel.
    place = jnp.array([layer], jnp.int32)
    # One operation for all layers; a single row's path is the row.
    mask = None if ancestors is None or ancestors.shape[1] == 1 else packed(ancestors)
    return kernel.gdn_front(
        place, projected, window, taps, weight, projected, projected, a_log, dt_bias, valid, mask,
        key_heads=key_heads, key_dim=key_dim, starts=starts, config=config,
    )  # fmt: skip


def gated_norm(
    x: Float[Array, "*R H d"],
    z: Float[Array, "*R Z"],
    weight: Float[Array, " d"],
    *,
    eps: float,
    start: int = 0,
    implementation: Implementation = "auto",
) -> Float[Array, "*R H d"]:
    """RMSNorm of x over the last axis times `weight` and silu of the gates; computed in fp32, returned in z's dtype.

    Args:
      x: heads of every row.
      z: gates of all heads side by side, H·d columns from `start` on; a kernel reads them where they lie.
      weight: of the norm, for every head.
      eps: added to the mean square.
      start: see `z`.
      implementation: "auto", "xla" or "pallas".

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    if resolve("gdn_mixer", implementation, _unsupported_dim(x.shape[-1])) == "xla":
        width = x.shape[-2] * x.shape[-1]
        return reference.gated_norm(x, z[..., start : start + width].reshape(x.shape), weight, eps=eps)
    rows = x.size // x.shape[-1]
    config = norm_config(target_device().device_kind, rows)
    return kernel.gated_norm(x, z, weight, eps=eps, start=start, config=config)
