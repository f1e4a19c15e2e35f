"""How long requests are: drawn from a distribution, or read from a trace."""

import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from experiments.traces import FORMATS, read_trace

__all__ = ["DISTRIBUTIONS", "FIVE_USERS", "Lengths", "check_source", "load_lengths"]

FIVE_USERS = (10_000, 50_000, 5_000, 100_000, 30_000)
"""Tokens of the five users of the classic example; K is a thousand."""


class Lengths(NamedTuple):
    """Tokens of each request's prompt, and tokens it generates."""

    prompt: Int[np.ndarray, " n"]
    output: Int[np.ndarray, " n"]

    @property
    def total(self) -> Int[np.ndarray, " n"]:
        """Tokens each request holds when it ends."""
        return self.prompt + self.output


def _log_normal(rng: np.random.Generator, count: int, mean: float, spread: float, most: int) -> Int[np.ndarray, " n"]:
    """Log-normal lengths of a mean (before they are cut to 1 .. most); `spread` is the deviation of the logarithm."""
    drawn: Float[np.ndarray, " n"] = rng.lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


def _short_chat(rng: np.random.Generator, count: int) -> Lengths:
    return Lengths(_log_normal(rng, count, 60, 0.7, 1024), _log_normal(rng, count, 130, 0.6, 1024))


def _long_chat(rng: np.random.Generator, count: int) -> Lengths:
    return Lengths(_log_normal(rng, count, 1200, 0.9, 16384), _log_normal(rng, count, 250, 0.6, 2048))


def _code(rng: np.random.Generator, count: int) -> Lengths:
    return Lengths(_log_normal(rng, count, 2000, 0.8, 16384), _log_normal(rng, count, 30, 0.8, 1024))


def _five_users(rng: np.random.Generator, count: int) -> Lengths:
    total = np.asarray(FIVE_USERS)
    return Lengths(total * 9 // 10, total - total * 9 // 10)


DISTRIBUTIONS: Mapping[str, Callable[[np.random.Generator, int], Lengths]] = types.MappingProxyType(
    {"short_chat": _short_chat, "long_chat": _long_chat, "code": _code, "five_users": _five_users}
)
"""Short chats of about 190 tokens in the mean, long chats of 1450, code completion of 2030, and the five users (always five)."""


def check_source(source: str) -> None:
    """Raises ValueError where a name is neither a distribution nor a file that could be a trace."""
    if source not in DISTRIBUTIONS and not source.endswith(tuple(FORMATS)):
        raise ValueError(f"lengths must be one of {', '.join(DISTRIBUTIONS)}, or a trace file ({', '.join(FORMATS)}); got {source!r}")


def load_lengths(source: str, count: int, seed: int) -> Lengths:
    """Lengths of requests.

    Args:
      source: a name in `DISTRIBUTIONS`, or the path of a trace, which is taken whole.
      count: how many to draw from a distribution.
      seed: of the draw.

    Raises:
      ValueError: there is no such distribution, or the trace is broken.
      OSError: there is no such file.
    """
    check_source(source)
    if source in DISTRIBUTIONS:
        return DISTRIBUTIONS[source](np.random.default_rng(seed), count)
    trace = read_trace(source)
    return Lengths(trace.prompt_tokens, trace.output_tokens)
