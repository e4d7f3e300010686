"""Grouped-query attention, with or without q/k norms and biases, optionally gated: the target's and the drafter's."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.layers import Linear, RMSNorm, project_joined
from pallas_kernels.attention_front import attention_front
from pallas_kernels.attention_front.reference import paged_kv, rotated_queries
from pallas_kernels.dispatch import Implementation
from pallas_kernels.tree_attention import tree_attention


class Attention(nnx.Module):
    """One attention mixer; parameter names are Hugging Face's `self_attn.*`.

    With `gated`, q_proj's rows are interleaved per head, [query | gate], and the output is multiplied by
    sigmoid(gate) before o_proj (Qwen3.5; always a sigmoid). With `shards`, a device holds its share of the heads.
    """

    @property
    def JOINED(self) -> dict[str, tuple[str, ...]]:
        """Keys and values apart from queries where rows of a context have only those."""
        return {"kv_proj": ("k_proj", "v_proj")} if self.apart else {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        eps: float,
        gated: bool,
        zero_centered: bool,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        out_std: float = 0.02,
        shards: int = 1,
        qk_norm: bool = True,
        bias: bool = False,
        apart: bool = False,
    ):
        """`apart`: keys and values are also made of rows that ask nothing, as a drafter's context."""
        self.apart = apart
        heads, kv_heads = heads // shards, kv_heads // shards
        self.heads, self.kv_heads, self.head_dim, self.gated = heads, kv_heads, head_dim, gated
        self.q_proj = Linear(hidden, heads * head_dim * (2 if gated else 1), dtype=dtype, rngs=rngs, bias=bias)
        self.k_proj = Linear(hidden, kv_heads * head_dim, dtype=dtype, rngs=rngs, bias=bias)
        self.v_proj = Linear(hidden, kv_heads * head_dim, dtype=dtype, rngs=rngs, bias=bias)
        self.o_proj = Linear(
            heads * head_dim, hidden, dtype=dtype, rngs=rngs, std=out_std, shards=shards, bias=bias
        )
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(head_dim, eps=eps, zero_centered=zero_centered, dtype=dtype)
            self.k_norm = RMSNorm(head_dim, eps=eps, zero_centered=zero_centered, dtype=dtype)

    def _front(self) -> dict[str, Any]:
        """What is static of the way from projections to attention."""
        eps, centered = (self.q_norm.eps, self.q_norm.zero_centered) if self.qk_norm else (0.0, False)
        return {"head_dim": self.head_dim, "eps": eps, "zero_centered": centered}

    def _gain(self, name: str) -> Float[Array, " d"] | None:
        return getattr(self, name).weight[...] if self.qk_norm else None

    def _gate(self, q: Float[Array, "B N P"]) -> Float[Array, "B N H d"] | None:
        if not self.gated:
            return None
        own = q[..., : 2 * self.heads * self.head_dim]
        return own.reshape(*q.shape[:2], self.heads, -1)[..., self.head_dim :]

    def project_q(
        self, x: Float[Array, "B N D"], cos: Float[Array, "B N h"], sin: Float[Array, "B N h"]
    ) -> tuple[Float[Array, "B N H d"], Float[Array, "B N H d"] | None]:
        """Queries, normed where the model norms them and rotated; the output gate's logits where there is one."""
        q = self.q_proj(x)
        return rotated_queries(q, self._gain("q_norm"), cos, sin, gated=self.gated, **self._front()), self._gate(q)

    def project_kv(
        self, x: Float[Array, "B N D"], cos: Float[Array, "B N h"], sin: Float[Array, "B N h"]
    ) -> Float[Array, "B N 2 K d"]:
        """Keys as queries are made (index 0) beside plain values (index 1), as the pages hold them."""
        kv = project_joined(self, "kv_proj", x) if self.apart else jnp.concatenate([self.k_proj(x), self.v_proj(x)], -1)
        return paged_kv(kv, self._gain("k_norm"), cos, sin, **self._front())

    def output(
        self,
        attended: Float[Array, "B N H d"],
        gate: Float[Array, "B N H d"] | None,
        implementation: Implementation = "xla",
    ) -> Float[Array, "B N D"]:
        """Gates the heads and projects them back."""
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(attended.dtype)
        return self.o_proj(attended.reshape(*attended.shape[:2], -1), implementation)

    def __call__(
        self,
        x: Float[Array, "B N D"],
        cos: Float[Array, "B N h"],
        sin: Float[Array, "B N h"],
        mask: Bool[Array, "B N N"] | None,
        pages: Float[Array, "L P S 2 K d"] | None,
        layer: int,
        block_tables: Int[Array, "B T"] | None,
        lengths: Int[Array, " B"] | None,
        *,
        window: int | None = None,
        positions: Int[Array, "B N"] | None = None,
        implementation: Implementation = "auto",
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B N 2 K d"]]:
        """Attends over the paged context and the rows; returns the mixed rows and their own keys and values."""
        if self.apart:
            projected, kv = self.q_proj(x, implementation), project_joined(self, "kv_proj", x, implementation)
        else:
            projected, kv = project_joined(self, "qkv_proj", x, implementation), None
        q, kv = attention_front(
            projected, kv, self._gain("q_norm"), self._gain("k_norm"), cos, sin, heads=self.heads,
            kv_heads=self.kv_heads, gated=self.gated, implementation=implementation, **self._front(),
        )  # fmt: skip
        out = tree_attention(
            q,
            kv,
            mask,
            pages,
            layer,
            block_tables,
            lengths,
            scale=self.head_dim**-0.5,
            window=window,
            positions=positions,
            implementation=implementation,
        )
        return self.output(out, self._gate(projected), implementation), kv
