"""One decoder-only transformer for every family.

The same layers serve two uses. `decoder(tokens)` is an ordinary causal language model over [batch, time], differentiable, for training.
`decoder.step(tokens, cache, ...)` runs a ragged batch of new tokens against a paged KV cache and returns the cache with them in it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import jaxpage
from models.config import ModelConfig
from models.layers import Embedding, FeedForward, Linear, RMSNorm, apply_rope, project, rope_table

__all__ = ["Decoder"]

# (layer, q[..., H, D], k[..., K, D], v[..., K, D]) -> out[..., H, D]
Attend = Callable[[int, Array, Array, Array], Array]


class Attention(nnx.Module):
    """Projections, optional per-head norms and RoPE around an attention function that the caller brings."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.sizes = (heads, kv_heads, dim)
        self.qkv_proj = Linear(config.hidden_size, (heads + 2 * kv_heads) * dim, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(heads * dim, config.hidden_size, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(dim, config.norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.norm_eps, dtype=dtype) if config.qk_norm else None

    def __call__(self, x: Float[Array, "*rows hidden"], rope: tuple[Array, Array], attend: Callable) -> Float[Array, "*rows hidden"]:
        heads, kv_heads, dim = self.sizes
        qkv = self.qkv_proj(x).reshape(*x.shape[:-1], heads + 2 * kv_heads, dim)
        q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(apply_rope(q, *rope).astype(x.dtype), apply_rope(k, *rope).astype(x.dtype), v.astype(x.dtype))
        return self.o_proj(out.reshape(*x.shape[:-1], heads * dim))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*rows hidden"], rope: tuple[Array, Array], attend: Callable) -> Float[Array, "*rows hidden"]:
        x = (x + self.attention(self.input_norm(x), rope, attend)).astype(x.dtype)
        return (x + self.feed_forward(self.post_norm(x))).astype(x.dtype)


class Decoder(nnx.Module):
    """A causal language model described by a `ModelConfig`.

    Args:
      config: sizes and switches.
      dtype: dtype of the weights and activations, float32 or bfloat16. Norms, softmax and logits are computed in float32.
      rngs: source of the initial weights; loaders overwrite them.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time vocab"]:
        """Logits of an uncached causal pass, in float32."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            window = self.config.window(layer)
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=None if window is None else (window - 1, 0), implementation="xla"
            )

        return self.logits(self._forward(tokens, positions, attend))

    def step(
        self,
        tokens: Int[Array, " T"],
        cache: jaxpage.KVCache,
        lengths: Int[Array, " S"],
        query_starts: Int[Array, " S+1"] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T hidden"], jaxpage.KVCache]:
        """Runs new tokens of many sequences and writes their keys and values into the cache.

        Args:
          tokens: the new tokens of all sequences, one sequence after another. Rows past the last sequence are padding.
          cache: a cache whose table already has room for them (`jaxpage.reserve`).
          lengths: tokens each sequence holds once these are written; 0 for a sequence that takes no part.
          query_starts: sequence s owns rows query_starts[s] to query_starts[s + 1]. None: decode, row s is sequence s.
          implementation: attention implementation, see `jaxpage.paged_attention`.

        Returns:
          The normed hidden states, to be passed to `logits`, and the cache.
        """
        storage = list(cache.storage)
        positions = jaxpage.query_positions(lengths, query_starts, tokens.shape[0])

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            out, storage[layer] = jaxpage.paged_attention(
                q,
                k,
                v,
                storage[layer],
                cache.table.blocks,
                lengths,
                query_starts,
                scale=self.config.head_dim**-0.5,
                window=self.config.window(layer),
                implementation=implementation,
            )
            return out

        hidden = self._forward(tokens, positions, attend)
        return hidden, cache._replace(storage=tuple(storage))

    def logits(self, hidden: Float[Array, "*rows hidden"]) -> Float[Array, "*rows vocab"]:
        """Scores of every token id for normed hidden states, in float32."""
        if self.lm_head is None:
            return self.embed.logits(hidden)
        return project(hidden, self.lm_head.weight[...])

    def _forward(self, tokens: Int[Array, "*rows"], positions: Int[Array, "*rows"], attend: Attend) -> Float[Array, "*rows hidden"]:
        config = self.config
        rope = rope_table(positions, config.head_dim, config.rope_theta, config.rope_factors)
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, lambda q, k, v, index=index: attend(index, q, k, v))
        return self.norm(x)
