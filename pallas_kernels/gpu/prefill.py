"""The prefill kernel's call, and what XLA does around it."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.format import GpuStorage
from pallas_kernels.gpu.paged import paged_context
from pallas_kernels.gpu.prefill_kernel import prefill_buffers, prefill_kernel
from pallas_kernels.gpu.spec import ROWS, Spec
from pallas_kernels.gpu.work import cut
from pallas_kernels.interpret import gpu_interpreter
from pallas_kernels.ragged import query_places

__all__ = ["ragged_prefill"]


def ragged_prefill(
    q: Float[Array, "T H D"],
    storage: GpuStorage,
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    visible: Int[Array, " S"],
    query_starts: Int[Array, " S+1"],
    spec: Spec,
    dtype: DTypeLike,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Causal attention of many queries for each sequence.

    Args:
      q: queries, one sequence after another.
      storage: one layer's blocks.
      block_table: blocks of each sequence in order; those that hold visible tokens must be in the pool, no other is read.
      lengths: tokens of each sequence.
      visible: tokens of each sequence that exist in the pool; at most its length.
      query_starts: sequence s owns rows query_starts[s] to query_starts[s + 1] of q, its last tokens.
      spec: the static description.
      dtype: of the result.

    Returns:
      (out, lse): zeros and -inf for a query that sees no token or is of no sequence; lse in float32.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = storage.blocks.shape[2] // 2
    group = num_heads // num_kv_heads
    tiles, places = cut(lengths, visible, query_starts, num_queries=num_queries, group=group, window=spec.window)
    num_tiles = tiles.seq.shape[0]
    position = jnp.repeat(query_places(lengths, query_starts, num_queries)[1], group)
    rows = jnp.swapaxes(q.astype(spec.operand).reshape(num_queries, num_kv_heads, group, head_dim), 0, 1)
    rows = rows.reshape(num_kv_heads, num_queries * group, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, ROWS), (0, spec.head_dim - head_dim)))  # the last tile may reach so far

    kernel = plgpu.kernel(
        functools.partial(prefill_kernel, spec),
        out_type=(
            jax.ShapeDtypeStruct((num_tiles, num_kv_heads, ROWS, spec.head_dim), dtype),
            jax.ShapeDtypeStruct((num_tiles, num_kv_heads, ROWS), jnp.float32),
        ),
        grid=(num_tiles, num_kv_heads),
        grid_names=("tile", "head"),
        scratch_types=prefill_buffers(spec),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    with gpu_interpreter():
        out, lse = kernel(rows, jnp.pad(position, (0, ROWS)), paged_context(storage, block_table, spec.tile), tiles)
    seen = (places.tile >= 0) & (tiles.end > tiles.first)[places.tile]
    seen = seen.reshape(num_queries, 1, group)
    out, lse = (jnp.swapaxes(each[places.tile, :, places.slot].reshape(num_queries, group, num_kv_heads, -1), 1, 2) for each in (out, lse))
    out = jnp.where(seen[..., None], out[..., :head_dim], 0)
    lse = jnp.where(seen, lse[..., 0], -jnp.inf)
    return out.reshape(num_queries, num_heads, head_dim), lse.reshape(num_queries, num_heads)
