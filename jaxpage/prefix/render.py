"""A radix tree as text: one line a node, with its blocks and its tokens."""

import collections
from collections.abc import Callable, Iterable, Sequence

from jaxpage.prefix import tokens as token_bytes
from jaxpage.prefix.node import Node

__all__ = ["render_tree"]

_LONGEST = 60  # characters of a node's tokens


def render_tree(nodes: Iterable[Node], show: Callable[[Sequence[int]], str]) -> str:
    """Draws nodes that hold token ids.

    Args:
      nodes: all of them.
      show: token ids -> text.
    """
    children: dict[Node | str, list[Node]] = collections.defaultdict(list)
    for node in sorted(nodes, key=lambda node: node.blocks[0]):
        children[node.namespace if node.parent is None else node.parent].append(node)
    lines = []
    for namespace in sorted(place for place in children if isinstance(place, str)):
        lines.append(f"namespace {namespace!r}")
        lines += _branches(children, namespace, show)
    return "\n".join(lines)


def _branches(children: dict[Node | str, list[Node]], place: Node | str, show: Callable[[Sequence[int]], str]) -> list[str]:
    lines, below = [], children.get(place, [])
    for node in below:
        last = node is below[-1]
        lines.append(("└─ " if last else "├─ ") + _line(node, show))
        lines += [("   " if last else "│  ") + line for line in _branches(children, node, show)]
    return lines


def _line(node: Node, show: Callable[[Sequence[int]], str]) -> str:
    tokens = token_bytes.decode(node.keys)
    text = show(tokens)
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    plural = "s" * (len(node.blocks) > 1)
    locked = f", locked {node.locks} times" if node.locks > 1 else ", locked" if node.locks else ""
    return f"block{plural} {_ranges(node.blocks)}, {len(tokens)} token{'s' * (len(tokens) > 1)}{locked}: {text}"


def _ranges(blocks: Sequence[int]) -> str:
    """Runs of consecutive ids as first-last."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
