"""The paged KV cache and the pure operations on it.

Every operation takes a cache and returns one; all are jittable, vectorised over sequences, and report failure as a flag. Under
`jax.jit` with the cache donated they update it in place.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpage import block_pool
from jaxpage.block_pool import BlockPool
from jaxpage.block_table import BlockTable, blocks_for, init_table
from jaxpage.config import CacheConfig
from pallas_kernels import gpu, layout

__all__ = ["KVCache", "attach", "blocks_needed", "fork", "init_cache", "release", "reserve", "truncate"]


class KVCache(NamedTuple):
    """Storage of every layer, and the one pool and table that all layers share."""

    storage: tuple[layout.Storage, ...]
    pool: BlockPool
    table: BlockTable

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return layout.sizes(self.storage[0]).block_size


def init_cache(config: CacheConfig, backend: str | None = None) -> KVCache:
    """An empty cache in a backend's physical layout.

    Args:
      config: sizes.
      backend: a key of `pallas_kernels.layout.LAYOUTS`; None picks this host's: "tpu", "gpu" where the kernels run on such a cache, or
        else "xla".

    Raises:
      NotImplementedError: the backend has no layout.
    """
    backend = backend or _host_backend(config)
    storage = tuple(_init_layer(config, backend) for _ in range(config.num_layers))
    return KVCache(storage, block_pool.init_pool(config.num_blocks), init_table(config.max_seqs, config.max_blocks_per_seq))


def _init_layer(config: CacheConfig, backend: str) -> layout.Storage:
    return layout.init_storage(
        backend, config.num_blocks, config.block_size, config.num_kv_heads, config.head_dim, config.dtype, config.scaled
    )


def _host_backend(config: CacheConfig) -> str:
    host = jax.default_backend()
    if host != "gpu" or config.dtype not in layout.LAYOUTS["gpu"].dtypes:
        return "tpu" if host == "tpu" else "xla"
    storage = jax.eval_shape(functools.partial(_init_layer, config, "gpu"))
    able, _ = gpu.supports(storage, config.num_kv_heads, config.max_seqs, config.max_blocks_per_seq, decode=False)
    return "gpu" if able else "xla"


class _Growth(NamedTuple):
    grows: Bool[Array, " S"]
    held: Int[Array, " S"]  # blocks the sequence has
    fresh: Int[Array, " S"]  # blocks it lacks
    copies: Bool[Array, " S"]  # its partial last block is shared: it needs a copy of its own


def _growth(cache: KVCache, new_lengths: Int[Array, " S"]) -> _Growth:
    blocks, lengths = cache.table
    size = cache.block_size
    grows = new_lengths > lengths
    held = blocks_for(lengths, size)
    fresh = jnp.where(grows, blocks_for(new_lengths, size) - held, 0)
    last = jnp.take_along_axis(blocks, jnp.maximum(held - 1, 0)[:, None], axis=1)[:, 0]
    copies = grows & (lengths % size != 0) & (cache.pool.refs[last] > 1)
    return _Growth(grows, held, fresh, copies)


def blocks_needed(cache: KVCache, new_lengths: Int[Array, " S"]) -> Int[Array, " S"]:
    """Blocks that `reserve` would take from the pool for each sequence."""
    growth = _growth(cache, new_lengths)
    return growth.fresh + growth.copies


def reserve(cache: KVCache, new_lengths: Int[Array, " S"], max_new_blocks: int | None = None) -> tuple[KVCache, Bool[Array, " S"]]:
    """Makes room for sequences to grow to new lengths.

    Each sequence gets all it needs or nothing, in row order: one that does not fit is not overtaken by a later one that needs blocks too.
    Where a sequence's partial last block is shared, the sequence gets a copy of it, so that what is written next is its own.

    Args:
      cache: the cache.
      new_lengths: tokens each sequence shall hold. One that is not above the present length changes nothing and is ok.
      max_new_blocks: most fresh blocks a sequence may need in this call; None: a whole row. A small bound makes the call cheap: decoding
        appends one token, so 1 is enough.

    Returns:
      (cache, ok): not ok are the sequences whose blocks the pool lacks, or whose new length the row or `max_new_blocks` cannot hold.
    """
    storage, pool, table = cache
    num_seqs, width = table.blocks.shape
    limit = width if max_new_blocks is None else min(max_new_blocks, width)
    grows, held, fresh, copies = _growth(cache, new_lengths)
    fits = (held + fresh <= width) & (fresh <= limit)
    need = jnp.where(fits, fresh + copies, 0)
    ok = ~grows | (fits & ((need == 0) | (jnp.cumsum(need) <= pool.num_free)))
    need = jnp.where(ok, need, 0)
    start = jnp.cumsum(need) - need
    copies = copies & ok

    copied = jnp.where(copies, block_pool.peek(pool, start), 0)
    step = jnp.arange(limit, dtype=jnp.int32)[None]
    added = ok[:, None] & (step < fresh[:, None])
    blocks = jnp.where(added, block_pool.peek(pool, (start + copies)[:, None] + step), 0)

    rows = jnp.arange(num_seqs, dtype=jnp.int32)
    last = jnp.maximum(held - 1, 0)
    shared = table.blocks[rows, last]
    entries = table.blocks.at[rows[:, None], jnp.where(added, held[:, None] + step, width)].set(blocks, mode="drop")
    entries = entries.at[rows, jnp.where(copies, last, width)].set(copied, mode="drop")
    pool = block_pool.take(pool, jnp.concatenate([copied, blocks.reshape(-1)]), jnp.sum(need))
    storage, pool = _copy_on_write(storage, pool, copies, shared, copied)
    table = BlockTable(entries, jnp.where(ok & grows, new_lengths, table.lengths).astype(jnp.int32))
    return KVCache(storage, pool, table), ok


def _copy_on_write(
    storage: tuple[layout.Storage, ...],
    pool: BlockPool,
    copies: Bool[Array, " S"],
    source: Int[Array, " S"],
    target: Int[Array, " S"],
) -> tuple[tuple[layout.Storage, ...], BlockPool]:
    """Copies the shared blocks and drops the references to the originals; a step without copies costs nothing."""
    order = jnp.argsort(~copies)

    def copy(index: Int[Array, ""], carry: tuple) -> tuple:
        storage, pool = carry
        row = order[index]
        storage = tuple(layout.copy_blocks(layer, source[row][None], target[row][None]) for layer in storage)
        return storage, block_pool.drop_one(pool, source[row])

    return lax.fori_loop(0, jnp.sum(copies, dtype=jnp.int32), copy, (storage, pool))


def truncate(cache: KVCache, new_lengths: Int[Array, " S"]) -> KVCache:
    """Shortens sequences and drops the blocks they no longer reach. A length that is not below the present one changes nothing."""
    blocks, lengths = cache.table
    shorter = jnp.clip(new_lengths, 0, lengths).astype(jnp.int32)
    column = jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
    dropped = column >= blocks_for(shorter, cache.block_size)[:, None]
    pool = block_pool.drop(cache.pool, jnp.where(dropped, blocks, 0))
    return KVCache(cache.storage, pool, BlockTable(jnp.where(dropped, 0, blocks), shorter))


def release(cache: KVCache, mask: Bool[Array, " S"]) -> KVCache:
    """Ends sequences: their rows are empty and their blocks lose a reference."""
    return truncate(cache, jnp.where(mask, 0, cache.table.lengths))


def fork(cache: KVCache, source: Int[Array, " n"], target: Int[Array, " n"]) -> KVCache:
    """Makes each target row a second owner of the source row's blocks; what the target held is released.

    All sources are read before any target is written, so beam search can permute its rows in one call. A partial last block is shared
    too, until one of its owners grows (`reserve`). Pairs with a row outside the table are passed over.
    """
    blocks, lengths = cache.table
    num_seqs = lengths.shape[0]
    valid = (source >= 0) & (source < num_seqs) & (target >= 0) & (target < num_seqs)
    origin = jnp.arange(num_seqs, dtype=jnp.int32).at[jnp.where(valid, target, num_seqs)].set(source, mode="drop")
    changed = (origin != jnp.arange(num_seqs))[:, None]
    # Hold first: a block that only the target held may be the source's too.
    pool = block_pool.hold(cache.pool, jnp.where(changed, blocks[origin], 0))
    pool = block_pool.drop(pool, jnp.where(changed, blocks, 0))
    return KVCache(cache.storage, pool, BlockTable(blocks[origin], lengths[origin]))


def attach(cache: KVCache, seq: Int[Array, ""], blocks: Int[Array, " n"], length: Int[Array, ""]) -> tuple[KVCache, Bool[Array, ""]]:
    """Puts a prefix in place: an empty row becomes an owner of blocks that others already hold.

    Args:
      cache: the cache.
      seq: the row.
      blocks: the prefix's blocks in order; entries past ceil(length / B) are ignored.
      length: tokens of the prefix.

    Returns:
      (cache, ok): not ok, and nothing changed, where the row is not empty or not there, the length exceeds `blocks` or the row, a block
      is named twice, or one is not in use: a stale hit.
    """
    table, pool = cache.table, cache.pool
    width = table.blocks.shape[1]
    used = jnp.arange(blocks.shape[0]) < blocks_for(length, cache.block_size)
    alive = (blocks > 0) & (blocks < pool.refs.shape[0]) & (pool.refs.at[blocks].get(mode="fill", fill_value=0) > 0)
    room = min(width, blocks.shape[0]) * cache.block_size
    ok = (seq >= 0) & (seq < table.lengths.shape[0]) & (table.lengths[seq] == 0)
    ok &= (length >= 0) & (length <= room) & jnp.all(alive | ~used)
    ordered = jnp.sort(jnp.where(used, blocks, -1 - jnp.arange(blocks.shape[0])))
    ok &= ~jnp.any(ordered[1:] == ordered[:-1])
    row = jnp.where(used & ok, blocks, 0)[:width]
    row = jnp.pad(row, (0, width - row.shape[0])).astype(jnp.int32)
    entries = jnp.where(ok, table.blocks.at[seq].set(row), table.blocks)
    lengths = jnp.where(ok, table.lengths.at[seq].set(length), table.lengths)
    return KVCache(cache.storage, block_pool.hold(pool, row), BlockTable(entries, lengths)), ok
