"""The work of a call as one flat list: tiles of queries, each of which walks the chunks of its sequence's context."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.tpu.format import Format

__all__ = ["Work", "Writes", "cut", "cut_writes"]


class Work(NamedTuple):
    """Tiles of queries of one sequence each, P of them, and how the cores share them. All of it is read as scalars."""

    seq: Int[Array, " P"]
    row: Int[Array, " P"]  # the tile's first row of q
    queries: Int[Array, " P"]  # how many there are
    position: Int[Array, " P"]  # of the first of them
    end: Int[Array, " P"]  # one past the last context token that the tile sees
    bounds: Int[Array, " cores+1"]  # core i takes the tiles from bounds[i] on
    steps: Int[Array, " cores"]  # chunks that core i walks in all


def cut(
    lengths: Int[Array, " S"],
    visible: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
    *,
    num_queries: int,
    tile: int,
    chunk: int,
    window: int | None,
    num_cores: int,
) -> Work:
    """Cuts the queries into tiles of at most `tile`, and the tiles into equal shares of chunks for the cores.

    Args:
      lengths: tokens of each sequence.
      visible: tokens of each sequence that exist in the pool; at most its length.
      query_starts: sequence s owns rows query_starts[s] to query_starts[s + 1]; None: row s is sequence s.
      num_queries: rows of q (T).
      tile: most queries of a tile.
      chunk: tokens of a chunk.
      window: tokens a query sees; None: all.
      num_cores: cores that share the work.
    """
    num_seqs = lengths.shape[0]
    zero = jnp.zeros(1, jnp.int32)
    if query_starts is None:
        query_starts = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    counts = query_starts[1:] - query_starts[:-1]
    tile_starts = jnp.concatenate([zero, jnp.cumsum(-(-counts // tile), dtype=jnp.int32)])
    index = jnp.arange(min(num_seqs, num_queries) + num_queries // tile if tile > 1 else num_queries, dtype=jnp.int32)
    seq = jnp.searchsorted(tile_starts, index, side="right", method="compare_all").astype(jnp.int32) - 1
    seq = jnp.clip(seq, 0, num_seqs - 1)
    offset = (index - tile_starts[seq]) * tile
    exists = index < tile_starts[-1]
    count = jnp.where(exists, jnp.clip(counts[seq] - offset, 0, tile), 0)
    position = lengths[seq] - counts[seq] + offset
    end = jnp.where(exists, jnp.clip(position + count, 0, visible[seq]), 0)

    first = jnp.zeros_like(end) if window is None else jnp.maximum(position - window + 1, 0)
    chunks = jnp.where(exists, jnp.maximum(-(-end // chunk) - first // chunk, 1), 0)  # without any context a tile still writes zeros
    chunk_starts = jnp.concatenate([zero, jnp.cumsum(chunks, dtype=jnp.int32)])
    shares = chunk_starts[-1] * jnp.arange(1, num_cores, dtype=jnp.int32) // num_cores
    inner = jnp.searchsorted(chunk_starts, shares, method="compare_all").astype(jnp.int32)
    bounds = jnp.concatenate([zero, jnp.minimum(inner, tile_starts[-1]), tile_starts[-1:]])
    steps = chunk_starts[bounds[1:]] - chunk_starts[bounds[:-1]]
    return Work(seq, query_starts[seq] + offset, count, position, end, bounds, steps)


class Writes(NamedTuple):
    """Units of a block to be written, I of them, those without a slot left out. All of it is read as scalars."""

    block: Int[Array, " I"]
    offset: Int[Array, " I"]  # in the block, of the first new token
    tokens: Int[Array, " I"]  # new tokens
    row: Int[Array, " I"]  # of the first of them among all new tokens
    total: Int[Array, " 1"]  # units that exist


def cut_writes(
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
    *,
    num_tokens: int,
    unit: int,
    form: Format,
    num_blocks: int,
) -> Writes:
    """Cuts the new tokens of all sequences into units of `unit` neighbouring slots."""
    num_seqs, width = block_table.shape
    if query_starts is None:
        query_starts = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    counts = jnp.minimum(query_starts[1:] - query_starts[:-1], lengths)
    first_unit = (lengths - counts) // unit
    units = jnp.where(counts > 0, (lengths - 1) // unit - first_unit + 1, 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(units, dtype=jnp.int32)])
    index = jnp.arange(min(num_tokens, num_tokens // unit + 2 * min(num_seqs, num_tokens)), dtype=jnp.int32)
    seq = jnp.clip(jnp.searchsorted(starts, index, side="right", method="compare_all").astype(jnp.int32) - 1, 0, num_seqs - 1)
    number = first_unit[seq] + index - starts[seq]  # of the unit in its sequence
    first = jnp.maximum(number * unit, lengths[seq] - counts[seq])
    stop = jnp.minimum((number + 1) * unit, lengths[seq])
    column = first // form.block_size
    block = block_table[seq, jnp.clip(column, 0, width - 1)]
    exists = (index < starts[-1]) & (column < width) & (block > 0) & (block < num_blocks)
    order = jnp.argsort(~exists, stable=True)
    row = query_starts[seq + 1] - (lengths[seq] - first)
    block, offset, tokens, row = (field[order].astype(jnp.int32) for field in (block, first % form.block_size, stop - first, row))
    return Writes(block, offset, tokens, row, jnp.sum(exists, dtype=jnp.int32)[None])
