"""What one sequence has produced, token by token, and how it ended."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jaxpage.decode import Decoded
from jaxpage.sampler_arrays import stop_ids
from jaxpage.sampling_params import SamplingParams

__all__ = ["Completion", "Detokenize", "TokenLogprob", "Transcript", "read_tokens"]

Detokenize = Callable[[Sequence[int]], str]


class TokenLogprob(NamedTuple):
    """A token's log-probability, and the best alternatives with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished sequence.

    Attributes:
      index: which prompt it continues.
      prompt_ids: the prompt.
      token_ids: the tokens produced, the stop id included.
      text: the tokens before a stop id as text, cut at a stop string; None without a detokenizer.
      finish_reason: "stop" at a stop id or string, "length" at its most tokens, "out_of_blocks" where the pool is too small for it alone,
        "aborted" by its user, or "no_allowed_token" where its constraint left none to choose.
      logprobs: of each token produced, where asked for.
      prompt_logprobs: of each prompt token given those before it, None for the first; where asked for.
    """

    index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[float | None, ...] | None


class Transcript:
    """Collects a running sequence's tokens and watches for its stop strings."""

    def __init__(
        self, index: int, prompt_ids: Sequence[int], params: SamplingParams, eos_ids: Sequence[int], detokenize: Detokenize | None
    ):
        self.index = index
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[float | None] = [None]
        self.stop_ids = frozenset(stop_ids(params, eos_ids))
        self._detokenize = detokenize

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> bool:
        """Adds tokens; True where one of them completes a stop string, and then those after it are left out."""
        known = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        if self._detokenize is None or not self.params.stop or self._stop_place(self._text(len(self.token_ids))) is None:
            return False
        for count in range(known + 1, len(self.token_ids) + 1):
            if self._stop_place(self._text(count)) is not None:
                del self.token_ids[count:], self.logprobs[count:]
                return True
        return False

    def complete(self, finish_reason: str) -> Completion:
        """The finished sequence."""
        text = None
        if self._detokenize is not None:
            text = self._text(len(self.token_ids))
            place = self._stop_place(text)
            text = text if place is None else text[:place]
        return Completion(
            self.index,
            self.prompt_ids,
            tuple(self.token_ids),
            text,
            finish_reason,
            tuple(self.logprobs) if self.params.logprobs is not None else None,
            tuple(self.prompt_logprobs) if self.params.prompt_logprobs else None,
        )

    def _text(self, count: int) -> str:
        assert self._detokenize is not None
        ids = self.token_ids[:count]
        if ids and ids[-1] in self.stop_ids and count >= self.params.min_tokens:
            ids = ids[:-1]
        return self._detokenize(ids)

    def _stop_place(self, text: str) -> int | None:
        """Where the first stop string begins that min_tokens allows: one that ends after the text of that many tokens."""
        early = len(self._text(self.params.min_tokens)) if self.params.min_tokens else 0
        places = [place for stop in self.params.stop if (place := text.find(stop, max(0, early - len(stop) + 1))) >= 0]
        return min(places, default=None)


def read_tokens(made: Decoded, row: int, count: int, num_logprobs: int | None) -> tuple[list[int], list[TokenLogprob]]:
    """The first `count` tokens of a row, and their log-probabilities with so many alternatives; None: none."""
    tokens, logprobs, top_ids, top_logprobs = jax.tree.map(lambda array: array[row, :count].tolist(), made)
    if num_logprobs is None or logprobs is None:
        return tokens, []
    best = [tuple(zip(*pair, strict=True))[:num_logprobs] for pair in zip(top_ids, top_logprobs, strict=True)]
    return tokens, [TokenLogprob(*token) for token in zip(tokens, logprobs, best, strict=True)]
