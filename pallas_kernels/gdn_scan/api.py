"""Public entries of the gated delta rule (Gated Delta Networks, arXiv 2412.06464).

Recurrence of one head, fp32, with state S [dk, dv]:
    S ← e^g S;  u = β (v − Sᵀ k);  S ← S + k uᵀ;  o = Sᵀ q / √dk
Value head j uses key head j // (Hv / Hk). Keys and queries come l2-normalised, in fp32 or bf16 as the model is; the
arithmetic, the state and all results are fp32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.ancestry import packed, unpacked
from pallas_kernels.dispatch import Implementation, resolve, target_device
from pallas_kernels.gdn_scan import (
    chunk_kernel,
    commit_kernel,
    path_kernel,
    reference,
    step_kernel,
    tree_kernel,
)
from pallas_kernels.gdn_scan.configs import table_for

DTYPES = (jnp.bfloat16, jnp.float32)
# Rows of a path that has been measured: longer ones are left to the tree's kernel.
LONGEST_PATH = 16
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 128


def unsupported(
    k: Float[Array, "... Hk dk"], v: Float[Array, "... Hv dv"], *, rows: int = 1
) -> str | None:
    """Why the Pallas kernels cannot take these keys and values, whatever the device; None if they can.

    Args:
      k, v: keys, and values or innovations.
      rows: what must fit one matrix: the rows of a tree, the length of a path.
    """
    if k.dtype not in DTYPES:
        return f"keys of dtype {k.dtype}, which is none of bfloat16, float32"
    for name, dim in (("key", k.shape[-1]), ("value", v.shape[-1])):
        if dim & (dim - 1) or not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
            return f"{name} head dim {dim} is not a power of two in {MIN_HEAD_DIM}...{MAX_HEAD_DIM}"
    if rows > tree_kernel.MAX_ROWS:
        return f"{rows} rows are more than {tree_kernel.MAX_ROWS}"
    return None


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
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B Hv dk dv"]]:
    """N causal rows from an initial state: outputs and the state after the last row.

    Rows with β = 0 and g = 0 leave the state untouched (padding).

    Args:
      q: queries; k: keys; v: values; beta: write strengths in (0, 1); g: log decays, at most 0.
      state: state before the first row.
      chunk: rows that XLA handles at once; the Pallas kernels have their own in their configs.
      precise: fp32 products throughout in XLA; False lets a GPU use TF32 (training).
      implementation: "auto", "xla" or "pallas".

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    if resolve("gdn_scan", implementation, unsupported(k, v)) == "xla":
        return reference.chunk_delta_rule(q, k, v, beta, g, state, chunk=chunk, precise=precise)
    config = table_for(target_device().device_kind, k.dtype).chunk
    return chunk_kernel.chunk_delta_rule(q, k, v, beta, g, state, config=config)


def tree_delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    beta: Float[Array, "B N Hv"],
    path_decay: Float[Array, "B N Hv"],
    state: Float[Array, "B Hv dk dv"] | Float[Array, "L B Hv dk dv"],
    ancestors: Bool[Array, "B N N"] | Int[Array, "B N S"],
    *,
    layer: int | None = None,
    paths: Int[Array, "B N P"] | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B N Hv dv"]]:
    """N tree rows from one committed state, no state per node.

    Rows are in topological order; `ancestors[b, i, j]` says that j is i or an ancestor of i.

    Args:
      q, k, v, beta: as in `chunk_delta_rule`.
      path_decay: sums of g along each root path, the row's own included (`gdn_mixer.gdn_front` makes them).
      state: committed states of one layer, or those of all layers with `layer` naming one. A kernel reads the one it
        needs where it lies; cutting a layer out beforehand would copy it.
      ancestors: ancestor-or-self mask, or its words (`ancestry.packed`), which spare kernels the packing.
      layer: see `state`.
      paths: of the same tree (`tree_search.search`), for kernels that `path_rows` says want them.
      implementation: "auto", "xla" or "pallas".

    Returns:
      The outputs; and u, the innovations of the rows. These with `k` and `path_decay` are all that `commit_path` needs.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    rows = q.shape[1]
    if resolve("gdn_scan", implementation, unsupported(k, v, rows=rows)) == "xla":
        one = state if layer is None else state[layer]
        return reference.tree_delta_rule(q, k, v, beta, path_decay, one, unpacked(ancestors))
    if layer is None:
        state, layer = state[None], 0
    table = table_for(target_device().device_kind, k.dtype)
    # The layer is an operand, not a constant, so that all layers run one compiled kernel.
    place = jnp.array([layer], jnp.int32)
    if rows == 1:
        return step_kernel.step_delta_rule(q, k, v, beta, path_decay, state, place, config=table.step)
    if paths is not None:
        config = table.tree[paths.shape[2]]
        return path_kernel.tree_delta_rule(q, k, v, beta, path_decay, state, place, paths, config=config)
    config = table.tree[tree_kernel.padded(rows)]
    mask = packed(ancestors)  # one operation for all layers
    return tree_kernel.tree_delta_rule(q, k, v, beta, path_decay, state, place, mask, config=config)


def path_rows(dtype: jax.typing.DTypeLike, value_dims: int, rows: int, depth: int) -> int:
    """Rows of a path if `tree_delta_rule` wants the `paths` of trees of so many rows and such a depth, else 0.

    Args:
      dtype: that of keys, queries and values.
      value_dims: of all heads of all slots together.
      rows, depth: of a tree.
    """
    longest = tree_kernel.padded(depth + 1)
    many = value_dims > table_for(target_device().device_kind, dtype).paths
    return 0 if many or longest > LONGEST_PATH or tree_kernel.padded(rows) <= longest else longest


def commit_path(
    state: Float[Array, "L B Hv dk dv"],
    k: Float[Array, "L B N Hk dk"],
    u: Float[Array, "L B N Hv dv"],
    path_decay: Float[Array, "L B N Hv"],
    path: Int[Array, "B D"],
    count: Int[Array, " B"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "L B Hv dk dv"]:
    """States of all layers after the first `count` rows of `path` (row numbers, root first).

    S' = e^{G_last} S + Σ_j e^{G_last − G_j} k_j u_jᵀ. A slot with count 0 keeps its state bit for bit. The Pallas
    kernel works in place if the caller's program donates `state`.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    if resolve("gdn_scan", implementation, unsupported(k, u, rows=path.shape[1])) == "xla":
        return reference.commit_path(state, k, u, path_decay, path, count)
    config = table_for(target_device().device_kind, k.dtype).commit
    return commit_kernel.commit_path(state, k, u, path_decay, path, count, config=config)
