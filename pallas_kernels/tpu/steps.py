"""Which chunks and blocks a tile sees, and the copies that bring them."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.tpu.spec import Buffers, Spec
from pallas_kernels.tpu.work import Work

__all__ = ["block_range", "chunk_range", "next_step", "start_blocks", "wait_blocks"]


def chunk_range(spec: Spec, work: Work, tile: Array) -> tuple[Array, Array]:
    """The first chunk that a tile sees, and one past the last. There is always one."""
    first = jnp.int32(0)
    if spec.window is not None:
        first = jnp.maximum(work.position[tile] - (spec.window - 1), 0) // spec.chunk
    return first, jnp.maximum(pl.cdiv(work.end[tile], spec.chunk), first + 1)


def block_range(spec: Spec, work: Work, tile: Array, chunk: Array) -> tuple[Array, Array]:
    """The blocks of a chunk that a tile sees."""
    start = chunk * spec.chunk
    last = jnp.clip(pl.cdiv(work.end[tile] - start, spec.form.block_size), 0, spec.chunk_blocks)
    if spec.window is None:
        return jnp.int32(0), last
    oldest = jnp.maximum(work.position[tile] - (spec.window - 1), 0)
    return jnp.clip((oldest - start) // spec.form.block_size, 0, last), last


def next_step(spec: Spec, work: Work, tile: Array, chunk: Array, last_tile: Array) -> tuple[Array, Array]:
    """The step after (tile, chunk); the tile is one past `last_tile` at the end."""
    stays = chunk + 1 < chunk_range(spec, work, tile)[1]
    following = jnp.where(stays, tile, tile + 1)
    return following, jnp.where(stays, chunk + 1, chunk_range(spec, work, jnp.minimum(following, last_tile))[0])


def _kv_rows(spec: Spec, first: Array | int, count: Array | int) -> pl.Slice:
    """Where some blocks of a chunk lie in its buffer."""
    if not spec.form.words:
        return pl.ds(first, count)
    size = spec.form.block_shape[0]
    start = first * size
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), count * size)


def start_blocks(spec: Spec, work: Work, buffers: Buffers, kv_hbm: Any, tile: Array, chunk: Array, slot: Array) -> None:
    """Starts a copy for each block of a chunk that the tile sees."""
    first, last = block_range(spec, work, tile, chunk)

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


def wait_blocks(spec: Spec, work: Work, buffers: Buffers, tile: Array, chunk: Array, slot: Array) -> None:
    """Waits for all copies of a chunk at once: the semaphore counts bytes."""
    first, last = block_range(spec, work, tile, chunk)

    @pl.when(last > first)
    def _() -> None:
        arriving = buffers.kv.at[slot, _kv_rows(spec, first, last - first)]
        pltpu.make_async_copy(arriving, arriving, buffers.kv_sem.at[slot]).wait()
