"""Requests that share prefixes, as chats, few-shot prompts and search over thoughts make them."""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

__all__ = ["WORKLOADS", "Request", "make_requests", "mooncake_requests"]

_VOCAB = 32_000

Tokens = Int[np.ndarray, " n"]


class Request(NamedTuple):
    """A prompt, and what is generated after it; `after` is the number of the request whose output the prompt contains."""

    prompt: Tokens
    output: Tokens
    after: int | None = None


class _Writer:
    """Draws texts of random tokens: two of them share nothing but by chance."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def text(self, mean: float, spread: float = 0.5) -> Tokens:
        """A text of log-normal length."""
        length = max(1, round(self.rng.lognormal(np.log(mean) - spread**2 / 2, spread)))
        return self.rng.integers(1, _VOCAB, length)


def _multi_turn(writer: _Writer, count: int) -> list[Request]:
    """Chats under one of three system prompts; each turn repeats all before it. Turns of different chats mix at random."""
    systems = [writer.text(200) for _ in range(3)]
    waiting: list[tuple[Tokens, int, int | None]] = []  # the chat so far, turns to go, and the last request
    requests: list[Request] = []
    while len(requests) < count:
        if len(waiting) < 24:
            waiting.append((systems[writer.rng.integers(3)], int(writer.rng.geometric(1 / 5)), None))
        history, turns, last = waiting.pop(int(writer.rng.integers(len(waiting))))
        prompt, output = np.concatenate([history, writer.text(60)]), writer.text(130)
        requests.append(Request(prompt, output, last))
        if turns > 1:
            waiting.append((np.concatenate([prompt, output]), turns - 1, len(requests) - 1))
    return requests


def _few_shot(writer: _Writer, count: int) -> list[Request]:
    """Short questions after the examples of one of eight tasks."""
    tasks = [writer.text(700) for _ in range(8)]
    return [Request(np.concatenate([tasks[writer.rng.integers(8)], writer.text(60)]), writer.text(20)) for _ in range(count)]


def _tree_of_thought(writer: _Writer, count: int) -> list[Request]:
    """Problems after a common instruction; of each state three thoughts are drawn, and the states go three levels deep."""
    instruction = writer.text(150)
    requests: list[Request] = []
    while len(requests) < count:
        level: list[tuple[Tokens, int | None]] = [(np.concatenate([instruction, writer.text(120)]), None)]
        for _ in range(3):
            drawn = [Request(state, writer.text(50), after) for state, after in level for _ in range(3)]
            first = len(requests)
            requests += drawn
            level = [(np.concatenate([each.prompt, each.output]), first + place) for place, each in enumerate(drawn)]
    return requests[:count]


def _self_consistency(writer: _Writer, count: int) -> list[Request]:
    """Sixteen answers to each question after one set of examples."""
    examples = writer.text(600)
    questions = [np.concatenate([examples, writer.text(80)]) for _ in range(-(-count // 16))]
    return [Request(questions[index // 16], writer.text(120)) for index in range(count)]


WORKLOADS: Mapping[str, Callable[[_Writer, int], list[Request]]] = types.MappingProxyType(
    {
        "multi_turn": _multi_turn,
        "few_shot": _few_shot,
        "tree_of_thought": _tree_of_thought,
        "self_consistency": _self_consistency,
    }
)
"""Workloads by name; see `make_requests`."""


def make_requests(workload: str, count: int, seed: int) -> list[Request]:
    """So many requests of a workload, in the order in which they arrive."""
    return WORKLOADS[workload](_Writer(np.random.default_rng(seed)), count)


def mooncake_requests(prefix_ids: Sequence[tuple[int, ...]]) -> list[Request]:
    """A Mooncake trace as requests for an index of block size 1: the id of a block of 512 tokens is one token.

    The prompt ends with one more token, which stands for those that are always computed; so all blocks of the trace can be hit.
    """
    end = np.zeros(1, np.int64)
    return [Request(np.concatenate([np.asarray(ids, np.int64) + 1, end]), end[:0]) for ids in prefix_ids]
