"""Measures which tiles of the GPU decode kernel are best on the device at hand, and writes them to where the kernels look them up."""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Sequence

import jax

import pallas_kernels.tiles
from experiments.device_check_decode import CONTENDERS, DRY_POINTS, Point, lower_point, measure_point
from pallas_kernels.tiles import GpuTiles, gpu_tiles, try_gpu_tiles

__all__ = ["TuneTiles", "best_tiles", "main", "run", "write_tiles"]

CANDIDATES = tuple(
    GpuTiles(decode_bytes=kib * 2**10, programs_per_sm=programs, fewest_tiles=tiles)
    for kib, programs, tiles in itertools.product((64, 96, 128), (1, 2, 4), (2, 4, 8))
)
POINTS = tuple(
    Point(*shape, batch, context, 16)
    for shape in (("llama-3-8b", 32, 8, 128), ("llama-3-70b/8", 8, 1, 128), ("llama-3.2-1b", 32, 8, 64))
    for batch, context in ((1, 8192), (16, 2048), (64, 8192))
)
_DRY_CANDIDATES = (GpuTiles(98304, 2, 4), GpuTiles(98304, 1, 1))


@dataclasses.dataclass(frozen=True)
class TuneTiles:
    """What is measured, and where the best goes."""

    output: pathlib.Path = pathlib.Path(pallas_kernels.tiles.__file__).parent / "gpu.json"
    """The file that gets the entry of this kind of device; others in it stay."""
    seed: int = 0
    """Of the values and the order of the blocks."""
    dry: bool = False
    """Tiny sizes in the interpreter on the CPU: shows that the tuning itself works. Writes nothing."""


def run(config: TuneTiles) -> None:
    """Measures, prints a line a choice, and writes the best.

    Raises:
      ValueError: there is no NVIDIA GPU, and this is not a dry run.
    """
    kind = jax.devices()[0].device_kind
    if not config.dry and not kind.startswith("NVIDIA"):
        raise ValueError(f"needs an NVIDIA GPU, this host has {kind}; --dry runs on a CPU")
    points, candidates = (DRY_POINTS, _DRY_CANDIDATES) if config.dry else (POINTS, CANDIDATES)
    by_point = [_measure(point, candidates, config.seed) for point in points]
    best, ratios = best_tiles(dict(zip(candidates, map(list, zip(*by_point, strict=True)), strict=True)))
    for tiles, ratio in sorted(ratios.items(), key=lambda item: item[1]):
        print(f"{ratio:.3f} of the best at each point: {', '.join(f'{name} {value}' for name, value in tiles._asdict().items())}")
    print(f"{kind}: {best}, instead of {gpu_tiles(kind)}")
    if not config.dry:
        write_tiles(config.output, kind, best)


def _measure(point: Point, candidates: Sequence[GpuTiles], seed: int) -> list[float]:
    """Seconds of each candidate; those that come to the same program are measured once."""
    known: dict[str, float] = {}
    seconds = []
    for tiles in candidates:
        with try_gpu_tiles(tiles):
            program = lower_point(point, CONTENDERS["jaxpage"], {})
        text = program.as_text()
        if text not in known:
            known[text] = measure_point(point, CONTENDERS["jaxpage"], program.compile(), math.inf, seed)
        seconds.append(known[text])
    return seconds


def best_tiles(seconds: dict[GpuTiles, list[float]]) -> tuple[GpuTiles, dict[GpuTiles, float]]:
    """The tiles whose times are closest to the best of each point, by their geometric mean, and that mean of all."""
    fastest = [min(times) for times in zip(*seconds.values(), strict=True)]
    ratios = {
        tiles: math.exp(sum(math.log(time / least) for time, least in zip(times, fastest, strict=True)) / len(times))
        for tiles, times in seconds.items()
    }
    return min(ratios, key=lambda tiles: ratios[tiles]), ratios


def write_tiles(path: pathlib.Path, kind: str, tiles: GpuTiles) -> None:
    """Adds or replaces the entry of a kind of device, one line each."""
    table = json.loads(path.read_text(encoding="utf-8")) | {kind: tiles._asdict()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in table.items())
    path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exit code 2 for bad input."""
    defaults = TuneTiles()
    parser = argparse.ArgumentParser(prog="python -m experiments.tune_tiles", description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=defaults.output, help="the file that gets the entry of this kind of device")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the values and the order of the blocks")
    parser.add_argument("--dry", action="store_true", help="tiny sizes in the interpreter on the CPU; writes nothing")
    try:
        run(TuneTiles(**vars(parser.parse_args(arguments))))
    except (ValueError, OSError) as error:
        print(f"tune_tiles: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
