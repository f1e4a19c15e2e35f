"""One tile of queries against one chunk of its context.

Keys and values are read from the chunk's buffer as whole registers. A full chunk is computed without any mask; where some tokens are not
seen, only the parts that hold tokens are computed, with a mask.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.tpu.format import LANES, Format
from pallas_kernels.tpu.plan import Plan
from pallas_kernels.tpu.softmax import Mask, Running, fold, score
from pallas_kernels.tpu.spec import Buffers, Spec
from pallas_kernels.tpu.steps import block_range
from pallas_kernels.tpu.work import Work

__all__ = ["attend_chunk", "decode_scales", "part_tokens", "units_per_turn"]

_MASKED_TOKENS = 256  # tokens that are computed at a time where some are not seen
_PREFILL_TOKENS = 512  # and by a tile of many queries where all are seen


class Part(NamedTuple):
    """Some tokens of the chunk that is computed."""

    chunk: Array
    slot: Array  # of the chunk in its buffer
    first_block: Array | int  # in the chunk
    tokens: int
    masked: bool  # whether some of them are not seen by all rows


def _load(spec: Spec, kv: Any, part: Part, column: Array | int, lanes: int, high: bool) -> Array:
    """Columns of some tokens as [tokens, lanes]."""
    form = spec.form
    _, slot, first_block, tokens, _ = part
    columns = []
    for offset in range(lanes // LANES):
        if form.words:
            start = first_block * form.block_shape[0] + column + offset
            words = kv[slot, pl.ds(start, tokens, stride=form.key_columns), :]
            half = words & jnp.uint32(0xFFFF0000) if high else words << 16
            columns.append(lax.bitcast_convert_type(half, jnp.float32).astype(form.dtype))
        else:
            stored = kv[slot, pl.ds(first_block, tokens // form.block_size), column + offset]
            columns.append(_values(form, stored).reshape(tokens, LANES))
    return jnp.concatenate(columns, axis=1) if len(columns) > 1 else columns[0]


def _values(form: Format, stored: Array) -> Array:
    """Stored values as the operands of a product."""
    if form.widened:
        return stored.astype(jnp.bfloat16)
    if not form.narrow:
        return stored
    if form.dtype != "int8":
        stored = pltpu.bitcast(stored, jnp.dtype(form.dtype))
    return stored.astype(jnp.float32).astype(jnp.bfloat16)


def decode_scales(spec: Spec, buffers: Buffers, slot: Array) -> None:
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


def _scales(spec: Spec, plan: Plan, scales: Any, unit: int | Array, first_head: int, part: Part) -> Array:
    """The scale of each row's kv head, [unit_rows, tokens]."""
    token = part.first_block * spec.form.block_size
    token = token if isinstance(token, int) else pl.multiple_of(token, LANES)
    shape = (plan.unit_rows, part.tokens)
    head_of_row = lax.broadcasted_iota(jnp.int32, shape, 0) // plan.head_rows
    out = jnp.zeros(shape, jnp.float32)
    for index in range(plan.unit_heads):
        row = scales[pl.ds(first_head + unit * plan.unit_heads + index, 1), pl.ds(token, part.tokens)]
        out = jnp.where(head_of_row == index, jnp.broadcast_to(row, shape), out)
    return out


def _score(spec: Spec, plan: Plan, buffers: Buffers, queries: Any, unit: int | Array, part: Part) -> Array:
    """Scores of one unit of a tile."""
    keys = _load(spec, buffers.kv, part, unit * plan.key_column, plan.unit_lanes, high=False)
    scales = _scales(spec, plan, buffers.scales, unit, 0, part) if spec.form.scaled else None
    return score(queries[unit], keys, scales, scale=spec.scale, soft_cap=spec.soft_cap)


def _fold(
    spec: Spec, plan: Plan, work: Work, buffers: Buffers, running: Running, scores: Array, tile: Array, unit: int | Array, part: Part
) -> None:
    """Folds one unit of a tile, given its scores."""
    values = _load(spec, buffers.kv, part, plan.value_column + unit * plan.key_column, plan.unit_lanes, high=True)
    scales = _scales(spec, plan, buffers.scales, unit, spec.form.num_kv_heads, part) if spec.form.scaled else None
    mask = None
    if part.masked:
        start = part.chunk * spec.chunk + part.first_block * spec.form.block_size
        token = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        position = work.position[tile] + (lax.broadcasted_iota(jnp.int32, scores.shape, 0) & (plan.queries - 1))
        seen = (token <= position) & (token < work.end[tile])
        token_of_value = start + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        value_seen = token_of_value < work.end[tile]
        if spec.window is not None:
            seen &= token > position - spec.window
            value_seen &= token_of_value > work.position[tile] - spec.window
        mask = Mask(seen, value_seen)
    fold(running, unit, scores, values, scales, mask)


def attend_chunk(
    spec: Spec, plan: Plan, work: Work, buffers: Buffers, queries: Any, running: Running, tile: Array, chunk: Array, slot: Array
) -> None:
    """One tile against one chunk of its context."""
    start, stop = chunk * spec.chunk, (chunk + 1) * spec.chunk
    full = (stop <= work.position[tile] + 1) & (stop <= work.end[tile])
    if spec.window is not None:
        full &= start > work.position[tile] + work.queries[tile] - 1 - spec.window

    def units(part: Part) -> None:
        if plan.queries == 1:  # few rows: all scores first, so that products and softmax of different units overlap
            scores = [_score(spec, plan, buffers, queries, unit, part) for unit in range(plan.units)]
            for unit in range(plan.units):
                _fold(spec, plan, work, buffers, running, scores[unit], tile, unit, part)
        else:

            def one(unit: Array, _: None) -> None:
                scores = _score(spec, plan, buffers, queries, unit, part)
                _fold(spec, plan, work, buffers, running, scores, tile, unit, part)

            lax.fori_loop(0, plan.units, one, None, unroll=units_per_turn(plan))

    def walk(tokens: int, first: Array | int, last: Array | int, masked: bool) -> None:
        blocks = tokens // spec.form.block_size
        if tokens == spec.chunk and not masked:
            units(Part(chunk, slot, 0, tokens, masked))
            return
        parts = (first // blocks, pl.cdiv(last, blocks))
        lax.fori_loop(*parts, lambda index, _: units(Part(chunk, slot, index * blocks, tokens, masked)), None)

    @pl.when(full)
    def _() -> None:
        walk(part_tokens(spec.form, spec.chunk, plan.queries > 1), 0, spec.chunk_blocks, masked=False)

    @pl.when(jnp.logical_not(full))
    def _() -> None:
        walk(max(min(_MASKED_TOKENS, spec.chunk), spec.form.block_size), *block_range(spec, work, tile, chunk), masked=True)


def units_per_turn(plan: Plan) -> int:
    """Units that are computed together, so that products of one overlap with the softmax of the other."""
    return plan.units if plan.queries == 1 else 2 - plan.units % 2


def part_tokens(form: Format, chunk_tokens: int, prefill: bool) -> int:
    """Tokens that are computed at a time in a full chunk: in decode all of them."""
    return max(min(_PREFILL_TOKENS, chunk_tokens), form.block_size) if prefill else chunk_tokens
