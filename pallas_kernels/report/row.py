"""One row of the report: what the compiler says of a kernel, and what follows from it."""

import dataclasses
from typing import Any

from pallas_kernels.report.cases import SHAPES, Case
from pallas_kernels.report.shape import Build, Setting

__all__ = ["Row", "compiled_row", "refused_row", "with_rates"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A case and its numbers; None is what could not be found out or what the device does not have, and `reason` says why."""

    kernel: str
    target: str
    shape: str
    block_size: int
    head_dim: int
    kv_dtype: str
    compiled: bool
    reason: str | None = None
    vmem_bytes: int | None = None
    smem_bytes: int | None = None
    temp_bytes: int | None = None
    """Bytes of HBM that the call needs besides its arguments and results."""
    compute_bundles: int | None = None
    mxu_cycles: int | None = None
    """Cycles of a chunk that the MXUs take at the data sheet's rate."""
    dma_issue_bundles: int | None = None
    bookkeeping_bundles: int | None = None
    """Bundles of a chunk that neither compute nor start copies; not part of what follows."""
    inner_loop_bundles: int | None = None
    """Bundles of a chunk: compute and the start of its copies."""
    chunk_tokens: float | None = None
    registers: int | None = None
    """Registers of a GPU's thread."""
    spill_bytes: int | None = None
    """Bytes of a GPU's registers that a thread stores and loads for want of room."""
    shared_bytes: int | None = None
    """Shared memory of a GPU's program."""
    occupancy: float | None = None
    """Share of the threads of a GPU's multiprocessor that programs fill."""
    bytes_per_token: float | None = None
    """Bytes copied from HBM for one token, padding included."""
    flops_per_token: float | None = None
    """FLOPs of attention to one token by the queries that it meets, without padding."""
    cycles_per_token: float | None = None
    """TPU: bundles for one token, or the MXUs' cycles in place of the compute bundles where those are more. GPU: what the products of one
    token, padding included, take at the data sheet's rate."""
    dma_cycles_per_token: float | None = None
    """Cycles in which the data sheet's bandwidth brings what is copied for one token."""
    bound: str | None = None
    """What takes longer: hbm or compute."""
    predicted_bandwidth_share: float | None = None
    """Share of the HBM bandwidth that keys and values, without padding, can reach where nothing stalls."""
    mxu_share: float | None = None
    """FLOPs of attention in the inner loop as a share of what the matrix units could do in its cycles. On an MXU of 256 rows and columns a
    head dimension of 128 fills half of it, so that one half is the most."""
    mxu_busy: float | None = None
    """Share of the inner loop's cycles in which the MXUs take rows, however full their matrices."""
    push_slot_share: float | None = None
    """Share of the slots for loading the MXUs in the compute bundles that are taken."""
    spill_slots: int | None = None
    """Slots in the compute bundles that store or load spilled registers."""
    intensity: float | None = None
    """FLOPs of attention for each byte copied."""
    flops_per_second: float | None = None
    """FLOPs of attention a second on one core of a TPU or on a whole GPU, as predicted."""


def refused_row(case: Case, reason: str) -> Row:
    """The row of a case that did not compile."""
    return Row(**dataclasses.asdict(case), head_dim=SHAPES[case.shape].head_dim, compiled=False, reason=reason)


def compiled_row(case: Case, **numbers: Any) -> Row:
    """The row of a case that compiled, with the fields that the compiler tells."""
    return Row(**dataclasses.asdict(case), head_dim=SHAPES[case.shape].head_dim, compiled=True, **numbers)


def with_rates(row: Row, setting: Setting, build: Build, cycles: float) -> Row:
    """Adds what follows from the cycles that one token's computation takes, beside what its bytes take.

    Args:
      row: the row.
      setting: its setting, with the rates of the target.
      build: the call, with its bytes.
      cycles: cycles of a token that do not wait for memory.
    """
    target = setting.target
    dma_cycles = build.stored_bytes / target.bytes_per_cycle
    slower = max(cycles, dma_cycles)
    row = dataclasses.replace(
        row,
        bytes_per_token=build.stored_bytes,
        cycles_per_token=cycles,
        dma_cycles_per_token=dma_cycles,
        bound="hbm" if dma_cycles >= cycles else "compute",
        predicted_bandwidth_share=dma_cycles / slower,
    )
    if not build.queries:
        return row
    flops = setting.token_flops * build.queries
    return dataclasses.replace(
        row,
        flops_per_token=flops,
        predicted_bandwidth_share=setting.token_bytes / target.bytes_per_cycle / slower,
        mxu_share=flops / cycles / target.matrix_flops,
        intensity=flops / build.stored_bytes,
        flops_per_second=flops / slower * target.clock,
    )
