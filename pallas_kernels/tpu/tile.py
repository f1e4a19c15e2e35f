"""The begin and the end of a tile: its queries come in as rows of tokens, and its outputs leave as such."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.tpu.format import LANES
from pallas_kernels.tpu.plan import Plan
from pallas_kernels.tpu.rows import Rows
from pallas_kernels.tpu.softmax import NOTHING, Running
from pallas_kernels.tpu.spec import Spec

__all__ = ["begin_tile", "finish_tile"]


def begin_tile(spec: Spec, plan: Plan, tile_ref: Any, queries: Any, running: Running, sinks: Any) -> None:
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


def finish_tile(spec: Spec, plan: Plan, tile_ref: Any, lse_ref: Any, running: Running) -> None:
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
