"""The tiles of a context one after another, with the copies of the next ones on their way."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.gpu.primitives import copy
from pallas_kernels.gpu.spec import Spec

__all__ = ["Walk", "split", "walk_over", "walk_tiles"]

_Pieces = tuple[Int[Array, ""], ...]


class Walk(NamedTuple):
    """Tiles of one program. A piece is the part of a block that one copy brings."""

    start: Int[Array, ""]  # piece of the first tile
    last: Int[Array, ""]  # piece that holds the last token; 0 where there is none
    steps: Int[Array, ""]  # tiles
    full: Int[Array, ""]  # so many of them come first in which no query's context ends

    def position(self, spec: Spec, step: Int[Array, ""]) -> Int[Array, ""]:
        """Of the first token of a tile."""
        return (self.start + step * spec.pieces) * spec.piece


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
    table_ref: Any,  # int32[M] in global memory: blocks of the sequence
    kv_ref: Any,  # [N*B, 2*D] in global memory: keys and values of one head
    kv_tiles: Any,  # [stages, tile, 2*D] in shared memory
    arrived: Any | None,  # barriers [stages]; None: copies are not counted
    fold: Callable[[Int[Array, ""], Any, Running, bool], Running],
    prepare: Callable[[], Running],
) -> Running:
    """Folds tiles into a running result.

    Args:
      fold: takes the number of a tile, its keys and values [tile, 2*D] in shared memory, what is there so far, and whether contexts may
        end in the tile. Then rows behind the last token hold anything.
      prepare: makes the result before the first tile, while that is on its way.
    """
    ahead = spec.stages - 1
    pieces_of = functools.partial(_pieces, spec, walk, table_ref)

    def slot_of(step: Int[Array, ""] | int) -> Int[Array, ""]:
        return lax.rem(jnp.int32(step), jnp.int32(spec.stages))

    def fetch(pieces: _Pieces, step: Int[Array, ""] | int, whole: bool) -> None:
        barrier = None if arrived is None else arrived.at[slot_of(step)]
        exists = [whole or (walk.start + step * spec.pieces + number <= walk.last) for number in range(spec.pieces)]
        _fetch(spec, pieces, exists, kv_ref, kv_tiles.at[slot_of(step)], barrier)

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
        if arrived is not None:
            plgpu.barrier_wait(arrived.at[slot_of(step)])
        return fold(step, kv_tiles.at[slot_of(step)], running, is_late), pieces

    late = jnp.maximum(jnp.minimum(walk.full, walk.steps - ahead - 1), 0)  # from here on contexts may end, and so may the pieces
    carry = (prepare(), pieces_of(ahead))
    carry = lax.fori_loop(0, late, functools.partial(body, is_late=False), carry)
    return lax.fori_loop(late, walk.steps, functools.partial(body, is_late=True), carry)[0]


def _pieces(
    spec: Spec,
    walk: Walk,
    table_ref: Any,  # int32[M] in global memory
    step: Int[Array, ""] | int,
) -> _Pieces:
    """Where the pool holds each piece of a tile, counted in pieces; past the end the last that exists, so that no other block is named."""
    pieces_of_block = jnp.int32(spec.block_size // spec.piece)
    found = []
    for number in range(spec.pieces):
        piece = jnp.minimum(walk.start + step * spec.pieces + number, walk.last)
        block = table_ref[lax.div(piece, pieces_of_block)]
        found.append(block * pieces_of_block + lax.rem(piece, pieces_of_block))
    return tuple(found)


def _fetch(
    spec: Spec,
    pieces: _Pieces,
    exists: Sequence[Bool[Array, ""] | bool],
    kv_ref: Any,  # [N*B, 2*D] in global memory
    kv_tile: Any,  # [tile, 2*D] in shared memory
    arrived: Any | None,  # its barrier
) -> None:
    """Starts the copies of the pieces that exist. The others arrive at once, because the barrier counts all pieces of a tile."""

    def start(number: int) -> None:
        source, target = (pl.ds(index * spec.piece, spec.piece) for index in (pieces[number], number))
        copy(kv_ref.at[source], kv_tile.at[target], arrived)

    for number, there in enumerate(exists):
        if there is True:
            start(number)
            continue
        pl.when(there)(functools.partial(start, number))
        if arrived is not None:
            pl.when(~there)(functools.partial(plgpu.barrier_arrive, arrived))
