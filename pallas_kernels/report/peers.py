"""The paged attention kernels that come with JAX, measured like ours."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import get_min_heads_per_blk

from pallas_kernels.report.shape import NUM_SEQS, Build, Setting, TpuProgram
from pallas_kernels.tpu.schedule import Chunk

__all__ = ["paged_attention_builds", "ragged_paged_attention_builds"]

_CHUNK_TOKENS = 1024
_QUERIES = (1, 8)
"""Queries a block that are tried for the ragged kernel, the better of which is reported."""
_REGISTER_VALUES = 16 * 128
_INT = jnp.int32


def ragged_paged_attention_builds(setting: Setting) -> list[Build]:
    """`jax.experimental.pallas.ops.tpu.ragged_paged_attention`, whose pages hold [B, 2 * K, D], keys at even heads.

    Raises:
      ValueError: the kernel does not take so many heads.
    """
    shape, size = setting.shape, setting.block_size
    q = setting.queries(NUM_SEQS)
    pages = jax.ShapeDtypeStruct((setting.num_blocks, size, 2 * shape.num_kv_heads, shape.head_dim), setting.kv_dtype)
    integers = [jax.ShapeDtypeStruct(sizes, _INT) for sizes in ((NUM_SEQS,), (NUM_SEQS, setting.table_width), (NUM_SEQS + 1,), (1,))]
    _, heads = get_min_heads_per_blk(shape.num_heads, 2 * shape.num_kv_heads, q.dtype, pages.dtype)
    share = heads / (2 * shape.num_kv_heads)
    scale = 1.0 if setting.kv_dtype.itemsize == 1 else None

    def build(queries: int) -> Build:
        def attend(*arguments: jax.Array) -> jax.Array:
            return ragged_paged_attention(
                *arguments,
                sm_scale=setting.scale,
                sliding_window=shape.window,
                k_scale=scale,
                v_scale=scale,
                num_kv_pages_per_block=_CHUNK_TOKENS // size,
                num_queries_per_block=queries,
            )

        return Build(
            function=attend,
            arguments=(q, pages, *integers),
            stored_bytes=_stored_bytes(setting),
            program=TpuProgram(
                kernel="ragged_paged_attention_kernel",
                tokens=_CHUNK_TOKENS * share,
                chunk=Chunk(_CHUNK_TOKENS // size, _registers(setting, heads)),
            ),
        )

    return [build(queries) for queries in _QUERIES]


def paged_attention_builds(setting: Setting) -> list[Build]:
    """`jax.experimental.pallas.ops.tpu.paged_attention`, whose pages hold [B, D] of one kv head; a chunk is of one head too.

    Raises:
      NotImplementedError: the kernel has no sliding window, and none for 8-bit pages without scales of each token.
    """
    shape, size = setting.shape, setting.block_size
    if shape.window is not None:
        raise NotImplementedError("the kernel has no sliding window")
    if setting.kv_dtype.itemsize == 1:
        raise NotImplementedError("the kernel takes 8-bit pages only with a float32 scale for each token, spread over the head")
    pages = jax.ShapeDtypeStruct((shape.num_kv_heads, setting.num_blocks, size, shape.head_dim), setting.kv_dtype)

    def attend(*arguments: jax.Array) -> jax.Array:
        q, *rest = arguments
        return paged_attention(q * jnp.asarray(setting.scale, q.dtype), *rest, pages_per_compute_block=_CHUNK_TOKENS // size)

    return [
        Build(
            function=attend,
            arguments=(
                setting.queries(NUM_SEQS),
                pages,
                pages,
                jax.ShapeDtypeStruct((NUM_SEQS,), _INT),
                jax.ShapeDtypeStruct((NUM_SEQS, setting.table_width), _INT),
            ),
            stored_bytes=_stored_bytes(setting),
            program=TpuProgram(
                kernel="paged_attention",
                tokens=_CHUNK_TOKENS / shape.num_kv_heads,
                # Keys and values are apart.
                chunk=Chunk(2 * _CHUNK_TOKENS // size, _registers(setting, 2)),
            ),
        )
    ]


def _stored_bytes(setting: Setting) -> float:
    """Bytes of a token in HBM, where XLA pads the head dimension to whole lanes."""
    return setting.token_bytes / setting.shape.head_dim * _padded(setting.shape.head_dim)


def _registers(setting: Setting, heads: int) -> int:
    """Registers that so many heads of a chunk, keys and values counted apart, fill as bfloat16; wider ones fill more, on some targets."""
    return _CHUNK_TOKENS * heads * _padded(setting.shape.head_dim) // _REGISTER_VALUES


def _padded(head_dim: int) -> int:
    return -(-head_dim // 128) * 128
