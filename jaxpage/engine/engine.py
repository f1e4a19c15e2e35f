"""The engine: many requests from one pool, coming and going. The host prepares the next pass while the device computes the last."""

import collections
import dataclasses
import os
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxpage.admission import check_requests
from jaxpage.attention import backend_of
from jaxpage.completion import Completion, Detokenize, Transcript, read_tokens
from jaxpage.config import CacheConfig
from jaxpage.decode import LENGTH, RUNNING, STOP
from jaxpage.engine.constraint import AllowedTokens, next_words
from jaxpage.engine.device import Device
from jaxpage.engine.drafts import with_drafts
from jaxpage.engine.memory import Memory
from jaxpage.engine.options import INDEXES, EngineOptions
from jaxpage.engine.passes import Made
from jaxpage.engine.policy import find_scheduling
from jaxpage.engine.save import check_same, load_engine, read_host, save_engine
from jaxpage.engine.scheduler import MixedPlan, Piece, RoundPlan, Scheduler
from jaxpage.engine.seq import Seq
from jaxpage.generate import Update
from jaxpage.inspect import Usage
from jaxpage.model import CausalModel
from jaxpage.prefix import PrefixIndex
from jaxpage.programs import Programs
from jaxpage.sampler_arrays import check_features
from jaxpage.sampling_params import SamplingParams

__all__ = ["Engine", "EngineStats"]

_REASONS = {RUNNING: None, STOP: "stop", LENGTH: "length"}


class EngineStats(NamedTuple):
    """What an engine is doing and has done.

    Attributes:
      running: sequences with a row.
      waiting: sequences without.
      blocks_used: blocks that a sequence or the index holds.
      blocks_total: blocks of the pool.
      blocks_cached: blocks that the index holds.
      swapped_bytes: host memory that preempted sequences take.
      passes: mixed passes and rounds dispatched.
      preemptions: how often a sequence gave way.
      prompt_tokens: prompt tokens computed.
      hit_tokens: prompt tokens found in the index instead.
      tokens: tokens produced.
      drafted_tokens: tokens guessed ahead.
      kept_drafts: those of them that were right.
      host_seconds: time in `step` that was not spent waiting for the device.
      wait_seconds: time that was.
    """

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    blocks_cached: int = 0
    swapped_bytes: int = 0
    passes: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    tokens: int = 0
    drafted_tokens: int = 0
    kept_drafts: int = 0
    host_seconds: float = 0.0
    wait_seconds: float = 0.0


class _Dispatched(NamedTuple):
    """A pass that is under way."""

    made: Made
    pieces: list[Piece]
    mixed: bool


class Engine:
    """Serves requests from one paged cache: continuous batching, prefix sharing, preemption.

    Requests are submitted at any time; `step` runs a pass and hands out what is new. Sequences with a common prefix share its blocks
    without anyone asking. When blocks run short, the index lets go what nobody uses, then the youngest of the lowest priority gives way
    and runs again later; no request is lost.
    """

    def __init__(
        self,
        model: CausalModel,
        options: EngineOptions,
        *,
        eos_ids: Sequence[int] = (),
        detokenize: Detokenize | None = None,
        index: PrefixIndex | None = None,
        programs: Programs | None = None,
        draft_model: CausalModel | None = None,
    ):
        """Allocates the cache; nothing is compiled yet (see `warmup`).

        Args:
          model: a causal model, such as `models.Decoder`.
          options: sizes and policies.
          eos_ids: token ids at which the model ends its text.
          detokenize: token ids -> text, for `Completion.text` and stop strings.
          index: a prefix index of one's own instead of the one that the options name.
          programs: compiled programs, to be shared by engines: those of equal sizes then compile once.
          draft_model: a small model of the same vocabulary that guesses ahead, where the options ask for speculation; None: prompt lookup.

        Raises:
          ValueError: an option is out of range, the index has another block size, or the draft model another vocabulary.
          NotImplementedError: there is no such attention implementation.
        """
        self.options = options
        self._eos_ids = tuple(eos_ids)
        self._detokenize = detokenize
        sizes = model.config
        length = min(options.max_length or sizes.max_length, sizes.max_length)
        config = CacheConfig(
            num_layers=sizes.num_layers,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            num_blocks=options.num_blocks,
            block_size=options.block_size,
            max_seqs=options.max_seqs,
            max_blocks_per_seq=-(-length // options.block_size),
            dtype=options.cache_dtype,
        )
        self._max_length = length
        backend = None if options.implementation is None else backend_of(options.implementation)
        self._draft_model = draft_model
        model = with_drafts(model, draft_model, options.speculation)
        self.programs = Programs() if programs is None else programs
        self._device = Device(
            model, config, options.features, self._eos_ids, options.steps_per_round, backend, options.implementation, self.programs
        )
        if index is None and (kind := INDEXES[options.prefix_index]) is not None:
            index = kind(options.block_size, options.eviction)
        if index is not None and index.block_size != options.block_size:
            raise ValueError(f"the index has blocks of {index.block_size} tokens, the cache of {options.block_size}")
        self._memory = Memory(self._device, index, options.swap_bytes)
        self._scheduler = Scheduler(self._memory, find_scheduling(options.scheduling), options.scheduler_sizes())
        self._seqs: dict[int, Seq] = {}
        self._under_way: collections.deque[_Dispatched] = collections.deque()
        self._news: list[Update] = []
        self._next_id = 0
        self._closed = False
        self._stats = EngineStats()

    @property
    def index(self) -> PrefixIndex | None:
        """What is kept of earlier sequences; pin and inspect it here."""
        return self._memory.index

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        *,
        priority: int = 0,
        namespace: str = "",
        request_id: int | None = None,
        allowed_tokens: AllowedTokens | None = None,
    ) -> int:
        """Adds a request.

        Args:
          prompt_ids: token ids of the prompt.
          params: how its tokens are chosen.
          priority: higher is preempted later, and admitted first under the scheduling policy "priority".
          namespace: prefixes are shared within it only.
          request_id: its name; None: the next number.
          allowed_tokens: says before each token which ones may be chosen. A request that may choose none ends with the reason
            "no_allowed_token". While such requests run, nothing is computed ahead.

        Returns:
          The name.

        Raises:
          ValueError: the engine is closed; the name is in use; the prompt is empty, holds an id outside the vocabulary or does not fit the
            pool; a parameter needs a feature that the engine was not made with; the namespace is no string.
        """
        if self._closed:
            raise ValueError("the engine is closed: it takes no more requests")
        if not isinstance(namespace, str):
            raise ValueError(f"namespace must be a string, got {namespace!r}")
        if not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        name = self._next_id if request_id is None else request_id
        if name in self._seqs:
            raise ValueError(f"request id {name} is in use by a request that has not ended")
        request = check_requests([prompt_ids], params, self._device.model.config)[0]
        room = min(self._max_length, self._memory.ledger.total * self.options.block_size)
        if len(request.prompt) > room:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens, max_length is {self._max_length} and the pool holds "
                f"{self._memory.ledger.total} blocks of {self.options.block_size}: it may have {room}"
            )
        check_features(params, self._eos_ids, self.options.features)
        if allowed_tokens is not None and not self.options.features.constrained:
            raise ValueError("allowed_tokens cannot be used here: the feature 'constrained' is off")
        if params.stop and self._detokenize is None:
            raise ValueError("stop strings need a detokenizer")
        request = request._replace(prompt_index=name, max_tokens=min(request.max_tokens, self._max_length - len(request.prompt) + 1))
        transcript = Transcript(name, request.prompt, params, self._eos_ids, self._detokenize)
        seq = Seq(name, request, transcript, list(request.prompt), priority, namespace, self._next_id, allowed_tokens=allowed_tokens)
        return self._add(seq)

    def _add(self, seq: Seq) -> int:
        self._next_id = max(self._next_id, seq.id) + 1
        self._seqs[seq.id] = seq
        self._scheduler.waiting.append(seq)
        return seq.id

    def fork(self, request_id: int, params: SamplingParams, *, from_prompt: bool = False) -> int:
        """Adds a request that goes on from where another is now, sharing its blocks: for tree search, or several samples of a prompt.

        Args:
          request_id: a request that has not ended.
          params: of the new one, its seed among them. `max_tokens` counts the tokens that it begins with. A constraint is the parent's.
          from_prompt: begin after the prompt, not after what has been produced since.

        Returns:
          The new request's name.

        Raises:
          KeyError: there is no such request.
          ValueError: see `submit`; or `max_tokens` leaves nothing to produce.
        """
        parent = self._find(request_id)
        produced = [] if from_prompt else list(parent.transcript.token_ids)
        if params.max_tokens <= len(produced):
            raise ValueError(f"max_tokens must be above the {len(produced)} tokens that the fork begins with, got {params.max_tokens}")
        prompt, constraint = parent.request.prompt, parent.allowed_tokens
        name = self.submit(prompt, params, priority=parent.priority, namespace=parent.namespace, allowed_tokens=constraint)
        child = self._seqs[name]
        child.transcript.token_ids.extend(produced)
        child.transcript.logprobs.extend(parent.transcript.logprobs[: len(produced)])
        child.tokens.extend(produced)
        child.made_bound = len(produced)
        child.parent = parent
        return name

    def abort(self, request_id: int) -> Completion:
        """Ends a request at once. What it has produced so far is in the completion, whose reason is "aborted".

        Raises:
          KeyError: there is no such request, or it has ended.
        """
        seq = self._find(request_id)
        return self._end(seq, "aborted")

    def _find(self, request_id: int) -> Seq:
        if request_id not in self._seqs:
            raise KeyError(f"no request {request_id!r} is waiting or running; it has ended or was never submitted")
        return self._seqs[request_id]

    def warmup(self) -> None:
        """Compiles all that any workload may need, so that nothing is compiled later (see `EngineOptions.buckets`)."""
        sizes = self._scheduler.sizes
        self._collect_all()
        self._device.warm_up(sizes.tokens, sizes.rows, self.options.preemption == "swap")

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._seqs)

    def step(self) -> list[Update]:
        """Dispatches one pass, and hands out the news that have come in since the last call.

        Raises:
          ValueError: an `allowed_tokens` returned no mask; names the request. The others go on once that is aborted.
        """
        start, waited = time.perf_counter(), self._stats.wait_seconds
        self._advance()
        self._count(host_seconds=time.perf_counter() - start - (self._stats.wait_seconds - waited))
        news, self._news = self._news, []
        return news

    def _advance(self) -> None:
        self._constrain()
        self._admit()
        plan = self._scheduler.plan()
        while plan is None and self._scheduler.short_of_blocks:
            # Results may end sequences, and only what is known can give way. Nobody is admitted here: it would take what was given up.
            if self._under_way:
                self._collect()
            else:
                self._give_way()
            plan = self._scheduler.plan()
        if plan is not None:
            mixed = isinstance(plan, MixedPlan)
            made = self._device.run_mixed(plan.batch) if isinstance(plan, MixedPlan) else self._device.run_decode(*plan[:2])
            self._count(passes=1)
            self._under_way.append(_Dispatched(made, plan.pieces, mixed))
        elif not self._under_way and (too_large := self._scheduler.next_waiting()) is not None:
            self._end(too_large, "out_of_blocks")  # nothing runs, and what the index keeps is pinned
        # One pass may be under way while the host prepares the next; not so where that depends on who ends in this one, or on its tokens.
        ahead = not (plan is None or self._scheduler.waiting or self._constrained() or _makes_first_tokens(plan))
        while len(self._under_way) > ahead:
            self._collect()

    def _admit(self) -> None:
        if self._scheduler.needs_parent():
            self._collect_all()
        while (seq := self._scheduler.admit()) is not None:
            left = len(seq.tokens) - seq.computed
            token = seq.tokens[-1] if left == 1 else -1
            request = seq.request
            self._device.place(seq.its_row, request.params, request.max_tokens, request.prompt, seq.transcript.token_ids, token)
            seq.decoding = left == 1
            computed_before = min(seq.computed, len(request.prompt))
            self._count(hit_tokens=computed_before, prompt_tokens=len(request.prompt) - computed_before)
            self._constrain()

    def _constrained(self) -> list[Seq]:
        return [seq for seq in self._scheduler.running if seq.allowed_tokens is not None]

    def _constrain(self) -> None:
        """Tells the device what constrained sequences may choose next, and ends those that may choose nothing."""
        for seq in self._constrained():
            produced = len(seq.transcript.token_ids)
            if seq.allowed_tokens is None or seq.allowed_known == produced:
                continue
            words = next_words(seq.allowed_tokens, seq.transcript, self._device.model.config.vocab_size)
            if words is None:
                self._end(seq, "no_allowed_token")
            else:
                self._device.set_allowed(seq.its_row, words)
                seq.allowed_known = produced

    def _give_way(self) -> None:
        victim = self._scheduler.victim()
        if victim is None:
            self._end(self._scheduler.running[0], "out_of_blocks")
        else:
            self._count(preemptions=1)
            self._scheduler.preempt(victim, swap=self.options.preemption == "swap")

    def _collect_all(self) -> None:
        while self._under_way:
            self._collect()

    def _collect(self) -> None:
        """Waits for the oldest pass under way, and takes note of what it made."""
        dispatched = self._under_way.popleft()
        start = time.perf_counter()
        made = jax.device_get(dispatched.made)
        self._memory.check_attached()
        self._count(wait_seconds=time.perf_counter() - start)
        for piece in dispatched.pieces:
            if piece.seq.row == piece.row:  # else it has ended since
                self._note(piece, made, dispatched.mixed)

    def _note(self, piece: Piece, made: Made, mixed: bool) -> None:
        seq, row = piece.seq, piece.row
        count = int(made.counts[row])
        size = self.options.block_size
        first, old_length = seq.length // size, seq.length
        written = piece.width if piece.known else count
        if mixed:
            rows = made.blocks[piece.start : piece.start + written]
            blocks = [int(rows[0]), *rows[-old_length % size or size :: size].tolist()] if written else []
            if piece.known and seq.request.params.prompt_logprobs and made.scores is not None:
                self._note_scores(seq, np.asarray(made.scores[piece.start : piece.start + piece.width]))
        else:
            blocks = made.blocks[row, : -(-(old_length + written) // size) - first].tolist()
        if not piece.known:
            seq.bound -= piece.most - written
        seq.made_bound -= piece.most - count
        if written:
            self._memory.learn(seq, blocks, written)
        tokens, scored = read_tokens(made.decoded, row, count, seq.request.params.logprobs)
        stopped = seq.transcript.extend(tokens, scored)
        new = seq.transcript.token_ids[len(seq.tokens) - len(seq.request.prompt) :]
        seq.tokens.extend(new)
        self._count(tokens=len(new))
        if made.drafts is not None:
            self._count(drafted_tokens=int(made.drafts.drafted[row]), kept_drafts=int(made.drafts.kept[row]))
        reason = "stop" if stopped else _REASONS[int(made.finish[row])]
        seq.length = min(seq.length, len(seq.tokens))  # what lies behind a stop string is not shared
        self._memory.share(seq)
        if reason is not None:
            self._end(seq, reason, tuple(new))
        elif new:
            self._news.append(Update(seq.id, tuple(new), None))

    def _note_scores(self, seq: Seq, scores: np.ndarray) -> None:
        """Log-probabilities of the prompt tokens after these; where the prompt is computed again, they are known."""
        known = seq.transcript.prompt_logprobs
        position = seq.length + 1
        wanted = scores[: max(0, len(seq.request.prompt) - position)].tolist()
        known.extend(wanted[len(known) - position :])

    def _end(self, seq: Seq, reason: str, new: tuple[int, ...] = ()) -> Completion:
        completion = seq.transcript.complete(reason)
        del self._seqs[seq.id]
        if seq.row is None:
            self._scheduler.waiting.remove(seq)
            self._memory.discard_swapped(seq)
        else:
            self._scheduler.leave(seq)
        self._news.append(Update(seq.id, new, completion))
        return completion

    def stream(self, request_id: int) -> Iterator[Update]:
        """The news of one request as they come, to its end; runs the engine meanwhile. News of others are kept for later.

        Raises:
          KeyError: there is no such request, or it has ended and its news were handed out.
        """
        if not any(update.prompt_index == request_id for update in self._news):
            self._find(request_id)
        return self._stream(request_id)

    def _stream(self, request_id: int) -> Iterator[Update]:
        while True:
            mine = [update for update in self._news if update.prompt_index == request_id]
            self._news = [update for update in self._news if update.prompt_index != request_id]
            yield from mine
            if mine and mine[-1].completion is not None:
                return
            self._news = self.step()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008  (frozen)
    ) -> list[Completion]:
        """Runs a batch of prompts to the end, and returns their completions in order; other requests go on meanwhile.

        Raises:
          ValueError: see `submit`; then none of them was added.
        """
        requests = check_requests(prompts, params, self._device.model.config)
        names: list[int] = []
        try:
            for request in requests:
                names.append(self.submit(request.prompt, request.params))
        except ValueError:
            for name in names:
                self.abort(name)
            self._news = [update for update in self._news if update.prompt_index not in names]
            raise
        ends: dict[int, Completion] = {}
        others: list[Update] = []
        while len(ends) < len(names):
            for update in self.step():
                if update.prompt_index not in names:
                    others.append(update)
                elif update.completion is not None:
                    ends[update.prompt_index] = update.completion
        self._news = others + self._news
        return [dataclasses.replace(ends[name], index=index) for index, name in enumerate(names)]

    def set_model(self, model: CausalModel) -> None:
        """Takes new weights, for instance of the next step of training: the cache stays, old prefixes are forgotten.

        Running sequences go on with what the old weights computed for them.

        Raises:
          ValueError: the model has other sizes.
        """
        if model.config != self._device.model.config:
            raise ValueError(f"the new model must have the sizes of the old one, got {model.config} for {self._device.model.config}")
        self._collect_all()
        self._memory.forget(self._seqs.values())
        self._device.model = with_drafts(model, self._draft_model, self.options.speculation)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes pool, tables, index and requests to a folder; the engine goes on, and so does what is restored from there.

        It waits for what is under way first. A save that fails or is killed leaves the one before as it was. The folder holds all
        prompts and the secret of a hash index, but no weights.

        Args:
          path: the folder; what was saved there before is replaced at the end.

        Raises:
          ValueError: the index is of a class of one's own.
        """
        self._collect_all()
        self._memory.check_attached()
        save_engine(self, Path(path))

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        model: CausalModel,
        options: EngineOptions,
        *,
        allowed_tokens: Mapping[int, AllowedTokens] = types.MappingProxyType({}),
        eos_ids: Sequence[int] = (),
        detokenize: Detokenize | None = None,
        index: PrefixIndex | None = None,
        programs: Programs | None = None,
        draft_model: CausalModel | None = None,
    ) -> "Engine":
        """An engine that goes on where a saved one was: each request gets the tokens that it would have got.

        Args:
          path: the folder.
          model: with the weights of the saved engine's, which are not in the folder.
          options: those of the saved engine.
          allowed_tokens: by its name, the function of each request that had one.
          eos_ids: those of the saved engine.
          detokenize: see `Engine`.
          index: an empty index, where the saved engine was given one of its own.
          programs: see `Engine`.
          draft_model: the saved engine's.

        Raises:
          FileNotFoundError: there is no saved engine.
          ValueError: it is broken, or differs; says in what.
        """
        host = read_host(Path(path))
        check_same(host, model.config, options, eos_ids)
        engine = cls(model, options, eos_ids=eos_ids, detokenize=detokenize, index=index, programs=programs, draft_model=draft_model)
        load_engine(engine, Path(path), host, allowed_tokens)
        return engine

    def stats(self) -> EngineStats:
        """What the engine is doing and has done."""
        ledger, index = self._memory.ledger, self._memory.index
        return self._stats._replace(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks_used=ledger.used,
            blocks_total=ledger.total,
            blocks_cached=index.total if index is not None else 0,
            swapped_bytes=self._memory.swapped_bytes,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the pool holds."""
        return self._device.config.pool_bytes

    def usage(self) -> Usage:
        """How full the pool is. What the index keeps is in use too."""
        return self._memory.ledger.usage

    def _count(self, **more: float) -> None:
        self._stats = self._stats._replace(**{name: getattr(self._stats, name) + value for name, value in more.items()})

    def close(self) -> list[Completion]:
        """Ends all requests and takes no more. Returns what they have produced."""
        self._closed = True
        return [self.abort(name) for name in list(self._seqs)]


def _makes_first_tokens(plan: MixedPlan | RoundPlan) -> bool:
    """Whether somebody waits for the first token: it comes now, not after the next pass."""
    return any(piece.known and piece.most for piece in plan.pieces)
