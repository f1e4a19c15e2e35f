"""Ragged paged attention for TPU: one kernel for decode, prefill and any mix of them, and what XLA does around it."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.format import LANES, Format
from pallas_kernels.tpu.kernel import kernel
from pallas_kernels.tpu.rows import pack_heads, pack_queries, unpack_heads, unpack_outputs
from pallas_kernels.tpu.softmax import LOG2E
from pallas_kernels.tpu.spec import make_spec, scratch_shapes
from pallas_kernels.tpu.work import Work, cut

__all__ = ["ragged_attention"]


def ragged_attention(
    q: Float[Array, "T H D"],
    blocks: Array,
    form: Format,
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    visible: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
    chunk_tokens: int,
    tile_queries: int,
    num_cores: int = 1,
    vmem_limit_bytes: int | None = None,
    with_lse: bool = False,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Attention of each query over the blocks of its sequence.

    Args:
      q: queries, one sequence after another.
      blocks: the physical blocks of one layer.
      form: how they are stored.
      block_table: blocks of each sequence; entries of visible tokens must be in the pool.
      lengths: tokens of each sequence.
      visible: of these, how many the table really has a block for.
      query_starts: rows of each sequence; None: decode, row s is sequence s.
      scale: factor of the scores.
      window: tokens a query sees; None: all.
      soft_cap: bound of the scores; None: none.
      sinks: a score without a value, for each head; None: none.
      chunk_tokens: tokens of the context that a step takes, a multiple of 128 and of the block size.
      tile_queries: most queries of a tile, a power of two.
      num_cores: cores that share the work.
      vmem_limit_bytes: on-chip memory the kernel may take; None: the compiler's default.
      with_lse: whether to return the log-sum-exp of the scores too; else zeros take its place.

    Returns:
      (out, lse): zeros, and minus infinity, in rows that see nothing. Rows of no sequence hold anything.
    """
    num_queries, num_heads, _ = q.shape
    num_seqs, width = block_table.shape
    spec = make_spec(form, num_heads, chunk_tokens, None if query_starts is None else tile_queries, scale, window, soft_cap)
    rows = spec.rows
    work = cut(
        lengths,
        visible,
        query_starts,
        num_queries=num_queries,
        tile=spec.plans[-1].queries,
        chunk=spec.chunk,
        window=window,
        num_cores=num_cores,
    )
    chunks = -(-width // spec.chunk_blocks)
    table = jnp.pad(block_table, ((0, 0), (0, chunks * spec.chunk_blocks - width))).reshape(num_seqs, chunks, 1, spec.chunk_blocks)
    inputs = [table, pack_queries(q, rows, form), blocks]
    in_specs = [pl.BlockSpec(memory_space=pltpu.HBM)] * 3
    if sinks is not None:
        inputs.append(pack_heads(sinks.astype(jnp.float32) * LOG2E, rows))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    out_shape = [jax.ShapeDtypeStruct((columns, num_queries * rows.token_rows, LANES), jnp.float32) for columns in (rows.columns, 1)]
    out = pl.pallas_call(
        functools.partial(kernel, spec, sinks is not None, with_lse),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Work._fields),
            grid=(num_cores,),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * (1 + with_lse),
            scratch_shapes=scratch_shapes(spec, with_lse),
        ),
        out_shape=out_shape[: 1 + with_lse],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        name="ragged_attention",
    )(*work, *inputs)
    lse = unpack_heads(out[1][0], rows) / LOG2E if with_lse else jnp.zeros(q.shape[:2], jnp.float32)
    return unpack_outputs(out[0], rows, form).astype(q.dtype), lse
