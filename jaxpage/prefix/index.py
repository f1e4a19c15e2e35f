"""What every prefix index offers, and the values it hands out.

An index is policy: it lives on the host, changes in place, and knows token ids, block ids and the block size. The device's references are
the truth. The index says which blocks it newly holds (`insert`) and which it lets go (`evict`, `forget`); its owner adds and takes their
references in the pool.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

__all__ = ["Event", "Match", "PrefixIndex", "Removed", "Stats", "Stored"]


class Match(NamedTuple):
    """The longest prefix of a prompt that an index has. It is good until the index evicts; `lock` makes it last.

    Attributes:
      blocks: the blocks that hold it, in order: what `attach` takes.
      length: its tokens, always fewer than the prompt has.
      tail: how many tokens of the last block belong to it; 0 without blocks. Where that is less than a block, the block must be cloned
        before the sequence writes to it. `reserve` does so, because the index holds it too.
      queried: tokens of the prompt.
      namespace: where it was looked up.
      stamp: tells the index whether it still holds the blocks for the same tokens.
    """

    blocks: tuple[int, ...]
    length: int
    tail: int
    queried: int
    namespace: str
    stamp: int


@dataclasses.dataclass(slots=True)
class Stats:
    """Counts of one namespace.

    Attributes:
      queried_tokens: tokens of the prompts whose matches were locked, empty matches included.
      hit_tokens: those of them that the matches covered.
      evicted_blocks: blocks that `evict` let go.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0


class Stored(NamedTuple):
    """An index holds blocks it did not hold, or more tokens of one that it did (a partial block has grown).

    A block is held once at most, so a router needs no hashes: its id names it until it is removed.

    Attributes:
      namespace: where.
      parent: the block before the first of them; 0 where they begin a sequence.
      blocks: the blocks, in order.
      tokens: their token ids; only the last block may hold fewer than the block size.
    """

    namespace: str
    parent: int
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]


class Removed(NamedTuple):
    """An index no longer holds these blocks."""

    blocks: tuple[int, ...]


Event = Stored | Removed


class PrefixIndex(Protocol):
    """The operations that all indexes share. Prefixes of one namespace are never matched in another."""

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""

    @property
    def stats(self) -> dict[str, Stats]:
        """Counts by namespace. Clear it to count anew."""

    @property
    def blocks(self) -> list[int]:
        """The blocks held, each once: the index's part of the references, as `check_cache` takes it."""

    @property
    def total(self) -> int:
        """How many blocks are held."""

    @property
    def evictable(self) -> int:
        """How many of them `evict` could let go now."""

    @property
    def protected(self) -> int:
        """How many of them are locked or pinned."""

    def match(self, tokens: Sequence[int] | np.ndarray, namespace: str = "") -> Match:
        """Looks a prompt up, and changes nothing: a scheduler may ask as often as it likes.

        Raises:
          ValueError: the tokens are no token ids.
        """

    def lock(self, match: Match, counted: bool = True) -> None:
        """A sequence uses a match: its blocks are kept until `unlock`, and the use is counted. Lock before anything is evicted.

        Args:
          match: what was matched.
          counted: False where a running sequence locks what it has inserted itself.

        Raises:
          ValueError: the match is stale; match again.
        """

    def unlock(self, match: Match, used: bool = True) -> None:
        """Ends a lock. A lock that was taken before `forget` is void, and ending it does nothing.

        Args:
          match: what was locked.
          used: False where the sequence did not run after all; the lookup is then taken out of `stats`.

        Raises:
          ValueError: it is not locked.
        """

    def insert(
        self, tokens: Sequence[int] | np.ndarray, blocks: Sequence[int] | np.ndarray, namespace: str = "", priority: int = 0
    ) -> list[int]:
        """Adds a sequence's blocks, whose keys and values must be written.

        First come stays: where the index has a block for the same tokens, it does not take the caller's. One that is to be written again
        should not be inserted before it is full: the next write would have to clone it.

        Args:
          tokens: from the first token of the sequence on, also where the blocks of its beginning have been inserted before.
          blocks: ceil(tokens / block size) blocks in order.
          namespace: where.
          priority: for the policy "priority": higher stays longer. What a sequence shares has the highest priority of those who share it.

        Returns:
          The blocks that the index holds now and did not before.

        Raises:
          ValueError: tokens, blocks or their number are wrong, or a block is held for other tokens. Nothing is changed then.
        """

    def evict(self, count: int) -> list[int]:
        """Lets blocks go in the order of the policy, ends of sequences first, and none that is locked or pinned.

        Returns:
          `count` blocks, or fewer where not so many are evictable.

        Raises:
          ValueError: the count is negative.
        """

    def pin(self, tokens: Sequence[int] | np.ndarray, namespace: str = "") -> int:
        """Keeps what the index has of these tokens until `unpin`. To pin again is to pin what there is by then.

        Returns:
          How many of the tokens are pinned.

        Raises:
          KeyError: the index has none of them.
        """

    def unpin(self, tokens: Sequence[int] | np.ndarray, namespace: str = "") -> None:
        """Ends the pin of the same tokens.

        Raises:
          KeyError: they are not pinned.
        """

    def forget(self) -> list[int]:
        """Forgets everything, locked and pinned or not, because the weights have changed. Running sequences keep their own references.

        Returns:
          All blocks that were held.
        """
