"""What the indexes share: what is held, locked, pinned and evicted, whatever way it is found."""

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxpage.prefix import tokens as token_bytes
from jaxpage.prefix.eviction import EvictionQueue, Policy, find_policy
from jaxpage.prefix.index import Event, Match, Removed, Stats, Stored
from jaxpage.prefix.node import Node, path

__all__ = ["Found", "PrefixTree"]


class Found(NamedTuple):
    """A prefix as a lookup finds it: its blocks, its tokens, and the node that has the last block."""

    blocks: list[int]
    length: int
    node: Node | None


class PrefixTree(abc.ABC):
    """The part of `PrefixIndex` that does not depend on how prefixes are found.

    Args:
      block_size: tokens a block holds.
      policy: a name in `POLICIES`, or a function of a `Record`.
      on_event: is told what the index holds and lets go, after the fact; it must not call the index.

    Raises:
      ValueError: the block size is not positive, or there is no such policy.
    """

    def __init__(self, block_size: int, policy: str | Policy = "lru", on_event: Callable[[Event], None] | None = None):
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size must be a positive integer, got {block_size!r}")
        self.block_size = block_size
        self.stats: dict[str, Stats] = {}
        self._queue: EvictionQueue[Node] = EvictionQueue(find_policy(policy))
        self._on_event = on_event
        self._holders: dict[int, Node] = {}  # block: its node
        self._pins: dict[tuple[str, bytes], Match] = {}
        self._evictable = 0
        self._clock = 0
        self._forgotten = 0  # the tick of the last `forget`

    @abc.abstractmethod
    def _find(self, chunks: list[bytes], namespace: str) -> Found:
        """The longest prefix that is held."""

    @abc.abstractmethod
    def _extend(self, chunks: list[bytes], blocks: list[int], namespace: str) -> tuple[Node | None, list[int]]:
        """Links what is not there yet. Returns the node in which the sequence ends now, and the blocks that are newly held."""

    @abc.abstractmethod
    def _add(self, node: Node) -> None:
        """Makes a node findable."""

    @abc.abstractmethod
    def _unlink(self, node: Node, key: bytes) -> None:
        """Makes a node that began with `key` unfindable."""

    @abc.abstractmethod
    def _clear(self) -> None:
        """Makes all nodes unfindable."""

    def _ending(self, node: Node, end: int) -> Node:
        """The node that ends after `end` blocks, made from the one that reaches so far if need be."""
        return node

    @property
    def blocks(self) -> list[int]:
        """The blocks held, each once."""
        return list(self._holders)

    @property
    def total(self) -> int:
        """How many blocks are held."""
        return len(self._holders)

    @property
    def evictable(self) -> int:
        """How many of them `evict` could let go now."""
        return self._evictable

    @property
    def protected(self) -> int:
        """How many of them are locked or pinned."""
        return len(self._holders) - self._evictable

    def nodes(self) -> list[Node]:
        """All nodes, in no order; for checks."""
        return list(dict.fromkeys(self._holders.values()))

    def match(self, tokens: Sequence[int] | np.ndarray, namespace: str = "") -> Match:
        """See `PrefixIndex.match`."""
        # The last token is always computed: its logits are what the sequence goes on from.
        return self._match(token_bytes.cut(tokens[:-1], self.block_size), namespace, len(tokens))

    def _match(self, chunks: list[bytes], namespace: str, queried: int) -> Match:
        blocks, length, node = self._find(chunks, namespace)
        tail = length - (len(blocks) - 1) * self.block_size if blocks else 0
        return Match(tuple(blocks), length, tail, queried, namespace, 0 if node is None else node.created)

    def lock(self, match: Match, counted: bool = True) -> None:
        """See `PrefixIndex.lock`."""
        node = self._protect(match) if match.blocks else None
        if not counted:
            return
        if node is not None:
            self._clock += 1
            for each in path(node):
                each.used = self._clock
                each.uses += 1
        stats = self.stats.setdefault(match.namespace, Stats())
        stats.queried_tokens += match.queried
        stats.hit_tokens += match.length

    def unlock(self, match: Match, used: bool = True) -> None:
        """See `PrefixIndex.unlock`."""
        if match.blocks and match.stamp > self._forgotten:
            self._unprotect(match)
        if not used:
            stats = self.stats.setdefault(match.namespace, Stats())
            stats.queried_tokens -= match.queried
            stats.hit_tokens -= match.length

    def pin(self, tokens: Sequence[int] | np.ndarray, namespace: str = "") -> int:
        """See `PrefixIndex.pin`."""
        chunks = token_bytes.cut(tokens, self.block_size)
        match = self._match(chunks, namespace, len(tokens))
        if not match.blocks:
            raise KeyError(f"none of the {len(tokens)} tokens is held in namespace {namespace!r}; insert them before they are pinned")
        before = self._pins.get((namespace, b"".join(chunks)))
        self._protect(match)
        if before is not None:
            self._unprotect(before)
        self._pins[namespace, b"".join(chunks)] = match
        return match.length

    def unpin(self, tokens: Sequence[int] | np.ndarray, namespace: str = "") -> None:
        """See `PrefixIndex.unpin`."""
        match = self._pins.pop((namespace, b"".join(token_bytes.cut(tokens, self.block_size))), None)
        if match is None:
            raise KeyError(f"the {len(tokens)} tokens are not pinned in namespace {namespace!r}; {len(self._pins)} others are")
        self._unprotect(match)

    def _protect(self, match: Match) -> Node:
        node = self._holders.get(match.blocks[-1])
        # Leaves are evicted first, so a match whose last block is still held for the same tokens is held as a whole.
        if node is None or node.created != match.stamp:
            raise ValueError(f"the match of {match.length} tokens is stale: block {match.blocks[-1]} was let go since; match again")
        node = self._ending(node, len(match.blocks))
        for each in path(node):
            if each.locks == 0:
                self._evictable -= len(each.blocks)
                self._queue.discard(each)
            each.locks += 1
        return node

    def _unprotect(self, match: Match) -> None:
        node = self._holders.get(match.blocks[-1])
        if node is None or node.created != match.stamp or node.end != len(match.blocks) or node.locks == 0:
            raise ValueError(f"the match of {match.length} tokens in {len(match.blocks)} blocks is not locked")
        for each in path(node):
            each.locks -= 1
            if each.locks == 0:
                self._evictable += len(each.blocks)
                if each.children == 0:
                    self._queue.push(each)

    def insert(
        self, tokens: Sequence[int] | np.ndarray, blocks: Sequence[int] | np.ndarray, namespace: str = "", priority: int = 0
    ) -> list[int]:
        """See `PrefixIndex.insert`."""
        chunks, ids = token_bytes.cut(tokens, self.block_size), [int(block) for block in blocks]
        if len(ids) != len(chunks):
            raise ValueError(f"{len(tokens)} tokens are {len(chunks)} blocks of {self.block_size}, got {len(ids)} blocks")
        if len(set(ids)) != len(ids) or min(ids, default=1) < 1:
            raise ValueError(f"blocks must differ and be above the null block 0, got {ids}")
        self._clock += 1
        node, added = self._extend(chunks, ids, namespace)
        for each in path(node):
            each.used = self._clock
            each.priority = max(each.priority, priority)
            self._queue.refresh(each)
        return added

    def _refuse_held(self, blocks: list[int]) -> None:
        """Raises where a block that is to be taken is held for other tokens."""
        for block in blocks:
            if (node := self._holders.get(block)) is not None:
                raise ValueError(
                    f"block {block} is held for other tokens, as block {node.start + node.blocks.index(block)} of a sequence in namespace "
                    f"{node.namespace!r}; it cannot hold two prefixes, so evict the one before it is written anew"
                )

    def _link(self, node: Node) -> None:
        """Counts a new node."""
        if node.parent is not None:
            node.parent.children += 1
            self._queue.discard(node.parent)
        self._holders.update(dict.fromkeys(node.blocks, node))
        self._evictable += len(node.blocks)
        self._queue.push(node)

    def _tell_stored(self, namespace: str, parent: int, blocks: Sequence[int], chunks: Sequence[bytes]) -> None:
        if self._on_event is not None and blocks:
            self._on_event(Stored(namespace, parent, tuple(blocks), token_bytes.decode(chunks)))

    def evict(self, count: int) -> list[int]:
        """See `PrefixIndex.evict`."""
        if count < 0:
            raise ValueError(f"the number of blocks to evict must not be negative, got {count}")
        released: list[int] = []
        while len(released) < count and (node := self._queue.pop()) is not None:
            first = node.keys[0]
            taken = node.blocks[: -(count - len(released)) - 1 : -1]  # from the end
            del node.blocks[-len(taken) :], node.keys[-len(taken) :]
            for block in taken:
                del self._holders[block]
            released += taken
            self.stats.setdefault(node.namespace, Stats()).evicted_blocks += len(taken)
            if node.blocks:
                self._queue.push(node)
            else:
                self._unlink(node, first)
                parent = node.parent
                if parent is not None:
                    parent.children -= 1
                    if parent.children == 0 and parent.locks == 0:
                        self._queue.push(parent)
        self._evictable -= len(released)
        if released and self._on_event is not None:
            self._on_event(Removed(tuple(released)))
        return released

    def forget(self) -> list[int]:
        """See `PrefixIndex.forget`."""
        blocks = list(self._holders)
        self._clear()
        self._holders.clear()
        self._pins.clear()
        self._queue.clear()
        self._evictable = 0
        self._forgotten = self._clock
        if blocks and self._on_event is not None:
            self._on_event(Removed(tuple(blocks)))
        return blocks
