"""The work of a prefill as one flat list: tiles of query rows of one sequence each."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.gpu.spec import ROWS
from pallas_kernels.ragged import query_places

__all__ = ["Places", "Tiles", "cut", "most_tiles"]


class Tiles(NamedTuple):
    """Tiles of up to 64 query rows; a query row is one of the G query heads of a token that share a kv head.

    A tile may end before its 64 rows do: the rest are of the next sequences, and their results are not taken. Tiles that do not exist see
    no token.
    """

    seq: Int[Array, " W"]
    row: Int[Array, " W"]  # the first query row
    first: Int[Array, " W"]  # the first token that any of its rows sees
    full_end: Int[Array, " W"]  # one past the last token that all of its rows see, but for a window
    end: Int[Array, " W"]  # one past the last token that any of its rows sees


class Places(NamedTuple):
    """Where each query row is."""

    tile: Int[Array, " T*G"]  # -1: it is of no sequence
    slot: Int[Array, " T*G"]


def most_tiles(num_queries: int, num_seqs: int, group: int) -> int:
    """How many tiles there can be: each sequence with queries may leave one of its own partly empty."""
    return min(num_queries, num_seqs) + num_queries * group // ROWS


def cut(
    lengths: Int[Array, " S"],
    visible: Int[Array, " S"],
    query_starts: Int[Array, " S+1"],
    *,
    num_queries: int,
    group: int,
    window: int | None,
) -> tuple[Tiles, Places]:
    """Cuts the query rows into tiles.

    Args:
      lengths: tokens of each sequence.
      visible: tokens of each sequence that exist in the pool; at most its length.
      query_starts: sequence s owns queries query_starts[s] to query_starts[s + 1].
      num_queries: T.
      group: query heads of a kv head (G).
      window: tokens a query sees; None: all.
    """
    num_seqs = lengths.shape[0]
    rows = (query_starts[1:] - query_starts[:-1]) * group
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-rows // ROWS), dtype=jnp.int32)])  # first tile of each sequence
    tile = jnp.arange(most_tiles(num_queries, num_seqs, group), dtype=jnp.int32)
    seq = jnp.searchsorted(starts, tile, side="right", method="compare_all").astype(jnp.int32) - 1
    exists = tile < starts[-1]
    seq = jnp.clip(seq, 0, num_seqs - 1)
    offset = (tile - starts[seq]) * ROWS
    position = lengths[seq] - rows[seq] // group + offset // group  # of the first row
    last = lengths[seq] - rows[seq] // group + (jnp.minimum(offset + ROWS, rows[seq]) - 1) // group
    full_end, end = (jnp.where(exists, jnp.clip(each + 1, 0, visible[seq]), 0) for each in (position, last))
    first = jnp.zeros_like(end) if window is None else jnp.maximum(position - window + 1, 0)

    query_seq, query_position = query_places(lengths, query_starts, num_queries)
    query_row = jnp.arange(num_queries * group, dtype=jnp.int32) - jnp.repeat(query_starts[query_seq], group) * group
    query_tile = jnp.where(jnp.repeat(query_position >= 0, group), jnp.repeat(starts[query_seq], group) + query_row // ROWS, -1)
    return Tiles(seq, query_starts[seq] * group + offset, first, full_end, end), Places(query_tile, query_row % ROWS)
