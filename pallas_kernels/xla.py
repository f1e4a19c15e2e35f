"""The fast XLA implementation: CPUs, and every device that has no kernel of its own.

Queries are cut into tiles of one sequence each. A tile walks its sequence's context in chunks of some blocks: gather the chunk's rows,
score, and fold into a running softmax (Milakov and Gimelshein, 2018), so that the context is never in memory as a whole. Tiles are sorted
by context length and run in groups; a group stops at its longest tile. The work so follows the real lengths, not the table's width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import layout
from pallas_kernels.ragged import query_places, visible_lengths, write_slots

__all__ = ["LAYOUT", "attend", "supports", "write"]

LAYOUT = "xla"  # of the cache it runs on

_CHUNK_BYTES = 8 * 2**20  # keys and values a step aims to gather for all tiles of a group
_FEWEST_TOKENS = 64  # of the context that a step gathers for each tile
_TILE_QUERIES = (8, 64)  # fewest and most queries of a prefill tile
_MOST_TOKENS = {"decode": 2048, "prefill": 256}  # a tile of prefill computes all it gathers, of a short context for nothing
_GROUP_TILES = {"decode": 64, "prefill": 8}  # tiles that walk their contexts together
_MASKED = -1e30  # finite, so that a row that sees nothing stays free of NaN


def supports(storage: layout.Storage, num_heads: int, num_seqs: int, table_width: int, decode: bool) -> tuple[bool, str]:
    """Whether this implementation can run such a call, and if not why."""
    if not isinstance(storage, layout.XlaStorage):
        return False, f"needs the XLA layout, the cache has {type(storage).__name__}"
    return True, ""


def write(
    storage: layout.XlaStorage,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
) -> layout.XlaStorage:
    """Puts new keys and values into their slots; rows without a slot go to the null block."""
    num_blocks, block_size, _, _ = layout.sizes(storage)
    seq, position = query_places(lengths, query_starts, k.shape[0])
    block, offset = write_slots(seq, position, block_table, num_blocks, block_size)
    keys = storage.keys.at[block, :, offset].set(k.astype(storage.keys.dtype), mode="promise_in_bounds")
    values = storage.values.at[block, :, offset].set(v.astype(storage.values.dtype), mode="promise_in_bounds")
    return layout.XlaStorage(keys, values)


class Tiles(NamedTuple):
    """Query rows of one sequence each. P tiles, R rows (queries times heads of a group)."""

    q: Float[Array, "P K R D"]
    position: Int[Array, "P R"]  # of each row's query; -1 for padding
    first: Int[Array, " P"]  # the first context token that any row of the tile sees
    end: Int[Array, " P"]  # one past the last
    blocks: Int[Array, "P M"]


class Running(NamedTuple):
    """A running softmax: highest score, sum of weights, weighted sum of values."""

    highest: Float[Array, "P K R"]
    total: Float[Array, "P K R"]
    out: Float[Array, "P K R D"]


def attend(
    q: Float[Array, "T H D"],
    storage: layout.XlaStorage,
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
    num_queries, num_heads, head_dim = q.shape
    if query_starts is None:
        cut, tile_of_query, offset_of_query = _cut_decode(lengths)
    else:
        cut, tile_of_query, offset_of_query = _cut_ragged(lengths, query_starts, num_queries)
    num_tiles, tile = cut.row.shape
    num_blocks, block_size, _, _ = layout.sizes(storage)
    visible = visible_lengths(block_table, lengths, num_blocks, block_size)
    kind = "decode" if query_starts is None else "prefill"
    size = min(num_tiles, _GROUP_TILES[kind])

    def run(cut: Cut) -> Float[Array, "P tile H D"]:
        tiles, start = _load_tiles(cut, q, storage, block_table, visible, window, sinks)
        chunk = (_FEWEST_TOKENS, _MOST_TOKENS[kind])
        done = _walk_context(tiles, start, storage, chunk, size == num_tiles, scale=scale, window=window, soft_cap=soft_cap)
        out = jnp.where(done.highest > _MASKED, 1.0 / done.total, 0.0)[..., None] * done.out
        out = jnp.moveaxis(out.reshape(size, tiles.q.shape[1], tile, -1, head_dim), 2, 1)
        return out.reshape(size, tile, num_heads, head_dim).astype(q.dtype)

    if size == num_tiles:
        out, place = run(cut), tile_of_query
    else:
        rank = jnp.argsort(jnp.argsort(jnp.max(cut.position, axis=1)))
        filler = -num_tiles % size  # the last group is full: the first tile runs once more for each place that is left over
        order = jnp.concatenate([jnp.zeros(filler, jnp.int32), jnp.argsort(rank)])
        groups = jax.tree.map(lambda array: array[order].reshape(-1, size, *array.shape[1:]), cut)
        out, place = lax.map(run, groups), filler + rank[tile_of_query]
    out = out.reshape(-1, num_heads, head_dim)[place * tile + offset_of_query]
    seen = query_places(lengths, query_starts, num_queries)[1] >= 0
    return jnp.where(seen[:, None, None], out, 0)


class Cut(NamedTuple):
    """How queries are cut into tiles of one sequence each."""

    seq: Int[Array, " P"]
    row: Int[Array, "P tile"]  # of q
    position: Int[Array, "P tile"]  # in the sequence; -1 where the tile has no query


def _cut_decode(lengths: Int[Array, " S"]) -> tuple[Cut, Int[Array, " T"], Int[Array, " T"]]:
    """One tile a sequence. Also the tile of each query, and its offset there."""
    rows = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    return Cut(rows, rows[:, None], lengths[:, None] - 1), rows, jnp.zeros_like(rows)


def _cut_ragged(
    lengths: Int[Array, " S"], query_starts: Int[Array, " S+1"], num_queries: int
) -> tuple[Cut, Int[Array, " T"], Int[Array, " T"]]:
    """Tiles of as many queries as a sequence has on average, so that few of their rows are empty. Also each query's tile, and its place."""
    num_seqs, (fewest, most) = lengths.shape[0], _TILE_QUERIES
    tile = min(max(fewest, min(num_queries // num_seqs, most)), num_queries)
    counts = query_starts[1:] - query_starts[:-1]
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-counts // tile))])
    index = jnp.arange(min(num_seqs, num_queries) + num_queries // tile, dtype=jnp.int32)  # at most so many tiles
    seq = jnp.clip(jnp.searchsorted(tile_starts, index, side="right", method="compare_all") - 1, 0, num_seqs - 1).astype(jnp.int32)
    offset = (index - tile_starts[seq])[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None]
    position = lengths[seq, None] - counts[seq, None] + offset
    exists = (index < tile_starts[-1])[:, None] & (offset < counts[seq, None])
    row = jnp.where(exists, query_starts[seq, None] + offset, 0)
    position = jnp.where(exists, jnp.maximum(position, -1), -1).astype(jnp.int32)

    owner, _ = query_places(lengths, query_starts, num_queries)
    within = jnp.arange(num_queries, dtype=jnp.int32) - query_starts[owner]
    tile_of_query = jnp.clip(tile_starts[owner] + within // tile, 0, index.shape[0] - 1)  # of a padding row: any
    return Cut(seq, row, position), tile_of_query, jnp.clip(within, 0) % tile


def _load_tiles(
    cut: Cut,
    q: Float[Array, "T H D"],
    storage: layout.XlaStorage,
    block_table: Int[Array, "S M"],
    visible: Int[Array, " S"],
    window: int | None,
    sinks: Float[Array, " H"] | None,
) -> tuple[Tiles, Running]:
    """The tiles of one group, and their running softmax before the first token."""
    num_tiles, tile = cut.row.shape
    num_kv_heads, head_dim = layout.sizes(storage).num_kv_heads, q.shape[2]
    rows = q[cut.row].reshape(num_tiles, tile, num_kv_heads, -1, head_dim)
    group = rows.shape[3]
    rows = jnp.moveaxis(rows, 1, 2).reshape(num_tiles, num_kv_heads, tile * group, head_dim)
    end = jnp.minimum(jnp.max(cut.position, axis=1) + 1, visible[cut.seq])
    first = jnp.zeros(num_tiles, jnp.int32)
    if window is not None:
        lowest = jnp.min(jnp.where(cut.position < 0, jnp.iinfo(jnp.int32).max, cut.position), axis=1)
        first = jnp.clip(lowest - window + 1, 0, end)
    tiles = Tiles(rows, jnp.repeat(cut.position, group, axis=1), first, end, block_table[cut.seq])
    shape = rows.shape[:-1]
    if sinks is None:
        highest, total = jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:  # a sink is a token with this score and no value
        highest = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, group), tile)
        highest, total = jnp.broadcast_to(highest[None], shape), jnp.ones(shape, jnp.float32)
    return tiles, Running(highest, total, jnp.zeros(rows.shape, jnp.float32))


def _walk_context(
    tiles: Tiles,
    running: Running,
    storage: layout.XlaStorage,
    chunk_tokens: tuple[int, int],
    only_group: bool,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Running:
    """Folds the whole context of one group of tiles, chunk by chunk, into its running softmax. A chunk has so many tokens, from and to.

    One of several groups may hold no query at all, and then takes no step; the only group takes a single chunk without a loop.
    """
    num_blocks, block_size, num_kv_heads, head_dim = layout.sizes(storage)
    num_tiles, width = tiles.blocks.shape
    token_bytes = 2 * num_tiles * num_kv_heads * head_dim * storage.keys.dtype.itemsize
    budget = min(max(_CHUNK_BYTES // token_bytes, chunk_tokens[0]), chunk_tokens[1])
    unit = _largest_divisor(block_size, budget)  # tokens of a gathered row: a block, or a part of a large one
    parts = block_size // unit
    num_units = width * parts
    num_chunks = -(-num_units // max(1, budget // unit))
    chunk_units = -(-num_units // num_chunks)  # chunks of equal size, so that the last one is not nearly empty
    chunk = chunk_units * unit
    key_rows, value_rows = (side.reshape(-1, unit * head_dim) for side in storage)

    def gather(rows: Float[Array, "N*K*parts unit*D"], index: Int[Array, "P K units"]) -> Float[Array, "P K chunk D"]:
        taken = rows.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return taken.reshape(index.shape[0], num_kv_heads, chunk, head_dim)

    def fold(step: Int[Array, ""], running: Running) -> Running:
        units = step * chunk_units + jnp.arange(chunk_units, dtype=jnp.int32)
        block = jnp.take(tiles.blocks, units // parts, axis=1, mode="clip")  # [P, units]
        head = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
        index = (jnp.clip(block, 0, num_blocks - 1)[:, None] * num_kv_heads + head) * parts + (units % parts)[None, None]

        token = step * chunk + jnp.arange(chunk, dtype=jnp.int32)
        exists = token[None] < tiles.end[:, None]  # [P, chunk]
        visible = exists[:, None] & (token[None, None] <= tiles.position[..., None])  # [P, R, chunk]
        if window is not None:
            visible &= token[None, None] > tiles.position[..., None] - window
        keys = gather(key_rows, index)
        # A value outside the context may be NaN, and 0 * NaN is NaN.
        values = jnp.where(exists[:, None, :, None], gather(value_rows, index), 0)
        return _fold_chunk(running, tiles.q, keys, values, visible[:, None], scale, soft_cap)

    if num_chunks == 1 and only_group:
        return fold(jnp.int32(0), running)
    last = jnp.minimum(-(-jnp.max(tiles.end) // chunk), num_chunks)  # a length beyond the table adds no work
    return lax.fori_loop(jnp.min(tiles.first) // chunk, last, fold, running)


def _fold_chunk(
    running: Running,
    q: Float[Array, "P K R D"],
    keys: Float[Array, "P K chunk D"],
    values: Float[Array, "P K chunk D"],
    visible: Bool[Array, "P 1 R chunk"],
    scale: float,
    soft_cap: float | None,
) -> Running:
    """One step of the running softmax, in float32."""
    scores = jnp.einsum("pkrd,pkcd->pkrc", q.astype(keys.dtype), keys, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, _MASKED)
    highest = jnp.maximum(running.highest, jnp.max(scores, axis=-1))
    # A row that has seen nothing yet gets weights of 1 here; the decay of its first visible token, exp(-1e30), takes them out again. One
    # that never sees a token keeps the score _MASKED and gives zeros.
    weights = jnp.exp(scores - highest[..., None])
    decay = jnp.exp(running.highest - highest)
    out = jnp.einsum("pkrc,pkcd->pkrd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return Running(highest, running.total * decay + jnp.sum(weights, axis=-1), running.out * decay[..., None] + out)


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)
