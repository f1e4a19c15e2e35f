"""A radix tree over token ids: prefixes are matched to the token, and what is left of them within a block is reported."""

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxpage.prefix import tokens as token_bytes
from jaxpage.prefix.eviction import Policy
from jaxpage.prefix.index import Event
from jaxpage.prefix.node import Node
from jaxpage.prefix.render import render_tree
from jaxpage.prefix.tree import Found, PrefixTree

__all__ = ["RadixIndex"]


class _Siblings:
    """The nodes after one place, by the token ids of their first block."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self._sorted: list[bytes] = []

    def add(self, node: Node) -> None:
        """Adds one whose first block none has."""
        bisect.insort(self._sorted, node.keys[0])
        self.nodes[node.keys[0]] = node

    def remove(self, key: bytes) -> None:
        """Takes one out."""
        del self._sorted[bisect.bisect_left(self._sorted, key)]
        del self.nodes[key]

    def nearest(self, chunk: bytes) -> tuple[Node | None, int]:
        """The one whose first block has the most tokens in common with `chunk`, and how many; None where there is none at all."""
        place = bisect.bisect_left(self._sorted, chunk)
        # In the order of their bytes, what has most in common with a string is next to where it would stand.
        near = [(token_bytes.common(key, chunk), key) for key in self._sorted[max(0, place - 1) : place + 1]]
        most, key = max(near, default=(0, b""))
        return (self.nodes[key], most) if most else (None, 0)


class _Walk(NamedTuple):
    node: Node | None  # where the walk ended
    held: list[int]  # blocks whose token ids are all equal
    near: Node | None  # has the block after those that has most in common with what is left
    common: int  # how many tokens that is


class RadixIndex(PrefixTree):
    """A `PrefixIndex` that matches token by token, and keeps partial last blocks too.

    Nodes split between blocks, so that each block is in one node and is counted once. Sequences that part within a block have blocks of
    their own from there on: siblings whose first tokens are equal.
    """

    def __init__(self, block_size: int, policy: str | Policy = "lru", on_event: Callable[[Event], None] | None = None):
        super().__init__(block_size, policy, on_event)
        self._children: dict[Node | str, _Siblings] = {}  # by the node before them, or by namespace

    def render(self, show: Callable[[Sequence[int]], str] = lambda tokens: " ".join(map(str, tokens))) -> str:
        """The tree as text. `show` turns token ids into what is shown of them, such as a tokenizer's `decode`."""
        return render_tree(self.nodes(), show)

    def _walk(self, chunks: list[bytes], namespace: str) -> _Walk:
        held: list[int] = []
        node: Node | None = None
        while len(held) < len(chunks):
            siblings = self._children.get(namespace if node is None else node)
            if siblings is None:
                break
            child = siblings.nodes.get(chunks[len(held)])
            if child is None:
                return _Walk(node, held, *siblings.nearest(chunks[len(held)]))
            node = child
            for key, block in zip(child.keys, child.blocks, strict=True):
                if len(held) == len(chunks):
                    break
                if key != chunks[len(held)]:
                    same = token_bytes.common(key, chunks[len(held)])
                    return _Walk(node, held, node if same else None, same)
                held.append(block)
        return _Walk(node, held, None, 0)

    def _find(self, chunks: list[bytes], namespace: str) -> Found:
        node, held, near, same = self._walk(chunks, namespace)
        length = sum(map(token_bytes.count, chunks[: len(held)])) + same
        if near is None:
            return Found(held, length, node)
        return Found([*held, near.blocks[len(held) - near.start]], length, near)

    def _extend(self, chunks: list[bytes], blocks: list[int], namespace: str) -> tuple[Node | None, list[int]]:
        walk = self._walk(chunks, namespace)
        node, place = walk.node, len(walk.held)
        parent = walk.held[-1] if walk.held else 0
        held, grown = place, False
        if place < len(chunks):
            own = self._own(blocks[place], walk, namespace)
            if own is not None and chunks[place].startswith(own.keys[-1]):
                node, held, grown = own, place + 1, True
            elif walk.common == token_bytes.count(chunks[place]):  # another block's tokens begin with these
                node, held = walk.near, place + 1
        added = blocks[held:]
        self._refuse_held(added)

        if node is not None:
            if grown:
                self._grow(node, chunks[place])
            node = self._ending(node, held)
        if added:
            node = Node(
                created=self._clock,
                used=self._clock,
                namespace=namespace,
                parent=node,
                start=held,
                keys=chunks[held:],
                blocks=added.copy(),
            )
            self._add(node)
            self._link(node)
        # Nothing is added after a block that was held already but for the walk's own, so that is what the first of these follows.
        first = place if grown else held
        self._tell_stored(namespace, parent, blocks[first:], chunks[first:])
        return node, added

    def _own(self, block: int, walk: _Walk, namespace: str) -> Node | None:
        """The node that ends with the caller's own block at the place where the walk ended: a partial block, written on since."""
        node, place = self._holders.get(block), len(walk.held)
        if node is None or node.namespace != namespace or node.end != place + 1 or node.blocks[-1] != block:
            return None
        above = node if node.start < place else node.parent
        return node if above is walk.node else None

    def _grow(self, node: Node, key: bytes) -> None:
        """A node's last block, which was partial, has more tokens."""
        if len(node.keys) > 1:
            node.keys[-1] = key
            return
        self._unlink(node, node.keys[0])
        node.keys[-1] = key
        self._add(node)

    def _ending(self, node: Node, end: int) -> Node:
        if end == node.end:
            return node
        count = end - node.start
        before = Node(
            created=node.created,
            used=node.used,
            uses=node.uses,
            priority=node.priority,
            namespace=node.namespace,
            parent=node.parent,
            start=node.start,
            keys=node.keys[:count],
            blocks=node.blocks[:count],
            children=1,
            locks=node.locks,
        )
        self._unlink(node, node.keys[0])
        self._add(before)
        node.parent, node.start = before, end
        del node.keys[:count], node.blocks[:count]
        self._add(node)
        self._holders.update(dict.fromkeys(before.blocks, before))
        return before

    def _add(self, node: Node) -> None:
        self._children.setdefault(node.namespace if node.parent is None else node.parent, _Siblings()).add(node)

    def _unlink(self, node: Node, key: bytes) -> None:
        place = node.namespace if node.parent is None else node.parent
        siblings = self._children[place]
        siblings.remove(key)
        if not siblings.nodes:
            del self._children[place]

    def _clear(self) -> None:
        self._children.clear()
