"""The roofline picture of `jaxpage kernels`: the rate that each kernel can reach against its FLOPs a byte, under its target's roofs."""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

try:
    import matplotlib
except ImportError as error:
    raise NotImplementedError("drawing needs the package matplotlib: install jaxpage[aot]") from error

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from pallas_kernels.report import Row
from pallas_kernels.targets import TARGETS, Target

__all__ = ["check_path", "draw"]

# Okabe and Ito's colours, which the colour-blind can tell apart, and shapes for where there is no colour.
_STYLES = (("#0072B2", "o"), ("#009E73", "s"), ("#D55E00", "^"), ("#CC79A7", "D"))
_COLUMNS = 2
_RATE = {"tpu": "FLOP/s that the schedule allows", "gpu": "FLOP/s that the data sheet allows"}


def check_path(path: pathlib.Path) -> None:
    """Fails before the work where the picture could not be written after it.

    Raises:
      ValueError: matplotlib knows no such format.
      OSError: there is no such folder.
    """
    known = sorted(pyplot.figure().canvas.get_supported_filetypes())
    pyplot.close()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"cannot draw to {path}; known formats are: {', '.join(known)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to draw to")


def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws one panel a target, with the attention kernels at their usual block size and dtype.

    Raises:
      ValueError: no row has a rate to draw.
    """
    rows = [row for row in rows if row.flops_per_second and row.block_size == 16 and row.kv_dtype == "bfloat16"]
    if not rows:
        raise ValueError("no attention kernel with blocks of 16 and bfloat16 was measured, so there is nothing to draw")
    targets = [target for name, target in TARGETS.items() if any(row.target == name for row in rows)]
    kernels = list(dict.fromkeys(row.kernel for row in rows))
    columns = min(_COLUMNS, len(targets))
    height = math.ceil(len(targets) / columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(5.6 * columns, 4.2 * height), squeeze=False, layout="constrained")
    for ax in axes.flat[len(targets) :]:
        ax.set_visible(False)
    for ax, target in zip(axes.flat, targets, strict=False):
        _panel(ax, target, [row for row in rows if row.target == target.name], kernels)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def _panel(ax: Axes, target: Target, rows: list[Row], kernels: list[str]) -> None:
    points = [(row.kernel, row.shape, row.intensity, row.flops_per_second) for row in rows if row.intensity and row.flops_per_second]
    ridge = target.flops / target.hbm
    left, right = min(x for _, _, x, _ in points) / 2, max(ridge, *(x for _, _, x, _ in points)) * 40
    bottom, top = min(target.hbm * left, *(y for _, _, _, y in points)) / 8, target.flops * 3  # with room for names
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    ax.set(xlabel="FLOPs for each byte from HBM", ylabel=_RATE[target.platform])
    ax.set(title=target.description)
    ax.grid(color="#dddddd", linewidth=0.5)
    roof = [left, ridge, right]
    ax.plot(roof, [min(target.flops, target.hbm * x) for x in roof], color="black", linewidth=1.2)
    ax.annotate(f"HBM {target.hbm / 1e9:.0f} GB/s", (ridge / 4, target.hbm * ridge / 4), (-6, 6), ha="right", **_TEXT)
    ax.annotate(f"bfloat16 {target.flops / 1e12:.0f} TFLOP/s", (ridge, target.flops), (0, 5), **_TEXT)

    styles = dict(zip(kernels, itertools.cycle(_STYLES), strict=False))
    ends: list[tuple[float, float, str]] = []
    for kernel in dict.fromkeys(kernel for kernel, *_ in points):
        series = sorted((x, y) for name, _, x, y in points if name == kernel)
        color, marker = styles[kernel]
        ax.plot(*zip(*series, strict=True), color=color, marker=marker, markersize=5, linestyle="")
        x, y = series[-1]
        ends.append((y, x, kernel))
    height = 0.0
    for y, x, kernel in sorted(ends):
        height = max(y, height * (top / bottom) ** _LINE)  # names of points that lie close are moved apart
        ax.annotate(kernel, (x, height), (8, -3), color=styles[kernel][0], **_TEXT)
    for x in dict.fromkeys(x for _, _, x, _ in points):
        shapes = list(dict.fromkeys(shape for _, shape, at, _ in points if at == x))
        names = ", ".join(shapes) if len(shapes) <= _NAMED else f"{len(shapes)} models"
        ax.annotate(names, (x, bottom), (0, 4), rotation=90, ha="center", **{**_TEXT, "fontsize": 6})


_NAMED = 2  # more names at one place would run into the points
_LINE = 0.045  # a line of text, as a share of a panel's height
_TEXT: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}
