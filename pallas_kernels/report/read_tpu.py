"""What libtpu's dump says of a compiled kernel, as numbers of a row."""

import dataclasses
import pathlib

from pallas_kernels.report.cases import Case
from pallas_kernels.report.row import Row, compiled_row, with_rates
from pallas_kernels.report.shape import Build, Setting, TpuProgram
from pallas_kernels.targets import TpuTarget
from pallas_kernels.tpu.bundles import read_program
from pallas_kernels.tpu.schedule import ChunkCost, chunk_cost, loop_cost

__all__ = ["read_tpu", "with_chunk", "with_loop"]


def read_tpu(case: Case, setting: Setting, build: Build, folder: pathlib.Path) -> Row:
    """The row of a compiled kernel, with the cost of its inner loop if that can be made out, or else why not."""
    assert isinstance(setting.target, TpuTarget) and build.program is not None
    program = read_program(folder, build.program.kernel, setting.target.delay_slots)
    row = compiled_row(case, vmem_bytes=program.memory.get("vmem", 0), smem_bytes=program.memory.get("smem", 0))
    try:
        if build.program.chunk is None:
            return with_loop(row, setting, build, build.program, loop_cost(program))
        return with_chunk(row, setting, build, build.program, chunk_cost(program, build.program.chunk, prefill=build.queries > 1))
    except ValueError as error:
        return dataclasses.replace(row, reason=str(error))


def with_loop(row: Row, setting: Setting, build: Build, program: TpuProgram, bundles: int) -> Row:
    """Adds what follows from the bundles of a loop that only moves data."""
    row = dataclasses.replace(row, inner_loop_bundles=bundles, chunk_tokens=program.tokens)
    return with_rates(row, setting, build, bundles / program.tokens)


def with_chunk(row: Row, setting: Setting, build: Build, program: TpuProgram, cost: ChunkCost) -> Row:
    """Adds what follows from the cost of one chunk of an attention kernel."""
    cycles = (max(cost.compute, cost.mxu) + cost.copy_start) / program.tokens
    row = dataclasses.replace(
        row,
        compute_bundles=cost.compute,
        mxu_cycles=cost.mxu,
        dma_issue_bundles=cost.copy_start,
        bookkeeping_bundles=cost.bookkeeping,
        inner_loop_bundles=cost.compute + cost.copy_start,
        chunk_tokens=program.tokens,
        mxu_busy=cost.mxu / (cycles * program.tokens),
        push_slot_share=cost.push_share,
        spill_slots=cost.spills,
    )
    return with_rates(row, setting, build, cycles)
