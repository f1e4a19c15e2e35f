"""The unit that an index holds: nodes are locked with all that lies before them, and evicted from the ends of sequences."""

import dataclasses
from collections.abc import Iterator

from jaxpage.prefix.eviction import Record

__all__ = ["Node", "path"]


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Node(Record):
    """A run of blocks that come, go and are locked together. Each block held is in one node.

    Attributes:
      namespace: that of the sequence.
      parent: the node before it; None where it begins a sequence.
      start: blocks before its first.
      keys: what identifies each block after those before it.
      blocks: the block ids, one a key.
      children: nodes whose parent it is.
      locks: locks and pins that end in it or below it.
    """

    namespace: str
    parent: "Node | None"
    start: int
    keys: list[bytes]
    blocks: list[int]
    children: int = 0
    locks: int = 0

    @property
    def end(self) -> int:
        """Blocks up to its last."""
        return self.start + len(self.blocks)


def path(node: Node | None) -> Iterator[Node]:
    """A node and those before it, the last first."""
    while node is not None:
        yield node
        node = node.parent
