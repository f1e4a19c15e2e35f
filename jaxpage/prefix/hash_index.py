"""A chain of hashes over full blocks: one look-up a block, whatever else is held."""

import hashlib
import secrets
from collections.abc import Callable

from jaxpage.prefix import tokens as token_bytes
from jaxpage.prefix.eviction import Policy
from jaxpage.prefix.index import Event
from jaxpage.prefix.node import Node
from jaxpage.prefix.tree import Found, PrefixTree

__all__ = ["HashIndex"]

_DIGEST = 16  # bytes: keys of 128 bits
_LONGEST_KEY = hashlib.blake2b.MAX_KEY_SIZE


class HashIndex(PrefixTree):
    """A `PrefixIndex` that matches full blocks.

    A block's key is a keyed hash of the key before it and of its token ids; the namespace is where the chain begins. So a key says all
    tokens from the first on, and who does not know the index's secret cannot make two prefixes meet.

    Args:
      block_size: tokens a block holds.
      policy: a name in `POLICIES`, or a function of a `Record`.
      on_event: is told what the index holds and lets go.
      secret: key of the hash, of 16 to 64 bytes; None: a random one.

    Raises:
      ValueError: block size, policy or secret are not allowed.
    """

    def __init__(
        self,
        block_size: int,
        policy: str | Policy = "lru",
        on_event: Callable[[Event], None] | None = None,
        secret: bytes | None = None,
    ):
        super().__init__(block_size, policy, on_event)
        self._secret = secrets.token_bytes(_LONGEST_KEY) if secret is None else secret
        if not _DIGEST <= len(self._secret) <= _LONGEST_KEY:
            raise ValueError(f"secret must have {_DIGEST} to {_LONGEST_KEY} bytes, got {len(self._secret)}")
        self._nodes: dict[bytes, Node] = {}

    def _hash(self, data: bytes, purpose: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_DIGEST, key=self._secret, person=purpose).digest()

    def _walk(self, chunks: list[bytes], namespace: str) -> tuple[list[Node], bytes]:
        """The nodes of the full blocks that are held, and the key of the first that is not, or of the last that is."""
        key = self._hash(namespace.encode(), b"namespace")
        nodes: list[Node] = []
        for chunk in chunks:
            if token_bytes.count(chunk) < self.block_size:
                break
            key = self._hash(key + chunk, b"block")
            node = self._nodes.get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes, key

    def _find(self, chunks: list[bytes], namespace: str) -> Found:
        nodes, _ = self._walk(chunks, namespace)
        return Found([node.blocks[0] for node in nodes], len(nodes) * self.block_size, nodes[-1] if nodes else None)

    def _extend(self, chunks: list[bytes], blocks: list[int], namespace: str) -> tuple[Node | None, list[int]]:
        nodes, key = self._walk(chunks, namespace)
        held = [node.blocks[0] for node in nodes]
        full = len(chunks) - (bool(chunks) and token_bytes.count(chunks[-1]) < self.block_size)
        added = blocks[len(nodes) : full]
        self._refuse_held(added)
        node = nodes[-1] if nodes else None
        for place in range(len(nodes), full):
            if place > len(nodes):
                key = self._hash(key + chunks[place], b"block")
            node = Node(
                created=self._clock,
                used=self._clock,
                namespace=namespace,
                parent=node,
                start=place,
                keys=[key],
                blocks=[blocks[place]],
            )
            self._add(node)
            self._link(node)
        self._tell_stored(namespace, held[-1] if held else 0, added, chunks[len(nodes) : full])
        return node, added

    def _add(self, node: Node) -> None:
        self._nodes[node.keys[0]] = node

    def _unlink(self, node: Node, key: bytes) -> None:
        del self._nodes[key]

    def _clear(self) -> None:
        self._nodes.clear()
