"""The report as Markdown: a section for each platform."""

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pallas_kernels.report.row import Row
from pallas_kernels.targets import TARGETS, Target

__all__ = ["markdown"]


def _number(value: float | None, form: str, unit: float = 1) -> str:
    return "" if value is None else format(value / unit, form)


def _nanoseconds(row: Row, cycles: float | None) -> str:
    return _number(cycles, ".3f", TARGETS[row.target].clock / 1e9)


_CASE: dict[str, Callable[[Row], str]] = {
    "kernel": lambda row: row.kernel,
    "target": lambda row: row.target,
    "shape": lambda row: row.shape,
    "block": lambda row: str(row.block_size),
    "KV": lambda row: row.kv_dtype,
}
_TPU_COLUMNS = _CASE | {
    "VMEM, MiB": lambda row: _number(row.vmem_bytes, ".1f", 2**20),
    "SMEM, KiB": lambda row: _number(row.smem_bytes, ".1f", 2**10),
    "temp, MiB": lambda row: _number(row.temp_bytes, ".1f", 2**20),
    "compute": lambda row: _number(row.compute_bundles, ".0f"),
    "MXU": lambda row: _number(row.mxu_cycles, ".0f"),
    "copy start": lambda row: _number(row.dma_issue_bundles, ".0f"),
    "other": lambda row: _number(row.bookkeeping_bundles, ".0f"),
    "tokens": lambda row: _number(row.chunk_tokens, "g"),
    "cycles/token": lambda row: _number(row.cycles_per_token, ".2f"),
    "HBM cycles/token": lambda row: _number(row.dma_cycles_per_token, ".2f"),
    "bound": lambda row: row.bound or "",
    "HBM share": lambda row: _number(row.predicted_bandwidth_share, ".0%"),
    "MXU share": lambda row: _number(row.mxu_share, ".1%"),
    "spills": lambda row: _number(row.spill_slots, ".0f"),
}
_GPU_COLUMNS = _CASE | {
    "registers": lambda row: _number(row.registers, ".0f"),
    "spills, B": lambda row: _number(row.spill_bytes, ".0f"),
    "shared, KiB": lambda row: _number(row.shared_bytes, ".1f", 2**10),
    "occupancy": lambda row: _number(row.occupancy, ".0%"),
    "temp, MiB": lambda row: _number(row.temp_bytes, ".1f", 2**20),
    "B/token": lambda row: _number(row.bytes_per_token, ".0f"),
    "FLOPs/token": lambda row: _number(row.flops_per_token, ".0f"),
    "HBM ns/token": lambda row: _nanoseconds(row, row.dma_cycles_per_token),
    "compute ns/token": lambda row: _nanoseconds(row, row.cycles_per_token) if row.flops_per_token else "",
    "bound": lambda row: row.bound or "",
}

_TPU_LEGEND = """\
Static cost of the inner loop, counted in the compiler's schedule; nothing was run. A bundle is a cycle where nothing stalls.

- compute, copy start, other: bundles for one chunk of so many tokens. MXU: the cycles that its matrix products take at the data sheet's
  rate, which the compiler's schedule may fall short of.
- cycles/token: compute (or MXU, if more) and copy start. HBM cycles/token: what the bytes of a token take at the data sheet's bandwidth.
- HBM share: the share of that bandwidth that the kernel can reach. MXU share: the same of the data sheet's FLOP/s; a head dimension of
  128 fills half of an MXU of v6e and tpu7x, which then reach 50 % at most.
"""
_GPU_LEGEND = """\
**Nothing here has run on a device.** The kernels were compiled for GPUs that were not there; what they take of a multiprocessor is what
ptxas says, and the times are arithmetic with the data sheets' rates, not measurements.

- registers: of a thread. spills: bytes that a thread stores and loads for want of registers. shared: memory of one program. occupancy:
  the share of a multiprocessor's threads that programs fill at once, by these three. A row without them is XLA's own, with no kernel.
- temp: memory that the call needs besides its arguments and results. A write that copied the pool would show here.
- B/token: bytes that are copied for one token of context, padding and scales included; for kv_write, that are stored. FLOPs/token: of
  attention by the queries that a copied token meets, without padding. A prefill copies a token again for each tile of 64 rows of query
  heads; what the L2 cache has of it does not come from HBM, which this does not count.
- HBM ns/token, compute ns/token: nanoseconds in which the whole chip moves those bytes, and multiplies (padding included), at the data
  sheet's rates. bound: the longer of the two. The rate of products is that of the newest instructions of a generation (wgmma, tcgen05);
  older ones that run on all of them reach less, and exponentials and softmax come on top.
"""


class _Section(NamedTuple):
    title: str
    legend: str
    columns: Mapping[str, Callable[[Row], str]]


_SECTIONS = {
    "tpu": _Section("# Kernels in the TPU compiler's schedule", _TPU_LEGEND, _TPU_COLUMNS),
    "gpu": _Section("# Kernels compiled for GPUs", _GPU_LEGEND, _GPU_COLUMNS),
}


def markdown(rows: Iterable[Row]) -> str:
    """For each platform: the compiler's versions, the assumed rates of the targets, the table of what compiled, and what did not."""
    rows = list(rows)
    sections = {platform: [row for row in rows if TARGETS[row.target].platform == platform] for platform in _SECTIONS}
    return "\n".join(_section(_SECTIONS[platform], some) for platform, some in sections.items() if some)


def _section(section: _Section, rows: Sequence[Row]) -> str:
    targets = [target for name, target in TARGETS.items() if any(row.target == name for row in rows)]
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", *targets[0].packages))
    parts = [
        section.title,
        section.legend,
        f"Compiled with {versions}. The rates assumed:",
        "\n".join(map(_rates, targets)),
        _table(section.columns, [row for row in rows if row.compiled]),
    ]
    if refused := _refused(rows):
        parts += ["Not measured:", refused]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _rates(target: Target) -> str:
    return (
        f"- {target.description}: HBM {target.hbm / 1e9:.0f} GB/s, bfloat16 {target.flops / 1e12:.1f} TFLOP/s, "
        f"{target.matrix_flops} FLOPs a cycle"
    )


def _table(columns: Mapping[str, Callable[[Row], str]], rows: Sequence[Row]) -> str:
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _refused(rows: Sequence[Row]) -> str:
    """What was not measured and why, the targets with the same reason together."""
    targets: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            case = f"- {row.kernel}, {row.shape}, block {row.block_size}, {row.kv_dtype}: {row.reason}"
            targets.setdefault(case, []).append(row.target)
    return "\n".join(f"{case} ({', '.join(names)})" for case, names in targets.items())
