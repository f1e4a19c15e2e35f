"""The static cost of a chunk: on programs made by hand, and on those of JAX's own kernels as libtpu dumped them."""

import pathlib

import pytest

from pallas_kernels.tpu.bundles import read_program
from pallas_kernels.tpu.schedule import Chunk, ChunkCost, chunk_cost, loop_cost

DUMPS = pathlib.Path(__file__).parent / "data" / "tpu_programs"  # cut down to what is read
DELAY = 1

COPY = "%1 = dma.hbm_to_vmem /*hbm=*/%s1"
PUSH = "%2 = vmatpush3.bf16.xpose.msra.mxu0 %v1"
ROWS = "%3 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mxu0 %v2"  # 16 of them
PLAIN = "%4 = vadd.f32 %v1, %v2"


def loop(name, *body):
    """Bundles that run again and again."""
    first, *rest = flat(body)
    return [f"{first} /* Start region {name} */", *rest, f"%9 = sbr.rel (!%p1) target = $region{name}", *[""] * DELAY]


def when(name, *body):
    """Bundles that are skipped at times."""
    return [f"%9 = sbr.rel (%p1) target = $region{name}", *[""] * DELAY, *flat(body), f"/* Start/End empty region {name} */"]


def flat(body):
    return [bundle for part in body for bundle in (part if isinstance(part, list) else [part])]


def program(folder, *body):
    bundles = flat(["", *body, "/* exit */"])
    (folder / "1-kernel.1-03-final_bundles.txt").write_text(
        "= control target key start\n" + "".join(f"{index:#6x} LB: > {{ {bundle} }}\n" for index, bundle in enumerate(bundles))
    )
    rows = "\n".join("0 1 0 1" if "vmatpush" in bundle else "0 0 0 0" for bundle in bundles)
    (folder / "1-kernel.1-01-final_hlo-static-per-bundle-utilization.txt").write_text(
        f"== CAPACITY:\nMATMUL, MATPUSH, VLOAD:FILL, VSTORE:SPILL\n    2     2     3     2\n== UTILIZATION:\n{rows}\n"
    )
    (folder / "1-kernel.1-00-pre-finalize-registers-and-allocations.txt").write_text(
        "  #allocation1 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'x']\n"
        "  #allocation2 [shape = 'u32[9]', space=vmem, size = 0x1000, scoped, tag = 'x']\n"
        "    #allocation3 [shape = 'u32[9]', space=vmem, size = 0x20, scoped, tag = 'x']\n"
        "  #allocation4 [shape = 'u32[9]', space=smem, size = 0x200, scoped, tag = 'x']\n"
    )
    return read_program(folder, "kernel", DELAY)


def test_rows_of_wide_values_fill_half_as_many_registers(tmp_path):
    wide = "%3 = vmatmul.mubr.msk.f32.gmra.mxu0 %v2", "%3 = vmatmul.f32.dwg.msra.gmra.mxu2 %v2"
    assert sum(piece.rows for piece in program(tmp_path, *wide, ROWS).pieces) == 2 * 8 + 16


def test_a_straight_kernel(tmp_path):
    read = program(tmp_path, loop(1, PLAIN, when(2, COPY, COPY), PLAIN, when(3, PUSH, PUSH, ROWS, PLAIN), PLAIN))
    cost = chunk_cost(read, Chunk(copies=2, registers=2))
    # Outside compute and copies: the first bundle and the branch with its delay slot (3), the target of that branch, a bundle, the next
    # branch and its delay slot (4), and the target, a bundle and the loop's own branch with its delay slot (4).
    assert cost == ChunkCost(compute=4, mxu=4, copy_start=2, bookkeeping=11, push_share=2 / 8, spills=2)
    assert read.memory == {"vmem": 0x1020, "smem": 0x200}


def test_full_chunks_count_and_partial_ones_do_not(tmp_path):
    read = program(
        tmp_path,
        when(9, COPY, COPY, COPY, COPY),  # before the loop
        loop(
            1,
            when(2, COPY, COPY, COPY, COPY),
            when(3, loop(4, COPY, PLAIN)),  # some blocks of a chunk, one at a time
            when(5, PUSH, PUSH, PUSH, PUSH, ROWS),
            when(6, loop(7, PUSH, PUSH, ROWS, PLAIN)),  # masked, half a chunk at a time
            when(8, PLAIN, PLAIN, PLAIN),  # once a sequence
        ),
    )
    cost = chunk_cost(read, Chunk(copies=4, registers=4, turns=2))
    assert (cost.compute, cost.copy_start, cost.mxu) == (5, 4, 4)


def test_inner_loops_count_as_often_as_a_chunk_takes_them(tmp_path):
    read = program(tmp_path, loop(1, loop(2, COPY, PLAIN), PLAIN, loop(3, loop(4, PUSH, PUSH, ROWS))))
    cost = chunk_cost(read, Chunk(copies=6, registers=8, turns=4))
    assert cost.copy_start == 6 * (2 + 1 + DELAY)
    assert cost.compute == 4 * (3 + 1 + DELAY)
    assert cost.mxu == 4 * 16 // 4


def test_prefill_is_what_sends_the_most_rows_past_a_register(tmp_path):
    decode, masked = when(3, PUSH, PUSH, ROWS), when(4, PUSH, PUSH, ROWS, PLAIN)
    prefill, masked_prefill = loop(5, PUSH, ROWS, ROWS, ROWS), loop(6, PUSH, ROWS, ROWS, ROWS, PLAIN)
    read = program(tmp_path, loop(1, when(2, COPY), decode, masked, when(7, prefill), when(8, masked_prefill)))
    chunk = Chunk(copies=1, registers=2, turns=2)
    assert chunk_cost(read, chunk).compute == 3
    assert chunk_cost(read, chunk, prefill=True).compute == 2 * (4 + 1 + DELAY)


def test_copies_among_the_compute_bundles_count_once(tmp_path):
    cost = chunk_cost(program(tmp_path, loop(1, COPY, PUSH, ROWS, PLAIN)), Chunk(copies=1, registers=1))
    assert (cost.compute, cost.copy_start, cost.bookkeeping) == (5 + DELAY, 0, 0)


def test_the_chunk_loop_is_the_innermost_that_does_both(tmp_path):
    read = program(tmp_path, loop(1, COPY, loop(2, when(3, COPY), PUSH, ROWS), PLAIN))
    assert chunk_cost(read, Chunk(copies=1, registers=1)).bookkeeping == 1 + DELAY  # the branch at the start of the inner loop


@pytest.mark.parametrize(
    ("body", "chunk", "message"),
    [
        ([loop(1, COPY), loop(2, PUSH)], Chunk(1, 1), "no loop of the kernel both starts copies"),
        ([loop(1, when(2, COPY), PUSH)], Chunk(1, 2), "loads the 2 registers"),
        ([loop(1, when(2, COPY), loop(3, PUSH, PUSH))], Chunk(1, 5, turns=2), "loads the 5 registers"),
        ([loop(1, when(2, COPY), PUSH)], Chunk(5, 1), "starts the 5 copies"),
        ([loop(1, loop(2, COPY, COPY), PUSH)], Chunk(5, 1), "starts the 5 copies"),
    ],
)
def test_programs_that_are_not_understood_are_refused(tmp_path, body, chunk, message):
    with pytest.raises(ValueError, match=message):
        chunk_cost(program(tmp_path, *body), chunk)


def test_a_loop_that_only_moves_data(tmp_path):
    read = program(tmp_path, PLAIN, loop(1, PLAIN, when(2, COPY), PLAIN), COPY)
    assert loop_cost(read) == 1 + (1 + DELAY) + 1 + 1 + 1 + (1 + DELAY)
    with pytest.raises(ValueError, match="no loop of the kernel starts copies"):
        loop_cost(program(tmp_path, COPY))


def test_a_missing_dump_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="of a kernel nothing"):
        read_program(tmp_path, "nothing", DELAY)


def test_the_ragged_kernel_of_jax():
    """For v6e: one kv head, 8 query heads, chunks of 8 blocks of 16 tokens."""
    read = read_program(DUMPS, "ragged_paged_attention_kernel", 4)
    cost = chunk_cost(read, Chunk(copies=8, registers=16))
    assert (cost.compute, cost.copy_start, cost.bookkeeping, cost.spills) == (83, 158, 20, 0)
    assert cost.push_share == pytest.approx(64 / (2 * 83))
    assert read.memory["vmem"] == 225280


def test_the_paged_kernel_of_jax():
    """For v4, whose branches have one delay slot: keys and values apart, and so few copies that nothing branches around them."""
    read = read_program(DUMPS, "paged_attention", 1)
    cost = chunk_cost(read, Chunk(copies=16, registers=16))
    assert (cost.compute, cost.copy_start, cost.bookkeeping, cost.spills) == (694, 0, 8, 0)
