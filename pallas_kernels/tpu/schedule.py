"""The static cost of one KV chunk of an attention kernel, read off its compiled program.

An attention kernel goes through the context of its sequences in chunks of so many tokens. For each it starts the copies of a chunk to come,
waits for the chunk's own, and runs two matrix products over it. `chunk_cost` finds the bundles that one full, unmasked chunk in the middle
of a long context takes, a bundle being a cycle where nothing stalls:

- The chunk loop is the innermost loop that both starts copies from HBM and loads the MXUs.
- Compute: the pieces of the chunk loop that load the MXUs, taken together where the same regions enclose them. In loops within the chunk
  loop they count as often as those turn for a chunk. A kernel may have several such groups, of which a chunk runs one: for decode and for
  prefill, masked and unmasked. Prefill sends more rows past each register that it loads, and a mask costs bundles, so the group for decode
  is the cheapest, and that for prefill the cheapest of those with the most rows a register.
- MXU: the cycles that the rows of those pieces take at the data sheet's rate. The compiler may schedule matrix products closer than the
  MXUs take them; then the core waits, and this is the larger number.
- Copy start: the cheapest group of pieces that starts all copies of a chunk, in a loop within by as many turns as that takes. A kernel may
  have another one for contexts that end within a chunk. Where compute and copies share their pieces, they count as compute.
- Bookkeeping: the other pieces of the chunk loop that run whenever compute or the copy starts do: no region encloses them that does not
  enclose those too. It is reported apart.

Not counted: what runs once a sequence or once a call (loading queries, storing results), control of loops within the chunk loop, and every
stall: waiting for a copy, bank conflicts, and latencies that the compiler did not foresee.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from pallas_kernels.targets import MXU_ROWS
from pallas_kernels.tpu.bundles import Piece, Program, Region

__all__ = ["Chunk", "ChunkCost", "chunk_cost", "loop_cost"]


class Chunk(NamedTuple):
    """What a kernel does for one chunk, as known from its parameters."""

    copies: int
    """Copies from HBM that fetch it."""
    registers: int
    """Registers that its keys and values fill when they are multiplied. The MXUs load each of them at least once."""
    turns: int = 1
    """Turns of the loops within the chunk loop that multiply it, all together, where it is not multiplied in one piece."""


class ChunkCost(NamedTuple):
    """Bundles for one chunk, and what they are busy with."""

    compute: int
    mxu: int
    copy_start: int
    bookkeeping: int
    push_share: float
    """Share of the slots for loading the MXUs in the compute bundles that are taken."""
    spills: int
    """Slots of the compute bundles that store or load a spilled register, counted once where a loop runs them often."""


class _Group(NamedTuple):
    pieces: list[Piece]
    times: int

    @property
    def bundles(self) -> int:
        return self.times * sum(piece.bundles for piece in self.pieces)


def chunk_cost(program: Program, chunk: Chunk, *, prefill: bool = False) -> ChunkCost:
    """The cost of one full chunk; the module says what counts.

    Args:
      program: the compiled kernel.
      chunk: what the kernel does for one chunk.
      prefill: count the path of a tile of many queries, not of one.

    Raises:
      ValueError: the program is no attention kernel that this module understands; the message says what is missing.
    """
    loop = _chunk_loop(program)
    inside = [piece for piece in program.pieces if loop in piece.regions]
    compute = _groups(inside, loop, "pushes", lambda done: chunk.turns if done * chunk.turns >= chunk.registers else 0, chunk.registers)
    if not compute:
        raise ValueError(f"no part of the chunk loop loads the {chunk.registers} registers of a chunk into the MXUs")
    if prefill:
        most = max(map(_intensity, compute))
        compute = [group for group in compute if _intensity(group) == most]
    starts = _groups(inside, loop, "copies", lambda done: 0 if chunk.copies % done else chunk.copies // done, chunk.copies)
    if not starts:
        raise ValueError(f"no part of the chunk loop starts the {chunk.copies} copies of a chunk")
    best, start = (min(groups, key=lambda group: group.bundles) for groups in (compute, starts))
    counted = {*best.pieces, *start.pieces}
    certain = {region for piece in counted for region in piece.regions}
    rest = [piece for piece in inside if piece.loop == loop and piece not in counted and certain.issuperset(piece.regions)]
    bundles = sum(piece.bundles for piece in best.pieces)
    return ChunkCost(
        compute=best.bundles,
        mxu=best.times * sum(piece.rows for piece in best.pieces) // MXU_ROWS,
        copy_start=0 if best.pieces == start.pieces else start.bundles,
        bookkeeping=sum(piece.bundles for piece in rest),
        push_share=program.use("MATPUSH", best.pieces) / (bundles * program.slots["MATPUSH"]),
        spills=program.use("VLOAD:FILL", best.pieces) + program.use("VSTORE:SPILL", best.pieces),
    )


def loop_cost(program: Program) -> int:
    """Bundles of one turn of the innermost loop that starts copies from HBM, all its predicated regions taken, inner loops once.

    This is an upper bound, for kernels that only move data.

    Raises:
      ValueError: no loop of the program starts copies.
    """
    loops = [piece.loop for piece in program.pieces if piece.copies and piece.loop]
    if not loops:
        raise ValueError("no loop of the kernel starts copies from HBM")
    deepest = max(loops, key=lambda loop: sum(loop in piece.regions and piece.bundles for piece in program.pieces))
    return deepest.stop - deepest.start


def _chunk_loop(program: Program) -> Region:
    loops = {region for piece in program.pieces for region in piece.regions if region.is_loop}
    both = [
        loop
        for loop in loops
        if all(any(getattr(piece, work) and loop in piece.regions for piece in program.pieces) for work in ("copies", "pushes"))
    ]
    if not both:
        raise ValueError("no loop of the kernel both starts copies from HBM and loads the MXUs")
    return min(both, key=lambda loop: loop.stop - loop.start)


def _groups(pieces: list[Piece], loop: Region, work: str, turns: Callable[[int], int], needed: int) -> list[_Group]:
    """Pieces that do a kind of work under the same regions, and how often they run for a chunk; those that do less than it needs not."""
    together = defaultdict(list)
    for piece in pieces:
        if getattr(piece, work):
            together[piece.regions].append(piece)
    groups = []
    for members in together.values():
        done = sum(getattr(piece, work) for piece in members)
        times = turns(done) if members[0].loop != loop else int(done >= needed)
        if times:
            groups.append(_Group(members, times))
    return groups


def _intensity(group: _Group) -> float:
    return sum(piece.rows for piece in group.pieces) / sum(piece.pushes for piece in group.pieces)
