"""The block sizes that the library supports on every backend."""

from collections.abc import Sequence

__all__ = ["BLOCK_SIZES", "check_block_sizes"]

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def check_block_sizes(sizes: Sequence[int]) -> None:
    """Raises ValueError for a block size that is not supported, or for none at all."""
    if not sizes:
        raise ValueError(f"name at least one block size of {', '.join(map(str, BLOCK_SIZES))}")
    for size in sizes:
        if size not in BLOCK_SIZES:
            raise ValueError(f"a block size must be one of {', '.join(map(str, BLOCK_SIZES))}; got {size}")
