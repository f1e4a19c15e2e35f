"""How all pictures look: readable in print, told apart by the colour-blind, and with their names beside the lines."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import LogLocator, NullFormatter
except ImportError as error:
    raise NotImplementedError("experiments draw with the package matplotlib: install jaxpage[experiments]") from error

__all__ = ["COLOURS", "bars", "grid", "label_ends", "lines", "log_heights", "log_ticks", "title"]

# Okabe and Ito's colours without the yellow one, which is too pale on paper; shapes for where there is no colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = "osD^vPX"
_SIZE = 8.0  # of text, in points


def grid(rows: int = 1, columns: int = 1, *, width: float = 5.0, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, each of a width and height in inches."""
    with matplotlib.rc_context({"font.size": _SIZE}):
        figure = Figure(figsize=(width * columns, height * rows), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#dddddd", linewidth=0.5)
        ax.set_axisbelow(True)
    return figure, axes


def lines(ax: Axes, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], **properties: Any) -> None:
    """Draws lines of (x, y) by name, sets properties of the axes, and writes each name beside its line's end."""
    ends = []
    for (name, (x, y)), colour, marker in zip(series.items(), itertools.cycle(COLOURS), itertools.cycle(_MARKERS), strict=False):
        ax.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.4)
        ends.append((name, colour, x[-1], y[-1]))
    ax.set(**properties)
    label_ends(ax, ends)


def label_ends(ax: Axes, ends: Sequence[tuple[str, str, float, float]]) -> None:
    """Writes (name, colour, x, y) at the right edge, each at the height of its y, moved apart where they would overlap."""
    to_axes = ax.transData + ax.transAxes.inverted()
    ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())  # what is drawn later must not move the lines away from their names
    ordered = sorted((float(to_axes.transform((x, y))[1]), name, colour) for name, colour, x, y in ends)
    height = ax.figure.get_figure(root=True).get_size_inches()[1] / ax.get_subplotspec().get_gridspec().nrows * 0.75 * 72  # type: ignore
    heights = _spread([place for place, _, _ in ordered], 1.25 * _SIZE / height)
    for (_, name, colour), place in zip(ordered, heights, strict=True):
        ax.text(1.02, place, name, color=colour, transform=ax.transAxes, va="center", fontsize=_SIZE)


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """Sorted values moved apart to at least a gap, and kept below 1 where there is room."""
    placed: list[float] = []
    for value in values:
        placed.append(max(value, placed[-1] + gap) if placed else value)
    ceiling = 1.0
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def bars(ax: Axes, names: Sequence[str], values: Sequence[float], texts: Sequence[str], colours: Sequence[str]) -> None:
    """Draws horizontal bars from the top down, with a text behind each."""
    places = range(len(names) - 1, -1, -1)
    ax.barh(places, values, color=list(colours), height=0.7)
    ax.set_yticks(list(places), names)
    ax.grid(visible=False, axis="y")
    for place, value, text in zip(places, values, texts, strict=True):
        ax.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=_SIZE)


def title(ax: Axes, text: str) -> None:
    """Writes what a panel shows above it."""
    ax.set_title(text, fontsize=_SIZE + 1)


def log_ticks(ax: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis with a tick at each value, in thousands from 1000 on."""
    ax.set_xscale("log", base=2)
    ticks = sorted(set(values))
    ax.set_xticks(ticks, [f"{tick / 1000:g}K" if tick >= 1000 else f"{tick:g}" for tick in ticks])
    ax.set_xticks([], minor=True)


def log_heights(ax: Axes) -> None:
    """A logarithmic y axis with numbers at 1, 2, 5, 10 and so on."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
