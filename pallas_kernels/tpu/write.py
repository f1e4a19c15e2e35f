"""Writes new keys and values into their slots, in place.

XLA's scatter would choose another layout for the pool and copy all of it. The kernel instead fetches the few rows of a block that share
registers with the new tokens, sets the new ones, and stores them back: a unit of 8 to 32 tokens, or a whole small block. Units that are
overwritten whole are not fetched. While one unit is changed, the next one is fetched and the last one stored.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.format import LANES, Format, pack
from pallas_kernels.tpu.work import Writes, cut_writes

__all__ = ["kv_write", "unit_tokens"]

_MOST_UNITS = 2**15  # each takes four numbers of scalar memory, of which there is 1 MiB
_RING = 3  # units on the chip: one comes in, one is changed, one goes out


def unit_tokens(form: Format) -> int:
    """Tokens of a block that are written together."""
    if form.words:
        return 1
    return min(form.block_size, 8 * (4 // form.storage_dtype.itemsize))


class Buffers(NamedTuple):
    """On-chip memory, and the semaphores of the copies."""

    units: Any  # [ring, *unit]
    fresh: Any  # float32 [ring, unit_tokens, C, 1, 128], or words [ring, 1, W, 128]
    fetch_sem: Any
    fresh_sem: Any
    store_sem: Any


def _kernel(form: Format, unit: int, *refs: Any) -> None:
    """Refs: the work in scalars, new tokens, the pool as input (unused: it is the output) and as output, buffers."""
    writes, (fresh_hbm, _pool_in_hbm, pool_hbm, *buffer_refs) = Writes(*refs[: len(Writes._fields)]), refs[len(Writes._fields) :]
    buffers = Buffers(*buffer_refs)
    total = writes.total[0]

    def place(item: Array) -> Any:
        start = writes.offset[item] // unit * unit
        if form.words:
            size = form.key_columns
            return pool_hbm.at[writes.block[item], pl.ds(pl.multiple_of(start * size, size), size)]
        if unit == form.block_size:
            return pool_hbm.at[writes.block[item]]
        return pool_hbm.at[writes.block[item], :, pl.ds(pl.multiple_of(start, unit), unit)]

    def fetch(item: Array) -> Any:
        slot = lax.rem(item, _RING)
        return pltpu.make_async_copy(place(item), buffers.units.at[slot], buffers.fetch_sem.at[slot])

    def fresh(item: Array) -> Any:
        slot, count = lax.rem(item, _RING), writes.tokens[item]
        new = fresh_hbm.at[pl.ds(writes.row[item], count)]
        return pltpu.make_async_copy(new, buffers.fresh.at[slot, pl.ds(0, count)], buffers.fresh_sem.at[slot])

    def store(item: Array) -> Any:
        slot = lax.rem(item, _RING)
        return pltpu.make_async_copy(buffers.units.at[slot], place(item), buffers.store_sem.at[slot])

    def start_inputs(item: Array) -> None:
        @pl.when(writes.tokens[item] < unit)
        def _() -> None:
            fetch(item).start()

        fresh(item).start()

    def change(item: Array) -> None:
        slot = lax.rem(item, _RING)
        if unit == 1:
            buffers.units[slot] = buffers.fresh[slot, 0].astype(buffers.units.dtype)
            return
        offset = lax.rem(writes.offset[item], unit)
        token = lax.broadcasted_iota(jnp.int32, (form.columns, unit, LANES), 1)

        def set_one(index: Array, block: Array) -> Array:
            return jnp.where(token == offset + index, buffers.fresh[slot, index], block)

        block = lax.fori_loop(0, writes.tokens[item], set_one, buffers.units[slot].astype(jnp.float32))
        buffers.units[slot] = block.astype(buffers.units.dtype)

    @pl.when(total > 0)
    def _() -> None:
        start_inputs(jnp.int32(0))

        def body(item: Array, carry: None) -> None:
            @pl.when(item + 1 < total)
            def _() -> None:
                @pl.when(item + 1 >= _RING)
                def _() -> None:
                    store(item + 1 - _RING).wait()

                start_inputs(item + 1)

            @pl.when(writes.tokens[item] < unit)
            def _() -> None:
                fetch(item).wait()

            fresh(item).wait()
            change(item)
            store(item).start()

        lax.fori_loop(0, total, body, None)
        for back in range(1, _RING + 1):

            @pl.when(total >= back)
            def _(back: int = back) -> None:
                store(total - back).wait()


def kv_write(
    blocks: Array,
    form: Format,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
) -> Array:
    """The physical blocks with new keys and values in their slots; what has no slot in the pool is dropped. Donate `blocks`.

    RoPE and quantisation happen in the one pass in which XLA brings the new rows into the order of the lanes.
    """
    unit = unit_tokens(form)
    most = min(k.shape[0], k.shape[0] // unit + 2 * block_table.shape[0])
    if most > _MOST_UNITS:
        raise NotImplementedError(
            f"writing {k.shape[0]} tokens takes up to {most} units, {_MOST_UNITS} fit the scalar memory; write fewer at once"
        )
    writes = cut_writes(block_table, lengths, query_starts, num_tokens=k.shape[0], unit=unit, form=form, num_blocks=blocks.shape[0])
    fresh = pack(k[:, None], v[:, None], form)  # [T, C, 1, 128], or words [T, W, 128]
    if not form.words:
        fresh = fresh.astype(jnp.float32)  # exact, and a row of its own for each token and column
    unit_shape = (form.key_columns, LANES) if form.words else (form.columns, unit, LANES)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    scratch = Buffers(
        units=pltpu.VMEM((_RING, *unit_shape), blocks.dtype),
        fresh=pltpu.VMEM((_RING, unit, *fresh.shape[1:]), fresh.dtype),
        fetch_sem=pltpu.SemaphoreType.DMA((_RING,)),
        fresh_sem=pltpu.SemaphoreType.DMA((_RING,)),
        store_sem=pltpu.SemaphoreType.DMA((_RING,)),
    )
    return pl.pallas_call(
        functools.partial(_kernel, form, unit),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Writes._fields), grid=(1,), in_specs=[hbm, hbm], out_specs=hbm, scratch_shapes=list(scratch)
        ),
        out_shape=jax.ShapeDtypeStruct(blocks.shape, blocks.dtype),
        input_output_aliases={len(Writes._fields) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        name="kv_write",
    )(*writes, fresh, blocks)
