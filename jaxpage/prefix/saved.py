"""The state of a prefix index as plain data, to be kept on disk, and the way back."""

import dataclasses
from typing import Any

from jaxpage.prefix.hash_index import HashIndex
from jaxpage.prefix.index import Match, Stats
from jaxpage.prefix.node import Node
from jaxpage.prefix.radix_index import RadixIndex
from jaxpage.prefix.tree import PrefixTree

__all__ = ["index_state", "load_match", "load_state", "match_state"]

_KINDS: dict[type[PrefixTree], str] = {RadixIndex: "radix", HashIndex: "hash"}


def index_state(index: PrefixTree) -> dict[str, Any]:
    """All that an index knows, in the types of JSON: what it holds, the order of eviction, locks, pins and counts.

    The hash index's secret is in it, for without that its hashes say nothing. Policy and listener are not.

    Raises:
      ValueError: the index is of a class of one's own.
    """
    nodes = index.nodes()
    places: dict[Node | None, int | None] = {node: place for place, node in enumerate(nodes)} | {None: None}
    return {
        "kind": _kind(index),
        "block_size": index.block_size,
        "clock": index._clock,
        "forgotten": index._forgotten,
        "stats": {namespace: dataclasses.asdict(stats) for namespace, stats in index.stats.items()},
        "secret": index._secret.hex() if isinstance(index, HashIndex) else None,
        "nodes": [_node_state(node) | {"parent": places[node.parent]} for node in nodes],
        "candidates": [places[node] for node in index._queue.items()],
        "holders": [[block, places[node]] for block, node in index._holders.items()],
        "pins": [[namespace, tokens.hex(), match_state(match)] for (namespace, tokens), match in index._pins.items()],
    }


def load_state(index: PrefixTree, state: dict[str, Any]) -> None:
    """Makes an empty index what another was when `index_state` looked at it.

    Args:
      index: of the same kind and block size, and with the same policy. Its listener is told nothing.
      state: from `index_state`.

    Raises:
      ValueError: the index holds something, or is of another kind or block size.
    """
    if index.total:
        raise ValueError(f"only an empty index can take a saved state, this one holds {index.total} blocks")
    given, saved = (_kind(index), index.block_size), (state["kind"], state["block_size"])
    if given != saved:
        raise ValueError(f"the saved index is {saved[0]!r} with blocks of {saved[1]} tokens, this one is {given[0]!r} with {given[1]}")
    index._clock, index._forgotten = state["clock"], state["forgotten"]
    index.stats.clear()
    index.stats.update({namespace: Stats(**stats) for namespace, stats in state["stats"].items()})
    if isinstance(index, HashIndex):
        index._secret = bytes.fromhex(state["secret"])
    nodes = [Node(**{**each, "keys": [bytes.fromhex(key) for key in each["keys"]], "parent": None}) for each in state["nodes"]]
    for node, each in zip(nodes, state["nodes"], strict=True):
        node.parent = None if each["parent"] is None else nodes[each["parent"]]
        index._add(node)
    index._holders.update({block: nodes[place] for block, place in state["holders"]})
    index._pins.update({(namespace, bytes.fromhex(tokens)): load_match(match) for namespace, tokens, match in state["pins"]})
    index._evictable = sum(len(node.blocks) for node in nodes if node.locks == 0)
    for place in state["candidates"]:
        index._queue.push(nodes[place])


def match_state(match: Match) -> list[Any]:
    """A match in the types of JSON."""
    return list(match)


def load_match(state: list[Any]) -> Match:
    """The match of such a state."""
    blocks, *rest = state
    return Match(tuple(blocks), *rest)


def _node_state(node: Node) -> dict[str, Any]:
    plain = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return plain | {"keys": [key.hex() for key in node.keys], "blocks": list(node.blocks)}


def _kind(index: PrefixTree) -> str:
    if type(index) not in _KINDS:
        raise ValueError(f"an index of class {type(index).__name__} cannot be saved or restored; those of {', '.join(_KINDS.values())} can")
    return _KINDS[type(index)]
