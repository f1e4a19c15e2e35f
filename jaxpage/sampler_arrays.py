"""From the sampling parameters of requests to the arrays of a batch."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxpage.sampling import Bias, Constraint, Penalties, Randomness, Sampler, Truncation
from jaxpage.sampling_params import SamplingParams

__all__ = ["Features", "build_sampler", "check_features"]


@dataclasses.dataclass(frozen=True)
class Features:
    """What a set of requests uses of the sampler and its results. Batches of the same features share one compiled program.

    `constrained` reserves room for the tokens that each sequence may choose (see `sampling.Constraint`).
    """

    random: bool
    truncated: bool
    penalised: bool
    num_biases: int
    num_stop_ids: int
    num_logprobs: int | None
    constrained: bool = False

    @classmethod
    def of(cls, requests: Sequence[SamplingParams], eos_ids: Sequence[int]) -> "Features":
        """The least features that serve all of the requests."""
        random = [params for params in requests if params.temperature > 0]
        return cls(
            random=bool(random),
            truncated=any(params.top_k > 0 or params.top_p < 1 or params.min_p > 0 for params in random),
            penalised=any(
                params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0 for params in requests
            ),
            num_biases=max((len(params.logit_bias) for params in requests), default=0),
            num_stop_ids=max((len(stop_ids(params, eos_ids)) for params in requests), default=0),
            num_logprobs=max((params.logprobs for params in requests if params.logprobs is not None), default=None),
        )


def check_features(params: SamplingParams, eos_ids: Sequence[int], features: Features) -> None:
    """Raises where a request uses more than some features offer.

    Raises:
      ValueError: names the parameter.
    """
    used = Features.of([params], eos_ids)
    for name, parameters in (("random", "temperature"), ("truncated", "top_k, top_p and min_p"), ("penalised", "penalties")):
        if getattr(used, name) and not getattr(features, name):
            raise ValueError(f"{parameters} cannot be used here: the feature {name!r} is off")
    for name, parameter in (("num_biases", "logit_bias"), ("num_stop_ids", "stop_ids"), ("num_logprobs", "logprobs")):
        count, most = getattr(used, name), getattr(features, name)
        if count is not None and count > (-1 if most is None else most):
            raise ValueError(f"{parameter} has {count} entries, at most {most or 0} can be used here: the feature {name!r}")


def stop_ids(params: SamplingParams, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """The token ids that end a sequence."""
    return tuple(dict.fromkeys([*params.stop_ids, *([] if params.ignore_eos else eos_ids)]))


def build_sampler(
    requests: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    features: Features,
    *,
    num_seqs: int,
    vocab_size: int,
    eos_ids: Sequence[int],
    max_tokens: Sequence[int],
    produced: Sequence[Sequence[int]] = (),
) -> Sampler:
    """Arrays for a batch of `num_seqs` rows, the first of which are the requests.

    Args:
      requests: sampling parameters of each row in use.
      prompts: its prompt ids, which the repetition penalty counts.
      features: parts to build.
      num_seqs: rows (S).
      vocab_size: token ids (V).
      eos_ids: the model's own end-of-text ids.
      max_tokens: most tokens of each row, where the context allows fewer than the request asks.
      produced: ids that a row has produced before, which all penalties count; rows without are new.

    Raises:
      ValueError: a logit bias or stop id is not in the vocabulary.
    """

    def column(name: str, dtype: type, default: float) -> jnp.ndarray:
        values: np.ndarray = np.full(num_seqs, default, dtype)
        values[: len(requests)] = [getattr(params, name) for params in requests]
        return jnp.asarray(values)

    for params in requests:
        for token in [*params.logit_bias, *params.stop_ids]:
            if not 0 <= token < vocab_size:
                raise ValueError(f"token id {token} in logit_bias or stop_ids is outside the vocabulary of {vocab_size}")
    stops = np.full((num_seqs, features.num_stop_ids), -1, np.int32)
    most = np.ones(num_seqs, np.int32)
    most[: len(requests)] = max_tokens
    for row, params in enumerate(requests):
        ids = stop_ids(params, eos_ids)
        stops[row, : len(ids)] = ids
    scored = np.zeros(num_seqs, bool)
    scored[: len(requests)] = [params.logprobs is not None for params in requests]
    return Sampler(
        scored=jnp.asarray(scored),
        stop_ids=jnp.asarray(stops),
        min_tokens=column("min_tokens", np.int32, 0),
        max_tokens=jnp.asarray(most),
        randomness=Randomness(
            column("seed", np.uint32, 0),
            column("temperature", np.float32, 0),
            Truncation(column("top_k", np.int32, 0), column("top_p", np.float32, 1), column("min_p", np.float32, 0))
            if features.truncated
            else None,
        )
        if features.random
        else None,
        penalties=Penalties(
            column("repetition_penalty", np.float32, 1),
            column("presence_penalty", np.float32, 0),
            column("frequency_penalty", np.float32, 0),
            _seen(prompts, num_seqs, vocab_size),
            _counts(produced, num_seqs, vocab_size),
        )
        if features.penalised
        else None,
        bias=_bias(requests, num_seqs, features.num_biases) if features.num_biases else None,
        constraint=Constraint(jnp.zeros(num_seqs, bool), jnp.zeros((num_seqs, -(-vocab_size // 32)), jnp.uint32))
        if features.constrained
        else None,
    )


def _seen(prompts: Sequence[Sequence[int]], num_seqs: int, vocab_size: int) -> jnp.ndarray:
    seen = np.zeros((num_seqs, vocab_size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, np.asarray(prompt)] = True
    return jnp.asarray(seen)


def _counts(produced: Sequence[Sequence[int]], num_seqs: int, vocab_size: int) -> jnp.ndarray:
    counts = np.zeros((num_seqs, vocab_size), np.int32)
    for row, tokens in enumerate(produced):
        np.add.at(counts[row], np.asarray(tokens, np.int32), 1)
    return jnp.asarray(counts)


def _bias(requests: Sequence[SamplingParams], num_seqs: int, width: int) -> Bias:
    ids = np.full((num_seqs, width), -1, np.int32)
    values = np.zeros((num_seqs, width), np.float32)
    for row, params in enumerate(requests):
        ids[row, : len(params.logit_bias)] = list(params.logit_bias)
        values[row, : len(params.logit_bias)] = list(params.logit_bias.values())
    return Bias(jnp.asarray(ids), jnp.asarray(values))
