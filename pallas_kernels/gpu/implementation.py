"""The implementation "gpu": what it supports, and how a call is brought to the kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.decode import split_decode
from pallas_kernels.gpu.device import Gpu, find_gpu
from pallas_kernels.gpu.format import GpuStorage, encode
from pallas_kernels.gpu.prefill import ragged_prefill
from pallas_kernels.gpu.spec import GROUP, Spec, choose_decode, choose_prefill, copy_fault
from pallas_kernels.gpu.splits import num_splits
from pallas_kernels.ragged import query_places, visible_lengths, write_slots

__all__ = ["LAYOUT", "attend", "supports", "write"]

LAYOUT = "gpu"  # of the cache it runs on

_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LARGEST_HEAD_DIM = 256


def supports(storage: GpuStorage, num_heads: int, num_seqs: int, table_width: int, decode: bool) -> tuple[bool, str]:
    """Whether this implementation can run such a call, and if not why."""
    if not isinstance(storage, GpuStorage):
        return False, f"needs the GPU layout, the cache has {type(storage).__name__}"
    device, reason = find_gpu()
    if device is None:
        return False, reason
    _, block_size, _, stored_dim = storage.blocks.shape
    if block_size not in _BLOCK_SIZES:
        return False, f"works with block sizes {', '.join(map(str, _BLOCK_SIZES))}, not {block_size}"
    if storage.blocks.dtype == jnp.float8_e4m3fn and not device.has_float8:
        return False, "works with float8_e4m3fn from compute capability 8.9 on; int8 does everywhere"
    if stored_dim > _LARGEST_HEAD_DIM:
        return False, f"works with head_dim up to {_LARGEST_HEAD_DIM}, not {storage.head_dim}"
    tile, stages = _tiles(storage, device, decode=False)
    if not stages:
        return False, f"head_dim {storage.head_dim} does not fit the {device.shared_memory // 2**10} KiB of shared memory"
    reason = copy_fault(block_size, stored_dim, storage.blocks.dtype, tile, device.counted_copies)
    return not reason, reason


def _tiles(storage: GpuStorage, device: Gpu, decode: bool) -> tuple[int, int]:
    choose = choose_decode if decode else choose_prefill
    _, block_size, _, stored_dim = storage.blocks.shape
    return choose(block_size, stored_dim, storage.blocks.dtype, device.shared_memory)


def write(
    storage: GpuStorage,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
) -> GpuStorage:
    """Puts new keys and values into their slots; rows without a slot go to the null block.

    XLA scatters into this layout in place, one contiguous row for each token, so that no kernel is needed.
    """
    num_blocks, block_size, _, _ = storage.blocks.shape
    seq, position = query_places(lengths, query_starts, k.shape[0])
    block, offset = write_slots(seq, position, block_table, num_blocks, block_size)
    rows, scales = encode(k, v, storage.blocks.dtype, storage.scales is not None)
    blocks = storage.blocks.at[block, offset].set(rows, mode="promise_in_bounds")
    if storage.scales is not None:
        scales = storage.scales.at[block, :, offset].set(scales, mode="promise_in_bounds")
    return GpuStorage(blocks, storage.head_dim, scales)


def attend(
    q: Float[Array, "T H D"],
    storage: GpuStorage,
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    """Causal attention of each query over its sequence's blocks; see `jaxpage.paged_attention` for the arguments.

    Raises:
      NotImplementedError: the kernels cannot run this call; says why.
    """
    num_blocks, block_size, heads, stored_dim = storage.blocks.shape
    num_seqs, table_width = block_table.shape
    able, reason = supports(storage, q.shape[1], num_seqs, table_width, query_starts is None)
    device, _ = find_gpu()
    if not able or device is None:
        raise NotImplementedError(reason)
    if query_starts is None and not _tiles(storage, device, decode=True)[1]:
        query_starts = jnp.arange(num_seqs + 1, dtype=jnp.int32)  # tiles of prefill may be shorter, and fit a small shared memory
    tile, stages = _tiles(storage, device, query_starts is None)
    spec = Spec(
        block_size=block_size,
        head_dim=stored_dim,
        dtype=storage.blocks.dtype.name,
        tile=tile,
        stages=stages,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        counted=device.counted_copies,
    )
    visible = visible_lengths(block_table, lengths, num_blocks, block_size)
    if query_starts is None:
        first = jnp.zeros_like(visible) if window is None else jnp.maximum(lengths - window, 0)
        context = table_width * block_size if window is None else min(table_width * block_size, window + tile)
        programs = num_seqs * (heads // 2) * -(-q.shape[1] // (heads // 2 * GROUP))
        splits = num_splits(programs, -(-context // tile), device.num_sms)
        out, lse = split_decode(q, storage, block_table, first, visible, spec, splits)
    else:
        # A result that is scaled once more is not rounded before.
        dtype = q.dtype if sinks is None else jnp.float32
        out, lse = ragged_prefill(q, storage, block_table, lengths, visible, query_starts, spec, dtype)
    if sinks is not None:  # a sink is one more token with this score and no value
        out *= jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None])[..., None]
    return out.astype(q.dtype)
