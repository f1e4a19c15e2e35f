"""Counts everything in an index anew, and says what does not add up."""

import collections

from jaxpage.prefix.tree import PrefixTree

__all__ = ["check_index"]


def check_index(index: PrefixTree) -> None:
    """Checks the counts of an index against its nodes; for tests and debugging.

    Raises:
      ValueError: says which count is wrong.
    """

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"broken index: {message}")

    nodes = index.nodes()
    alive = set(nodes)
    named = collections.Counter(block for node in nodes for block in node.blocks)
    require(named == collections.Counter(index.blocks), "the blocks of the nodes are not those held, each once")
    children = collections.Counter(node.parent for node in nodes if node.parent is not None)
    below: collections.Counter = collections.Counter()
    for node in nodes:
        where = f"the node of blocks {node.blocks}"
        require(len(node.keys) == len(node.blocks) > 0, f"{where} has {len(node.keys)} keys")
        require(node.children == children[node], f"{where} counts {node.children} children, not {children[node]}")
        require(node.parent is None or node.parent.end == node.start, f"{where} does not follow its parent")
        require(node.start == 0 or node.parent is not None, f"{where} starts at block {node.start} of nothing")
        if node.parent is not None:
            require(node.parent in alive, f"{where} has a parent that was let go")
            below[node.parent] += node.locks
    for node in nodes:
        require(0 <= below[node] <= node.locks, f"the node of blocks {node.blocks} has {node.locks} locks, those after it {below[node]}")
    evictable = sum(len(node.blocks) for node in nodes if node.locks == 0)
    require(index.evictable == evictable, f"{index.evictable} blocks count as evictable, {evictable} are")
    require(index.evictable + index.protected == index.total, f"{index.evictable} + {index.protected} are not {index.total}")
