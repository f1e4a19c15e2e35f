"""What the attention kernel is traced with: the static description of a call, and the buffers it takes on the chip."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.fit import buffer_bytes
from pallas_kernels.tpu.format import LANES, Format
from pallas_kernels.tpu.plan import Plan, decode_plan, prefill_plan
from pallas_kernels.tpu.rows import Rows, arrange
from pallas_kernels.tpu.softmax import Running

__all__ = ["RING", "Buffers", "Spec", "make_spec", "scratch_shapes", "vmem_bytes"]

RING = 3  # query tiles on the chip: the next one comes in, one is computed, the outputs of the last one go out
_SMALL_TILE = 16  # queries of a tile for drafts and short prompts


class Spec(NamedTuple):
    """What is known when the kernel is traced."""

    form: Format
    rows: Rows
    plans: tuple[Plan, ...]  # smallest tiles first
    chunk_blocks: int
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.chunk_blocks * self.form.block_size


class Buffers(NamedTuple):
    """On-chip memory of one core, and the semaphores of the copies to and from it."""

    table: Any  # SMEM int32 [2, 1, chunk_blocks]
    kv: Any  # [2, chunk_blocks, C, B, 128], or words [2, chunk_blocks * B * W, 128]
    tiles: Any  # float32 [ring, columns, queries * token_rows, 128]: queries on their way in, outputs on their way out
    scales: Any  # float32 [2 K, chunk], or nothing: of the chunk that is computed
    lse: Any  # float32 [ring, 1, queries * token_rows, 128], or nothing
    queries: tuple[Any, ...]  # for each plan [units, unit_rows, unit_lanes]
    running: tuple[Running, ...]  # for each plan
    table_sem: Any
    kv_sem: Any
    query_sem: Any
    out_sem: Any


def make_spec(
    form: Format, num_heads: int, chunk_tokens: int, tile_queries: int | None, scale: float, window: int | None, soft_cap: float | None
) -> Spec:
    """The description of a call. `tile_queries` None: decode."""
    rows = arrange(form, num_heads)
    sizes = [] if tile_queries is None else sorted({min(_SMALL_TILE, tile_queries), tile_queries})
    plans = (decode_plan(rows, form), *(prefill_plan(rows, form, size) for size in sizes))
    return Spec(form, rows, plans, chunk_tokens // form.block_size, scale, window, soft_cap)


def scratch_shapes(spec: Spec, with_lse: bool) -> list:
    """On-chip memory, in the order of `Buffers`."""
    form, rows = spec.form, spec.rows
    tile_rows = spec.plans[-1].queries * rows.token_rows
    operand = jnp.float32 if jnp.dtype(form.dtype) == jnp.float32 else jnp.bfloat16
    kv_shape = (spec.chunk_blocks * form.block_shape[0], LANES) if form.words else (spec.chunk_blocks, *form.block_shape)
    buffers = Buffers(
        table=pltpu.SMEM((2, 1, spec.chunk_blocks), jnp.int32),
        kv=pltpu.VMEM((2, *kv_shape), form.storage_dtype),
        tiles=pltpu.VMEM((RING, rows.columns, tile_rows, LANES), jnp.float32),
        scales=pltpu.VMEM((-(-2 * form.num_kv_heads // 8) * 8, spec.chunk), jnp.float32) if form.scaled else [],
        lse=[pltpu.VMEM((RING, 1, tile_rows, LANES), jnp.float32)] if with_lse else [],
        queries=tuple(pltpu.VMEM((plan.units, plan.unit_rows, plan.unit_lanes), operand) for plan in spec.plans),
        running=tuple(
            Running(
                pltpu.VMEM((plan.units, plan.unit_rows, LANES), jnp.float32),
                pltpu.VMEM((plan.units, plan.unit_rows, LANES), jnp.float32),
                pltpu.VMEM((plan.units, plan.unit_rows, plan.unit_lanes), jnp.float32),
            )
            for plan in spec.plans
        ),
        table_sem=pltpu.SemaphoreType.DMA((2,)),
        kv_sem=pltpu.SemaphoreType.DMA((2,)),
        query_sem=pltpu.SemaphoreType.DMA((RING,)),
        out_sem=pltpu.SemaphoreType.DMA((RING,)),
    )
    return list(buffers)


def vmem_bytes(form: Format, num_heads: int, chunk_tokens: int, tile_queries: int | None, with_lse: bool) -> int:
    """Bytes of on-chip memory that the kernel's buffers take. `tile_queries` None: decode."""
    spec = make_spec(form, num_heads, chunk_tokens, tile_queries, 1.0, None, None)
    buffers = jax.tree.leaves(scratch_shapes(spec, with_lse)[1:-4])  # but for the table and the semaphores
    return sum(buffer_bytes(buffer.shape, buffer.dtype) for buffer in buffers)
