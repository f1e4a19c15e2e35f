"""The engine: many requests from one pool, coming and going. The host prepares the next pass while the device computes the last."""

import dataclasses
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpage.admission import check_requests
from jaxpage.attention import backend_of
from jaxpage.completion import Completion, Detokenize
from jaxpage.engine.constraint import AllowedTokens
from jaxpage.engine.device import Device
from jaxpage.engine.drafts import with_drafts
from jaxpage.engine.intake import Intake
from jaxpage.engine.memory import Memory
from jaxpage.engine.options import INDEXES, EngineOptions
from jaxpage.engine.policy import find_scheduling
from jaxpage.engine.runner import Runner
from jaxpage.engine.scheduler import Scheduler
from jaxpage.engine.seq import Seq
from jaxpage.engine.stats import EngineStats
from jaxpage.generate import Update
from jaxpage.inspect import Usage
from jaxpage.model import CausalModel
from jaxpage.prefix import PrefixIndex
from jaxpage.programs import Programs
from jaxpage.sampling_params import SamplingParams

__all__ = ["Engine"]


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
        config = options.cache_config(model.config)
        self._intake = Intake(model.config, options, tuple(eos_ids), detokenize)
        backend = None if options.implementation is None else backend_of(options.implementation)
        self._draft_model = draft_model
        model = with_drafts(model, draft_model, options.speculation)
        self.programs = Programs() if programs is None else programs
        self._device = Device(
            model, config, options.features, self._intake.eos_ids, options.steps_per_round, backend, options.implementation, self.programs
        )
        if index is None and (kind := INDEXES[options.prefix_index]) is not None:
            index = kind(options.block_size, options.eviction)
        if index is not None and index.block_size != options.block_size:
            raise ValueError(f"the index has blocks of {index.block_size} tokens, the cache of {options.block_size}")
        self._memory = Memory(self._device, index, options.swap_bytes)
        self._scheduler = Scheduler(self._memory, find_scheduling(options.scheduling), options.scheduler_sizes())
        self._runner = Runner(self._device, self._memory, self._scheduler, options.preemption == "swap")
        self._next_id = 0
        self._closed = False

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
        name = self._next_id if request_id is None else request_id
        if name in self._runner.seqs:
            raise ValueError(f"request id {name} is in use by a request that has not ended")
        seq = self._intake.make_seq(name, self._next_id, prompt_ids, params, priority, namespace, allowed_tokens)
        self._next_id = max(self._next_id, name) + 1
        self._runner.seqs[name] = seq
        self._scheduler.waiting.append(seq)
        return name

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
        child = self._runner.seqs[name]
        child.continue_from(parent, produced)
        return name

    def abort(self, request_id: int) -> Completion:
        """Ends a request at once. What it has produced so far is in the completion, whose reason is "aborted".

        Raises:
          KeyError: there is no such request, or it has ended.
        """
        seq = self._find(request_id)
        return self._runner.end(seq, "aborted")

    def _find(self, request_id: int) -> Seq:
        if request_id not in self._runner.seqs:
            raise KeyError(f"no request {request_id!r} is waiting or running; it has ended or was never submitted")
        return self._runner.seqs[request_id]

    def warmup(self) -> None:
        """Compiles all that any workload may need, so that nothing is compiled later: the options' shapes in their `jaxpage.buckets`."""
        sizes = self._scheduler.sizes
        self._runner.collect_all()
        self._device.warm_up(sizes.tokens, sizes.rows, self.options.preemption == "swap")

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._runner.seqs)

    def step(self) -> list[Update]:
        """Dispatches one pass, and hands out the news that have come in since the last call.

        Raises:
          ValueError: an `allowed_tokens` returned no mask; names the request. The others go on once that is aborted.
        """
        self._runner.advance()
        return self._runner.news.take()

    def stream(self, request_id: int) -> Iterator[Update]:
        """The news of one request as they come, to its end; runs the engine meanwhile. News of others are kept for later.

        Raises:
          KeyError: there is no such request, or it has ended and its news were handed out.
        """
        if not any(update.prompt_index == request_id for update in self._runner.news.waiting):
            self._find(request_id)
        return self._stream(request_id)

    def _stream(self, request_id: int) -> Iterator[Update]:
        while True:
            mine = self._runner.news.take([request_id])
            yield from mine
            if mine and mine[-1].completion is not None:
                return
            self._runner.advance()

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
            self._runner.news.take(names)
            raise
        ends: dict[int, Completion] = {}
        while len(ends) < len(names):
            self._runner.advance()
            ends |= {update.prompt_index: update.completion for update in self._runner.news.take(names) if update.completion is not None}
        return [dataclasses.replace(ends[name], index=index) for index, name in enumerate(names)]

    def set_model(self, model: CausalModel) -> None:
        """Takes new weights, for instance of the next step of training: the cache stays, old prefixes are forgotten.

        Running sequences go on with what the old weights computed for them.

        Raises:
          ValueError: the model has other sizes.
        """
        if model.config != self._device.model.config:
            raise ValueError(f"the new model must have the sizes of the old one, got {model.config} for {self._device.model.config}")
        self._runner.collect_all()
        self._memory.forget(self._runner.seqs.values())
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
        from jaxpage.engine.save import save_engine  # with Orbax, which nothing else here needs

        self._runner.collect_all()
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
        draft_model: CausalModel | None = None,
        **parts: Any,
    ) -> "Engine":
        """An engine that goes on where a saved one was: each request gets the tokens that it would have got.

        Args:
          path: the folder.
          model: with the weights of the saved engine's, which are not in the folder.
          options: those of the saved engine.
          allowed_tokens: by its name, the function of each request that had one.
          eos_ids: those of the saved engine.
          draft_model: as `model`, where the saved engine had one.
          parts: other arguments of `Engine`, as the saved engine had them; an index of one's own is to be empty.

        Raises:
          FileNotFoundError: there is no saved engine.
          ValueError: it is broken, or differs; says in what.
        """
        from jaxpage.engine.save import check_same, load_engine, read_host

        host = read_host(Path(path))
        check_same(host, model.config, None if draft_model is None else draft_model.config, options, eos_ids)
        engine = cls(model, options, eos_ids=eos_ids, draft_model=draft_model, **parts)
        load_engine(engine, Path(path), host, allowed_tokens)
        return engine

    def stats(self) -> EngineStats:
        """What the engine is doing and has done."""
        return self._runner.report()

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the pool holds, those of a draft model included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._device.state.cache.storage))

    def usage(self) -> Usage:
        """How full the pool is. What the index keeps is in use too."""
        return self._memory.ledger.usage

    def close(self) -> list[Completion]:
        """Ends all requests and takes no more. Returns what they have produced."""
        self._closed = True
        return [self.abort(name) for name in list(self._runner.seqs)]
