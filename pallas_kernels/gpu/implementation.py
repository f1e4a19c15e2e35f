"""The implementation "gpu": what it supports, and how a call is brought to the kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.decode import split_decode
from pallas_kernels.gpu.device import find_gpu
from pallas_kernels.gpu.format import GpuStorage, interleave
from pallas_kernels.gpu.spec import GROUP, TILE, Spec, choose_stages
from pallas_kernels.gpu.splits import num_splits
from pallas_kernels.ragged import query_places, visible_lengths, write_slots

__all__ = ["LAYOUT", "attend", "supports", "write"]

LAYOUT = "gpu"  # of the cache it runs on

_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
_LARGEST_HEAD_DIM = 256


def supports(storage: GpuStorage, num_heads: int, num_seqs: int, table_width: int, decode: bool) -> tuple[bool, str]:
    """Whether this implementation can run such a call, and if not why."""
    if not isinstance(storage, GpuStorage):
        return False, f"needs the GPU layout, the cache has {type(storage).__name__}"
    if not decode:
        return False, "has a kernel for decode only, one query a sequence (query_starts=None)"
    device, reason = find_gpu()
    if device is None:
        return False, reason
    _, block_size, _, stored_dim = storage.blocks.shape
    if block_size not in _BLOCK_SIZES:
        return False, f"works with block sizes {', '.join(map(str, _BLOCK_SIZES))}, not {block_size}"
    if stored_dim > _LARGEST_HEAD_DIM:
        return False, f"works with head_dim up to {_LARGEST_HEAD_DIM}, not {storage.head_dim}"
    if not choose_stages(stored_dim, storage.blocks.dtype.itemsize, device.shared_memory):
        return False, f"head_dim {storage.head_dim} does not fit the {device.shared_memory // 2**10} KiB of shared memory"
    return True, ""


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
    rows = interleave(k.astype(storage.blocks.dtype), v.astype(storage.blocks.dtype))
    return GpuStorage(storage.blocks.at[block, offset].set(rows, mode="promise_in_bounds"), storage.head_dim)


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
    """Attention of one query a sequence over the sequence's blocks; see `jaxpage.paged_attention` for the arguments.

    Raises:
      NotImplementedError: the kernel cannot run this call; says why.
    """
    num_blocks, block_size, heads, stored_dim = storage.blocks.shape
    num_seqs, num_heads, _ = q.shape
    able, reason = supports(storage, num_heads, num_seqs, block_table.shape[1], query_starts is None)
    device, _ = find_gpu()
    if not able or device is None:
        raise NotImplementedError(reason)
    end = visible_lengths(block_table, lengths, num_blocks, block_size)
    first = jnp.zeros_like(end) if window is None else jnp.maximum(lengths - window, 0)
    context = block_table.shape[1] * block_size
    if window is not None:
        context = min(context, window + TILE)
    programs = num_seqs * (heads // 2) * -(-num_heads // (heads // 2 * GROUP))
    spec = Spec(
        block_size=block_size,
        head_dim=stored_dim,
        dtype=storage.blocks.dtype.name,
        num_splits=num_splits(programs, -(-context // TILE), device.num_sms),
        stages=choose_stages(stored_dim, storage.blocks.dtype.itemsize, device.shared_memory),
        scale=scale,
        soft_cap=soft_cap,
    )
    out, lse = split_decode(q, storage.blocks, block_table, first, end, spec)
    if sinks is not None:  # a sink is one more token with this score and no value
        out *= jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None])[..., None]
    return out.astype(q.dtype)
