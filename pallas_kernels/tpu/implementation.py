"""The implementation "tpu": what it supports, and how a call is brought to the kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.interpret import interpreting
from pallas_kernels.ragged import visible_lengths
from pallas_kernels.tiles import TpuLimits, tpu_limits
from pallas_kernels.tpu.attention import ragged_attention
from pallas_kernels.tpu.fit import Fit, fit
from pallas_kernels.tpu.format import Format, TpuStorage
from pallas_kernels.tpu.spec import vmem_bytes
from pallas_kernels.tpu.write import kv_write

__all__ = ["LAYOUT", "attend", "attend_with_lse", "choose_tiles", "supports", "write"]

LAYOUT = "tpu"  # of the cache it runs on

_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MOST_LANES = 256
_MOST_SCALED_HEADS = 32  # two bytes of scale for each key and value head fill the 128 lanes of one column


def _device_kind() -> str | None:
    """The TPU that the kernel is compiled for; "interpreter", or None where there is no TPU."""
    if interpreting():
        return "interpreter"
    described = jax.sharding.get_abstract_mesh().abstract_device  # a mesh of another machine's devices: compiled without one at hand
    kind = described.device_kind if described is not None else jax.devices()[0].device_kind
    return kind if kind.startswith("TPU") else None


def _num_cores() -> int:
    """TensorCores that share a device's memory, and so a kernel's work."""
    if interpreting():
        return 1
    described = jax.sharding.get_abstract_mesh().abstract_device
    return (described.num_cores if described is not None else getattr(jax.devices()[0], "num_cores", None)) or 1


def choose_tiles(form: Format, num_heads: int, limits: TpuLimits, decode: bool, with_lse: bool = False) -> Fit | None:
    """The tiles that a call gets on a device; None: nothing fits."""

    def total_bytes(tiles: Fit) -> int:
        return vmem_bytes(form, num_heads, tiles.chunk_tokens, None if decode else tiles.tile_queries, with_lse)

    return fit(form, total_bytes, limits, decode)


def supports(storage: TpuStorage, num_heads: int, num_seqs: int, table_width: int, decode: bool) -> tuple[bool, str]:
    """Whether this implementation can run such a call, and if not why."""
    if not isinstance(storage, TpuStorage):
        return False, f"needs the TPU layout, the cache has {type(storage).__name__}"
    kind = _device_kind()
    if kind is None:
        return False, f"needs a TPU, this host has {jax.devices()[0].device_kind}; tests run it within jaxpage.interpret_kernels()"
    form = storage.form
    if form.block_size not in _BLOCK_SIZES:
        return False, f"works with block sizes {', '.join(map(str, _BLOCK_SIZES))}, not {form.block_size}"
    if form.lanes > _MOST_LANES:
        return False, f"works with head_dim up to {_MOST_LANES}, not {form.head_dim}"
    if form.scaled and form.num_kv_heads > _MOST_SCALED_HEADS:
        return False, f"works with up to {_MOST_SCALED_HEADS} kv heads where each has a scale, not {form.num_kv_heads}"
    limits = tpu_limits(kind)
    if choose_tiles(form, num_heads, limits, decode) is None:
        return False, _too_large(form, num_heads, limits)
    return True, ""


def _too_large(form: Format, num_heads: int, limits: TpuLimits) -> str:
    room = limits.vmem_limit_bytes // 2**20
    return f"no tile of {num_heads} heads of {form.head_dim} fits the {room} MiB of on-chip memory; shard the heads"


def write(
    storage: TpuStorage,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
) -> TpuStorage:
    """Puts new keys and values into their slots; rows without a slot are dropped."""
    return TpuStorage(kv_write(storage.blocks, storage.form, k, v, block_table, lengths, query_starts), storage.form)


def attend(
    q: Float[Array, "T H D"],
    storage: TpuStorage,
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    """Causal attention of each query over its sequence's blocks; see `jaxpage.paged_attention` for the arguments."""
    return _attend(False, q, storage, block_table, lengths, query_starts, scale, window, soft_cap, sinks)[0]


def attend_with_lse(
    q: Float[Array, "T H D"],
    storage: TpuStorage,
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Also returns the log-sum-exp of each row's scores, so that results over parts of a context can be merged.

    It is minus infinity where none is seen. A sink counts like a token, so give sinks to one part only."""
    return _attend(True, q, storage, block_table, lengths, query_starts, scale, window, soft_cap, sinks)


def _attend(
    with_lse: bool,
    q: Array,
    storage: TpuStorage,
    block_table: Array,
    lengths: Array,
    query_starts: Array | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
) -> tuple[Array, Array]:
    form = storage.form
    limits = tpu_limits(_device_kind() or "")
    tiles = choose_tiles(form, q.shape[1], limits, query_starts is None, with_lse)
    if tiles is None:
        raise NotImplementedError(_too_large(form, q.shape[1], limits))
    out, lse = ragged_attention(
        q,
        storage.blocks,
        form,
        block_table,
        lengths,
        visible_lengths(block_table, lengths, storage.blocks.shape[0], form.block_size),
        query_starts,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        chunk_tokens=tiles.chunk_tokens,
        tile_queries=tiles.tile_queries,
        num_cores=_num_cores(),
        vmem_limit_bytes=limits.vmem_limit_bytes,
        with_lse=with_lse,
    )
    seen = _rows_of_sequences(lengths, query_starts, q.shape[0])
    return jnp.where(seen[:, None, None], out, 0), jnp.where(seen[:, None], lse, -jnp.inf)


def _rows_of_sequences(lengths: Int[Array, " S"], query_starts: Int[Array, " S+1"] | None, num_queries: int) -> Array:
    if query_starts is None:
        return lengths > 0
    row = jnp.arange(num_queries)
    return (row >= query_starts[0]) & (row < query_starts[-1])
