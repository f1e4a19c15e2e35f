"""Runs an experiment: a folder for each configuration, a row for each point, and a report made of the rows."""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import tqdm

from experiments.experiment import Experiment, Part, Picture, Row
from experiments.render import markdown

__all__ = ["RESULTS", "read_rows", "report", "results_folder", "run"]

RESULTS = pathlib.Path("results")
"""Where results go, seen from the working directory."""


def results_folder(name: str, config: Any) -> pathlib.Path:
    """results/NAME/<hash of the configuration>, made with its config.json.

    Raises:
      ValueError: the folder holds the results of another configuration.
    """
    text = json.dumps(dataclasses.asdict(config), sort_keys=True, indent=2) + "\n"
    folder = RESULTS / name / hashlib.sha256(text.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise ValueError(f"{folder} holds the results of another configuration (its config.json was changed); delete or move the folder")
    _write(file, text)
    return folder


def read_rows(folder: pathlib.Path) -> list[Row]:
    """The rows of a folder. What an interrupt left of a last line is cut off, in the file too.

    Raises:
      ValueError: a line is no JSON object.
    """
    file = folder / "rows.jsonl"
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{file}, line {number}: not a row; delete the line to measure its point again")
        rows.append(row)
    return rows


def run(name: str, experiment: Experiment, config: Any) -> list[Part]:
    """Measures the points that have no row yet, and writes the report.

    Args:
      name: of the experiment.
      experiment: what to run.
      config: an instance of its configuration.

    Returns:
      The parts of the report.
    """
    folder = results_folder(name, config)
    rows = read_rows(folder)
    points = list(experiment.points(config))
    left = [point for point in points if not any(_has(row, point) for row in rows)]
    with open(folder / "rows.jsonl", "a", encoding="utf-8") as file:
        for point in tqdm.tqdm(left, desc=name, initial=len(points) - len(left), total=len(points), disable=None):
            row = {**point, **experiment.measure(config, point)}
            file.write(json.dumps(row) + "\n")
            file.flush()
    return report(name, experiment, config)


def report(name: str, experiment: Experiment, config: Any) -> list[Part]:
    """Writes table.md and the pictures of what was measured.

    Returns:
      The parts of the report, in the order of the configuration's points.

    Raises:
      ValueError: no point has been measured yet.
    """
    folder = results_folder(name, config)
    rows = read_rows(folder)
    ordered = [row for point in experiment.points(config) for row in rows if _has(row, point)]
    if not ordered:
        raise ValueError(f"{folder} has no rows yet; run the experiment without --report first")
    parts = list(experiment.report(config, ordered))
    for part in parts:
        if isinstance(part, Picture):
            part.figure.savefig(folder / f"{part.name}.png", dpi=160)
    _write(folder / "table.md", markdown(parts))
    return parts


def _has(row: Row, point: Row) -> bool:
    """Whether a row is that of a point."""
    return all(key in row and row[key] == value for key, value in point.items())


def _write(file: pathlib.Path, text: str) -> None:
    """Writes a file all or nothing."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
