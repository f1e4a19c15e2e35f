"""The host's account of the block pool. The device's references are the truth; this says what they are once all dispatched work is done."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxpage.engine.seq import Seq
from jaxpage.inspect import Usage

__all__ = ["BlockLedger"]


class BlockLedger:
    """References of the blocks that the host knows of, and the blocks promised to running sequences.

    Args:
      num_blocks: blocks in the pool, the null block included.
      block_size: tokens a block holds.

    Attributes:
      refs: references of each block [N].
      fill: tokens in each block [N]; means something where there are references.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.refs = np.zeros(num_blocks, np.int32)
        self.fill = np.zeros(num_blocks, np.int32)
        self._used = 0

    @property
    def total(self) -> int:
        """Blocks that can be handed out."""
        return self.refs.size - 1

    @property
    def used(self) -> int:
        """Blocks that somebody holds, as far as known."""
        return self._used

    @property
    def usage(self) -> Usage:
        """Blocks and slots in use; a shared block counts once."""
        return Usage(self._used, self.total, int(self.fill[self.refs > 0].sum()), self._used * self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of different blocks."""
        ids = np.asarray(blocks, np.int32)
        self._used += int(np.count_nonzero(self.refs[ids] == 0))
        self.refs[ids] += 1

    def drop(self, blocks: Sequence[int]) -> int:
        """Takes a reference from each of different blocks. Returns how many are free now."""
        ids = np.asarray(blocks, np.int32)
        self.refs[ids] -= 1
        freed = int(np.count_nonzero(self.refs[ids] == 0))
        self._used -= freed
        return freed

    def promised(self, seq: Seq, length: int) -> int:
        """Blocks beyond those known that a sequence takes in all to hold `length` tokens."""
        return max(0, self.blocks_for(length) - len(seq.blocks)) + (seq.shared_tail and length > seq.length)

    def free(self, running: Iterable[Seq]) -> int:
        """Blocks that are neither held nor promised."""
        return self.total - self._used - sum(self.promised(seq, seq.bound) for seq in running)
