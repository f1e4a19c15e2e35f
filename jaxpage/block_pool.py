"""The pool of KV blocks: which are free, and how many references each has.

The page allocator of the analogy: block = physical page. Free blocks are a stack; a block in use has as many references as table entries
and index holds name it. Block 0 is the null block: it is never handed out and has no references.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

__all__ = ["BlockPool", "drop", "drop_one", "hold", "init_pool", "peek", "take"]


class BlockPool(NamedTuple):
    """N blocks. The first `num_free` entries of `free` are the free ones; the last of those is handed out next."""

    free: Int[Array, " N"]
    num_free: Int[Array, ""]
    refs: Int[Array, " N"]


def init_pool(num_blocks: int) -> BlockPool:
    """A pool with all blocks but the null block free; they are handed out as 1, 2, 3, ..."""
    free = jnp.concatenate([jnp.arange(num_blocks - 1, 0, -1, dtype=jnp.int32), jnp.zeros(1, jnp.int32)])
    return BlockPool(free, jnp.int32(num_blocks - 1), jnp.zeros(num_blocks, jnp.int32))


def peek(pool: BlockPool, rank: Int[Array, "..."]) -> Int[Array, "..."]:
    """The blocks that are handed out next: rank 0 is the first. A rank that is not free gives the null block."""
    return jnp.where(rank < pool.num_free, pool.free.at[pool.num_free - 1 - rank].get(mode="fill", fill_value=0), 0)


def take(pool: BlockPool, blocks: Int[Array, "..."], count: Int[Array, ""]) -> BlockPool:
    """Hands out the next `count` blocks with one reference each. `blocks` lists them as `peek` gave them; null blocks are passed over."""
    blocks = blocks.reshape(-1)
    refs = pool.refs.at[_or_none(pool, blocks, blocks > 0)].set(1, mode="drop")
    return BlockPool(pool.free, pool.num_free - count, refs)


def hold(pool: BlockPool, blocks: Int[Array, "..."]) -> BlockPool:
    """Adds a reference to each block named, as often as it is named. Null blocks are passed over."""
    blocks = blocks.reshape(-1)
    return pool._replace(refs=pool.refs.at[_or_none(pool, blocks, blocks > 0)].add(1, mode="drop"))


def drop(pool: BlockPool, blocks: Int[Array, "..."]) -> BlockPool:
    """Takes a reference from each block named, as often as it is named; blocks left without one are free again.

    A block is freed once however often it is named, and a free block stays free: references never fall below zero.
    """
    blocks = blocks.reshape(-1)
    refs = jnp.maximum(pool.refs.at[_or_none(pool, blocks, blocks > 0)].add(-1, mode="drop"), 0)
    freed = (pool.refs > 0) & (refs == 0)
    places = pool.num_free + jnp.cumsum(freed) - 1
    size = pool.free.shape[0]
    free = pool.free.at[jnp.where(freed, places, size)].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    return BlockPool(free, pool.num_free + jnp.sum(freed, dtype=jnp.int32), refs)


def drop_one(pool: BlockPool, block: Int[Array, ""]) -> BlockPool:
    """Takes one reference from one block that has some, at a cost that does not depend on the pool."""
    freed = pool.refs[block] == 1
    free = pool.free.at[jnp.where(freed, pool.num_free, pool.free.shape[0])].set(block, mode="drop")
    return BlockPool(free, pool.num_free + freed.astype(jnp.int32), pool.refs.at[block].add(-1))


def _or_none(pool: BlockPool, blocks: Int[Array, " n"], keep: Bool[Array, " n"]) -> Int[Array, " n"]:
    """The index where `keep`, else one that mode="drop" discards."""
    return jnp.where(keep, blocks, pool.refs.shape[0])
