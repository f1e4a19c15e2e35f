"""How one sequence's next tokens are chosen: the request's side."""

import dataclasses
import math
from collections.abc import Mapping

__all__ = ["SamplingParams"]

_LARGEST = 1e20  # float32 holds this with room for products


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one sequence. The defaults decode greedily.

    The scores pass, in this order: logit bias, repetition, presence and frequency penalties, stop ids barred until `min_tokens`,
    temperature, then top-k, top-p among what top-k left, and min-p. Equal scores at a threshold are all kept; greedy decoding takes the
    lowest id of equal ones.

    Attributes:
      max_tokens: most tokens to produce.
      min_tokens: stop ids and stop strings do not end the sequence before so many tokens.
      temperature: 0 is greedy; else the scores are divided by it.
      top_k: keep the k best tokens; 0 keeps all.
      top_p: keep the best tokens whose probabilities reach this sum (Holtzman et al., 2020); 1 keeps all.
      min_p: keep tokens at least this fraction as probable as the best one (Nguyen et al., 2024); 0 keeps all.
      repetition_penalty: scores of tokens in the prompt or the output are divided by it where positive, multiplied where negative
        (Keskar et al., 2019); 1 changes nothing.
      presence_penalty: subtracted from the scores of tokens in the output.
      frequency_penalty: subtracted once for each time a token is in the output.
      logit_bias: token id -> value added to its score.
      seed: of the sequence's own random stream; with the same seed, prompt and parameters come the same tokens, whatever else is in
        the batch.
      stop_ids: token ids that end the sequence, besides the model's own.
      stop: strings that end the sequence; the text ends before them.
      ignore_eos: the model's own end-of-text ids do not end the sequence.
      logprobs: return the log-probability of each token produced and of so many best alternatives; None returns none. They are the
        model's, before penalties, temperature and truncation.
      prompt_logprobs: return the log-probability of each prompt token given those before it.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        limits = {
            "max_tokens": (1, 2**31 - 1),
            "min_tokens": (0, self.max_tokens if isinstance(self.max_tokens, int) else 0),
            "temperature": (0.0, math.inf),
            "top_k": (0, 2**31 - 1),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.0, _LARGEST),
            "presence_penalty": (-_LARGEST, _LARGEST),
            "frequency_penalty": (-_LARGEST, _LARGEST),
            "seed": (0, 2**32 - 1),
            "logprobs": (0, 1024),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name == "logprobs":
                continue
            whole = isinstance(low, int)
            number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not number or not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"{name} must be {'an integer ' if whole else ''}from {low} to {high}, got {value!r}")
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0, got 0")
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty must be above 0, got 0")
        if isinstance(self.stop, str):
            raise ValueError(f"stop must be a tuple of strings, got the string {self.stop!r}")
        if any(not text for text in self.stop):
            raise ValueError("stop strings must not be empty")
        for token, value in self.logit_bias.items():
            if not isinstance(token, int) or token < 0 or not abs(value) <= _LARGEST:
                raise ValueError(f"logit_bias must map token ids to values up to {_LARGEST:g}, got {token!r}: {value!r}")
        if not all(isinstance(token, int) for token in self.stop_ids):
            raise ValueError(f"stop_ids must be token ids, got {self.stop_ids!r}")
