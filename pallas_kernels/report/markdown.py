"""The report as Markdown."""

import importlib.metadata
from collections.abc import Callable, Iterable, Sequence

from pallas_kernels.report.row import Row
from pallas_kernels.targets import TARGETS

__all__ = ["markdown"]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "kernel": lambda row: row.kernel,
    "target": lambda row: row.target,
    "shape": lambda row: row.shape,
    "block": lambda row: str(row.block_size),
    "KV": lambda row: row.kv_dtype,
    "VMEM, MiB": lambda row: _number(row.vmem_bytes and row.vmem_bytes / 2**20, ".1f"),
    "SMEM, KiB": lambda row: _number(row.smem_bytes and row.smem_bytes / 2**10, ".1f"),
    "temp, MiB": lambda row: _number(row.temp_bytes if row.temp_bytes is None else row.temp_bytes / 2**20, ".1f"),
    "compute": lambda row: _number(row.compute_bundles, "d"),
    "MXU": lambda row: _number(row.mxu_cycles, "d"),
    "copy start": lambda row: _number(row.dma_issue_bundles, "d"),
    "other": lambda row: _number(row.bookkeeping_bundles, "d"),
    "tokens": lambda row: _number(row.chunk_tokens, "g"),
    "cycles/token": lambda row: _number(row.cycles_per_token, ".2f"),
    "HBM cycles/token": lambda row: _number(row.dma_cycles_per_token, ".2f"),
    "bound": lambda row: row.bound or "",
    "HBM share": lambda row: _number(row.predicted_bandwidth_share, ".0%"),
    "MXU share": lambda row: _number(row.mxu_share, ".1%"),
    "spills": lambda row: _number(row.spill_slots, "d"),
}

_LEGEND = """\
Static cost of the inner loop, counted in the compiler's schedule; nothing was run. A bundle is a cycle where nothing stalls.

- compute, copy start, other: bundles for one chunk of so many tokens. MXU: the cycles that its matrix products take at the data sheet's
  rate, which the compiler's schedule may fall short of.
- cycles/token: compute (or MXU, if more) and copy start. HBM cycles/token: what the bytes of a token take at the data sheet's bandwidth.
- HBM share: the share of that bandwidth that the kernel can reach. MXU share: the same of the data sheet's FLOP/s; a head dimension of
  128 fills half of an MXU of v6e and tpu7x, which then reach 50 % at most.
"""


def markdown(rows: Iterable[Row]) -> str:
    """The compiler's versions, the assumed rates of the targets, the table of what compiled, and a list of what did not."""
    rows = list(rows)
    names = [name for name in TARGETS if any(row.target == name for row in rows)]
    rates = [
        f"- {target.name} ({target.topology}), one core: clock {target.clock / 1e9:.2f} GHz (assumed), HBM {target.hbm / 1e9:.0f} GB/s, "
        f"bfloat16 {target.flops / 1e12:.1f} TFLOP/s, {target.mxu_flops} FLOPs a cycle"
        for target in map(TARGETS.__getitem__, names)
    ]
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "libtpu"))
    parts = [
        "# Kernels in the TPU compiler's schedule",
        _LEGEND,
        f"Compiled with {versions}. The rates assumed:",
        "\n".join(rates),
        _table([row for row in rows if row.compiled]),
    ]
    refused = [
        f"- {row.kernel}, {row.target}, {row.shape}, block {row.block_size}, {row.kv_dtype}: {row.reason}" for row in rows if row.reason
    ]
    if refused:
        parts += ["Not measured:", "\n".join(refused)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    lines = [list(_COLUMNS), ["---"] * len(_COLUMNS), *([cell(row) for cell in _COLUMNS.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
