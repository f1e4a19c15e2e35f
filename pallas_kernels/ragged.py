"""Where each row of a ragged batch belongs: its sequence, its position, its slot in the pool."""

import jax.numpy as jnp
from jaxtyping import Array, Int

__all__ = ["query_places", "visible_lengths", "write_slots"]


def query_places(
    lengths: Int[Array, " S"], query_starts: Int[Array, " S+1"] | None, num_queries: int
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """The sequence and the position of each query row.

    Args:
      lengths: tokens of each sequence, the new ones included; 0 for a sequence that takes no part.
      query_starts: sequence s owns rows query_starts[s] to query_starts[s + 1], its last tokens; None: row s is sequence s.
      num_queries: T.

    Returns:
      (seq, position); position is -1 for a padding row, whose seq means nothing but is in range.
    """
    if query_starts is None:
        return jnp.arange(num_queries, dtype=jnp.int32), lengths.astype(jnp.int32) - 1
    rows = jnp.arange(num_queries, dtype=jnp.int32)
    seq = jnp.searchsorted(query_starts, rows, side="right", method="compare_all") - 1
    padding = (rows < query_starts[0]) | (rows >= query_starts[-1])
    seq = jnp.clip(seq, 0, lengths.shape[0] - 1).astype(jnp.int32)
    position = lengths[seq] - (query_starts[seq + 1] - rows)
    return seq, jnp.where(padding, -1, jnp.maximum(position, -1)).astype(jnp.int32)


def write_slots(
    seq: Int[Array, " T"], position: Int[Array, " T"], block_table: Int[Array, "S M"], num_blocks: int, block_size: int
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Block and offset where each new token's key and value go.

    A padding row, a position beyond the table and a block outside the pool all lead to the null block.
    """
    column = position // block_size
    fits = (position >= 0) & (column < block_table.shape[1])
    block = block_table[seq, jnp.where(fits, column, 0)]
    known = fits & (block > 0) & (block < num_blocks)
    return jnp.where(known, block, 0), jnp.where(known, position % block_size, 0)


def visible_lengths(block_table: Int[Array, "S M"], lengths: Int[Array, " S"], num_blocks: int, block_size: int) -> Int[Array, " S"]:
    """Tokens of each sequence that can be read: the context ends before the first block that is not in the pool, and with the table."""
    known = (block_table > 0) & (block_table < num_blocks)
    blocks = jnp.sum(jnp.cumprod(known, axis=1, dtype=jnp.int32), axis=1)
    return jnp.minimum(lengths, blocks * block_size).astype(jnp.int32)
