"""The prefill kernel: one program for each tile of 64 query rows of one sequence and kv head.

A query row is one query head of one token; rows of a token follow each other, so that they share what is read for them. The rows fill
the rows of the products, tokens and head_dim their columns: scores are Q K^T, outputs P V (Dao, 2023).
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.paged import Paged
from pallas_kernels.gpu.primitives import mma, store
from pallas_kernels.gpu.softmax import MASKED, Softmax, add_scores, finish, scaled, times_scale, where_seen
from pallas_kernels.gpu.spec import ROWS, KvBuffers, Spec
from pallas_kernels.gpu.walk import Tile, walk_over, walk_tiles
from pallas_kernels.gpu.work import Tiles

__all__ = ["prefill_buffers", "prefill_kernel"]


class _Running(NamedTuple):
    out: tuple[Float[Array, "64 lanes"], ...]  # of D lanes, in as many parts as the shared memory's swizzle makes of them
    softmax: Softmax


class _Context(NamedTuple):
    """The tokens that the queries see."""

    position_ref: Any  # int32[64] in global memory: of each row's token
    end: Int[Array, ""]  # one past the last token that any of them sees


def prefill_buffers(spec: Spec) -> list:
    """The kernel's buffers in shared memory."""
    return [spec.kv_buffers(), spec.shared((ROWS, spec.head_dim), spec.swizzle), spec.shared((ROWS, spec.tile), 2 * spec.tile)]


def prefill_kernel(
    spec: Spec,
    q_ref: Any,  # [K, R, D] in global memory
    position_ref: Any,  # int32[R] in global memory
    paged: Paged,
    tiles: Tiles,  # in global memory
    out_ref: Any,  # [W, K, 64, D] in global memory
    lse_ref: Any,  # float32[W, K, 64] in global memory
    buffers: KvBuffers,
    q_tile: Any,  # [64, D] in shared memory
    weights_tile: Any,  # [64, tile] in shared memory
) -> None:
    """Attention of the query rows of one tile. Rows of another sequence come out as anything, and so do tiles that see no token."""
    head = lax.axis_index("head")
    number = out_ref.shape[0] - 1 - lax.axis_index("tile")  # the last tiles of a sequence have the longest context: they begin first
    rows = pl.ds(tiles.row[number], ROWS)
    context = _Context(position_ref.at[rows], tiles.end[number])
    walk = walk_over(spec, tiles.first[number], tiles.full_end[number], context.end)

    @pl.when(walk.steps > 0)
    def _() -> None:
        running = walk_tiles(
            spec,
            walk,
            tiles.seq[number],
            head,
            paged,
            buffers,
            plgpu.Layout.MMA_ACC(spec.operand).reduce(0),
            functools.partial(_fold, spec, context, q_tile, weights_tile),
            functools.partial(_prepare, spec, q_ref.at[head, rows], q_tile),
        )
        factor, lse = finish(running.softmax)
        for part, out in zip(_parts(spec), running.out, strict=True):
            out = out * lax.broadcast_in_dim(factor, out.shape, [0])
            store(out_ref.at[number, head, :, part], out.astype(out_ref.dtype))
        store(lse_ref.at[number, head], lse)


def _parts(spec: Spec) -> list:
    """The lanes of a head, in parts that the shared memory's swizzle keeps together."""
    return [pl.ds(start, spec.lanes) for start in range(0, spec.head_dim, spec.lanes)]


def _prepare(
    spec: Spec,
    q_ref: Any,  # [64, D] in global memory
    q_tile: Any,  # [64, D] in shared memory
) -> _Running:
    layout = plgpu.Layout.MMA_ACC(spec.operand)
    for part in _parts(spec):  # through the registers: a copy would have to begin at a multiple of 8 rows
        q_tile[:, part] = plgpu.load(q_ref.at[:, part], layout=layout, optimized=False)
    out = tuple(plgpu.layout_cast(jnp.zeros((ROWS, part.size), jnp.float32), layout) for part in _parts(spec))
    highest = plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), layout.reduce(1))
    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), layout.reduce(1))
    return _Running(out, Softmax(highest, total))


def _fold(
    spec: Spec,
    context: _Context,
    q_tile: Any,  # [64, D] in shared memory
    weights_tile: Any,  # [64, tile] in shared memory
    tile: Tile,
    running: _Running,
    may_end: bool,
) -> _Running:
    dtype = spec.operand
    left, right, sums = plgpu.Layout.MMA_LHS(dtype), plgpu.Layout.MMA_RHS(dtype), plgpu.Layout.MMA_ACC(dtype)
    key_scale, value_scale = tile.scales or (None, None)

    scores = plgpu.layout_cast(jnp.zeros((ROWS, spec.tile), jnp.float32), sums)
    for part in _parts(spec):
        scores = mma(scores, plgpu.load(q_tile.at[:, part], layout=left), plgpu.load(tile.kv.at[:, part].T, layout=right))
    scores = scaled(spec, times_scale(scores, key_scale, tokens=1))
    token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=sums) + tile.position
    if may_end or spec.window is not None:  # asked for again at each tile, because the registers are full
        position = plgpu.load(context.position_ref, layout=sums.reduce(1), optimized=False)
    if may_end:
        seen = jnp.minimum(position + 1, context.end)
        scores = where_seen(scores, token < lax.broadcast_in_dim(seen, scores.shape, [0]))
    if spec.window is not None:
        scores = where_seen(scores, token > lax.broadcast_in_dim(position - spec.window, scores.shape, [0]))
    softmax, weights, decay = add_scores(running.softmax, scores, tokens=1)

    weights = times_scale(weights, value_scale, tokens=1)
    if may_end and value_scale is not None:  # the scale of a row that holds no token may be NaN
        weights = jnp.where(token < context.end, weights, 0.0)
    weights_tile[...] = weights.astype(dtype)  # the tensor cores give sums and take operands in different registers
    out = []
    for part, total in zip(_parts(spec), running.out, strict=True):
        values = plgpu.load(tile.kv.at[:, pl.ds(spec.head_dim + part.start, part.size)], layout=right)
        if may_end:  # and so may the row itself: 0 * NaN is NaN
            token = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=right) + tile.position
            values = jnp.where(token < context.end, values, jnp.zeros((), dtype))
        total = total * lax.broadcast_in_dim(decay, total.shape, [0])
        out.append(mma(total, plgpu.load(weights_tile, layout=left), values))
    return _Running(tuple(out), softmax)
