"""Three greetings in a radix tree, and its picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import plot
from jaxpage.prefix import RadixIndex

__all__ = ["GREETINGS", "draw_tree", "greeting_tree"]

GREETINGS = ("Hello, how are you?", "Hello, how can I help?", "Hi there!")


def greeting_tree(greetings: Sequence[str] = GREETINGS) -> list[dict[str, Any]]:
    """The nodes of a radix tree that holds the greetings, one character a token and a block.

    Returns:
      For each node its text, how many characters come before it, and the place of its parent in the list; parents come first.
    """
    index = RadixIndex(block_size=1)
    used = 0
    for greeting in greetings:
        index.insert(np.frombuffer(greeting.encode("utf-32-le"), "<u4"), range(used + 1, used + 1 + len(greeting)))
        used += len(greeting)
    nodes = sorted(index.nodes(), key=lambda node: (node.start, node.blocks))
    places = {node: place for place, node in enumerate(nodes)}
    return [
        {
            "text": b"".join(node.keys).decode("utf-32-le"),
            "start": node.start,
            "parent": None if node.parent is None else places[node.parent],
        }
        for node in nodes
    ]


def draw_tree(nodes: Sequence[dict[str, Any]]) -> Any:
    """Boxes from left to right, each with its text; a space shows as an open box."""
    children: dict[int | None, list[int]] = {}
    for place, node in enumerate(nodes):
        children.setdefault(node["parent"], []).append(place)
    depths: dict[int, int] = {}
    heights: dict[int, float] = {}

    def arrange(at: int, depth: int) -> float:
        depths[at] = depth
        below = [arrange(child, depth + 1) for child in children.get(at, [])]
        heights[at] = sum(below) / len(below) if below else float(sum(other not in children for other in heights))
        return heights[at]

    for root in children[None]:
        arrange(root, 1)
    figure, (ax,) = plot.grid(width=6.4, height=0.5 + 0.55 * sum(at not in children for at in heights))
    middle = sum(heights[root] for root in children[None]) / len(children[None])
    style = {"boxstyle": "round", "facecolor": "white", "edgecolor": plot.COLOURS[0]}
    ax.text(0, middle, "root", ha="center", va="center", fontsize=8, bbox={**style, "edgecolor": "#555555"}, zorder=2)
    for at, node in enumerate(nodes):
        parent = (0.0, middle) if node["parent"] is None else (depths[node["parent"]], heights[node["parent"]])
        x, y = depths[at], heights[at]
        ax.plot([parent[0], x], [parent[1], y], color="#555555", linewidth=1, zorder=1)
        text = node["text"].replace(" ", "␣")
        ax.text(x, y, text, ha="center", va="center", fontsize=9, family="monospace", bbox=style, zorder=2)
    ax.set(xlim=(-0.3, max(depths.values()) + 0.6), ylim=(max(heights.values()) + 0.5, min(heights.values()) - 0.5))
    ax.set_axis_off()
    return figure
