"""Beam search as one loop on the device: a step permutes the rows of the block table, and a row copies a block only to write to it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpage.admission import check_requests
from jaxpage.attention import backend_of
from jaxpage.buckets import BLOCK_BUCKETS, ROW_BUCKETS, SEQ_BUCKETS, bucket
from jaxpage.completion import Transcript
from jaxpage.config import CacheConfig
from jaxpage.kv_cache import KVCache, fork, init_cache, release, reserve
from jaxpage.model import CausalModel, ModelSizes
from jaxpage.programs import Programs
from jaxpage.prompt_passes import prefill_prompts
from jaxpage.sampling_params import SamplingParams

__all__ = ["Finished", "Hypothesis", "beam_cache_config", "beam_loop", "beam_search"]


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One of the best continuations.

    Attributes:
      token_ids: the tokens, an end of text included.
      score: log-probability / number of tokens ** length penalty.
      logprob: log-probability of all the tokens together.
      finish_reason: "stop" at an end of text, "length" at the most tokens.
    """

    token_ids: tuple[int, ...]
    score: float
    logprob: float
    finish_reason: str


class Finished(NamedTuple):
    """The best hypotheses so far, as many as the beam is wide (W), the best first; where there is none yet, the score is -inf."""

    tokens: Int[Array, "W T"]
    counts: Int[Array, " W"]
    scores: Float[Array, " W"]
    logprobs: Float[Array, " W"]
    stopped: Bool[Array, " W"]


class _Open(NamedTuple):
    """What the rows of the cache have produced, the best first."""

    tokens: Int[Array, "W T"]
    logprobs: Float[Array, " W"]


def beam_search(
    model: CausalModel,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    num_return: int = 1,
    eos_ids: Sequence[int] = (),
    block_size: int = 16,
    cache_dtype: str = "float32",
    implementation: str | None = None,
    programs: Programs | None = None,
) -> list[Hypothesis]:
    """The continuations of a prompt with the highest scores that a beam of some width finds, as in Hugging Face transformers.

    Of the best tokens of all rows together, those that end the text and are among the `width` best become hypotheses; the `width` best
    of the others go on. The `width` hypotheses of the highest scores are kept.

    Args:
      model: a causal model.
      prompt: token ids.
      width: rows that go on in each step (W).
      max_tokens: most tokens of a hypothesis (T), or what the context leaves. Rows that reach it are hypotheses too.
      length_penalty: a hypothesis has the score log-probability / number of tokens ** length_penalty; above 0 longer ones gain.
      early_stopping: True: the search ends once it has `width` hypotheses. False: it ends once, besides, the best row would not be better
        than the worst of them if it ended now. With a length penalty above 0 it could still become better later; that is not looked for.
      num_return: how many to return.
      eos_ids: tokens that end a text.
      block_size: tokens a block holds (B).
      cache_dtype: dtype of keys and values.
      implementation: see `jaxpage.paged_attention`.
      programs: compiled programs, to be shared by calls.

    Returns:
      `num_return` hypotheses, the best first; fewer where there are not so many texts.

    Raises:
      ValueError: an argument is out of range, or the prompt is empty, too long or outside the vocabulary.
      NotImplementedError: there is no such attention implementation, or it cannot run the cache.
    """
    sizes = model.config
    _check({"width": width, "num_return": num_return, "block_size": block_size}, length_penalty, early_stopping, eos_ids, sizes)
    request = check_requests([prompt], SamplingParams(max_tokens=max_tokens), sizes)[0]
    programs = Programs() if programs is None else programs
    config = beam_cache_config(sizes, len(request.prompt), width, request.max_tokens, block_size, cache_dtype)
    cache = init_cache(config, None if implementation is None else backend_of(implementation))
    transcript = Transcript(0, request.prompt, request.params, (), None)
    cache = prefill_prompts(programs, model, cache, [transcript], implementation=implementation)
    _, finished = programs.run(
        beam_loop,
        model,
        cache,
        np.int32(request.prompt[-1]),
        np.asarray(tuple(eos_ids), np.int32),
        np.float32(length_penalty),
        np.bool_(early_stopping),
        donate=(1,),
        max_tokens=request.max_tokens,
        implementation=implementation,
    )
    tokens, counts, scores, logprobs, stopped = jax.device_get(finished)
    return [
        Hypothesis(
            tuple(tokens[place, : counts[place]].tolist()),
            float(scores[place]),
            float(logprobs[place]),
            "stop" if stopped[place] else "length",
        )
        for place in range(num_return)
        if scores[place] > -math.inf
    ]


def _check(counts: dict[str, int], length_penalty: float, early_stopping: bool, eos_ids: Sequence[int], sizes: ModelSizes) -> None:
    most = {"width": SEQ_BUCKETS[-1], "num_return": counts["width"], "block_size": 2**31 - 1}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most[name]:
            raise ValueError(f"{name} must be an integer from 1 to {most[name]}, got {value!r}")
    if not isinstance(length_penalty, int | float) or not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty must be a finite number, got {length_penalty!r}")
    if not isinstance(early_stopping, bool):
        raise ValueError(f"early_stopping must be True or False, got {early_stopping!r}")
    for token in eos_ids:
        if not 0 <= token < sizes.vocab_size:
            raise ValueError(f"token id {token} in eos_ids is outside the vocabulary of {sizes.vocab_size}")


def beam_cache_config(sizes: ModelSizes, prompt_length: int, width: int, max_tokens: int, block_size: int, dtype: str) -> CacheConfig:
    """A cache in which a beam can never run short: the prompt's blocks once, and for each row what it writes itself and one copy.

    Args:
      sizes: the model's.
      prompt_length: tokens of the prompt.
      width: rows (W).
      max_tokens: most tokens of a row (T).
      block_size: tokens a block holds.
      dtype: of keys and values.

    Raises:
      ValueError: a size is out of range.
    """
    most = -(-(prompt_length + max_tokens - 1) // block_size)
    shared = (prompt_length - 1) // block_size  # full blocks of the prompt, which nobody writes to
    return CacheConfig(
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        num_blocks=bucket(1 + shared + 1 + width * (most - shared + 1), BLOCK_BUCKETS),
        block_size=block_size,
        max_seqs=width,
        max_blocks_per_seq=bucket(most, ROW_BUCKETS),
        dtype=dtype,
    )


def beam_loop(
    model: CausalModel,
    cache: KVCache,
    last: Int[Array, ""],
    eos_ids: Int[Array, " E"],
    length_penalty: Float[Array, ""],
    early_stopping: Bool[Array, ""],
    *,
    max_tokens: int,
    implementation: str | None = None,
) -> tuple[KVCache, Finished]:
    """The search itself; see `beam_search`.

    Args:
      model: the model.
      cache: as many rows as the beam is wide; row 0 holds the prompt but its last token, the others nothing. Donate it under `jax.jit`.
      last: the prompt's last token.
      eos_ids: tokens that end a text.
      length_penalty: see `beam_search`.
      early_stopping: see `beam_search`.
      max_tokens: most tokens of a hypothesis (T), static.
      implementation: see `jaxpage.paged_attention`.

    Returns:
      (cache, hypotheses): the rows are empty again.
    """
    width = cache.table.lengths.shape[0]
    rows = jnp.arange(width)
    cache = fork(cache, jnp.zeros_like(rows), rows)
    # All rows are the same at first: what follows comes from row 0.
    opened = _Open(jnp.zeros((width, max_tokens), jnp.int32), jnp.where(rows == 0, 0.0, -jnp.inf))
    nothing = jnp.full(width, -jnp.inf)
    finished = Finished(opened.tokens, jnp.zeros(width, jnp.int32), nothing, nothing, jnp.zeros(width, bool))

    def score(logprobs: Float[Array, " n"], count: Int[Array, ""]) -> Float[Array, " n"]:
        return logprobs / count.astype(jnp.float32) ** length_penalty

    def is_over(step: Int[Array, ""], opened: _Open, finished: Finished) -> Bool[Array, ""]:
        worst = finished.scores[-1]
        return (worst > -jnp.inf) & (early_stopping | (score(opened.logprobs, step)[0] <= worst))

    def goes_on(carry: tuple) -> Bool[Array, ""]:
        step, _, opened, finished = carry
        return (step < max_tokens) & ~is_over(step, opened, finished)

    def advance(carry: tuple) -> tuple:
        step, cache, opened, finished = carry
        tokens = jnp.where(step == 0, last, opened.tokens[:, jnp.maximum(step - 1, 0)])
        cache, _ = reserve(cache, cache.table.lengths + 1, max_new_blocks=1)
        hidden, cache = model.step(tokens, cache, cache.table.lengths, implementation=implementation)
        logprobs = opened.logprobs[:, None] + jax.nn.log_softmax(model.logits(hidden), axis=-1)
        # So many that enough are left to go on, however many of them end.
        count = min(width * (1 + eos_ids.shape[0]), logprobs.size)
        best, places = lax.top_k(logprobs.reshape(-1), count)
        origin, tokens = jnp.divmod(places.astype(jnp.int32), logprobs.shape[1])
        texts = opened.tokens[origin].at[:, step].set(tokens)
        ends = jnp.any(tokens[:, None] == eos_ids[None], axis=-1)
        scores = jnp.where(ends & (jnp.arange(count) < width), score(best, step + 1), -jnp.inf)
        finished = _keep_best(finished, Finished(texts, jnp.full(count, step + 1), scores, best, jnp.ones(count, bool)))
        chosen = jnp.argsort(ends, stable=True)[:width]
        cache = fork(cache, origin[chosen], rows)
        return step + 1, cache, _Open(texts[chosen], best[chosen]), finished

    step, cache, opened, finished = lax.while_loop(goes_on, advance, (jnp.int32(0), cache, opened, finished))
    scores = jnp.where(is_over(step, opened, finished), -jnp.inf, score(opened.logprobs, step))
    unended = Finished(opened.tokens, jnp.full(width, step), scores, opened.logprobs, jnp.zeros(width, bool))
    return release(cache, jnp.ones(width, bool)), _keep_best(finished, unended)


def _keep_best(kept: Finished, more: Finished) -> Finished:
    """The best of both, as many as are kept; of equal ones those that were there before."""
    every = jax.tree.map(lambda one, other: jnp.concatenate([one, other]), kept, more)
    _, places = lax.top_k(every.scores, kept.scores.shape[0])
    return jax.tree.map(lambda leaf: leaf[places], every)
