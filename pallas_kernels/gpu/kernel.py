"""The decode kernel: one program for each sequence, kv head and split of the context.

A program walks its tiles of 64 tokens with a running softmax (Milakov and Gimelshein, 2018), in base 2, while the copies of the next
tiles are on their way. Tokens and head_dim fill the rows of the products, the query heads of one kv head their 8 columns, so that
no row of the tensor cores is spent on padding of the query. Scores are K Q^T, outputs V^T P^T.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.primitives import mma, store
from pallas_kernels.gpu.spec import GROUP, TILE, Spec

__all__ = ["decode_kernel"]

_LOG2E = math.log2(math.e)
_MASKED = -1e30  # finite: -inf - -inf is NaN


class _Running(NamedTuple):
    """A running softmax in base 2; R value rows."""

    out: Float[Array, "R 8"]
    highest: Float[Array, " 8"]
    total: Float[Array, " 8"]


class _Walk(NamedTuple):
    """Tiles of one program. A piece is the part of a block that one copy brings."""

    first: Int[Array, ""]  # context token that the query sees
    end: Int[Array, ""]  # one past the last
    start: Int[Array, ""]  # piece of the first tile
    last: Int[Array, ""]  # piece that holds the last token; 0 where there is none
    steps: Int[Array, ""]


def _walk(spec: Spec, split: Int[Array, ""], first: Int[Array, ""], end: Int[Array, ""]) -> _Walk:
    """Cuts the pieces that hold visible tokens into tiles, and the tiles into splits of equal size but for one tile."""
    pieces_of_tile = TILE // spec.piece
    start = lax.div(first, jnp.int32(spec.piece))
    last = lax.div(jnp.maximum(end - 1, 0), jnp.int32(spec.piece))
    tiles = jnp.where(end > first, lax.div(last - start, jnp.int32(pieces_of_tile)) + 1, 0)
    low = lax.div(tiles * split, jnp.int32(spec.num_splits))
    high = lax.div(tiles * (split + 1), jnp.int32(spec.num_splits))
    return _Walk(first, end, start + low * pieces_of_tile, last, high - low)


def decode_kernel(
    spec: Spec,
    q_ref: Any,  # [S, K*J, 8, D] in global memory, J groups of 8 query heads for each kv head
    kv_ref: Any,  # [N*B, 2*K*D] in global memory
    table_ref: Any,  # int32[S, M] in global memory
    first_ref: Any,  # int32[S] in global memory
    end_ref: Any,  # int32[S] in global memory
    out_ref: Any,  # float32[P, S, K*J, R, 8] in global memory
    lse_ref: Any,  # float32[P, S, K*J, 8] in global memory
    kv_tiles: Any,  # [stages, 64, 2*D] in shared memory
    weights_tile: Any,  # [8, 64] in shared memory
    arrived: Any,  # barriers [stages]
) -> None:
    """Attention of one query over one split of its context; the last D of the R rows of `out_ref` are the result.

    Where a split has no tile, out is 0 and lse -inf.
    """
    seq, split, group = lax.axis_index("seq"), lax.axis_index("split"), lax.axis_index("group")
    groups_of_head = q_ref.shape[1] * 2 * spec.head_dim // kv_ref.shape[1]
    columns = pl.ds(lax.div(group, jnp.int32(groups_of_head)) * (2 * spec.head_dim), 2 * spec.head_dim)
    walk = _walk(spec, split, first_ref[seq], end_ref[seq])
    pieces_of = functools.partial(_pieces, spec, walk, table_ref.at[seq])

    def fetch(pieces: tuple[Int[Array, ""], ...], step: Int[Array, ""] | int) -> None:
        _fetch(spec, pieces, kv_ref.at[:, columns], kv_tiles.at[slot_of(step)], arrived.at[slot_of(step)])

    def slot_of(step: Int[Array, ""] | int) -> Int[Array, ""]:
        return lax.rem(jnp.int32(step), jnp.int32(spec.stages))

    for step in range(spec.stages - 1):
        pl.when(step < walk.steps)(functools.partial(fetch, pieces_of(step), step))
    dtype = q_ref.dtype
    query = plgpu.load(q_ref.at[seq, group].T, layout=plgpu.Layout.MMA_RHS(dtype), optimized=False)  # [D, 8]

    def step_with(step: Int[Array, ""], carry: tuple[_Running, tuple], holds_end: bool) -> tuple[_Running, tuple]:
        running, pieces = carry
        plgpu.commit_smem()  # the slot that is filled next has been read by all warps
        pl.when(step + spec.stages - 1 < walk.steps)(functools.partial(fetch, pieces, step + spec.stages - 1))
        pieces = pieces_of(step + spec.stages)  # on their way while the tile is computed
        plgpu.barrier_wait(arrived.at[slot_of(step)])
        position = (walk.start + step * (TILE // spec.piece)) * spec.piece
        return _fold(spec, walk, position, query, kv_tiles.at[slot_of(step)], weights_tile, running, holds_end), pieces

    full = jnp.maximum(walk.steps - 1, 0)
    carry = (_nothing(spec, dtype), pieces_of(spec.stages - 1))
    carry = lax.fori_loop(0, full, functools.partial(step_with, holds_end=False), carry)
    running, _ = lax.fori_loop(full, walk.steps, functools.partial(step_with, holds_end=True), carry)
    _finish(running, out_ref.at[split, seq, group], lse_ref.at[split, seq, group])


def _pieces(
    spec: Spec,
    walk: _Walk,
    table_ref: Any,  # int32[M] in global memory
    step: Int[Array, ""] | int,
) -> tuple[Int[Array, ""], ...]:
    """Where the pool holds each piece of a tile, counted in pieces.

    A barrier counts all pieces of a tile. So past the end the last one that exists is copied again, and no block beyond it is named.
    """
    pieces_of_block = jnp.int32(spec.block_size // spec.piece)
    found = []
    for number in range(TILE // spec.piece):
        piece = jnp.minimum(walk.start + step * (TILE // spec.piece) + number, walk.last)
        block = table_ref[lax.div(piece, pieces_of_block)]
        found.append(block * pieces_of_block + lax.rem(piece, pieces_of_block))
    return tuple(found)


def _fetch(
    spec: Spec,
    pieces: tuple[Int[Array, ""], ...],
    kv_ref: Any,  # [N*B, 2*D] in global memory: one head
    kv_tile: Any,  # [64, 2*D] in shared memory
    arrived: Any,  # its barrier
) -> None:
    """Starts the copies of a tile."""
    for number, piece in enumerate(pieces):
        source, target = (pl.ds(index * spec.piece, spec.piece) for index in (piece, number))
        plgpu.copy_gmem_to_smem(kv_ref.at[source], kv_tile.at[target], arrived)


def _nothing(spec: Spec, dtype: jnp.dtype) -> _Running:
    """The running softmax before the first tile."""
    layout = plgpu.Layout.MMA_ACC(dtype)
    out = plgpu.layout_cast(jnp.zeros((spec.value_rows, GROUP), jnp.float32), layout)
    highest = plgpu.layout_cast(jnp.full((GROUP,), _MASKED, jnp.float32), layout.reduce(0))
    total = plgpu.layout_cast(jnp.zeros((GROUP,), jnp.float32), layout.reduce(0))
    return _Running(out, highest, total)


def _fold(
    spec: Spec,
    walk: _Walk,
    position: Int[Array, ""],
    query: Float[Array, "D 8"],
    kv_tile: Any,  # [64, 2*D] in shared memory
    weights_tile: Any,  # [8, 64] in shared memory
    running: _Running,
    holds_end: bool,
) -> _Running:
    """Folds a tile whose first token has this position. `holds_end`: it may have rows that hold no token."""
    dtype = query.dtype
    left, right, sums = plgpu.Layout.MMA_LHS(dtype), plgpu.Layout.MMA_RHS(dtype), plgpu.Layout.MMA_ACC(dtype)
    keys = plgpu.load(kv_tile.at[:, pl.ds(0, spec.head_dim)], layout=left)
    scores = mma(plgpu.layout_cast(jnp.zeros((TILE, GROUP), jnp.float32), sums), keys, query)
    token = plgpu.broadcasted_iota(jnp.int32, (TILE, GROUP), 0, layout=sums) + position
    scores = jnp.where((token >= walk.first) & (token < walk.end), _scaled(spec, scores), _MASKED)

    highest = jnp.maximum(running.highest, jnp.max(scores, axis=0))
    decay = jnp.exp2(running.highest - highest)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(highest, scores.shape, [1]))
    total = running.total * decay + jnp.sum(weights, axis=0)

    # Each warp has the weights of its own 16 tokens and needs those of all: they change hands in shared memory.
    weights_tile.T[...] = plgpu.layout_cast(weights.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    values = plgpu.load(kv_tile.at[:, pl.ds(2 * spec.head_dim - spec.value_rows, spec.value_rows)].T, layout=left)
    if holds_end:  # a row that holds no token may be NaN, and 0 * NaN is NaN
        token = plgpu.broadcasted_iota(jnp.int32, values.shape, 1, layout=left) + position
        values = jnp.where(token < walk.end, values, jnp.zeros((), dtype))
    out = running.out * lax.broadcast_in_dim(decay, running.out.shape, [1])
    return _Running(mma(out, values, plgpu.load(weights_tile.T, layout=right)), highest, total)


def _scaled(spec: Spec, scores: Float[Array, "64 8"]) -> Float[Array, "64 8"]:
    """Scores in base 2, capped.

    The tanh of the soft cap is made of an exponential: the GPU's own approximate tanh is wrong in the fourth digit.
    """
    if spec.soft_cap is None:
        return scores * (spec.scale * _LOG2E)
    cap = spec.soft_cap * _LOG2E
    return cap - 2 * cap / (jnp.exp2(scores * (2 * spec.scale * _LOG2E / spec.soft_cap)) + 1)


def _finish(
    running: _Running,
    out_ref: Any,  # float32[R, 8] in global memory
    lse_ref: Any,  # float32[8] in global memory
) -> None:
    """Normalises, and goes back to natural logarithms."""
    seen = running.total > 0
    total = jnp.where(seen, running.total, 1.0)
    store(out_ref, running.out * lax.broadcast_in_dim(1.0 / total, running.out.shape, [1]))
    store(lse_ref, jnp.where(seen, (running.highest + jnp.log2(total)) / _LOG2E, -jnp.inf))
