"""Our own TPU kernels, as the report compiles them."""

import jax
import jax.numpy as jnp

from pallas_kernels import layout
from pallas_kernels.report.shape import NUM_SEQS, PREFILL_SEQS, PREFILL_TOKENS, Build, Setting, TpuProgram
from pallas_kernels.targets import device_mesh
from pallas_kernels.tiles import tpu_limits
from pallas_kernels.tpu import implementation
from pallas_kernels.tpu.chunk import part_tokens, units_per_turn
from pallas_kernels.tpu.format import Format, TpuStorage
from pallas_kernels.tpu.plan import decode_plan, prefill_plan
from pallas_kernels.tpu.rows import arrange
from pallas_kernels.tpu.schedule import Chunk
from pallas_kernels.tpu.write import unit_tokens

__all__ = ["decode_builds", "prefill_builds", "write_builds"]


def decode_builds(setting: Setting) -> list[Build]:
    """Attention of one query a sequence.

    Raises:
      NotImplementedError: the kernel does not take the setting.
    """
    return [_attention(setting, NUM_SEQS, None)]


def prefill_builds(setting: Setting) -> list[Build]:
    """Attention of the last tokens of a few sequences.

    Raises:
      NotImplementedError: the kernel does not take the setting.
    """
    return [_attention(setting, PREFILL_SEQS, PREFILL_TOKENS)]


def write_builds(setting: Setting) -> list[Build]:
    """The write of one token a sequence.

    Raises:
      NotImplementedError: the kernel does not take the setting.
    """
    storage = _storage(setting, NUM_SEQS, decode=True)
    new = jax.ShapeDtypeStruct((NUM_SEQS, setting.shape.num_kv_heads, setting.shape.head_dim), setting.queries(1).dtype)

    def write(storage: TpuStorage, k: jax.Array, v: jax.Array, table: jax.Array, lengths: jax.Array) -> TpuStorage:
        return implementation.write(storage, k, v, table, lengths, None)

    moved = 2 * unit_tokens(storage.form) * _stored_bytes(storage)  # the tokens that share registers are fetched and stored
    arguments = (storage, new, new, *setting.table(NUM_SEQS))
    return [Build(write, arguments, stored_bytes=moved, queries=0, donate=(0,), program=TpuProgram("kv_write"))]


def _attention(setting: Setting, num_seqs: int, seq_queries: int | None) -> Build:
    shape, decode = setting.shape, seq_queries is None
    storage = _storage(setting, num_seqs, decode)
    form = storage.form
    tiles = implementation.choose_tiles(form, shape.num_heads, tpu_limits(setting.target.device_kind), decode)
    assert tiles is not None  # it is supported

    def attend(q: jax.Array, storage: TpuStorage, table: jax.Array, lengths: jax.Array, starts: jax.Array | None) -> jax.Array:
        return implementation.attend(
            q, storage, table, lengths, starts, scale=setting.scale, window=shape.window, soft_cap=None, sinks=None
        )

    starts = None if decode else jax.ShapeDtypeStruct((num_seqs + 1,), jnp.int32)
    part = part_tokens(form, tiles.chunk_tokens, not decode)
    rows = arrange(form, shape.num_heads)
    plan = decode_plan(rows, form) if decode else prefill_plan(rows, form, tiles.tile_queries)
    return Build(
        function=attend,
        arguments=(setting.queries(num_seqs * (seq_queries or 1)), storage, *setting.table(num_seqs), starts),
        stored_bytes=_stored_bytes(storage),
        queries=tiles.tile_queries,
        program=TpuProgram(
            kernel="ragged_attention",
            tokens=tiles.chunk_tokens,
            chunk=Chunk(
                copies=tiles.chunk_tokens // form.block_size,
                registers=_registers(form, tiles.chunk_tokens),
                turns=plan.units // units_per_turn(plan) * tiles.chunk_tokens // part,
            ),
        ),
    )


def _registers(form: Format, tokens: int) -> int:
    """Registers that keys and values fill when they are multiplied, at least: 16 rows of bfloat16 each."""
    return 2 * form.key_columns * tokens // 16


def _storage(setting: Setting, num_seqs: int, decode: bool) -> TpuStorage:
    shape = setting.shape

    def empty() -> layout.Storage:
        sizes = (setting.num_blocks, setting.block_size, shape.num_kv_heads, shape.head_dim)
        return layout.init_storage("tpu", *sizes, setting.kv_dtype, setting.scaled)

    storage = jax.eval_shape(empty)
    assert isinstance(storage, TpuStorage)
    with jax.set_mesh(device_mesh(setting.target)):
        supported, reason = implementation.supports(storage, shape.num_heads, num_seqs, setting.table_width, decode)
    if not supported:
        raise NotImplementedError(reason)
    return storage


def _stored_bytes(storage: TpuStorage) -> float:
    """Bytes of a token in HBM."""
    return storage.blocks.size * storage.blocks.dtype.itemsize / (storage.blocks.shape[0] * storage.form.block_size)
