"""Shapes are rounded up to few sizes, so that few programs are compiled."""

__all__ = ["BLOCK_BUCKETS", "ROW_BUCKETS", "SEQ_BUCKETS", "SWAP_BUCKETS", "TOKEN_BUCKETS", "bucket"]

SEQ_BUCKETS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sequences of a batch."""

TOKEN_BUCKETS: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Prompt tokens of one prefill pass; longer prompts take several passes."""

BLOCK_BUCKETS: tuple[int, ...] = tuple(sorted({2**power for power in range(25)} | {3 * 2**power for power in range(23)}))
"""Blocks of the pool."""

ROW_BUCKETS: tuple[int, ...] = (1, 2, 3, *(step * 2**power for power in range(22) for step in (4, 5, 6, 7)))
"""Blocks of a sequence's row. Finer than the pool's: attention may read what a row has beyond the sequence."""

SWAP_BUCKETS: tuple[int, ...] = tuple(2**power for power in range(25))
"""Blocks that are swapped to the host or back together."""


def bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`.

    Raises:
      ValueError: none does.
    """
    for candidate in buckets:
        if size <= candidate:
            return candidate
    raise ValueError(f"{size} exceeds the largest bucket, {buckets[-1]}")
