"""Text to train on: small tasks with one right answer, or a file."""

import pathlib
import string
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import tokenizers
from jaxtyping import Float, Int
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from models import Tokenizer

__all__ = ["TASKS", "Batches", "FileBatches", "Task", "TaskBatches", "byte_tokenizer", "held_out_tasks"]

END = "\n"
"""Ends every answer."""


class Task(NamedTuple):
    """A question and its one right answer; both are text."""

    prompt: str
    answer: str


def _copy(rng: np.random.Generator) -> Task:
    word = "".join(string.ascii_lowercase[int(place)] for place in rng.integers(0, 26, rng.integers(2, 7)))
    return Task(f"copy {word}=", word)


def _add(rng: np.random.Generator) -> Task:
    one, two = (int(each) for each in rng.integers(0, 100, 2))
    return Task(f"{one}+{two}=", str(one + two))


TASKS: Mapping[str, Callable[[np.random.Generator], Task]] = types.MappingProxyType({"copy": _copy, "add": _add})
"""Tasks by name: functions that draw one."""


def _held_out(task: Task) -> bool:
    """A tenth of all tasks, by their text: they are never trained on."""
    return zlib.crc32(task.prompt.encode()) % 10 == 0


def _draw(name: str, rng: np.random.Generator, held_out: bool) -> Task:
    while _held_out(task := TASKS[name](rng)) != held_out:
        pass
    return task


def held_out_tasks(name: str, count: int, seed: int) -> list[Task]:
    """Tasks that no batch contains."""
    rng = np.random.default_rng([seed, 1])
    return [_draw(name, rng, held_out=True) for _ in range(count)]


def byte_tokenizer(eos: str | None) -> Tokenizer:
    """A tokenizer whose tokens are the 256 bytes; `eos`, one of them, ends a generation."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, tuple(backend.encode(eos).ids) if eos is not None else ())


class Batch(NamedTuple):
    """Rows of tokens, and how much the loss on each token after the first counts."""

    tokens: Int[np.ndarray, "batch window+1"]
    weights: Float[np.ndarray, "batch window"]


class Batches(Protocol):
    """The batch of each step. It depends on the step alone, so that training goes on anywhere."""

    def __call__(self, step: int) -> Batch:
        """The batch of a step."""


class TaskBatches(NamedTuple):
    """Rows of tasks, one line after another; only answers count in the loss, for questions cannot be guessed."""

    names: Sequence[str]
    tokenizer: Tokenizer
    batch: int
    window: int
    seed: int

    def __call__(self, step: int) -> Batch:
        """The batch of a step."""
        rng = np.random.default_rng([self.seed, 0, step])
        rows, weights = zip(*(self._row(rng) for _ in range(self.batch)), strict=True)
        return Batch(np.asarray(rows, np.int32), np.asarray(weights, np.float32)[:, 1:])

    def _row(self, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        text, counts = "", ""
        while len(text) <= self.window:
            task = _draw(self.names[int(rng.integers(len(self.names)))], rng, held_out=False)
            text += task.prompt + task.answer + END
            counts += "0" * len(task.prompt) + "1" * (len(task.answer) + len(END))
        return self.tokenizer.encode(text[: self.window + 1]), [int(each) for each in counts[: self.window + 1]]


class FileBatches(NamedTuple):
    """Rows from random places of a text."""

    ids: Int[np.ndarray, " n"]
    batch: int
    window: int
    seed: int

    @classmethod
    def read(cls, path: str, tokenizer: Tokenizer, batch: int, window: int, seed: int) -> "FileBatches":
        """Reads a text file.

        Raises:
          ValueError: it is no UTF-8, or too short for one row.
          OSError: it cannot be read.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no UTF-8 text: {error}") from error
        ids = np.asarray(tokenizer.encode(text), np.int32)
        if len(ids) <= window + 1:
            raise ValueError(f"{path} has {len(ids)} bytes; a window of {window} needs more than {window + 1}")
        return cls(ids, batch, window, seed)

    def __call__(self, step: int) -> Batch:
        """The batch of a step."""
        starts = np.random.default_rng([self.seed, 0, step]).integers(0, len(self.ids) - self.window, self.batch)
        rows = self.ids[starts[:, None] + np.arange(self.window + 1)]
        return Batch(rows, np.ones((self.batch, self.window), np.float32))
