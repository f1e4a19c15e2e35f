"""Batch generation from the host: admit prompts, prefill, decode in rounds, hand out what was produced."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxpage import decode
from jaxpage.buckets import BLOCK_BUCKETS, SEQ_BUCKETS, TOKEN_BUCKETS, bucket
from jaxpage.completion import Completion, Detokenize, TokenLogprob, Transcript
from jaxpage.config import CacheConfig
from jaxpage.decode import DecodeState, Decoded
from jaxpage.inspect import Usage, usage
from jaxpage.kv_cache import KVCache, init_cache, release, reserve
from jaxpage.programs import Programs
from jaxpage.sampler_arrays import Features, build_sampler
from jaxpage.sampling_params import SamplingParams

__all__ = ["BatchDecoder", "Stats", "Update", "generate"]


class ModelSizes(Protocol):
    """The fields of a model's configuration that a cache is sized by; `models.ModelConfig` has them."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def max_length(self) -> int: ...  # noqa: D102


class GenerativeModel(decode.CausalModel, Protocol):
    """A causal model that tells its sizes."""

    config: ModelSizes


@dataclasses.dataclass
class Stats:
    """What the runs of a decoder have cost; `usage` is the fullest its pool has been."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    usage: Usage = Usage(0, 0, 0, 0)


class Update(NamedTuple):
    """News of one sequence: tokens it produced, and the whole of it once it has ended."""

    index: int
    token_ids: tuple[int, ...]
    completion: Completion | None


class _Request(NamedTuple):
    transcript: Transcript
    max_tokens: int  # what the request asks or the context allows


class BatchDecoder:
    """Generates for batches of prompts from one paged cache.

    Prompts are taken in order, as many at a time as the pool and `max_seqs` hold; the rest wait for the batch before them. The programs
    are compiled once for each bucket of shapes (`jaxpage.buckets`) and kept.
    """

    def __init__(
        self,
        model: GenerativeModel,
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
          ValueError: a size is not positive, or the dtype is unknown.
        """
        for name, value in (("block_size", block_size), ("max_seqs", max_seqs), ("steps_per_round", steps_per_round)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.model = model
        self.eos_ids = tuple(eos_ids)
        self.detokenize = detokenize
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_seqs = min(max_seqs, SEQ_BUCKETS[-1])
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
          ValueError: an empty or too long prompt, an id outside the vocabulary, or a pool that cannot hold a prompt. Nothing has been
            produced then.
        """
        requests = self._requests(prompts, params)
        if not requests:
            return
        config = self._cache_config(requests)
        features = Features.of([request.transcript.params for request in requests], self.eos_ids)
        cache = init_cache(config)
        self.stats.kv_bytes = config.pool_bytes
        while requests:
            batch = self._admit(requests, config)
            requests = requests[len(batch) :]
            cache = yield from self._run_batch(cache, batch, features, config)

    def _requests(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[_Request]:
        many = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(many) != len(prompts):
            raise ValueError(f"params must be one SamplingParams or one for each of the {len(prompts)} prompts, got {len(many)}")
        sizes = self.model.config
        requests = []
        for index, (prompt, one) in enumerate(zip(prompts, many, strict=True)):
            if len(prompt) == 0:
                raise ValueError(f"prompt {index} is empty; a prompt needs at least one token")
            if len(prompt) > sizes.max_length:
                raise ValueError(f"prompt {index} has {len(prompt)} tokens, the model's context holds {sizes.max_length}")
            if not 0 <= min(prompt) <= max(prompt) < sizes.vocab_size:
                raise ValueError(f"prompt {index} holds a token id outside the vocabulary of {sizes.vocab_size}")
            if one.stop and self.detokenize is None:
                raise ValueError("stop strings need a detokenizer")
            # The last token produced is never written to the cache.
            room = sizes.max_length - len(prompt) + 1
            transcript = Transcript(index, prompt, one, self.eos_ids, self.detokenize)
            requests.append(_Request(transcript, min(one.max_tokens, room)))
        return requests

    def _cache_config(self, requests: Sequence[_Request]) -> CacheConfig:
        blocks = [-(-(len(request.transcript.prompt_ids) + request.max_tokens - 1) // self.block_size) for request in requests]
        if self.num_blocks is not None:
            for request in requests:
                need = self._prompt_blocks(request) + 1
                if need > self.num_blocks:
                    raise ValueError(
                        f"prompt {request.transcript.index} needs {need} blocks of {self.block_size} tokens (the null block included), "
                        f"the pool has {self.num_blocks}"
                    )
        max_seqs = bucket(min(len(requests), self.max_seqs), SEQ_BUCKETS)
        sizes = self.model.config
        return CacheConfig(
            num_layers=sizes.num_layers,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            num_blocks=self.num_blocks or bucket(sum(sorted(blocks)[-max_seqs:]) + 1, BLOCK_BUCKETS),
            block_size=self.block_size,
            max_seqs=max_seqs,
            max_blocks_per_seq=bucket(max(blocks), BLOCK_BUCKETS),
            dtype=self.cache_dtype,
        )

    def _prompt_blocks(self, request: _Request) -> int:
        return -(-len(request.transcript.prompt_ids) // self.block_size)

    def _admit(self, requests: Sequence[_Request], config: CacheConfig) -> list[_Request]:
        """The next requests, in order, whose prompts fit the empty pool together."""
        batch: list[_Request] = []
        free = config.num_blocks - 1
        for request in requests[: config.max_seqs]:
            free -= self._prompt_blocks(request)
            if free < 0:
                break
            batch.append(request)
        return batch

    def _run_batch(self, cache: KVCache, batch: list[_Request], features: Features, config: CacheConfig) -> Iterator[Update]:
        transcripts = [request.transcript for request in batch]
        prompts = [transcript.prompt_ids for transcript in transcripts]
        params = [transcript.params for transcript in transcripts]
        sampler = build_sampler(
            params,
            prompts,
            features,
            num_seqs=config.max_seqs,
            vocab_size=self.model.config.vocab_size,
            eos_ids=self.eos_ids,
            max_tokens=[request.max_tokens for request in batch],
        )
        cache = self._prefill(cache, transcripts, config.max_seqs)
        tokens, active = np.zeros(config.max_seqs, np.int32), np.zeros(config.max_seqs, bool)
        tokens[: len(batch)] = [prompt[-1] for prompt in prompts]
        active[: len(batch)] = True
        state = decode.init_state(cache, sampler, jnp.asarray(tokens), jnp.asarray(active))
        wanted = [one.logprobs for one in params if one.logprobs is not None]
        running = dict(enumerate(transcripts))
        while running:
            start, compiling = time.perf_counter(), self.programs.compile_seconds
            before = np.asarray(state.num_produced)
            state, made, starved = self.programs.run(
                decode.decode_loop,
                self.model,
                state,
                donate=(1,),
                num_steps=self.steps_per_round,
                num_logprobs=max(wanted) if wanted else None,
                implementation=self.implementation,
            )
            made, starved, finish, after = jax.device_get((made, starved, state.finish, state.num_produced))
            self.stats.decode_seconds += time.perf_counter() - start - (self.programs.compile_seconds - compiling)
            self._note_usage(state.cache)

            ended, updates = {}, []
            for row, transcript in running.items():
                count = int(after[row] - before[row])
                known = len(transcript.token_ids)
                stopped = transcript.extend(made.tokens[row, :count].tolist(), _token_logprobs(made, row, count, transcript.params))
                if stopped:
                    ended[row] = "stop"
                elif finish[row] != decode.RUNNING:
                    ended[row] = "stop" if finish[row] == decode.STOP else "length"
                updates.append((row, tuple(transcript.token_ids[known:])))
            if not ended and starved.any():
                # Nobody ended, so nothing comes free: the last in line gives way.
                ended[int(np.flatnonzero(starved)[-1])] = "out_of_blocks"
            if ended:
                state = self.programs.run(_end, state, jnp.asarray(np.isin(np.arange(config.max_seqs), list(ended))), donate=(0,))
            for row, new in updates:
                completion = running[row].complete(ended[row]) if row in ended else None
                self.stats.tokens += len(new)
                if new or completion is not None:
                    yield Update(running[row].index, new, completion)
            running = {row: transcript for row, transcript in running.items() if row not in ended}
        return state.cache

    def _prefill(self, cache: KVCache, transcripts: Sequence[Transcript], num_seqs: int) -> KVCache:
        """Runs all prompts but their last tokens, which the decode loop takes: there each sequence's first token is sampled."""
        start, compiling = time.perf_counter(), self.programs.compile_seconds
        lengths = np.zeros(num_seqs, np.int32)
        lengths[: len(transcripts)] = [len(transcript.prompt_ids) - 1 for transcript in transcripts]
        cache, ok = self.programs.run(reserve, cache, jnp.asarray(lengths), donate=(0,))
        if not bool(jnp.all(ok)):
            raise RuntimeError("an admitted batch does not fit the pool")
        scored = any(transcript.params.prompt_logprobs for transcript in transcripts)
        done = np.zeros(num_seqs, np.int32)
        while (done < lengths).any():
            # Fill one pass with what is left of the prompts, in row order.
            left = lengths - done
            starts = np.minimum(np.concatenate([[0], np.cumsum(left)]), TOKEN_BUCKETS[-1]).astype(np.int32)
            counts = np.diff(starts)
            tokens = np.zeros(bucket(int(starts[-1]), TOKEN_BUCKETS), np.int32)
            targets = np.zeros_like(tokens)
            for row, transcript in enumerate(transcripts):
                first, count = done[row], counts[row]
                place = slice(starts[row], starts[row] + count)
                tokens[place] = transcript.prompt_ids[first : first + count]
                targets[place] = transcript.prompt_ids[first + 1 : first + count + 1]
            done += counts
            cache, scores = self.programs.run(
                decode.prefill,
                self.model,
                cache,
                jnp.asarray(tokens),
                jnp.asarray(np.where(counts > 0, done, 0).astype(np.int32)),
                jnp.asarray(starts),
                *([jnp.asarray(targets)] if scored else []),
                donate=(1,),
                implementation=self.implementation,
            )
            if scores is not None:
                scores = np.asarray(scores)
                for row, transcript in enumerate(transcripts):
                    transcript.prompt_logprobs.extend(scores[starts[row] : starts[row] + counts[row]].tolist())
        jax.block_until_ready(cache)
        self.stats.prompt_tokens += sum(len(transcript.prompt_ids) for transcript in transcripts)
        self.stats.prefill_seconds += time.perf_counter() - start - (self.programs.compile_seconds - compiling)
        return cache

    def _note_usage(self, cache: KVCache) -> None:
        now = usage(cache)
        if now.blocks_used >= self.stats.usage.blocks_used:
            self.stats.usage = now


def _end(state: DecodeState, mask: Bool[Array, " S"]) -> DecodeState:
    return state._replace(cache=release(state.cache, mask), active=state.active & ~mask)


def _token_logprobs(made: Decoded, row: int, count: int, params: SamplingParams) -> list[TokenLogprob]:
    if params.logprobs is None or made.logprobs is None or made.top_ids is None or made.top_logprobs is None:
        return []
    return [
        TokenLogprob(
            int(made.tokens[row, step]),
            float(made.logprobs[row, step]),
            tuple(zip(made.top_ids[row, step].tolist(), made.top_logprobs[row, step].tolist(), strict=True))[: params.logprobs],
        )
        for step in range(count)
    ]


def generate(
    model: GenerativeModel,
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
