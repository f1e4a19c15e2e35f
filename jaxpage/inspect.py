"""Looking at a cache from the host: is it sound, and how full is it."""

from typing import NamedTuple

import jax
import numpy as np

from jaxpage.kv_cache import KVCache

__all__ = ["Usage", "check_cache", "usage"]


class Usage(NamedTuple):
    """How full a cache is. A slot is one token's place in a block."""

    blocks_used: int
    blocks_total: int
    slots_used: int
    slots_reserved: int

    @property
    def share(self) -> float:
        """Share of the slots in used blocks that hold a token; 0 where no block is in use."""
        return self.slots_used / self.slots_reserved if self.slots_reserved else 0.0


def usage(cache: KVCache) -> Usage:
    """Counts blocks and slots. A shared block counts once, with the tokens of the owner that fills it most."""
    blocks, lengths = jax.device_get((cache.table.blocks, cache.table.lengths))
    size = cache.block_size
    fill = np.zeros(cache.pool.refs.shape[0], np.int64)
    held = np.clip(lengths[:, None] - np.arange(blocks.shape[1]) * size, 0, size)
    np.maximum.at(fill, blocks, held)
    used = fill.size - 1 - int(cache.pool.num_free)
    return Usage(used, fill.size - 1, int(fill[1:].sum()), used * size)


def check_cache(cache: KVCache, holds: np.ndarray | None = None) -> None:
    """Checks every invariant of pool and table.

    Args:
      cache: a cache with concrete arrays.
      holds: blocks that a prefix index holds, each as often as it holds it.

    Raises:
      ValueError: says which invariant is broken and where.
    """
    free, num_free, refs = jax.device_get(cache.pool)
    blocks, lengths = jax.device_get(cache.table)
    num_blocks, size = refs.size, cache.block_size

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"broken cache: {message}")

    require(0 <= num_free < num_blocks, f"num_free is {num_free} of {num_blocks} blocks")
    stack = free[:num_free]
    require(bool(np.all((stack > 0) & (stack < num_blocks))), f"the free list names a block outside 1 to {num_blocks - 1}")
    require(np.unique(stack).size == stack.size, "a block is free twice")
    require(refs[0] == 0, f"the null block has {refs[0]} references")
    used = int(np.sum(refs > 0))
    require(num_free + used + 1 == num_blocks, f"{num_free} free + {used} used + 1 null are not {num_blocks} blocks")
    require(not np.any(refs[stack] != 0), "a free block has references")
    for seq, length in enumerate(lengths):
        count = -(-int(length) // size)
        fits = length >= 0 and count <= blocks.shape[1]
        require(fits, f"sequence {seq} holds {length} tokens, its row has room for {blocks.shape[1] * size}")
        row = blocks[seq]
        require(bool(np.all((row[:count] > 0) & (row[:count] < num_blocks))), f"sequence {seq} has a hole in its {count} blocks")
        require(not np.any(row[count:]), f"sequence {seq} names blocks past its {length} tokens")
        require(np.unique(row[:count]).size == count, f"sequence {seq} names a block twice")
    if holds is not None and np.size(holds):
        require(bool(np.min(holds) >= 1 and np.max(holds) < num_blocks), f"the index holds a block outside 1 to {num_blocks - 1}")
    named = np.concatenate([blocks.reshape(-1), np.asarray(holds if holds is not None else [], np.int32).reshape(-1)])
    counted = np.bincount(named, minlength=num_blocks)[:num_blocks]
    counted[0] = 0
    if np.any(counted != refs):
        block = int(np.argmax(counted != refs))
        raise ValueError(f"broken cache: block {block} has {refs[block]} references but is named {counted[block]} times")
