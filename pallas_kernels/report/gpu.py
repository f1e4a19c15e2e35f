"""Our own GPU kernels, as the report compiles them."""

import jax
import jax.numpy as jnp

from pallas_kernels import gpu, layout
from pallas_kernels.gpu.format import GpuStorage
from pallas_kernels.gpu.spec import GROUP
from pallas_kernels.report.shape import NUM_SEQS, PREFILL_SEQS, PREFILL_TOKENS, Build, Setting
from pallas_kernels.targets import device_mesh

__all__ = ["decode_builds", "prefill_builds", "write_builds"]

_VALUE_ROWS = 64  # rows of decode's product with the values come in such groups
_PREFILL_ROWS = 64  # query heads that prefill multiplies with a copied token of their kv head, at a time


def decode_builds(setting: Setting) -> list[Build]:
    """Attention of one query a sequence.

    Raises:
      NotImplementedError: the kernel does not take the setting.
    """
    shape = setting.shape
    storage = _storage(setting, NUM_SEQS, decode=True)
    programs = shape.num_kv_heads * -(-shape.num_heads // (shape.num_kv_heads * GROUP))  # that copy keys and values of one head
    stored_dim = _stored_dim(storage)
    build = _attention(setting, storage, NUM_SEQS, None)
    return [
        build._replace(
            stored_bytes=build.stored_bytes * programs / shape.num_kv_heads,
            matrix_flops=2 * GROUP * programs * (stored_dim + -(-stored_dim // _VALUE_ROWS) * _VALUE_ROWS),
        )
    ]


def prefill_builds(setting: Setting) -> list[Build]:
    """Attention of the last tokens of a few sequences.

    Raises:
      NotImplementedError: the kernel does not take the setting.
    """
    shape = setting.shape
    storage = _storage(setting, PREFILL_SEQS, decode=False)
    return [
        _attention(setting, storage, PREFILL_SEQS, PREFILL_TOKENS)._replace(
            queries=_PREFILL_ROWS * shape.num_kv_heads / shape.num_heads,
            matrix_flops=4 * _PREFILL_ROWS * shape.num_kv_heads * _stored_dim(storage),
        )
    ]


def write_builds(setting: Setting) -> list[Build]:
    """The write of one token a sequence.

    Raises:
      NotImplementedError: the kernel does not take the setting.
    """
    storage = _storage(setting, NUM_SEQS, decode=True)
    new = jax.ShapeDtypeStruct((NUM_SEQS, setting.shape.num_kv_heads, setting.shape.head_dim), setting.queries(1).dtype)

    def write(storage: GpuStorage, k: jax.Array, v: jax.Array, table: jax.Array, lengths: jax.Array) -> GpuStorage:
        return gpu.write(storage, k, v, table, lengths, None)

    arguments = (storage, new, new, *setting.table(NUM_SEQS))
    return [Build(write, arguments, stored_bytes=_token_bytes(setting, storage), queries=0, donate=(0,))]


def _attention(setting: Setting, storage: GpuStorage, num_seqs: int, seq_queries: int | None) -> Build:
    window = setting.shape.window
    starts = None if seq_queries is None else jax.ShapeDtypeStruct((num_seqs + 1,), jnp.int32)

    def attend(q: jax.Array, storage: GpuStorage, table: jax.Array, lengths: jax.Array, starts: jax.Array | None) -> jax.Array:
        return gpu.attend(q, storage, table, lengths, starts, scale=setting.scale, window=window, soft_cap=None, sinks=None)

    arguments = (setting.queries(num_seqs * (seq_queries or 1)), storage, *setting.table(num_seqs), starts)
    return Build(attend, arguments, stored_bytes=_token_bytes(setting, storage))


def _storage(setting: Setting, num_seqs: int, decode: bool) -> GpuStorage:
    shape = setting.shape

    def empty() -> layout.Storage:
        sizes = (setting.num_blocks, setting.block_size, shape.num_kv_heads, shape.head_dim)
        return layout.init_storage("gpu", *sizes, setting.kv_dtype, setting.scaled)

    storage = jax.eval_shape(empty)
    assert isinstance(storage, GpuStorage)
    with jax.set_mesh(device_mesh(setting.target)):
        supported, reason = gpu.supports(storage, shape.num_heads, num_seqs, setting.table_width, decode)
    if not supported:
        raise NotImplementedError(reason)
    return storage


def _stored_dim(storage: GpuStorage) -> int:
    return storage.blocks.shape[-1]


def _token_bytes(setting: Setting, storage: GpuStorage) -> float:
    """Bytes of a token in memory, scales and padding included."""
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(storage))
    return stored / (setting.num_blocks * setting.block_size)
