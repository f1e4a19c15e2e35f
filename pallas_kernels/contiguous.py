"""Decode attention over a contiguous cache: the naive system that paging is compared with.

Contiguous reservation is paging with one block a sequence, as long as the longest sequence may get. The queries then go to their blocks
rather than the blocks to their queries, and nothing is gathered: this is the usual dense attention over [sequences, heads, length, D].
It reads the whole reservation and takes unwritten slots to be finite, as dense caches do, so it runs only where it is named. Prefill goes
the way of the XLA implementation.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import layout, xla

__all__ = ["LAYOUT", "attend", "supports", "write"]

LAYOUT = "xla"  # of the cache it runs on

write = xla.write


def supports(storage: layout.Storage, num_heads: int, num_seqs: int, table_width: int, decode: bool) -> tuple[bool, str]:
    """Whether this implementation can run such a call, and if not why."""
    if not isinstance(storage, layout.XlaStorage):
        return False, f"needs the XLA layout, the cache has {type(storage).__name__}"
    if table_width != 1:
        return False, f"needs one block a sequence, the block table has {table_width} columns"
    if layout.sizes(storage).num_blocks > num_seqs + 1:
        return False, f"needs a block reserved for each of the {num_seqs} sequences, the pool has {layout.sizes(storage).num_blocks}"
    return True, ""


def attend(
    q: Float[Array, "T H D"],
    storage: layout.XlaStorage,
    block_table: Int[Array, "S 1"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    """Causal attention of each query over its sequence's one block; see `jaxpage.paged_attention` for the arguments."""
    if query_starts is not None:
        return xla.attend(q, storage, block_table, lengths, query_starts, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    num_blocks, block_size, num_kv_heads, head_dim = layout.sizes(storage)
    num_heads = q.shape[1]
    group = num_heads // num_kv_heads
    owned = (lengths > 0) & (block_table[:, 0] > 0)
    block = jnp.where(owned, block_table[:, 0], num_blocks)

    by_block = jnp.zeros((num_blocks, num_kv_heads, group, head_dim), q.dtype)
    by_block = by_block.at[block].set(q.reshape(-1, num_kv_heads, group, head_dim), mode="drop")
    length = jnp.zeros(num_blocks, jnp.int32).at[block].set(lengths, mode="drop")

    scores = jnp.einsum("nkgd,nkcd->nkgc", by_block.astype(storage.keys.dtype), storage.keys, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    token = jnp.arange(block_size)[None]
    visible = token < length[:, None]
    if window is not None:
        visible &= token >= length[:, None] - window
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jnp.where(visible[:, None, None], jax.nn.softmax(scores, axis=-1)[..., :block_size], 0.0).astype(storage.values.dtype)
    out = jnp.einsum("nkgc,nkcd->nkgd", weights, storage.values, preferred_element_type=jnp.float32)
    out = out.at[block].get(mode="fill", fill_value=0.0)
    return out.reshape(q.shape).astype(q.dtype)
