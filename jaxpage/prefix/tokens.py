"""Token ids as bytes, cut into blocks: what the indexes compare and hash."""

from collections.abc import Sequence

import numpy as np

__all__ = ["common", "count", "cut", "decode"]

_DTYPE = np.dtype("<i4")
_SIZE = _DTYPE.itemsize


def cut(tokens: Sequence[int] | np.ndarray, block_size: int) -> list[bytes]:
    """The token ids of each block, the last of which may be partial. Never an empty one.

    Raises:
      ValueError: they are no token ids.
    """
    ids = np.asarray(tokens)
    if ids.size == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"tokens must be one row of integers, got {ids.dtype} of shape {ids.shape}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > np.iinfo(_DTYPE).max:
        raise ValueError(f"token ids must be from 0 to {np.iinfo(_DTYPE).max}, got {low if low < 0 else high}")
    data = ids.astype(_DTYPE).tobytes()
    step = block_size * _SIZE
    return [data[start : start + step] for start in range(0, len(data), step)]


def decode(chunks: Sequence[bytes]) -> tuple[int, ...]:
    """The token ids of blocks."""
    return tuple(np.frombuffer(b"".join(chunks), _DTYPE).tolist())


def count(chunk: bytes) -> int:
    """How many tokens a block's bytes are."""
    return len(chunk) // _SIZE


def common(one: bytes, other: bytes) -> int:
    """How many tokens two blocks have in common from their beginning."""
    shorter = min(len(one), len(other))
    for start in range(0, shorter, _SIZE):
        if one[start : start + _SIZE] != other[start : start + _SIZE]:
            return start // _SIZE
    return shorter // _SIZE
