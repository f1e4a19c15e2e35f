"""The engine's loop: a pass is planned and dispatched, the one before it comes in, and what it made is noted."""

import collections
import time
from typing import NamedTuple

import jax
import numpy as np

from jaxpage.completion import Completion, read_tokens
from jaxpage.decode import LENGTH, RUNNING, STOP
from jaxpage.engine.constraint import next_words
from jaxpage.engine.device import Device
from jaxpage.engine.memory import Memory
from jaxpage.engine.news import News
from jaxpage.engine.passes import Made
from jaxpage.engine.scheduler import MixedPlan, Piece, RoundPlan, Scheduler
from jaxpage.engine.seq import Seq
from jaxpage.engine.stats import EngineStats
from jaxpage.generate import Update

__all__ = ["Runner"]

_REASONS = {RUNNING: None, STOP: "stop", LENGTH: "length"}


class _Dispatched(NamedTuple):
    """A pass that is under way."""

    made: Made
    pieces: list[Piece]
    mixed: bool


class Runner:
    """Runs sequences to their ends.

    Args:
      device: rows and pool.
      memory: blocks.
      scheduler: what waits and runs.
      swaps: preempted sequences go to host memory while that lasts.

    Attributes:
      seqs: all that wait or run, by name.
      news: what was produced and nobody was told of.
      under_way: passes that were dispatched and have not come in, the oldest first.
      stats: what has been done.
    """

    def __init__(self, device: Device, memory: Memory, scheduler: Scheduler, swaps: bool):
        self.seqs: dict[int, Seq] = {}
        self.news = News()
        self.under_way: collections.deque[_Dispatched] = collections.deque()
        self.stats = EngineStats()
        self._device = device
        self._memory = memory
        self._scheduler = scheduler
        self._swaps = swaps

    def advance(self) -> None:
        """Dispatches the next pass, and takes note of those that have come in.

        Raises:
          ValueError: an `allowed_tokens` returned no mask; names the request.
        """
        start, waited = time.perf_counter(), self.stats.wait_seconds
        self._advance()
        self._count(host_seconds=time.perf_counter() - start - (self.stats.wait_seconds - waited))

    def _advance(self) -> None:
        self._constrain()
        self._admit()
        plan = self._scheduler.plan()
        while plan is None and self._scheduler.short_of_blocks:
            # Results may end sequences, and only what is known can give way. Nobody is admitted here: it would take what was given up.
            if self.under_way:
                self._collect()
            else:
                self._give_way()
            plan = self._scheduler.plan()
        if plan is not None:
            mixed = isinstance(plan, MixedPlan)
            made = self._device.run_mixed(plan.batch) if isinstance(plan, MixedPlan) else self._device.run_decode(*plan[:2])
            self._count(passes=1)
            self.under_way.append(_Dispatched(made, plan.pieces, mixed))
        elif not self.under_way and (too_large := self._scheduler.next_waiting()) is not None:
            self.end(too_large, "out_of_blocks")  # nothing runs, and what the index keeps is pinned
        # One pass may be under way while the host prepares the next; not so where that depends on who ends in this one, or on its tokens.
        ahead = not (plan is None or self._scheduler.waiting or self._constrained() or _makes_first_tokens(plan))
        while len(self.under_way) > ahead:
            self._collect()

    def _admit(self) -> None:
        if self._scheduler.needs_parent():
            self.collect_all()
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
                self.end(seq, "no_allowed_token")
            else:
                self._device.set_allowed(seq.its_row, words)
                seq.allowed_known = produced

    def _give_way(self) -> None:
        victim = self._scheduler.victim()
        if victim is None:
            self.end(self._scheduler.running[0], "out_of_blocks")
        else:
            self._count(preemptions=1)
            self._scheduler.preempt(victim, swap=self._swaps)

    def collect_all(self) -> None:
        """Waits for all that is under way, and takes note of it."""
        while self.under_way:
            self._collect()

    def _collect(self) -> None:
        """Waits for the oldest pass under way, and takes note of what it made."""
        dispatched = self.under_way.popleft()
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
        size = self._memory.ledger.block_size
        first, old_length = seq.length // size, seq.length
        written = piece.width if piece.known else count
        if mixed:
            rows = made.blocks[piece.start : piece.start + written]
            blocks = [int(rows[0]), *rows[-old_length % size or size :: size].tolist()] if written else []
            if piece.known and seq.request.params.prompt_logprobs and made.scores is not None:
                self._note_scores(seq, np.asarray(made.scores[piece.start : piece.start + piece.width]))
        else:
            blocks = made.blocks[row, : -(-(old_length + written) // size) - first].tolist()
        if 0 in blocks:
            raise RuntimeError(f"request {seq.id} got no block where the host's account has one for it: pool and account disagree")
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
            self.end(seq, reason, tuple(new))
        elif new:
            self.news.add(Update(seq.id, tuple(new), None))

    def _note_scores(self, seq: Seq, scores: np.ndarray) -> None:
        """Log-probabilities of the prompt tokens after these; where the prompt is computed again, they are known."""
        known = seq.transcript.prompt_logprobs
        position = seq.length + 1
        wanted = scores[: max(0, len(seq.request.prompt) - position)].tolist()
        known.extend(wanted[len(known) - position :])

    def end(self, seq: Seq, reason: str, new: tuple[int, ...] = ()) -> Completion:
        """Ends a sequence, which gives up what it has, and tells so with the tokens that nobody was told of."""
        completion = seq.transcript.complete(reason)
        del self.seqs[seq.id]
        if seq.row is None:
            self._scheduler.waiting.remove(seq)
            self._memory.discard_swapped(seq)
        else:
            self._scheduler.leave(seq)
        self.news.add(Update(seq.id, new, completion))
        return completion

    def report(self) -> EngineStats:
        """What is going on, and what has been done."""
        ledger, index = self._memory.ledger, self._memory.index
        return self.stats._replace(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks_used=ledger.used,
            blocks_total=ledger.total,
            blocks_cached=index.total if index is not None else 0,
            swapped_bytes=self._memory.swapped_bytes,
        )

    def _count(self, **more: float) -> None:
        self.stats = self.stats._replace(**{name: getattr(self.stats, name) + value for name, value in more.items()})


def _makes_first_tokens(plan: MixedPlan | RoundPlan) -> bool:
    """Whether somebody waits for the first token: it comes now, not after the next pass."""
    return any(piece.known and piece.most for piece in plan.pieces)
