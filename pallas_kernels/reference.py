"""The reference implementation: gathers each sequence's whole context and attends to it in one plain formula.

Slow and memory-hungry on purpose: it is what the others are compared with. It is differentiable.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import layout, xla
from pallas_kernels.ragged import query_places, visible_lengths

__all__ = ["LAYOUT", "attend", "supports", "write"]

LAYOUT = "xla"  # of the cache it runs on

write = xla.write


def supports(storage: layout.Storage, num_heads: int, num_seqs: int, table_width: int, decode: bool) -> tuple[bool, str]:
    """Whether this implementation can run such a call, and if not why."""
    return xla.supports(storage, num_heads, num_seqs, table_width, decode)


def attend(
    q: Float[Array, "T H D"],
    storage: layout.Storage,
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    """Causal attention of each query over its sequence's blocks; see `jaxpage.paged_attention` for the arguments."""
    num_blocks, block_size, num_kv_heads, head_dim = layout.sizes(storage)
    num_queries, num_heads, _ = q.shape
    num_seqs, width = block_table.shape
    seq, position = query_places(lengths, query_starts, num_queries)

    # The context of every sequence, [S, M * B, K, D].
    keys, values = (
        side.at[block_table].get(mode="clip").reshape(num_seqs, width * block_size, num_kv_heads, head_dim).astype(jnp.float32)
        for side in layout.unpack(storage)
    )
    token = jnp.arange(width * block_size)[None]
    exists = token < visible_lengths(block_table, lengths, num_blocks, block_size)[:, None]

    visible = exists[seq] & (token <= position[:, None])  # [T, M * B]
    if window is not None:
        visible &= token > position[:, None] - window
    grouped = q.astype(jnp.float32).reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys = jnp.where(exists[..., None, None], keys, 0.0)[seq]
    values = jnp.where(exists[..., None, None], values, 0.0)[seq]
    scores = jnp.einsum("tkgd,tckd->tkgc", grouped, keys, precision="highest").reshape(num_queries, num_heads, -1) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], (num_queries, num_heads, 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)[..., : token.shape[1]]
    weights = weights.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, -1)
    out = jnp.einsum("tkgc,tckd->tkgd", weights, values, precision="highest").reshape(q.shape)
    return jnp.where((position >= 0)[:, None, None], out, 0.0).astype(q.dtype)
