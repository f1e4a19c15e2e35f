"""How long a replica's work takes, fitted to measured decode steps."""

import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["StepTime", "fit_step_time", "measured_steps"]

# SmolLM2-135M in bfloat16 on two CPU cores: sequences, tokens of context of each, milliseconds of a step (docs/measured/decode_bench.md).
_DEFAULT = ((1, 128, 28.0), (1, 1024, 35.8), (8, 128, 37.2), (8, 1024, 71.0), (32, 128, 64.8), (32, 1024, 220.7))


class StepTime(NamedTuple):
    """Seconds of a decode step: one part for each step, for each sequence and for each token of context in it."""

    step_s: float
    seq_s: float
    token_s: float

    def decode_s(self, seqs: int, context_tokens: int) -> float:
        """One step of so many sequences, which hold so many tokens together."""
        return self.step_s + self.seq_s * seqs + self.token_s * context_tokens

    def prefill_s(self, tokens: int) -> float:
        """So many prompt tokens: each takes what one more sequence takes in a step."""
        return self.step_s + self.seq_s * tokens


def measured_steps(file: str) -> list[tuple[int, int, float]]:
    """Sequences, context and milliseconds of the decode steps in a rows.jsonl of decode_bench; of the default for an empty name.

    Raises:
      ValueError: the file has fewer than three such rows.
      OSError: it cannot be read.
    """
    if not file:
        return list(_DEFAULT)
    rows = [json.loads(line) for line in pathlib.Path(file).read_text(encoding="utf-8").splitlines()]
    steps = [(row["batch"], row["context"], row["paged_step_ms"]) for row in rows if row.get("row") == "step"]
    if len(steps) < 3:
        raise ValueError(f"{file} has {len(steps)} decode steps; three at least are needed for a fit: give the rows.jsonl of decode_bench")
    return steps


def fit_step_time(steps: Sequence[tuple[int, int, float]]) -> StepTime:
    """The least squares of the relative errors, without parts below zero."""
    seqs, context, ms = np.asarray(steps, np.float64).T
    parts = np.stack([np.ones_like(seqs), seqs, seqs * context], axis=1) / ms[:, None]
    kept = [0, 1, 2]
    while True:  # a part that would be negative is left out
        values, *_ = np.linalg.lstsq(parts[:, kept], np.ones_like(ms), rcond=None)
        if np.all(values >= 0):
            break
        del kept[int(np.argmin(values))]
    fitted = np.zeros(3)
    fitted[kept] = values / 1e3
    return StepTime(*map(float, fitted))
