# %% [markdown]
# # Gated DeltaNet on a tree
#
# Three of four layers of a Qwen3.5/3.6 model keep no keys and values but a state, a matrix $S \in \mathbb{R}^{d_k \times
# d_v}$ a head. A row with key $k$, value $v$, query $q$, write strength $\beta$ and log decay $g \le 0$ does
#
# $$ S \leftarrow e^{g} S, \qquad u = \beta\,(v - S^\top k), \qquad S \leftarrow S + k\,u^\top, \qquad o = S^\top q /
# \sqrt{d_k}. $$
#
# On a token tree each row continues from its **parent's** state. Here is how all rows are computed at once from the
# committed state $S_0$ alone, with no state copied, checked step by step against that recurrence (Gated Delta Networks,
# arXiv 2412.06464; the tree form is derived in `docs/algorithm.md`).

# %% setup

# %% [markdown]
# ## A tree and random inputs
#
# Rows in topological order: parents before children. $M$ is the ancestor-or-self mask.

# %%
import jax.numpy as jnp
import numpy as np

from dflash_jax import SpineFirst, plots
from dflash_jax.tree import build_tree

rng = np.random.default_rng(0)
marginals = jax.nn.log_softmax(3 * jnp.asarray(rng.normal(size=(1, 7, 50)), jnp.float32))
tree = build_tree(jnp.array([0]), marginals, 31, SpineFirst())
parent, M = np.asarray(tree.parents[0]), np.asarray(tree.ancestors[0])
N, dk, dv = len(parent), 16, 24
plots.ancestor_mask(tree, title="M, the ancestor-or-self mask")

# %%
def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


K, Q, V = unit(rng.normal(size=(N, dk))), unit(rng.normal(size=(N, dk))), rng.normal(size=(N, dv))
beta, g = rng.uniform(size=N), -rng.uniform(0, 0.5, size=N)
S0 = rng.normal(size=(dk, dv))
print(f"{N} rows, a state of {dk} × {dv}, all in {S0.dtype}")

# %% [markdown]
# ## The direct way: a state a row
#
# This is the definition, and what has to be reproduced. It keeps one state for every node.

# %%
states, U_direct, O_direct = np.zeros((N, dk, dv)), np.zeros((N, dv)), np.zeros((N, dv))
for i in range(N):
    S = np.exp(g[i]) * (S0 if parent[i] < 0 else states[parent[i]])
    U_direct[i] = beta[i] * (V[i] - S.T @ K[i])
    states[i] = S + np.outer(K[i], U_direct[i])
    O_direct[i] = states[i].T @ Q[i] / np.sqrt(dk)


def check(name, ours, direct):
    error = np.abs(ours - direct).max() / np.abs(direct).max()
    print(f"{name}: largest relative error {error:.1e}")
    assert error < 1e-12


print(f"{states.nbytes / 2**10:.0f} KiB of states for {N} rows")

# %% [markdown]
# ## Step 1: a state is a sum over its path
#
# With $G_i = \sum_{j \in \text{path}(i)} g_j = (M g)_i$, unrolling the recurrence gives
#
# $$ S_i = e^{G_i} S_0 + \sum_{j \in \text{path}(i)} e^{G_i - G_j}\, k_j u_j^\top. $$

# %%
G = M @ g
# Masked before exp: off the path the difference can be positive, and overflow.
D = np.exp(np.where(M, G[:, None] - G[None, :], -np.inf))
unrolled = np.exp(G)[:, None, None] * S0 + np.einsum("ij,jk,jv->ikv", D, K, U_direct)
check("states by their paths", unrolled, states)

# %% [markdown]
# ## Step 2: all u solve one triangular system
#
# Put the sum (without row $i$ itself: $M^*$, no diagonal) into $u_i = \beta_i (v_i - e^{g_i} S_{\text{parent}(i)}^\top
# k_i)$:
#
# $$ A = M^* \circ \operatorname{diag}(\beta)\,(D \circ K K^\top), \qquad (I + A)\,U = \operatorname{diag}(\beta)\,(V -
# \operatorname{diag}(e^{G})\,K S_0). $$
#
# Parents come before children, so $I + A$ is unit lower triangular.

# %%
A = np.where(M & ~np.eye(N, dtype=bool), beta[:, None] * D * (K @ K.T), 0.0)
assert np.array_equal(A, np.tril(A, -1))
U = np.linalg.solve(np.eye(N) + A, beta[:, None] * (V - np.exp(G)[:, None] * (K @ S0)))
check("u of all rows", U, U_direct)

# %% [markdown]
# $A$ is nilpotent: a power of it connects a row with ancestors so many steps up, and the tree is only so deep.

# %%
levels = int(np.asarray(tree.depths[0]).max()) + 1
power = np.linalg.matrix_power(A, levels)
print(f"{levels} levels: A^{levels - 1} has norm {np.linalg.norm(np.linalg.matrix_power(A, levels - 1)):.1e}, A^{levels} {np.linalg.norm(power):.1e}")
assert not power.any()

# %% [markdown]
# ## Step 3: outputs
#
# $$ O = \bigl[\operatorname{diag}(e^{G})\,Q S_0 + (M \circ D \circ Q K^\top)\,U\bigr] / \sqrt{d_k} $$

# %%
O = (np.exp(G)[:, None] * (Q @ S0) + (D * (Q @ K.T)) @ U) / np.sqrt(dk)
check("outputs of all rows", O, O_direct)

# %% [markdown]
# ## Step 4: commit the accepted path
#
# Nothing was written. What a row leaves behind is $k$, $u$ and $G$; the state after the last accepted row is one product of
# the path's length. Rejected rows never touch a state, so there is nothing to roll back.

# %%
path = np.flatnonzero(M[N - 1])  # the walk, say, ended in the last row
share = np.exp(G[path[-1]] - G[path])
committed = np.exp(G[path[-1]]) * S0 + (share[:, None] * K[path]).T @ U[path]
check(f"state after {len(path)} accepted rows", committed, states[path[-1]])

# %% [markdown]
# ## The library's ops
#
# `tree_delta_rule` and `commit_path` are this algebra in fp32 for all heads and slots (XLA here; on an NVIDIA GPU a Pallas
# kernel). The inverse is built by doubling diagonal blocks, which unlike a product of powers of $A$ does not cancel where
# keys are nearly parallel.

# %%
from pallas_kernels.gdn_scan import commit_path, tree_delta_rule


def one(x):  # [rows, d] -> [batch 1, rows, heads 1, d]
    return jnp.asarray(x, jnp.float32)[None, :, None]


out, fresh = tree_delta_rule(
    one(Q), one(K), one(V), one(beta), one(G), jnp.asarray(S0, jnp.float32)[None, None], tree.ancestors
)
after = commit_path(
    jnp.asarray(S0, jnp.float32)[None, None, None], one(K)[None], fresh[None], one(G)[None],
    jnp.asarray(path)[None], jnp.array([len(path)]),
)
for name, ours, direct in (
    ("outputs", out[0, :, 0], O_direct), ("u", fresh[0, :, 0], U_direct), ("committed state", after[0, 0, 0], states[path[-1]])
):
    error = np.linalg.norm(np.asarray(ours, np.float64) - direct) / np.linalg.norm(direct)
    print(f"{name}: relative error in fp32 {error:.1e}")
    assert error < 2e-6

# %% [markdown]
# Nearly parallel keys, strong writes and no decay, as a prompt of one repeated token makes them, are the hard case. Here
# are 64 rows of a prompt chunk (a chain: $M$ is causal), inverted both ways in fp32:

# %%
from pallas_kernels.gdn_scan.reference import unit_lower_inverse

rows = 64
keys = unit(np.ones((rows, dk)) + 1e-3 * rng.normal(size=(rows, dk)))
hard = np.tril(0.999 * (keys @ keys.T), -1)
exact = np.linalg.inv(np.eye(rows) + hard)
blocks = np.asarray(unit_lower_inverse(jnp.asarray(hard, jnp.float32)), np.float64)
eye, square = np.eye(rows, dtype=np.float32), hard.astype(np.float32)
powers = eye - square
for _ in range(5):  # (I - A)(I + A²)(I + A⁴) … (I + A³²): exact but for rounding, since A⁶⁴ = 0
    square = square @ square
    powers = powers @ (eye + square)
for name, found in (("doubling diagonal blocks", blocks), ("a product of powers of A", powers)):
    print(f"{name}: relative error {np.linalg.norm(found - exact) / np.linalg.norm(exact):.1e}")

# %% [markdown]
# ## What it saves at the 27B shape
#
# 48 layers of 48 value heads with states of 128 × 128 in fp32, 16 key heads, and a convolution over 10,240 channels:

# %%
layers, heads, key_heads, d, channels = 48, 48, 16, 128, 10240
state = layers * heads * d * d * 4
log = layers * (key_heads * d * 2 + heads * d * 4 + heads * 4 + channels * 2)
print(f"a state for each node: {state / 2**20:.0f} MiB, for 64 rows {64 * state / 2**30:.0f} GiB")
print(f"k, u, G and the convolution's input: {log / 2**20:.1f} MiB a node, for 64 rows {64 * log / 2**20:.0f} MiB")
