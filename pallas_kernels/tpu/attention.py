"""Ragged paged attention for TPU: one kernel for decode, prefill and any mix of them.

The kernel walks one flat list of steps. A step is one chunk of one tile's context, and tiles of all sequences follow each other without a
break: while a step computes, the keys and values of the next step are on their way, and so is the part of the block table that the step
after that needs. The block table stays in HBM; only the part for two chunks is on the chip. A full chunk is computed without any mask.

Blocks are fetched one copy each, with one semaphore for all of a chunk. What a tile cannot see is not fetched.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.fit import buffer_bytes
from pallas_kernels.tpu.format import LANES, Format
from pallas_kernels.tpu.plan import Plan, decode_plan, prefill_plan
from pallas_kernels.tpu.rows import Rows, arrange, pack_heads, pack_queries, unpack_heads, unpack_outputs
from pallas_kernels.tpu.softmax import LOG2E, NOTHING, Mask, Running, fold
from pallas_kernels.tpu.work import Work, cut

__all__ = ["ragged_attention", "vmem_bytes"]

_RING = 3  # query tiles on the chip: the next one comes in, one is computed, the outputs of the last one go out
_SMALL_TILE = 16  # queries of a tile for drafts and short prompts
_MASKED_TOKENS = 256  # tokens that a masked step, and every step of a prefill tile, takes at a time


class Spec(NamedTuple):
    """What is known when the kernel is traced."""

    form: Format
    rows: Rows
    plans: tuple[Plan, ...]  # smallest tiles first
    chunk_blocks: int
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.chunk_blocks * self.form.block_size


class Buffers(NamedTuple):
    """On-chip memory of one core, and the semaphores of the copies to and from it."""

    table: Any  # SMEM int32 [2, 1, chunk_blocks]
    kv: Any  # [2, chunk_blocks, C, B, 128], or words [2, chunk_blocks * B * W, 128]
    tiles: Any  # float32 [ring, columns, queries * token_rows, 128]: queries on their way in, outputs on their way out
    scales: Any  # float32 [2 K, chunk], or nothing: of the chunk that is computed
    lse: Any  # float32 [ring, 1, queries * token_rows, 128], or nothing
    queries: tuple[Any, ...]  # for each plan [units, unit_rows, unit_lanes]
    running: tuple[Running, ...]  # for each plan
    table_sem: Any
    kv_sem: Any
    query_sem: Any
    out_sem: Any


def _chunk_range(spec: Spec, work: Work, tile: Array) -> tuple[Array, Array]:
    """The first chunk that a tile sees, and one past the last. There is always one."""
    first = jnp.int32(0)
    if spec.window is not None:
        first = jnp.maximum(work.position[tile] - (spec.window - 1), 0) // spec.chunk
    return first, jnp.maximum(pl.cdiv(work.end[tile], spec.chunk), first + 1)


def _block_range(spec: Spec, work: Work, tile: Array, chunk: Array) -> tuple[Array, Array]:
    """The blocks of a chunk that a tile sees."""
    start = chunk * spec.chunk
    last = jnp.clip(pl.cdiv(work.end[tile] - start, spec.form.block_size), 0, spec.chunk_blocks)
    if spec.window is None:
        return jnp.int32(0), last
    oldest = jnp.maximum(work.position[tile] - (spec.window - 1), 0)
    return jnp.clip((oldest - start) // spec.form.block_size, 0, last), last


def _next_step(spec: Spec, work: Work, tile: Array, chunk: Array, last_tile: Array) -> tuple[Array, Array]:
    """The step after (tile, chunk); the tile is one past `last_tile` at the end."""
    stays = chunk + 1 < _chunk_range(spec, work, tile)[1]
    following = jnp.where(stays, tile, tile + 1)
    return following, jnp.where(stays, chunk + 1, _chunk_range(spec, work, jnp.minimum(following, last_tile))[0])


def _kv_rows(spec: Spec, first: Array | int, count: Array | int) -> pl.Slice:
    """Where some blocks of a chunk lie in its buffer."""
    if not spec.form.words:
        return pl.ds(first, count)
    size = spec.form.block_shape[0]
    return pl.ds(pl.multiple_of(first * size, size), count * size)


def _start_blocks(spec: Spec, work: Work, buffers: Buffers, kv_hbm: Any, tile: Array, chunk: Array, slot: Array) -> None:
    """Starts a copy for each block of a chunk that the tile sees."""
    first, last = _block_range(spec, work, tile, chunk)

    def start(index: Array | int) -> None:
        target = buffers.kv.at[slot, _kv_rows(spec, index, 1)] if spec.form.words else buffers.kv.at[slot, index]
        pltpu.make_async_copy(kv_hbm.at[buffers.table[slot, 0, index]], target, buffers.kv_sem.at[slot]).start()

    @pl.when(last - first == spec.chunk_blocks)
    def _() -> None:
        for index in range(spec.chunk_blocks):
            start(index)

    @pl.when(last - first != spec.chunk_blocks)
    def _() -> None:
        lax.fori_loop(first, last, lambda index, _: start(index), None)


def _wait_blocks(spec: Spec, work: Work, buffers: Buffers, tile: Array, chunk: Array, slot: Array) -> None:
    """Waits for all copies of a chunk at once: the semaphore counts bytes."""
    first, last = _block_range(spec, work, tile, chunk)

    @pl.when(last > first)
    def _() -> None:
        arriving = buffers.kv.at[slot, _kv_rows(spec, first, last - first)]
        pltpu.make_async_copy(arriving, arriving, buffers.kv_sem.at[slot]).wait()


def _load(spec: Spec, kv: Any, slot: Array, first_block: Array | int, tokens: int, column: Array | int, lanes: int, high: bool) -> Array:
    """Columns of some tokens of a chunk as [tokens, lanes]."""
    form = spec.form
    parts = []
    for offset in range(lanes // LANES):
        if form.words:
            start = first_block * form.block_shape[0] + column + offset
            words = kv[slot, pl.ds(start, tokens, stride=form.key_columns), :]
            half = words & jnp.uint32(0xFFFF0000) if high else words << 16
            parts.append(lax.bitcast_convert_type(half, jnp.float32).astype(form.dtype))
        else:
            part = _values(form, kv[slot, pl.ds(first_block, tokens // form.block_size), column + offset])
            parts.append(part.reshape(tokens, LANES))
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def _values(form: Format, stored: Array) -> Array:
    """Stored values as the operands of a product."""
    if form.storage_dtype != jnp.int8:
        return stored
    if form.dtype != "int8":
        stored = pltpu.bitcast(stored, jnp.dtype(form.dtype))
    return stored.astype(jnp.float32).astype(jnp.bfloat16)


def _decode_scales(spec: Spec, buffers: Buffers, slot: Array) -> None:
    """Brings the scales of a chunk from bytes, a token a row, to float32, a token a lane.

    A product with the right ones and powers of two puts the two bytes of a scale together and turns them by the way. It is exact: bytes are
    small integers. Sixteen bits of a bfloat16 are the upper half of a float32.
    """
    form = spec.form
    stored = buffers.kv[slot, :, form.columns - 1].astype(jnp.int32) & 0xFF
    stored = stored.astype(jnp.float32).astype(jnp.bfloat16).reshape(spec.chunk, LANES)
    shape = (buffers.scales.shape[0], LANES)
    head, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    place = jnp.where(lane == head, 1.0, jnp.where(lane == head + LANES // 2, 256.0, 0.0)).astype(jnp.bfloat16)
    bits = lax.dot_general(place, stored, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    buffers.scales[...] = lax.bitcast_convert_type(bits.astype(jnp.int32) << 16, jnp.float32)


def _scales(spec: Spec, plan: Plan, scales: Any, unit: int | Array, first_head: int, token: int | Array, tokens: int) -> Array:
    """The scale of each row's kv head, [unit_rows, tokens]."""
    shape = (plan.unit_rows, tokens)
    head_of_row = lax.broadcasted_iota(jnp.int32, shape, 0) // plan.head_rows
    out = jnp.zeros(shape, jnp.float32)
    for index in range(plan.unit_heads):
        row = scales[pl.ds(first_head + unit * plan.unit_heads + index, 1), pl.ds(token, tokens)]
        out = jnp.where(head_of_row == index, jnp.broadcast_to(row, shape), out)
    return out


def _step(
    spec: Spec,
    plan: Plan,
    work: Work,
    buffers: Buffers,
    queries: Any,
    running: Running,
    *,
    tile: Array,
    chunk: Array,
    slot: Array,
    unit: Array | int,
    first_block: Array | int,
    tokens: int,
    masked: bool,
) -> None:
    """One unit of a tile against some tokens of a chunk."""
    column = unit * plan.key_column
    load = functools.partial(_load, spec, buffers.kv, slot, first_block, tokens)
    keys = load(column=column, lanes=plan.unit_lanes, high=False)
    values = keys if spec.form.interleaved else load(column=plan.value_column + column, lanes=plan.unit_lanes, high=True)
    mask = None
    if masked:
        start = chunk * spec.chunk + first_block * spec.form.block_size
        shape = (plan.unit_rows, tokens)
        token = start + lax.broadcasted_iota(jnp.int32, shape, 1)
        position = work.position[tile] + (lax.broadcasted_iota(jnp.int32, shape, 0) & (plan.queries - 1))
        seen = (token <= position) & (token < work.end[tile])
        token_of_value = start + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        value_seen = token_of_value < work.end[tile]
        if spec.window is not None:
            seen &= token > position - spec.window
            value_seen &= token_of_value > work.position[tile] - spec.window
        mask = Mask(seen, value_seen)
    key_scales = value_scales = None
    if spec.form.scaled:
        token = first_block * spec.form.block_size
        token = token if isinstance(token, int) else pl.multiple_of(token, LANES)
        read = functools.partial(_scales, spec, plan, buffers.scales, unit, token=token, tokens=tokens)
        key_scales, value_scales = read(first_head=0), read(first_head=spec.form.num_kv_heads)
    fold(running, unit, queries[unit], keys, values, mask, key_scales, value_scales, scale=spec.scale, soft_cap=spec.soft_cap)


def _attend(
    spec: Spec, plan: Plan, work: Work, buffers: Buffers, queries: Any, running: Running, tile: Array, chunk: Array, slot: Array
) -> None:
    """One tile against one chunk of its context."""
    step = functools.partial(_step, spec, plan, work, buffers, queries, running, tile=tile, chunk=chunk, slot=slot)
    start, stop = chunk * spec.chunk, (chunk + 1) * spec.chunk
    full = (stop <= work.position[tile] + 1) & (stop <= work.end[tile])
    if spec.window is not None:
        full &= start > work.position[tile] + work.count[tile] - 1 - spec.window
    tokens = max(min(_MASKED_TOKENS, spec.chunk), spec.form.block_size)
    blocks = tokens // spec.form.block_size
    first, last = _block_range(spec, work, tile, chunk)

    def walk(masked: bool) -> None:
        def part(index: Array, _: None) -> None:
            run = functools.partial(step, first_block=index * blocks, tokens=tokens, masked=masked)
            if plan.queries == 1:
                for unit in range(plan.units):
                    run(unit=unit)
            else:
                lax.fori_loop(0, plan.units, lambda unit, _: run(unit=unit), None)

        lax.fori_loop(first // blocks, pl.cdiv(last, blocks), part, None)

    @pl.when(full)
    def _() -> None:
        if plan.queries == 1:
            for unit in range(plan.units):
                step(unit=unit, first_block=0, tokens=spec.chunk, masked=False)
        else:
            walk(masked=False)

    @pl.when(jnp.logical_not(full))
    def _() -> None:
        walk(masked=True)


def _begin_tile(spec: Spec, plan: Plan, tile_ref: Any, queries: Any, running: Running, sinks: Any) -> None:
    """Brings a tile's queries into the order of the products, and sets its running softmax to nothing seen."""
    rows = spec.rows
    lane = functools.partial(lax.broadcasted_iota, jnp.int32, dimension=1)
    running.out[...] = jnp.zeros_like(running.out)
    if sinks is None:
        running.highest[...] = jnp.full_like(running.highest, NOTHING)
        running.total[...] = jnp.zeros_like(running.total)
    if plan.queries == 1:
        for unit in range(plan.units):
            own = _read_columns(tile_ref, pl.ds(unit * rows.pack_rows, rows.pack_rows))
            slot_of_row = lax.broadcasted_iota(jnp.int32, own.shape, 0) // rows.slot_rows
            wide = [jnp.where(slot_of_row == slot, own, 0.0) for slot in range(plan.unit_slots)] if plan.unit_slots > 1 else [own]
            queries[unit] = jnp.concatenate(wide, axis=1).astype(queries.dtype) if len(wide) > 1 else own.astype(queries.dtype)
            if sinks is not None:  # a token with this score and no value
                running.highest[unit] = sinks[pl.ds(unit * rows.pack_rows, rows.pack_rows), :]
                running.total[unit] = (lane(shape=(rows.pack_rows, LANES)) == 0).astype(jnp.float32)
        return
    for slot in range(rows.slots):
        for head in range(rows.slot_rows):
            row = _row_of(rows, slot, head)
            place = pl.ds(head * plan.queries, plan.queries)
            own = _read_columns(tile_ref, pl.ds(row, plan.queries, stride=rows.token_rows))
            queries[slot, place, :] = own.astype(queries.dtype)
            if sinks is not None:
                shape = (plan.queries, LANES)
                running.highest[slot, place, :] = jnp.broadcast_to(sinks[pl.ds(row, 1), :], shape)
                running.total[slot, place, :] = (lane(shape=shape) == 0).astype(jnp.float32)


def _read_columns(ref: Any, place: pl.Slice) -> Array:
    columns = [ref[column, place, :] for column in range(ref.shape[0])]
    return jnp.concatenate(columns, axis=1) if len(columns) > 1 else columns[0]


def _write_columns(ref: Any, place: pl.Slice, value: Array) -> None:
    for column in range(ref.shape[0]):
        ref[column, place, :] = value[:, column * LANES : (column + 1) * LANES]


def _row_of(rows: Rows, slot: int, head: int) -> int:
    return slot // rows.pack_slots * rows.pack_rows + slot % rows.pack_slots * rows.slot_rows + head


def _finish_tile(spec: Spec, plan: Plan, tile_ref: Any, lse_ref: Any, running: Running) -> None:
    """Divides by the sum of weights and puts the outputs where the queries were."""
    rows = spec.rows
    lanes = rows.slot_lanes
    for unit in range(plan.units):
        total = jnp.sum(running.total[unit], axis=1, keepdims=True)
        out = running.out[unit] * jnp.where(total > 0, 1.0 / total, 0.0)
        lse = running.highest[unit] + jnp.log2(total)
        if plan.queries == 1:
            own = out[:, :lanes]
            for slot in range(1, plan.unit_slots):
                slot_of_row = lax.broadcasted_iota(jnp.int32, own.shape, 0) // rows.slot_rows
                own = jnp.where(slot_of_row == slot, out[:, slot * lanes : (slot + 1) * lanes], own)
            place = pl.ds(unit * rows.pack_rows, rows.pack_rows)
            _write_columns(tile_ref, place, own)
            if lse_ref is not None:
                _write_columns(lse_ref, place, lse)
            continue
        for head in range(rows.slot_rows):
            place = pl.ds(_row_of(rows, unit, head), plan.queries, stride=rows.token_rows)
            part = slice(head * plan.queries, (head + 1) * plan.queries)
            _write_columns(tile_ref, place, out[part])
            if lse_ref is not None:
                _write_columns(lse_ref, place, lse[part])


def _kernel(spec: Spec, has_sinks: bool, has_lse: bool, *refs: Any) -> None:
    """One core's share of the work. Refs: the work in scalars, then inputs, outputs and buffers."""
    work, refs = Work(*refs[: len(Work._fields)]), refs[len(Work._fields) :]
    table_hbm, query_hbm, kv_hbm, *refs = refs
    sinks = refs.pop(0) if has_sinks else None
    out_hbm = refs.pop(0)
    lse_hbm = refs.pop(0) if has_lse else None
    buffers = Buffers(*refs)
    lse_tiles = buffers.lse[0] if has_lse else None
    core = pl.program_id(0)
    first_tile, stop_tile = work.bounds[core], work.bounds[core + 1]
    rows = spec.rows.token_rows

    def table_copy(tile: Array, chunk: Array, slot: Array | int) -> Any:
        return pltpu.make_async_copy(table_hbm.at[work.seq[tile], chunk], buffers.table.at[slot], buffers.table_sem.at[slot])

    def ring(tile: Array) -> Array:
        return lax.rem(tile - first_tile, _RING)

    def tile_copy(hbm: Any, tiles: Any, tile: Array, outward: bool) -> Any:
        size = work.count[tile] * rows if spec.plans[-1].queries > 1 else rows
        far = hbm.at[:, pl.ds(pl.multiple_of(work.row[tile] * rows, 8), size)]
        near = tiles.at[ring(tile), :, pl.ds(0, size)]
        semaphore = (buffers.out_sem if outward else buffers.query_sem).at[ring(tile)]
        return pltpu.make_async_copy(*((near, far) if outward else (far, near)), semaphore)

    def start_outputs(tile: Array) -> None:
        tile_copy(out_hbm, buffers.tiles, tile, True).start()
        if has_lse:
            tile_copy(lse_hbm, lse_tiles, tile, True).start()

    def wait_outputs(tile: Array) -> None:
        tile_copy(out_hbm, buffers.tiles, tile, True).wait()
        if has_lse:
            tile_copy(lse_hbm, lse_tiles, tile, True).wait()

    def by_plan(tile: Array, run: Any) -> None:
        """Runs a function of a plan's index for the smallest plan that holds the tile."""
        fewer = 0
        for index, plan in enumerate(spec.plans):
            fits = (work.count[tile] > fewer) & (work.count[tile] <= plan.queries)
            pl.when(fits)(functools.partial(run, index))
            fewer = plan.queries

    @pl.when(work.steps[core] > 0)
    def _() -> None:
        chunk = _chunk_range(spec, work, first_tile)[0]
        following = _next_step(spec, work, first_tile, chunk, stop_tile - 1)
        table_copy(first_tile, chunk, 0).start()

        @pl.when(following[0] < stop_tile)
        def _() -> None:
            table_copy(*following, 1).start()

        tile_copy(query_hbm, buffers.tiles, first_tile, False).start()
        table_copy(first_tile, chunk, 0).wait()
        _start_blocks(spec, work, buffers, kv_hbm, first_tile, chunk, jnp.int32(0))

        def body(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            tile, chunk, next_tile, next_chunk = carry
            slot = lax.rem(index, 2)
            after_tile, after_chunk = _next_step(spec, work, jnp.minimum(next_tile, stop_tile - 1), next_chunk, stop_tile - 1)
            after_tile = jnp.where(next_tile < stop_tile, after_tile, stop_tile)

            @pl.when(next_tile < stop_tile)
            def _() -> None:
                table_copy(next_tile, next_chunk, 1 - slot).wait()
                _start_blocks(spec, work, buffers, kv_hbm, next_tile, next_chunk, 1 - slot)

                @pl.when(next_tile != tile)
                def _() -> None:
                    @pl.when(next_tile - first_tile >= _RING)
                    def _() -> None:
                        wait_outputs(next_tile - _RING)

                    tile_copy(query_hbm, buffers.tiles, next_tile, False).start()

            @pl.when(after_tile < stop_tile)
            def _() -> None:
                table_copy(after_tile, after_chunk, slot).start()

            first, last = _chunk_range(spec, work, tile)
            tile_ref = buffers.tiles.at[ring(tile)]
            lse_ref = lse_tiles.at[ring(tile)] if has_lse else None

            @pl.when(chunk == first)
            def _() -> None:
                tile_copy(query_hbm, buffers.tiles, tile, False).wait()
                by_plan(
                    tile, lambda plan: _begin_tile(spec, spec.plans[plan], tile_ref, buffers.queries[plan], buffers.running[plan], sinks)
                )

            _wait_blocks(spec, work, buffers, tile, chunk, slot)
            if spec.form.scaled:
                _decode_scales(spec, buffers, slot)
            by_plan(
                tile,
                lambda plan: _attend(
                    spec, spec.plans[plan], work, buffers, buffers.queries[plan], buffers.running[plan], tile, chunk, slot
                ),
            )

            @pl.when(chunk + 1 == last)
            def _() -> None:
                by_plan(tile, lambda plan: _finish_tile(spec, spec.plans[plan], tile_ref, lse_ref, buffers.running[plan]))
                start_outputs(tile)

            return next_tile, next_chunk, after_tile, after_chunk

        lax.fori_loop(0, work.steps[core], body, (first_tile, chunk, *following))
        for back in range(1, _RING + 1):

            @pl.when(stop_tile - first_tile >= back)
            def _(back: int = back) -> None:
                wait_outputs(stop_tile - back)


def ragged_attention(
    q: Float[Array, "T H D"],
    blocks: Array,
    form: Format,
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    visible: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
    chunk_tokens: int,
    tile_queries: int,
    num_cores: int = 1,
    vmem_limit_bytes: int | None = None,
    with_lse: bool = False,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"] | None]:
    """Attention of each query over the blocks of its sequence.

    Args:
      q: queries, one sequence after another.
      blocks: the physical blocks of one layer.
      form: how they are stored.
      block_table: blocks of each sequence; entries of visible tokens must be in the pool.
      lengths: tokens of each sequence.
      visible: of these, how many the table really has a block for.
      query_starts: rows of each sequence; None: decode, row s is sequence s.
      scale: factor of the scores.
      window: tokens a query sees; None: all.
      soft_cap: bound of the scores; None: none.
      sinks: a score without a value, for each head; None: none.
      chunk_tokens: tokens of the context that a step takes, a multiple of 128 and of the block size.
      tile_queries: most queries of a tile, a power of two.
      num_cores: cores that share the work.
      vmem_limit_bytes: on-chip memory the kernel may take; None: the compiler's default.
      with_lse: whether to return the log-sum-exp of the scores too.

    Returns:
      (out, lse): zeros, and minus infinity, in rows that see nothing. Rows of no sequence hold anything.
    """
    num_queries, num_heads, _ = q.shape
    num_seqs, width = block_table.shape
    spec = _spec(form, num_heads, chunk_tokens, None if query_starts is None else tile_queries, scale, window, soft_cap)
    rows = spec.rows
    work = cut(
        lengths,
        visible,
        query_starts,
        num_queries=num_queries,
        tile=spec.plans[-1].queries,
        chunk=spec.chunk,
        window=window,
        num_cores=num_cores,
    )
    chunks = -(-width // spec.chunk_blocks)
    table = jnp.pad(block_table, ((0, 0), (0, chunks * spec.chunk_blocks - width))).reshape(num_seqs, chunks, 1, spec.chunk_blocks)
    inputs = [table, pack_queries(q, rows, form), blocks]
    in_specs = [pl.BlockSpec(memory_space=pltpu.HBM)] * 3
    if sinks is not None:
        inputs.append(pack_heads(sinks.astype(jnp.float32) * LOG2E, rows))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    out_shape = [jax.ShapeDtypeStruct((columns, num_queries * rows.token_rows, LANES), jnp.float32) for columns in (rows.columns, 1)]
    out = pl.pallas_call(
        functools.partial(_kernel, spec, sinks is not None, with_lse),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Work._fields),
            grid=(num_cores,),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * (1 + with_lse),
            scratch_shapes=_scratch(spec, with_lse),
        ),
        out_shape=out_shape[: 1 + with_lse],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        name="ragged_attention",
    )(*work, *inputs)
    lse = unpack_heads(out[1][0], rows) / LOG2E if with_lse else None
    return unpack_outputs(out[0], rows, form).astype(q.dtype), lse


def vmem_bytes(form: Format, num_heads: int, chunk_tokens: int, tile_queries: int | None) -> int:
    """Bytes of on-chip memory that the kernel's buffers take. `tile_queries` None: decode."""
    spec = _spec(form, num_heads, chunk_tokens, tile_queries, 1.0, None, None)
    buffers = jax.tree.leaves(_scratch(spec, with_lse=True)[1:-4])  # but for the table and the semaphores
    return sum(buffer_bytes(buffer.shape, buffer.dtype) for buffer in buffers)


def _spec(
    form: Format, num_heads: int, chunk_tokens: int, tile_queries: int | None, scale: float, window: int | None, soft_cap: float | None
) -> Spec:
    rows = arrange(form, num_heads)
    sizes = [] if tile_queries is None else sorted({min(_SMALL_TILE, tile_queries), tile_queries})
    plans = (decode_plan(rows, form), *(prefill_plan(rows, form, size) for size in sizes))
    return Spec(form, rows, plans, chunk_tokens // form.block_size, scale, window, soft_cap)


def _scratch(spec: Spec, with_lse: bool) -> list:
    """On-chip memory, in the order of `Buffers`."""
    form, rows = spec.form, spec.rows
    tile_rows = spec.plans[-1].queries * rows.token_rows
    operand = jnp.float32 if jnp.dtype(form.dtype) == jnp.float32 else jnp.bfloat16
    kv_shape = (spec.chunk_blocks * form.block_shape[0], LANES) if form.words else (spec.chunk_blocks, *form.block_shape)
    buffers = Buffers(
        table=pltpu.SMEM((2, 1, spec.chunk_blocks), jnp.int32),
        kv=pltpu.VMEM((2, *kv_shape), form.storage_dtype),
        tiles=pltpu.VMEM((_RING, rows.columns, tile_rows, LANES), jnp.float32),
        scales=pltpu.VMEM((-(-2 * form.num_kv_heads // 8) * 8, spec.chunk), jnp.float32) if form.scaled else [],
        lse=[pltpu.VMEM((_RING, 1, tile_rows, LANES), jnp.float32)] if with_lse else [],
        queries=tuple(pltpu.VMEM((plan.units, plan.unit_rows, plan.unit_lanes), operand) for plan in spec.plans),
        running=tuple(
            Running(
                pltpu.VMEM((plan.units, plan.unit_rows, LANES), jnp.float32),
                pltpu.VMEM((plan.units, plan.unit_rows, LANES), jnp.float32),
                pltpu.VMEM((plan.units, plan.unit_rows, plan.unit_lanes), jnp.float32),
            )
            for plan in spec.plans
        ),
        table_sem=pltpu.SemaphoreType.DMA((2,)),
        kv_sem=pltpu.SemaphoreType.DMA((2,)),
        query_sem=pltpu.SemaphoreType.DMA((_RING,)),
        out_sem=pltpu.SemaphoreType.DMA((_RING,)),
    )
    return list(buffers)
