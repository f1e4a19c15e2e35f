"""`python -m experiments NAME [overrides]` runs an experiment; `python -m experiments list` names them all."""

import sys
from collections.abc import Callable
from typing import Any

import tyro

from experiments import decode_bench

EXPERIMENTS: dict[str, tuple[type, Callable[[Any], None]]] = {"decode_bench": (decode_bench.DecodeBench, decode_bench.run)}
"""Configuration and function of each experiment."""


def main() -> None:
    """Runs the experiment that the command line names. Bad input ends it with one line on stderr and exit code 2."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("list", [])
    try:
        if name == "list":
            for known, (config, _) in EXPERIMENTS.items():
                print(f"{known}: {(config.__doc__ or '').splitlines()[0]}")
            return
        if name not in EXPERIMENTS:
            raise ValueError(f"no experiment {name!r}; there are: {', '.join(EXPERIMENTS)}")
        config, run = EXPERIMENTS[name]
        run(tyro.cli(config, prog=f"python -m experiments {name}", args=arguments))
    except (ValueError, OSError) as error:
        print(f"experiments: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
