"""The fast XLA implementation: CPUs, and every device that has no kernel of its own.

Queries are cut into tiles of one sequence each. A tile walks its sequence's context in chunks of some blocks: gather the chunk's rows,
score, and fold into a running softmax (Milakov and Gimelshein, 2018), so that the context is never in memory as a whole. Tiles are sorted
by context length and run in groups; a group stops at its longest tile. The work so follows the real lengths, not the table's width.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import layout
from pallas_kernels.ragged import query_places, write_slots

__all__ = ["attend", "supports", "write"]

_CHUNK_BYTES = 8 * 2**20  # keys and values a step aims to gather for all tiles of a group
_CHUNK_TOKENS = (64, 2048)  # fewest and most context tokens a step gathers for each tile
_TILE_QUERIES = 64  # queries of a prefill tile
_GROUP_TILES = {"decode": 64, "prefill": 8}  # tiles that walk their contexts together
_MASKED = -1e30  # finite, so that a row that sees nothing stays free of NaN


def supports(storage: layout.Storage, num_seqs: int, table_width: int, decode: bool) -> tuple[bool, str]:
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
    num_kv_heads = layout.sizes(storage).num_kv_heads
    group = num_heads // num_kv_heads
    tile = 1 if query_starts is None else min(_TILE_QUERIES, num_queries)
    seq, row, position = _tile_rows(lengths, query_starts, num_queries, tile)
    num_tiles = seq.shape[0]

    # [P, tile, H, D] -> [P, K, tile * G, D]
    rows = q if query_starts is None else q[row.reshape(-1)]
    rows = rows.reshape(num_tiles, tile, num_kv_heads, group, head_dim)
    rows = jnp.moveaxis(rows, 1, 2).reshape(num_tiles, num_kv_heads, tile * group, head_dim)
    low = jnp.min(jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position), axis=1)
    first = jnp.zeros(num_tiles, jnp.int32) if window is None else jnp.maximum(low - window + 1, 0)
    end = jnp.max(position, axis=1) + 1
    tiles = Tiles(rows, jnp.repeat(position, group, axis=1), jnp.minimum(first, end), end, block_table[seq])

    start = Running(
        jnp.full(rows.shape[:-1], _MASKED, jnp.float32), jnp.zeros(rows.shape[:-1], jnp.float32), jnp.zeros(rows.shape, jnp.float32)
    )
    if sinks is not None:
        # A sink is a token with this score and no value.
        highest = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, group), tile)
        start = start._replace(highest=jnp.broadcast_to(highest[None], rows.shape[:-1]), total=jnp.ones_like(start.total))
    group_tiles = _GROUP_TILES["decode" if query_starts is None else "prefill"]
    out = _run_groups(tiles, start, storage, group_tiles, scale=scale, window=window, soft_cap=soft_cap)

    out = jnp.moveaxis(out.reshape(num_tiles, num_kv_heads, tile, group, head_dim), 1, 2).reshape(num_tiles * tile, num_heads, head_dim)
    seen = position.reshape(-1) >= 0
    if query_starts is None:
        return jnp.where(seen[:, None, None], out, 0.0).astype(q.dtype)
    target = jnp.where(seen, row.reshape(-1), num_queries)
    return jnp.zeros_like(q).at[target].set(out.astype(q.dtype), mode="drop")


def _tile_rows(
    lengths: Int[Array, " S"], query_starts: Int[Array, " S+1"] | None, num_queries: int, tile: int
) -> tuple[Int[Array, " P"], Int[Array, "P tile"], Int[Array, "P tile"]]:
    """Sequence, query rows and their positions of each tile; position -1 where a tile has no query."""
    if query_starts is None:
        rows = jnp.arange(num_queries, dtype=jnp.int32)
        return rows, rows[:, None], lengths[:, None].astype(jnp.int32) - 1
    num_seqs = lengths.shape[0]
    counts = query_starts[1:] - query_starts[:-1]
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-counts // tile))])
    index = jnp.arange(min(num_seqs, num_queries) + num_queries // tile, dtype=jnp.int32)  # at most so many tiles
    seq = jnp.clip(jnp.searchsorted(tile_starts, index, side="right", method="compare_all") - 1, 0, num_seqs - 1).astype(jnp.int32)
    offset = (index - tile_starts[seq])[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None]
    position = lengths[seq, None] - counts[seq, None] + offset
    exists = (index < tile_starts[-1])[:, None] & (offset < counts[seq, None])
    row = jnp.where(exists, query_starts[seq, None] + offset, 0)
    return seq, row, jnp.where(exists, jnp.maximum(position, -1), -1).astype(jnp.int32)


def _run_groups(
    tiles: Tiles,
    start: Running,
    storage: layout.XlaStorage,
    group_tiles: int,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "P K R D"]:
    """Runs the tiles in groups of like lengths and finishes the softmax."""
    num_tiles = tiles.q.shape[0]
    size = min(num_tiles, group_tiles)

    def run(group: tuple[Tiles, Running]) -> Float[Array, "P K R D"]:
        done = _walk_context(*group, storage, size == num_tiles, scale=scale, window=window, soft_cap=soft_cap)
        return jnp.where(done.highest > _MASKED, 1.0 / done.total, 0.0)[..., None] * done.out

    if size == num_tiles:
        return run((tiles, start))
    order = jnp.argsort(tiles.end)
    # The first tiles are the shortest: repeat them to fill the last group.
    order = jnp.concatenate([order[: -num_tiles % size], order])
    grouped = [[array[order].reshape(-1, size, *array.shape[1:]) for array in part] for part in (tiles, start)]
    out = lax.map(run, (Tiles(*grouped[0]), Running(*grouped[1])))
    return jnp.zeros(tiles.q.shape, jnp.float32).at[order].set(out.reshape(-1, *out.shape[2:]))


def _walk_context(
    tiles: Tiles,
    running: Running,
    storage: layout.XlaStorage,
    only_group: bool,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Running:
    """Folds the whole context of one group of tiles, chunk by chunk, into its running softmax.

    One of several groups may hold no query at all, and then takes no step; the only group takes a single chunk without a loop.
    """
    num_blocks, block_size, num_kv_heads, head_dim = layout.sizes(storage)
    num_tiles, width = tiles.blocks.shape
    token_bytes = 2 * num_tiles * num_kv_heads * head_dim * storage.keys.dtype.itemsize
    budget = min(max(_CHUNK_BYTES // token_bytes, _CHUNK_TOKENS[0]), _CHUNK_TOKENS[1])
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
        block = jnp.take(tiles.blocks, units // parts, axis=1, mode="fill", fill_value=0)  # [P, units]
        known = (block > 0) & (block < num_blocks)
        head = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
        index = (jnp.where(known, block, 0)[:, None] * num_kv_heads + head) * parts + (units % parts)[None, None]

        token = step * chunk + jnp.arange(chunk, dtype=jnp.int32)
        exists = jnp.repeat(known, unit, axis=1) & (token[None] < tiles.end[:, None])  # [P, chunk]
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
