"""Batch generation from the host: admit prompts, prefill, decode in rounds, hand out what was produced."""

import contextlib
import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxpage import decode
from jaxpage.admission import Request, admit, check_requests, check_sizes, size_cache
from jaxpage.attention import backend_of
from jaxpage.completion import Completion, Detokenize, Transcript, read_tokens
from jaxpage.config import CacheConfig
from jaxpage.decode import Decoded, DecodeState
from jaxpage.inspect import Usage, usage
from jaxpage.kv_cache import KVCache, init_cache, release
from jaxpage.model import CausalModel
from jaxpage.programs import Programs
from jaxpage.prompt_passes import prefill_prompts
from jaxpage.sampler_arrays import Features, build_sampler
from jaxpage.sampling_params import SamplingParams

__all__ = ["BatchDecoder", "Stats", "Update", "generate"]


@dataclasses.dataclass
class Stats:
    """What the runs of a decoder have cost; `usage` is the fullest its pool has been."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    usage: Usage = dataclasses.field(default_factory=lambda: Usage(0, 0, 0, 0))


class Update(NamedTuple):
    """News of one sequence: tokens it produced, and the whole of it once it has ended."""

    prompt_index: int
    token_ids: tuple[int, ...]
    completion: Completion | None


class BatchDecoder:
    """Generates for batches of prompts from one paged cache.

    Prompts are taken in order, as many at a time as the pool and `max_seqs` hold; the rest wait for the batch before them. The programs
    are compiled once for each bucket of shapes (`jaxpage.buckets`) and kept.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        eos_ids: Sequence[int] = (),
        detokenize: Detokenize | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_seqs: int = 64,
        cache_dtype: str = "float32",
        steps_per_round: int = 32,
        implementation: str | None = None,
    ):
        """Prepares a decoder; nothing is allocated or compiled yet.

        Args:
          model: a causal model.
          eos_ids: token ids at which the model ends its text.
          detokenize: token ids -> text, for `Completion.text` and stop strings.
          block_size: tokens a block holds.
          num_blocks: blocks in the pool, the null block included; None: as many as the prompts may come to need.
          max_seqs: most sequences at a time.
          cache_dtype: dtype of keys and values.
          steps_per_round: decode steps between two looks of the host.
          implementation: attention implementation, see `jaxpage.paged_attention`.

        Raises:
          ValueError: a size is out of range.
        """
        check_sizes(block_size, max_seqs, num_blocks)
        if steps_per_round < 1:
            raise ValueError(f"steps_per_round must be at least 1, got {steps_per_round}")
        self.model = model
        self.eos_ids = tuple(eos_ids)
        self.detokenize = detokenize
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_seqs = max_seqs
        self.cache_dtype = cache_dtype
        self.steps_per_round = steps_per_round
        self.implementation = implementation
        self.stats = Stats()
        self.programs = Programs()

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]) -> Iterator[Update]:
        """Generates, and yields what every round produced.

        Args:
          prompts: token ids of each prompt.
          params: one set for all prompts or one for each.

        Raises:
          ValueError: an empty or too long prompt, an id outside the vocabulary, an unknown cache dtype, or a pool that cannot hold a
            prompt. All of this is checked at the call, before anything is produced.
          NotImplementedError: the attention implementation does not exist or cannot run the cache.
        """
        requests = check_requests(prompts, params, self.model.config)
        if any(request.params.stop for request in requests) and self.detokenize is None:
            raise ValueError("stop strings need a detokenizer")
        if not requests:
            return iter(())
        config = size_cache(
            requests,
            self.model.config,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_seqs=self.max_seqs,
            dtype=self.cache_dtype,
        )
        return self._run(requests, config)

    def _run(self, requests: list[Request], config: CacheConfig) -> Iterator[Update]:
        features = Features.of([request.params for request in requests], self.eos_ids)
        cache = init_cache(config, None if self.implementation is None else backend_of(self.implementation))
        self.stats.kv_bytes = config.pool_bytes
        while requests:
            batch = admit(requests, config, self.max_seqs)
            requests = requests[len(batch) :]
            cache = yield from self._run_batch(cache, batch, features, config.max_seqs)

    def _run_batch(self, cache: KVCache, batch: list[Request], features: Features, num_seqs: int) -> Generator[Update, None, KVCache]:
        transcripts = [Transcript(request.prompt_index, request.prompt, request.params, self.eos_ids, self.detokenize) for request in batch]
        sampler = build_sampler(
            [request.params for request in batch],
            [request.prompt for request in batch],
            features,
            num_seqs=num_seqs,
            vocab_size=self.model.config.vocab_size,
            eos_ids=self.eos_ids,
            max_tokens=[request.max_tokens for request in batch],
        )
        with self._timed("prefill_seconds"):
            cache = prefill_prompts(self.programs, self.model, cache, transcripts, implementation=self.implementation)
            jax.block_until_ready(cache)
        self.stats.prompt_tokens += sum(len(request.prompt) for request in batch)
        tokens, active = np.zeros(num_seqs, np.int32), np.zeros(num_seqs, bool)
        tokens[: len(batch)] = [request.prompt[-1] for request in batch]
        active[: len(batch)] = True
        state = decode.init_state(cache, sampler, jnp.asarray(tokens), jnp.asarray(active))
        running = dict(enumerate(transcripts))
        while running:
            with self._timed("decode_seconds"):
                state, made = self._round(state, features.num_logprobs)
            self._note_usage(state.cache)
            known = {row: len(transcript.token_ids) for row, transcript in running.items()}
            ended = {row: reason for row, transcript in running.items() if (reason := made.add_to(row, transcript))}
            if not ended and made.starved.any():
                # Nobody ended, so nothing comes free: the last in line gives way.
                ended[int(np.flatnonzero(made.starved)[-1])] = "out_of_blocks"
            if ended:
                state = self.programs.run(_end, state, jnp.asarray(np.isin(np.arange(num_seqs), list(ended))), donate=(0,))
            for row, transcript in running.items():
                new = tuple(transcript.token_ids[known[row] :])
                completion = transcript.complete(ended[row]) if row in ended else None
                self.stats.tokens += len(new)
                if new or completion is not None:
                    yield Update(transcript.index, new, completion)
            running = {row: transcript for row, transcript in running.items() if row not in ended}
        return state.cache

    def _round(self, state: DecodeState, num_logprobs: int | None) -> tuple[DecodeState, "_Round"]:
        before = np.asarray(state.num_produced)
        state, made, starved = self.programs.run(
            decode.decode_loop,
            self.model,
            state,
            donate=(1,),
            num_steps=self.steps_per_round,
            num_logprobs=num_logprobs,
            implementation=self.implementation,
        )
        made, starved, finish, after = jax.device_get((made, starved, state.finish, state.num_produced))
        return state, _Round(made, after - before, finish, starved)

    @contextlib.contextmanager
    def _timed(self, field: str) -> Iterator[None]:
        """Adds the time of the block to a field of the statistics, without what went into compiling."""
        start, compiling = time.perf_counter(), self.programs.compile_seconds
        yield
        spent = time.perf_counter() - start - (self.programs.compile_seconds - compiling)
        setattr(self.stats, field, getattr(self.stats, field) + spent)

    def _note_usage(self, cache: KVCache) -> None:
        now = usage(cache)
        if now.blocks_used >= self.stats.usage.blocks_used:
            self.stats.usage = now


class _Round(NamedTuple):
    """What a round of decode steps produced, on the host."""

    made: Decoded
    counts: np.ndarray  # tokens of each row
    finish: np.ndarray
    starved: np.ndarray

    def add_to(self, row: int, transcript: Transcript) -> str | None:
        """Adds the row's tokens to its transcript. The reason why the sequence ended, or None."""
        tokens, scored = read_tokens(self.made, row, int(self.counts[row]), transcript.params.logprobs)
        if transcript.extend(tokens, scored):
            return "stop"
        return {decode.RUNNING: None, decode.STOP: "stop", decode.LENGTH: "length"}[int(self.finish[row])]


def _end(state: DecodeState, mask: Bool[Array, " S"]) -> DecodeState:
    return state._replace(cache=release(state.cache, mask), active=state.active & ~mask)


def generate(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008  (frozen)
    **options: object,
) -> list[Completion]:
    """Generates for a batch of prompts and returns the completions in the prompts' order.

    Args:
      model: a causal model, such as `models.Decoder`.
      prompts: token ids of each prompt.
      params: one set of sampling parameters for all prompts or one for each.
      options: see `BatchDecoder`.

    Raises:
      ValueError: see `BatchDecoder.run`.
    """
    decoder = BatchDecoder(model, **options)  # type: ignore[arg-type]
    done = [update.completion for update in decoder.run(prompts, params) if update.completion is not None]
    return sorted(done, key=lambda completion: completion.index)
