"""Public entries of the gated delta rule (Gated Delta Networks, arXiv 2412.06464).

Recurrence of one head, fp32, with state S [dk, dv]:
    S ← e^g S;  u = β (v − Sᵀ k);  S ← S + k uᵀ;  o = Sᵀ q / √dk
Value head j uses key head j // (Hv / Hk). Keys and queries come l2-normalised.
"""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.gdn_scan import reference


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

    Rows with β = 0 and g = 0 leave the state untouched (padding). Everything is fp32.

    Args:
      q: queries; k: keys; v: values; beta: write strengths in (0, 1); g: log decays, at most 0.
      state: state before the first row.
      chunk: rows handled at once.
      precise: fp32 products throughout; False lets a GPU use TF32 (training).
      implementation: "auto", "xla" or "pallas".
    """
    resolve("gdn_scan", implementation)
    return reference.chunk_delta_rule(q, k, v, beta, g, state, chunk=chunk, precise=precise)


def tree_delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    beta: Float[Array, "B N Hv"],
    g: Float[Array, "B N Hv"],
    state: Float[Array, "B Hv dk dv"],
    ancestors: Bool[Array, "B N N"],
    *,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B N Hv dv"], Float[Array, "B N Hv"]]:
    """N tree rows from one committed state, no state per node.

    Rows are in topological order; `ancestors[b, i, j]` says that j is i or an ancestor of i.

    Returns:
      The outputs; u, the innovations of the rows; and the sums of g along each root path. The last two with `k` are
      all that `commit_path` needs.
    """
    resolve("gdn_scan", implementation)
    return reference.tree_delta_rule(q, k, v, beta, g, state, ancestors)


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

    S' = e^{G_last} S + Σ_j e^{G_last − G_j} k_j u_jᵀ. A slot with count 0 keeps its state bit for bit.
    """
    resolve("gdn_scan", implementation)
    return reference.commit_path(state, k, u, path_decay, path, count)
