"""The block table: which blocks hold each sequence, in order. The page table of the analogy."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

__all__ = ["BlockTable", "blocks_for", "init_table"]


class BlockTable(NamedTuple):
    """S sequences of up to M blocks. Token t of sequence s is in block `blocks[s, t // B]`; unused entries are the null block."""

    blocks: Int[Array, "S M"]
    lengths: Int[Array, " S"]


def init_table(max_seqs: int, max_blocks_per_seq: int) -> BlockTable:
    """A table of empty sequences."""
    return BlockTable(jnp.zeros((max_seqs, max_blocks_per_seq), jnp.int32), jnp.zeros(max_seqs, jnp.int32))


def blocks_for(lengths: Int[Array, " S"], block_size: int) -> Int[Array, " S"]:
    """Blocks that so many tokens take."""
    return -(-lengths // block_size)
