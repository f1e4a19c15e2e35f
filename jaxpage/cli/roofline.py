"""The roofline picture of `jaxpage kernels`: the rate that each kernel can reach against its FLOPs a byte, under the roofs of each TPU."""

import math
import pathlib
from collections.abc import Sequence

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
    ridge = target.flops / target.hbm
    intensities = [row.intensity for row in rows if row.intensity]
    low, high = min(intensities) / 2, max(ridge, *intensities) * 8
    roof = [low, ridge, high]
    ax.plot(roof, [min(target.flops, target.hbm * x) / 1e12 for x in roof], color="black", linewidth=1.2)
    ax.annotate(f"HBM {target.hbm / 1e9:.0f} GB/s", (ridge / 4, target.hbm * ridge / 4 / 1e12), (-6, 6), **_TEXT, ha="right")
    ax.annotate(f"bfloat16 {target.flops / 1e12:.0f} TFLOP/s", (ridge * 1.2, target.flops / 1e12), (0, 5), **_TEXT)
    for kernel, (color, marker) in zip(kernels, _STYLES, strict=False):
        points = sorted((row.intensity, row.flops_per_second / 1e12) for row in rows if row.kernel == kernel)
        if points:
            ax.plot(*zip(*points, strict=True), marker=marker, color=color, linestyle=":", linewidth=0.8, markersize=5)
            ax.annotate(kernel, points[-1], (8, -3), **_TEXT, color=color)
    for shape in dict.fromkeys(row.shape for row in rows):
        x = min(row.intensity for row in rows if row.shape == shape and row.intensity)
        ax.annotate(shape, (x, 0), (0, 4), xycoords=("data", "axes fraction"), rotation=90, ha="center", **{**_TEXT, "fontsize": 6})
    ax.set(xscale="log", yscale="log", title=f"{target.name}, one core at {target.clock / 1e9:.2f} GHz (assumed)")
    ax.set(xlabel="FLOPs for each byte from HBM", ylabel="TFLOP/s that the schedule allows")
    ax.grid(color="#dddddd", linewidth=0.5)


_TEXT = {"textcoords": "offset points", "fontsize": 8}
