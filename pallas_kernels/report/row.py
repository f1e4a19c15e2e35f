"""One row of the report: what the compiler says of a kernel, and what follows from it."""

import dataclasses

from pallas_kernels.report.cases import SHAPES, Case
from pallas_kernels.report.shape import Build, Setting
from pallas_kernels.tpu.schedule import ChunkCost

__all__ = ["Row", "compiled_row", "refused_row", "with_chunk", "with_loop"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A case and its numbers; None is what could not be found out, and `reason` says why."""

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
    cycles_per_token: float | None = None
    """Bundles for one token, or the MXUs' cycles in place of the compute bundles where those are more."""
    dma_cycles_per_token: float | None = None
    """Cycles in which the data sheet's bandwidth brings what is copied for one token."""
    bound: str | None = None
    """What takes longer: hbm or compute."""
    predicted_bandwidth_share: float | None = None
    """Share of the HBM bandwidth that keys and values, without padding, can reach where nothing stalls."""
    mxu_share: float | None = None
    """FLOPs of attention in the inner loop as a share of what the MXUs could do in its bundles. On an MXU of 256 rows and columns a
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
    """FLOPs of attention a second on one core, as predicted."""


def refused_row(case: Case, reason: str) -> Row:
    """The row of a case that did not compile."""
    return Row(**dataclasses.asdict(case), head_dim=SHAPES[case.shape].head_dim, compiled=False, reason=reason)


def compiled_row(case: Case, memory: dict[str, int], temp_bytes: int | None) -> Row:
    """The row of a case that compiled, with the bytes that the kernel allocates in each memory, and those that the call needs in HBM."""
    return Row(
        **dataclasses.asdict(case),
        head_dim=SHAPES[case.shape].head_dim,
        compiled=True,
        vmem_bytes=memory.get("vmem", 0),
        smem_bytes=memory.get("smem", 0),
        temp_bytes=temp_bytes,
    )


def with_loop(row: Row, setting: Setting, build: Build, bundles: int, loop_cycles: int) -> Row:
    """Adds what follows from the bundles and cycles of an inner loop, one turn of which takes `build.tokens` tokens."""
    cycles = loop_cycles / build.tokens
    dma_cycles = build.stored_bytes / setting.target.bytes_per_cycle
    return dataclasses.replace(
        row,
        inner_loop_bundles=bundles,
        chunk_tokens=build.tokens,
        cycles_per_token=cycles,
        dma_cycles_per_token=dma_cycles,
        bound="hbm" if dma_cycles >= cycles else "compute",
        predicted_bandwidth_share=dma_cycles / max(cycles, dma_cycles),
    )


def with_chunk(row: Row, setting: Setting, build: Build, cost: ChunkCost) -> Row:
    """Adds what follows from the cost of one chunk of an attention kernel."""
    target = setting.target
    row = with_loop(row, setting, build, cost.compute + cost.copy_start, max(cost.compute, cost.mxu) + cost.copy_start)
    assert row.cycles_per_token is not None and row.dma_cycles_per_token is not None
    slower = max(row.cycles_per_token, row.dma_cycles_per_token)
    flops = 4 * setting.shape.num_heads * setting.shape.head_dim * build.queries
    return dataclasses.replace(
        row,
        compute_bundles=cost.compute,
        mxu_cycles=cost.mxu,
        dma_issue_bundles=cost.copy_start,
        bookkeeping_bundles=cost.bookkeeping,
        predicted_bandwidth_share=setting.token_bytes / target.bytes_per_cycle / slower,
        mxu_share=flops / row.cycles_per_token / target.mxu_flops,
        mxu_busy=cost.mxu / (row.cycles_per_token * build.tokens),
        push_slot_share=cost.push_share,
        spill_slots=cost.spills,
        intensity=flops / build.stored_bytes,
        flops_per_second=flops / slower * target.clock,
    )
