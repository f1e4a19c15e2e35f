"""The program of one TPU kernel as libtpu dumps it: its VLIW bundles, and the loops and predicated regions that they form.

A core issues one bundle a cycle. The dump numbers them, marks where the compiler's regions start and end, and has relative branches only,
each to the start of a region. A branch back closes a loop; a branch forward skips a predicated region, which is what `pl.when` becomes.
The bundles behind a branch that run in any case (its delay slots) belong to the region that it ends.
"""

import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Piece", "Program", "Region", "read_program"]


class Region(NamedTuple):
    """Bundles `start` to `stop`, without `stop`, that run again and again (a loop) or are skipped at times."""

    start: int
    stop: int
    is_loop: bool


class Piece(NamedTuple):
    """Straight-line bundles: nothing branches into them or out of them but at their ends."""

    start: int
    stop: int
    regions: tuple[Region, ...]
    """What encloses the piece, outermost first."""
    copies: int
    """Copies from HBM to VMEM that it starts."""
    pushes: int
    """Registers that it loads into the MXUs as the stationary operand."""
    rows: int
    """Rows that it sends through the MXUs: 8 in a register of 32-bit values, 16 in one of narrower values."""

    @property
    def bundles(self) -> int:
        """How many bundles the piece has."""
        return self.stop - self.start

    @property
    def loop(self) -> Region | None:
        """The innermost loop around the piece."""
        return next((region for region in reversed(self.regions) if region.is_loop), None)


class Program(NamedTuple):
    """A kernel's bundles, cut into pieces."""

    pieces: tuple[Piece, ...]
    slots: dict[str, int]
    """What of each unit a bundle can hold: MATMUL, MATPUSH, VLOAD and so on."""
    used: dict[str, tuple[int, ...]]
    """Slots of each unit that each bundle takes. A slow operation takes its slot in as many bundles as it lasts."""
    memory: dict[str, int]
    """Bytes that the kernel allocates in each memory, vmem and smem among them."""

    def use(self, unit: str, pieces: list[Piece]) -> int:
        """Slots of a unit that pieces take in all."""
        return sum(sum(self.used[unit][piece.start : piece.stop]) for piece in pieces)


_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(?:[A-Z]{2})? *: *(?:> *)*(?=\{)", re.MULTILINE)
_BRANCH = re.compile(r"\bsbr\.rel (?:\([^)]*\) )?target = \$region(\d+)")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_ALLOCATION = re.compile(r"^ +#allocation\d+ \[shape = .*?space=(\w+), size = (0x[0-9a-f]+), (?:offset = \S+, )?scoped", re.MULTILINE)
_COPY, _PUSH = re.compile(r"= dma\.hbm_to_vmem\b"), re.compile(r"\b(?:vmatpush\d?|vmatprep\.subr)\b")
_MATMUL, _WIDE_MATMUL = re.compile(r"\bvmatmul\b"), re.compile(r"\bvmatmul(?:\.mubr)?(?:\.msk)?\.f32\b")
_SUFFIXES = {
    "bundles": "final_bundles",
    "utilization": "final_hlo-static-per-bundle-utilization",
    "memory": "pre-finalize-registers-and-allocations",
}


def read_program(folder: pathlib.Path, kernel: str, delay_slots: int) -> Program:
    """Reads the program of a kernel.

    Args:
      folder: where libtpu dumped it.
      kernel: the name of the kernel (the `name` of its `pallas_call`).
      delay_slots: bundles that still run behind a branch.

    Raises:
      FileNotFoundError: the folder holds no program of that name.
    """
    texts = {part: _newest(folder, kernel, suffix).read_text() for part, suffix in _SUFFIXES.items()}
    bundles = _BUNDLE.split(texts["bundles"])[1:]
    slots, used = _utilization(texts["utilization"])
    memory: dict[str, int] = {}
    for space, size in _ALLOCATION.findall(texts["memory"]):
        memory[space] = memory.get(space, 0) + int(size, 16)
    return Program(tuple(_pieces(bundles, _regions(bundles, delay_slots))), slots, used, memory)


def _newest(folder: pathlib.Path, kernel: str, suffix: str) -> pathlib.Path:
    name = re.compile(rf"\d+-{re.escape(kernel)}(?:\.\d+)?-\d+-{suffix}\.txt")
    found = sorted(path for path in folder.iterdir() if name.fullmatch(path.name))
    if not found:
        raise FileNotFoundError(f"{folder} holds no {suffix} of a kernel {kernel}")
    return found[-1]


def _regions(bundles: list[str], delay_slots: int) -> list[Region]:
    starts: dict[str, int] = {}
    for index, bundle in enumerate(bundles):
        for name in _START.findall(bundle):
            starts.setdefault(name, index)
    regions = []
    for index, bundle in enumerate(bundles):
        for name in _BRANCH.findall(bundle):
            behind = index + delay_slots + 1
            goal = starts.get(name, len(bundles) - 1)  # only the exit of the kernel goes without a mark
            if goal <= index:
                regions.append(Region(goal, behind, True))
            elif goal > behind:
                regions.append(Region(behind, goal, False))
    return sorted(regions, key=lambda region: (region.start, -region.stop))


def _pieces(bundles: list[str], regions: list[Region]) -> Iterator[Piece]:
    cuts = sorted({0, len(bundles), *(edge for region in regions for edge in region[:2])})
    for start, stop in itertools.pairwise(cuts):
        around = tuple(region for region in regions if region.start <= start and stop <= region.stop)
        text = "".join(bundles[start:stop])
        copies, pushes, matmuls, wide = (len(operation.findall(text)) for operation in (_COPY, _PUSH, _MATMUL, _WIDE_MATMUL))
        yield Piece(start, stop, around, copies, pushes, rows=16 * matmuls - 8 * wide)


def _utilization(text: str) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """The table has a title, the units, their slots, another title, and one line a bundle."""
    _, units, slots, _, *rows = text.strip().splitlines()
    names = units.split(", ")
    columns = zip(*(map(int, row.split()) for row in rows), strict=True)
    return dict(zip(names, map(int, slots.split()), strict=True)), dict(zip(names, columns, strict=True))
