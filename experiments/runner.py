"""What every experiment does with its results: one folder a configuration, rows as JSON lines, a Markdown table."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import tqdm

__all__ = ["markdown_table", "results_folder", "run_rows"]

Row = dict[str, Any]


def results_folder(name: str, config: Any, root: pathlib.Path = pathlib.Path("results")) -> pathlib.Path:
    """results/NAME/<hash of the configuration>, made with its config.json."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True, indent=2)
    folder = root / name / hashlib.sha256(text.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    return folder


def run_rows(folder: pathlib.Path, rows: Iterable[Row], total: int) -> list[Row]:
    """Runs an experiment's points with a progress bar and writes each row as it comes.

    Args:
      folder: where rows.jsonl goes.
      rows: yields one row a point.
      total: how many points there are.
    """
    done = []
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as file:
        for row in tqdm.tqdm(rows, total=total, desc=folder.parent.name, disable=None):
            done.append(row)
            print(json.dumps(row), file=file, flush=True)
    return done


def markdown_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows as a Markdown table; floats with three significant digits or more, missing values empty."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
        return "" if value is None else str(value)

    lines = [list(columns), ["---"] * len(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
