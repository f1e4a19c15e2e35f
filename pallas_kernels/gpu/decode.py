"""The decode kernel's call, and what XLA does around it."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.decode_kernel import decode_buffers, decode_kernel
from pallas_kernels.gpu.format import GpuStorage
from pallas_kernels.gpu.paged import paged_context
from pallas_kernels.gpu.spec import GROUP, Spec
from pallas_kernels.interpret import gpu_interpreter
from pallas_kernels.merge import merge_states

__all__ = ["split_decode"]


def split_decode(
    q: Float[Array, "S H D"],
    storage: GpuStorage,
    block_table: Int[Array, "S M"],
    first: Int[Array, " S"],
    end: Int[Array, " S"],
    spec: Spec,
    num_splits: int,
) -> tuple[Float[Array, "S H D"], Float[Array, "S H"]]:
    """Attention of one query for each sequence.

    Args:
      q: queries.
      storage: one layer's blocks.
      block_table: blocks of each sequence in order; those that hold the tokens `first` to `end` must be in the pool, no other is read.
      first: the first context token that the query sees.
      end: one past the last; a sequence with end <= first sees none.
      spec: the static description.
      num_splits: programs that share the context of one sequence and head.

    Returns:
      (out, lse) in float32: zeros and -inf for a sequence that sees no token.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = storage.blocks.shape[2] // 2
    group = num_heads // num_kv_heads
    groups = -(-group // GROUP)  # of 8 query heads, for each kv head
    q = q.astype(spec.operand).reshape(num_seqs, num_kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, groups * GROUP - group), (0, spec.head_dim - head_dim)))
    q = q.reshape(num_seqs, num_kv_heads * groups, GROUP, spec.head_dim)

    shape = (num_splits, num_seqs, num_kv_heads * groups)
    kernel = plgpu.kernel(
        functools.partial(decode_kernel, spec),
        out_type=(
            jax.ShapeDtypeStruct((*shape, spec.value_rows, GROUP), jnp.float32),
            jax.ShapeDtypeStruct((*shape, GROUP), jnp.float32),
        ),
        grid=(num_seqs, num_splits, num_kv_heads * groups),
        grid_names=("seq", "split", "group"),
        scratch_types=decode_buffers(spec),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    with gpu_interpreter():
        out, lse = kernel(q, paged_context(storage, block_table, spec.tile), first, end)
    out = jnp.swapaxes(out[..., spec.value_rows - spec.head_dim :, :], -1, -2)[..., :head_dim]  # [P, S, K*J, 8, D]
    out, lse = merge_states(out, lse)
    out = out.reshape(num_seqs, num_kv_heads, groups * GROUP, head_dim)[:, :, :group]
    lse = lse.reshape(num_seqs, num_kv_heads, groups * GROUP)[:, :, :group]
    return out.reshape(num_seqs, num_heads, head_dim), lse.reshape(num_seqs, num_heads)
