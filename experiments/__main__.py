"""`python -m experiments NAME [overrides]` runs an experiment; `python -m experiments list` names them all."""

import ast
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Sequence

from experiments.experiment import Experiment

EXPERIMENTS = {
    "waste": "experiments.waste",
    "block_size": "experiments.block_size",
    "paged_vs_contiguous": "experiments.paged_vs_contiguous",
    "prefix_sharing": "experiments.prefix_sharing",
    "radix_vs_hash": "experiments.radix_vs_hash",
    "fleet": "experiments.fleet",
    "train": "experiments.train",
    "decode_bench": "experiments.decode_bench",
    "engine_bench": "experiments.engine_bench",
}
"""Module of each experiment. It is imported when the experiment is run, so that a list costs nothing."""

TOOLS = {"device_check": "experiments.device_check", "tune_tiles": "experiments.tune_tiles"}
"""What is no experiment but is run on a device: modules with a command line of their own."""

USAGE = """usage: python -m experiments NAME [overrides]   run one; NAME --help lists what can be overridden
       python -m experiments SWEEP.py           run every configuration that the file's sweep() yields
       python -m experiments all                run all, and write results/report.md and results/report.html
       python -m experiments list               name them
--quick begins with small sizes; --report makes tables and pictures anew from rows that were measured before."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what the command line names. Bad input ends it with one line on stderr and exit code 2."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        if name in ("-h", "--help"):
            print(USAGE)
        elif name == "list":
            for known in [*EXPERIMENTS, *TOOLS]:
                print(f"{known}: {summary(known)}")
        elif name in TOOLS:
            importlib.import_module(TOOLS[name]).main(rest)
        else:
            _run(name, rest)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"experiments: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("experiments: interrupted; the rows so far are kept, and the same command goes on from there", file=sys.stderr)
        sys.exit(130)


def _run(name: str, arguments: list[str]) -> None:
    if name != "all" and not name.endswith(".py") and name not in EXPERIMENTS:
        raise ValueError(f"no experiment {name!r}; there are: {', '.join([*EXPERIMENTS, *TOOLS])}")
    from experiments import commands  # only now: the list needs no more than Python

    experiments = {known: lambda module=module: load(module) for known, module in EXPERIMENTS.items()}
    if name == "all":
        commands.run_all(experiments, {known: summary(known) for known in EXPERIMENTS}, arguments)
    elif name.endswith(".py"):
        commands.run_sweep(pathlib.Path(name), experiments, arguments)
    else:
        commands.run_one(name, experiments[name](), arguments)


def summary(name: str) -> str:
    """What an experiment or tool is about, in a line: the first of its module, which is not imported for it."""
    module = {**EXPERIMENTS, **TOOLS}[name]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"the experiment {name} has no module {module}")
    text = ast.get_docstring(ast.parse(pathlib.Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def load(module: str) -> Experiment:
    """The experiment of a module."""
    return importlib.import_module(module).EXPERIMENT


if __name__ == "__main__":
    main()
