"""What the command line can do: run one experiment, a sweep, or all with a report page."""

import contextlib
import dataclasses
import difflib
import io
import json
import pathlib
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro

from experiments import render, runner
from experiments.experiment import Experiment, Part, Row, Table

__all__ = ["parse", "run_all", "run_one", "run_sweep"]

_QUICK, _REPORT = "--quick", "--report"

Loaders = Mapping[str, Callable[[], Experiment]]


def run_one(name: str, experiment: Experiment, arguments: Sequence[str]) -> None:
    """Runs an experiment with the overrides of a command line and prints its report."""
    config, action = parse(name, experiment, arguments)
    parts = action(name, experiment, config)
    _print(parts)
    print(f"written to {runner.results_folder(name, config)}; delete that folder to measure anew")


def parse(name: str, experiment: Experiment, arguments: Sequence[str]) -> tuple[Any, Callable[[str, Experiment, Any], list[Part]]]:
    """The configuration that a command line asks for, and what is to be done with it: `runner.run` or `runner.report`.

    Raises:
      ValueError: there is no such override, or its value makes no sense.
    """
    default = experiment.quick if _QUICK in arguments else experiment.config()
    rest = [argument for argument in arguments if argument not in (_QUICK, _REPORT)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config, unknown = tyro.cli(
                experiment.config,
                default=default,
                prog=f"python -m experiments {name}",
                args=rest,
                return_unknown_args=True,
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as stopped:
        if not stopped.code:
            raise  # --help
        raise ValueError(_unboxed(said.getvalue())) from stopped
    if unknown:
        flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(experiment.config)]
        near = difflib.get_close_matches(unknown[0], flags, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join([*flags, _QUICK, _REPORT])}"
        raise ValueError(f"{name} takes no {unknown[0]!r}; {hint}")
    return config, runner.report if _REPORT in arguments else runner.run


def _unboxed(box: str) -> str:
    """What tyro says in a box over several lines, as one."""
    lines = [line.strip("│|─- ") for line in box.splitlines()[1:-1]]
    text = " ".join(line for line in lines if line)
    return text.partition(" For full helptext")[0].partition(" Argument helptext")[0]


def run_sweep(file: pathlib.Path, experiments: Loaders, arguments: Sequence[str]) -> None:
    """Runs every configuration that the file's function `sweep` yields, and puts their rows into one table.

    The table has the fields in which the configurations differ, and what was measured: results/sweeps/<name of the file>/.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it has no `sweep`, or that yields something else than configurations of experiments.
    """
    if arguments:
        raise ValueError(f"a sweep takes no overrides, got {' '.join(arguments)}; change {file}")
    if not file.is_file():
        raise FileNotFoundError(f"there is no sweep {file}")
    sweep = runpy.run_path(str(file)).get("sweep")
    if not callable(sweep):
        raise ValueError(f"{file} has no function sweep() that yields configurations")
    configs = list(sweep())
    found = [_experiment_of(config, experiments) for config in configs]
    fields = [dataclasses.asdict(config) for config in configs]
    differ = [key for key in dict.fromkeys(key for each in fields for key in each) if len({str(each.get(key)) for each in fields}) > 1]
    rows: list[Row] = []
    for (name, experiment), config, values in zip(found, configs, fields, strict=True):
        runner.run(name, experiment, config)
        folder = runner.results_folder(name, config)
        rows += [{**{key: values.get(key) for key in differ}, **row} for row in runner.read_rows(folder)]
    if not rows:
        raise ValueError(f"sweep() of {file} yields no configuration")
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list | dict) or key in differ))
    parts: list[Part] = [Table(rows, columns)]
    folder = runner.RESULTS / "sweeps" / file.stem
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "table.md").write_text(render.markdown(parts), encoding="utf-8")
    _print(parts)
    print(f"written to {folder}")


def _experiment_of(config: Any, experiments: Loaders) -> tuple[str, Experiment]:
    """The experiment that a configuration belongs to: that of the module which defines it."""
    name = type(config).__module__.rpartition(".")[2]
    if name not in experiments or type(config) is not experiments[name]().config:
        raise ValueError(f"sweep() must yield configurations of {', '.join(experiments)}; got {config!r}")
    return name, experiments[name]()


def run_all(experiments: Loaders, summaries: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Runs every experiment and writes results/report.md and the self-contained results/report.html.

    Raises:
      ValueError: the arguments are others than --quick and --report.
    """
    if unknown := set(arguments) - {_QUICK, _REPORT}:
        raise ValueError(f"all takes {_QUICK} and {_REPORT} only, got {', '.join(sorted(unknown))}")
    title = "Experiments with jaxpage"
    quick = [_QUICK] if _QUICK in arguments else []
    text, page = [f"# {title}\n"], []
    for name, load in experiments.items():
        experiment = load()
        config, action = parse(name, experiment, arguments)
        parts = action(name, experiment, config)
        folder = runner.results_folder(name, config)
        command = f"`{' '.join(['python -m experiments', name, *quick])}`"
        head = [summaries[name], f"Made by {command}; rows and configuration are in `{folder}`."]
        text.append(f"## {name}\n\n{render.markdown([*head, *parts], f'{folder.relative_to(runner.RESULTS).as_posix()}/')}")
        page.append(f"<h2>{name}</h2>\n{render.html_parts([*head, *parts], folder)}")
    (runner.RESULTS / "report.md").write_text("\n".join(text), encoding="utf-8")
    (runner.RESULTS / "report.html").write_text(render.html_page(title, "\n".join(page)), encoding="utf-8")
    print(f"written to {runner.RESULTS / 'report.md'} and {runner.RESULTS / 'report.html'}")


def _print(parts: Sequence[Part]) -> None:
    print(render.terminal(parts, colours=sys.stdout.isatty()))
