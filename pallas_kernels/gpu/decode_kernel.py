"""The decode kernel: one program for each sequence, kv head and split of the context.

A program walks its tiles of 64 tokens with a running softmax. Tokens and head_dim fill the rows of the products, the query heads of one
kv head their 8 columns, so that no row of the tensor cores is spent on padding of the query. Scores are K Q^T, outputs V^T P^T.
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
from pallas_kernels.gpu.spec import GROUP, KvBuffers, Spec
from pallas_kernels.gpu.walk import Tile, split, walk_over, walk_tiles

__all__ = ["decode_buffers", "decode_kernel"]


class _Running(NamedTuple):
    """R value rows."""

    query: Float[Array, "D 8"]
    out: Float[Array, "R 8"]
    softmax: Softmax


class _Context(NamedTuple):
    """The tokens that the query sees."""

    first: Int[Array, ""]
    end: Int[Array, ""]


def decode_buffers(spec: Spec) -> list:
    """The kernel's buffers in shared memory."""
    return [spec.kv_buffers(), spec.shared((GROUP, spec.tile), 128)]


def decode_kernel(
    spec: Spec,
    q_ref: Any,  # [S, K*J, 8, D] in global memory, J groups of 8 query heads for each kv head
    paged: Paged,
    first_ref: Any,  # int32[S] in global memory
    end_ref: Any,  # int32[S] in global memory
    out_ref: Any,  # float32[P, S, K*J, R, 8] in global memory
    lse_ref: Any,  # float32[P, S, K*J, 8] in global memory
    buffers: KvBuffers,
    weights_tile: Any,  # [8, tile] in shared memory
) -> None:
    """Attention of one query over one split of its context; the last D of the R rows of `out_ref` are the result.

    Where a split has no tile, out is 0 and lse -inf.
    """
    seq, part, group = lax.axis_index("seq"), lax.axis_index("split"), lax.axis_index("group")
    groups_of_head = q_ref.shape[1] * 2 * spec.head_dim // paged.kv.shape[1]
    context = _Context(first_ref[seq], end_ref[seq])
    running = walk_tiles(
        spec,
        split(spec, walk_over(spec, context.first, context.end, context.end), part, out_ref.shape[0]),
        seq,
        lax.div(group, jnp.int32(groups_of_head)),
        paged,
        buffers,
        plgpu.Layout.MMA_ACC(spec.operand).reduce(1),
        functools.partial(_fold, spec, context, weights_tile),
        functools.partial(_prepare, spec, q_ref.at[seq, group]),
    )
    factor, lse = finish(running.softmax)
    store(out_ref.at[part, seq, group], running.out * lax.broadcast_in_dim(factor, running.out.shape, [1]))
    store(lse_ref.at[part, seq, group], lse)


def _prepare(
    spec: Spec,
    q_ref: Any,  # [8, D] in global memory
) -> _Running:
    layout = plgpu.Layout.MMA_ACC(spec.operand)
    query = plgpu.load(q_ref.T, layout=plgpu.Layout.MMA_RHS(spec.operand), optimized=False)
    out = plgpu.layout_cast(jnp.zeros((spec.value_rows, GROUP), jnp.float32), layout)
    highest = plgpu.layout_cast(jnp.full((GROUP,), MASKED, jnp.float32), layout.reduce(0))
    total = plgpu.layout_cast(jnp.zeros((GROUP,), jnp.float32), layout.reduce(0))
    return _Running(query, out, Softmax(highest, total))


def _fold(
    spec: Spec,
    context: _Context,
    weights_tile: Any,  # [8, tile] in shared memory
    tile: Tile,
    running: _Running,
    may_end: bool,
) -> _Running:
    dtype = spec.operand
    left, right, sums = plgpu.Layout.MMA_LHS(dtype), plgpu.Layout.MMA_RHS(dtype), plgpu.Layout.MMA_ACC(dtype)
    key_scale, value_scale = tile.scales or (None, None)

    keys = plgpu.load(tile.kv.at[:, pl.ds(0, spec.head_dim)], layout=left)
    scores = mma(plgpu.layout_cast(jnp.zeros((spec.tile, GROUP), jnp.float32), sums), keys, running.query)
    scores = scaled(spec, times_scale(scores, key_scale, tokens=0))
    token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=sums) + tile.position
    if may_end:
        scores = where_seen(scores, token < context.end)
    if spec.window is not None:
        scores = where_seen(scores, token >= context.first)
    softmax, weights, decay = add_scores(running.softmax, scores, tokens=0)

    weights = times_scale(weights, value_scale, tokens=0)
    if may_end and value_scale is not None:  # the scale of a row that holds no token may be NaN
        weights = jnp.where(token < context.end, weights, 0.0)
    # Each warp has the weights of its own 16 tokens and needs those of all: they change hands in shared memory.
    weights_tile.T[...] = plgpu.layout_cast(weights.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    values = plgpu.load(tile.kv.at[:, pl.ds(2 * spec.head_dim - spec.value_rows, spec.value_rows)].T, layout=left)
    if may_end:  # and so may the row itself: 0 * NaN is NaN
        token = plgpu.broadcasted_iota(jnp.int32, values.shape, 1, layout=left) + tile.position
        values = jnp.where(token < context.end, values, jnp.zeros((), dtype))
    out = running.out * lax.broadcast_in_dim(decay, running.out.shape, [1])
    return _Running(running.query, mma(out, values, plgpu.load(weights_tile.T, layout=right)), softmax)
