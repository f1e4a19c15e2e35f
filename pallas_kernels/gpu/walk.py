"""The tiles of a context one after another, with the copies of the next ones on their way."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gpu.paged import Paged
from pallas_kernels.gpu.primitives import copy
from pallas_kernels.gpu.spec import KvBuffers, Spec
from pallas_kernels.gpu.staging import stage

__all__ = ["Tile", "Walk", "split", "walk_over", "walk_tiles"]

_ASKED_AHEAD = 8  # most pieces of a tile whose places are asked for a tile ahead: they take a register each
_Pieces = tuple[Int[Array, ""], ...]


class Walk(NamedTuple):
    """Tiles of one program. A piece is the part of a block that one copy brings."""

    start: Int[Array, ""]  # piece of the first tile
    last: Int[Array, ""]  # piece that holds the last token; 0 where there is none
    steps: Int[Array, ""]  # tiles
    full: Int[Array, ""]  # so many of them come first in which no query's context ends


class Tile(NamedTuple):
    """Keys and values of one head, in shared memory."""

    position: Int[Array, ""]  # of the first token
    kv: Any  # [tile, 2*D], side by side
    scales: tuple[Float[Array, " tile"], Float[Array, " tile"]] | None  # of keys and of values; what is stored times them is meant


def walk_over(spec: Spec, first: Int[Array, ""], full_end: Int[Array, ""], end: Int[Array, ""]) -> Walk:
    """Tiles over the tokens `first` to `end`, from the first piece of them on; all queries see those before `full_end`."""
    start = lax.div(first, jnp.int32(spec.piece))
    last = lax.div(jnp.maximum(end - 1, 0), jnp.int32(spec.piece))
    steps = jnp.where(end > first, lax.div(last - start, jnp.int32(spec.pieces)) + 1, 0)
    full = lax.div(jnp.maximum(full_end - start * spec.piece, 0), jnp.int32(spec.tile))
    return Walk(start, last, steps, jnp.minimum(full, steps))


def split(spec: Spec, walk: Walk, number: Int[Array, ""], count: int) -> Walk:
    """One of `count` parts of a walk, of equal size but for one tile."""
    low, high = (lax.div(walk.steps * edge, jnp.int32(count)) for edge in (number, number + 1))
    return Walk(walk.start + low * spec.pieces, walk.last, high - low, jnp.clip(walk.full - low, 0, high - low))


def walk_tiles[Running](
    spec: Spec,
    walk: Walk,
    seq: Int[Array, ""],
    head: Int[Array, ""],
    paged: Paged,
    buffers: KvBuffers,
    scales_layout: Any,
    fold: Callable[[Tile, Running, bool], Running],
    prepare: Callable[[], Running],
) -> Running:
    """Folds the tiles of one sequence and kv head into a running result.

    Args:
      scales_layout: how the registers shall hold the scales of a tile.
      fold: takes a tile, what is there so far, and whether contexts may end in the tile. Then rows behind the last token hold anything.
      prepare: makes the result before the first tile, while that is on its way.
    """
    ahead = spec.stages - 1
    kv_ref = paged.kv.at[:, pl.ds(head * (2 * spec.head_dim), 2 * spec.head_dim)]
    arrived = buffers.arrived
    locate = functools.partial(_locate, spec, walk, paged.table.at[seq])

    def slot_of(step: Int[Array, ""] | int) -> Int[Array, ""]:
        return lax.rem(jnp.int32(step), jnp.int32(spec.stages))

    def pieces_of(step: Int[Array, ""] | int) -> _Pieces:
        return tuple(locate(step, number) for number in range(spec.pieces)) if spec.pieces <= _ASKED_AHEAD else ()

    def fetch(pieces: _Pieces, step: Int[Array, ""] | int, whole: bool) -> None:
        def start(number: Int[Array, ""] | int, piece: Int[Array, ""]) -> None:
            exists = whole or (walk.start + step * spec.pieces + number <= walk.last)
            barrier = None if arrived is None else arrived.at[slot_of(step)]
            _copy(spec, kv_ref, piece, buffers.tiles.at[slot_of(step)], number, barrier, exists)

        for number, piece in enumerate(pieces):
            start(number, piece)
        if not pieces:  # small blocks: the table is asked when the copies start, which then wait for it
            lax.fori_loop(0, spec.pieces, lambda number, _: start(number, locate(step, number)), None)

    def scales_at(position: Int[Array, ""]) -> tuple[Float[Array, " tile"], Float[Array, " tile"]] | None:
        if paged.scales is None:
            return None
        refs = [paged.scales.at[seq, 2 * head + side, pl.ds(position, spec.tile)] for side in (0, 1)]
        keys, values = (plgpu.load(ref, layout=scales_layout, optimized=False).astype(jnp.float32) for ref in refs)
        return keys, values

    for step in range(ahead):
        pl.when(step < walk.steps)(functools.partial(fetch, pieces_of(step), step, whole=False))

    def body(step: Int[Array, ""], carry: tuple[Running, _Pieces], is_late: bool) -> tuple[Running, _Pieces]:
        running, pieces = carry
        # The slot that is filled next has been read by all warps.
        if arrived is None:
            plgpu.wait_gmem_to_smem(0 if is_late else (ahead - 1) * spec.pieces)
        else:
            plgpu.commit_smem()
        if is_late:
            pl.when(step + ahead < walk.steps)(functools.partial(fetch, pieces, step + ahead, whole=False))
        else:
            fetch(pieces, step + ahead, whole=True)
        pieces = pieces_of(step + ahead + 1)  # on their way while the tile is computed
        position = (walk.start + step * spec.pieces) * spec.piece
        scales = scales_at(position)
        if arrived is not None:
            plgpu.barrier_wait(arrived.at[slot_of(step)])
        tile = Tile(position, stage(spec, buffers.tiles.at[slot_of(step)], buffers.staged), scales)
        return fold(tile, running, is_late), pieces

    late = jnp.maximum(jnp.minimum(walk.full, walk.steps - ahead - 1), 0)  # from here on contexts may end, and so may the pieces
    carry = (prepare(), pieces_of(ahead))
    carry = lax.fori_loop(0, late, functools.partial(body, is_late=False), carry)
    return lax.fori_loop(late, walk.steps, functools.partial(body, is_late=True), carry)[0]


def _locate(
    spec: Spec,
    walk: Walk,
    table_ref: Any,  # int32[M] in global memory
    step: Int[Array, ""] | int,
    number: Int[Array, ""] | int,
) -> Int[Array, ""]:
    """Where the pool holds a piece of a tile, counted in pieces; past the end the last that exists, so that no other block is named."""
    pieces_of_block = jnp.int32(spec.block_size // spec.piece)
    piece = jnp.minimum(walk.start + step * spec.pieces + number, walk.last)
    return table_ref[lax.div(piece, pieces_of_block)] * pieces_of_block + lax.rem(piece, pieces_of_block)


def _copy(
    spec: Spec,
    kv_ref: Any,  # [N*B, 2*D] in global memory
    piece: Int[Array, ""],
    kv_tile: Any,  # [tile, 2*D] in shared memory
    number: Int[Array, ""] | int,
    arrived: Any | None,  # the tile's barrier
    exists: Bool[Array, ""] | bool,
) -> None:
    """Starts the copy of a piece to its place in a tile. One that does not exist arrives at once: the barrier counts all of a tile."""
    source, target = kv_ref.at[pl.ds(piece * spec.piece, spec.piece)], kv_tile.at[pl.ds(number * spec.piece, spec.piece)]
    if exists is True:
        copy(source, target, arrived)
        return
    pl.when(exists)(functools.partial(copy, source, target, arrived))
    if arrived is not None:
        pl.when(~exists)(functools.partial(plgpu.barrier_arrive, arrived))
