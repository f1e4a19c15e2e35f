"""Checks the GPU kernels on the device at hand, and measures their bandwidth beside a plain copy and other implementations.

`python -m experiments.device_check` takes four minutes and needs nothing but JAX and NumPy beside this repository: parts of the package are
imported only when there is something that they can do without.
"""

import argparse
import dataclasses
import json
import pathlib
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from experiments.plain_jax import without_jaxtyping

__all__ = ["DeviceCheck", "main", "run"]

_COPY_BYTES, _DRY_COPY_BYTES = 2**31, 2**20
_THREADS = 8  # that compile and check kernels


@dataclasses.dataclass(frozen=True)
class DeviceCheck:
    """What is checked, and where the findings go."""

    minutes: float = 4.0
    """After which nothing more is begun."""
    seed: int | None = None
    """Of all inputs; None: a fresh one."""
    json: pathlib.Path = pathlib.Path("results/device_check.json")
    """Where everything goes that was found."""
    dry: bool = False
    """Tiny sizes on the CPU, in the interpreters: shows that the check itself works. Its times mean nothing."""


def run(config: DeviceCheck) -> bool:
    """Checks, measures, writes the JSON file and prints a table last; says whether no kernel was wrong.

    Raises:
      ValueError: there is no NVIDIA GPU, and this is not a dry run.
    """
    device = jax.devices()[0]
    if not config.dry and not device.device_kind.startswith("NVIDIA"):
        raise ValueError(f"needs an NVIDIA GPU, this host has {device.device_kind}; --dry runs on a CPU")
    if config.dry and device.platform != "cpu":
        raise ValueError("a dry run is for the CPU: set JAX_PLATFORMS=cpu")
    without_jaxtyping()
    from experiments.device_check_decode import DRY_POINTS, POINTS, decode_rows
    from experiments.device_check_kernels import CASES, DRY_CASES, check_case
    from experiments.device_timing import copy_rate

    start = time.monotonic()
    seed = random.randrange(2**31) if config.seed is None else config.seed
    print(f"{device.device_kind}, jax {jax.__version__}, seed {seed}{', DRY RUN: times mean nothing' if config.dry else ''}", flush=True)
    cases = DRY_CASES if config.dry else CASES
    with ThreadPoolExecutor(1 if config.dry else _THREADS) as pool:  # the interpreter has one state
        checks = list(pool.map(check_case, cases.keys(), cases.values(), range(seed, seed + len(cases))))
    for check in checks:
        print(_check_line(check), flush=True)

    copy = copy_rate(_DRY_COPY_BYTES if config.dry else _COPY_BYTES)
    rows = []
    for row in decode_rows(DRY_POINTS if config.dry else POINTS, copy, start + config.minutes * 60, seed):
        rows.append(row)
        print(_row_line(row), flush=True)
    found = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "platform_version": device.client.platform_version,
        "command": " ".join(sys.argv),
        "dry": config.dry,
        "seed": seed,
        "seconds": time.monotonic() - start,
        "copy_bytes_per_second": copy,
        "checks": checks,
        "decode": rows,
    }
    config.json.parent.mkdir(parents=True, exist_ok=True)
    config.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n" + summary(found) + f"\nwritten to {config.json} after {found['seconds']:.0f} s")
    return all(check["state"] in ("right", "refused") for check in checks)


def _check_line(check: dict[str, Any]) -> str:
    error = "" if check["error"] is None else f", error {check['error']:.1e} of at most {check['tolerance']:.0e}"
    return f"{check['state']:>8}  {check['case']}{error}{', ' + check['reason'] if check['reason'] else ''}"


def _row_line(row: dict[str, Any]) -> str:
    where = f"{row['shape']}, batch {row['batch']}, context {row['context']}, block {row['block_size']}, {row['contender']}"
    return f"{where}: {row['reason'] or '{:.0f} GB/s, {:.0%} of a copy'.format(row['bytes_per_second'] / 1e9, row['share'])}"


def summary(found: dict[str, Any]) -> str:
    """The short table: the bandwidth of each implementation as a share of a plain copy's, and how many kernels were right."""
    rows = found["decode"]
    columns = list(dict.fromkeys(_column(row) for row in rows))
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row["shape"], row["batch"], row["context"]), {})
        line[_column(row)] = "-" if row["share"] is None else f"{row['share']:.0%}{'*' if row['cached'] else ''}"
    states = [check["state"] for check in found["checks"]]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    header = ["shape", "batch", "context", *columns]
    table = [header, *([*map(str, key), *(line.get(column, "-") for column in columns)] for key, line in sorted(lines.items()))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        [
            f"{found['device']}, jax {found['jax']}: kernels: {counts}; a copy moves {found['copy_bytes_per_second'] / 1e9:.0f} GB/s.",
            "Decode, bytes of keys and values a second as a share of that (* caches may have helped):",
            *("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table),
        ]
    )


def _column(row: dict[str, Any]) -> str:
    return row["contender"] if row["block_size"] == row["context"] else f"{row['contender']}, block {row['block_size']}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exit code 1 where a kernel was wrong or failed, 2 for bad input."""
    defaults = DeviceCheck()
    parser = argparse.ArgumentParser(prog="python -m experiments.device_check", description=__doc__)
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="after which nothing more is begun")
    parser.add_argument("--seed", type=int, help="of all inputs; default: a fresh one")
    parser.add_argument("--json", type=pathlib.Path, default=defaults.json, help="where everything goes that was found")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, in the interpreters; its times mean nothing")
    try:
        right = run(DeviceCheck(**vars(parser.parse_args(arguments))))
    except (ValueError, OSError) as error:
        print(f"device_check: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
