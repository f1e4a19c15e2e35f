"""The attention kernel: one flat list of steps.

A step is one chunk of one tile's context, and tiles of all sequences follow each other without a break: while a step computes, the keys and
values of the next step are on their way, and so is the part of the block table that the step after that needs. The block table stays in
HBM; only the part for two chunks is on the chip.

Blocks are fetched one copy each, with one semaphore for all of a chunk. What a tile cannot see is not fetched.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.tpu.chunk import attend_chunk, decode_scales
from pallas_kernels.tpu.spec import RING, Buffers, Spec
from pallas_kernels.tpu.steps import chunk_range, next_step, start_blocks, wait_blocks
from pallas_kernels.tpu.tile import begin_tile, finish_tile
from pallas_kernels.tpu.work import Work

__all__ = ["kernel"]


def kernel(spec: Spec, has_sinks: bool, has_lse: bool, *refs: Any) -> None:
    """One core's share of the work. Refs: the work in scalars, then inputs, outputs and buffers."""
    work, rest = Work(*refs[: len(Work._fields)]), list(refs[len(Work._fields) :])
    table_hbm, query_hbm, kv_hbm = (rest.pop(0) for _ in range(3))
    sinks = rest.pop(0) if has_sinks else None
    out_hbm = rest.pop(0)
    lse_hbm = rest.pop(0) if has_lse else None
    buffers = Buffers(*rest)
    lse_tiles: Any = buffers.lse[0] if has_lse else None
    core = pl.program_id(0)
    first_tile, stop_tile = work.bounds[core], work.bounds[core + 1]
    rows = spec.rows.token_rows

    def table_copy(tile: Array, chunk: Array, slot: Array | int) -> Any:
        part = jnp.minimum(chunk, table_hbm.shape[1] - 1)  # a window may begin beyond the table; nothing is fetched by that part
        return pltpu.make_async_copy(table_hbm.at[work.seq[tile], part], buffers.table.at[slot], buffers.table_sem.at[slot])

    def ring(tile: Array) -> Array:
        return lax.rem(tile - first_tile, RING)

    def tile_copy(hbm: Any, tiles: Any, tile: Array, outward: bool) -> Any:
        size = work.queries[tile] * rows if spec.plans[-1].queries > 1 else rows
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
            fits = (work.queries[tile] > fewer) & (work.queries[tile] <= plan.queries)
            pl.when(fits)(functools.partial(run, index))
            fewer = plan.queries

    @pl.when(work.steps[core] > 0)
    def _() -> None:
        chunk = chunk_range(spec, work, first_tile)[0]
        following = next_step(spec, work, first_tile, chunk, stop_tile - 1)
        table_copy(first_tile, chunk, 0).start()

        @pl.when(following[0] < stop_tile)
        def _() -> None:
            table_copy(*following, 1).start()

        tile_copy(query_hbm, buffers.tiles, first_tile, False).start()
        table_copy(first_tile, chunk, 0).wait()
        start_blocks(spec, work, buffers, kv_hbm, first_tile, chunk, jnp.int32(0))

        def body(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            tile, chunk, next_tile, next_chunk = carry
            slot = lax.rem(index, 2)
            after_tile, after_chunk = next_step(spec, work, jnp.minimum(next_tile, stop_tile - 1), next_chunk, stop_tile - 1)
            after_tile = jnp.where(next_tile < stop_tile, after_tile, stop_tile)

            @pl.when(next_tile < stop_tile)
            def _() -> None:
                table_copy(next_tile, next_chunk, 1 - slot).wait()
                start_blocks(spec, work, buffers, kv_hbm, next_tile, next_chunk, 1 - slot)

                @pl.when(next_tile != tile)
                def _() -> None:
                    @pl.when(next_tile - first_tile >= RING)
                    def _() -> None:
                        wait_outputs(next_tile - RING)

                    tile_copy(query_hbm, buffers.tiles, next_tile, False).start()

            @pl.when(after_tile < stop_tile)
            def _() -> None:
                table_copy(after_tile, after_chunk, slot).start()

            first, last = chunk_range(spec, work, tile)
            tile_ref = buffers.tiles.at[ring(tile)]
            lse_ref = lse_tiles.at[ring(tile)] if has_lse else None

            @pl.when(chunk == first)
            def _() -> None:
                tile_copy(query_hbm, buffers.tiles, tile, False).wait()
                by_plan(
                    tile, lambda plan: begin_tile(spec, spec.plans[plan], tile_ref, buffers.queries[plan], buffers.running[plan], sinks)
                )

            wait_blocks(spec, work, buffers, tile, chunk, slot)
            if spec.form.scaled:
                decode_scales(spec, buffers, slot)
            by_plan(
                tile,
                lambda plan: attend_chunk(
                    spec, spec.plans[plan], work, buffers, buffers.queries[plan], buffers.running[plan], tile, chunk, slot
                ),
            )

            @pl.when(chunk + 1 == last)
            def _() -> None:
                by_plan(tile, lambda plan: finish_tile(spec, spec.plans[plan], tile_ref, lse_ref, buffers.running[plan]))
                start_outputs(tile)

            return next_tile, next_chunk, after_tile, after_chunk

        lax.fori_loop(0, work.steps[core], body, (first_tile, chunk, *following))
        for back in range(1, RING + 1):

            @pl.when(stop_tile - first_tile >= back)
            def _(back: int = back) -> None:
                wait_outputs(stop_tile - back)
