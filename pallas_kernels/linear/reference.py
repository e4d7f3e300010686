"""XLA reference of products with weights and what stands after them."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def matmul_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """Asks for fp32 products in fp32; without this a GPU would silently round the operands to TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(
    x: Float[Array, "... i"],
    weight: Float[Array, "o i"],
    bias: Float[Array, " o"] | None,
    *,
    swiglu: bool,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "... O"]:
    """See `pallas_kernels.linear.api.linear`."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    # Sums are fp32 inside; a bf16 result asks for no copy in fp32 on the way.
    y = lax.dot_general(x, weight, dims, precision=matmul_precision(weight.dtype), preferred_element_type=dtype)
    y = y if bias is None else y + bias
    if not swiglu:
        return y
    gate, up = jnp.split(y, 2, axis=-1)
    return jax.nn.silu(gate) * up
