"""Which sequences run, which wait, who gives way, and what the next pass computes."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpage.buckets import bucket
from jaxpage.engine.memory import Memory
from jaxpage.engine.passes import Batch
from jaxpage.engine.policy import ScheduleKey, first_to_admit
from jaxpage.engine.seq import Seq

__all__ = ["MixedPlan", "Piece", "RoundPlan", "Scheduler", "SchedulerSizes"]


class SchedulerSizes(NamedTuple):
    """Sizes of what is run together.

    Attributes:
      rows: the buckets of rows that decode together; the last is the most sequences that run.
      tokens: the buckets of tokens of a mixed pass; the last is the most.
      steps: most tokens of a sequence in a round.
      spare_blocks: blocks that an admission leaves free for those that run, besides one for each of them.
      max_passed_over: how often a waiting sequence may be passed over.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    steps: int
    spare_blocks: int
    max_passed_over: int


class Piece(NamedTuple):
    """One sequence's part of a pass: `width` rows of the batch from `start` on; at most `most` tokens are sampled."""

    seq: Seq
    row: int
    start: int
    width: int
    known: bool
    most: int


class MixedPlan(NamedTuple):
    """A ragged pass."""

    batch: Batch
    pieces: list[Piece]


class RoundPlan(NamedTuple):
    """A run of decode steps of the first rows, as many as there are limits: most tokens of each."""

    limits: np.ndarray
    until_end: bool
    pieces: list[Piece]


class Scheduler:
    """Keeps the sequences that wait and run. It plans; the engine dispatches.

    Args:
      memory: blocks.
      key: order of admission.
      sizes: how much runs together.
    """

    def __init__(self, memory: Memory, key: ScheduleKey, sizes: SchedulerSizes):
        self.memory = memory
        self.sizes = sizes
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self._key = key
        self._free_rows = list(range(sizes.rows[-1]))

    def take_over(self, running: list[Seq], waiting: list[Seq]) -> None:
        """Begins with sequences that another scheduler left."""
        self.running, self.waiting = running, waiting
        self._free_rows = [row for row in range(self.sizes.rows[-1]) if all(row != seq.row for seq in running)]

    def admit(self) -> Seq | None:
        """Gives a row to the next waiting sequence, if there is one that may start, a row, and blocks for all its tokens."""
        seq = self.next_waiting()
        if seq is None or not self._free_rows:
            return None
        # Each of those that run may need a block next; what is admitted would be the first to give it up again.
        row, spare = min(self._free_rows), self.sizes.spare_blocks + len(self.running) if self.running else 0
        parent, seq.parent = seq.parent, None
        if parent is not None and parent.row is not None:
            started = self.memory.fork(parent, seq, row, self.running, spare)
            seq.parent = None if started else parent
        else:
            started = self.memory.start(seq, row, self.running, spare)
        if not started:
            return None
        self._free_rows.remove(row)
        self.waiting.remove(seq)
        self.running.append(seq)
        for other in self.waiting:
            other.passed_over += other.arrival < seq.arrival
        return seq

    def next_waiting(self) -> Seq | None:
        """The sequence that `admit` would give a row to."""
        computing = [seq for seq in self.running if seq.length < len(seq.tokens) - 1]
        ready = [seq for seq in self.waiting if not (self._waits_for_parent(seq) or self._waits_for_prefix(seq, computing))]
        return first_to_admit(ready, self._key, self.memory.hit, self.sizes.max_passed_over) if ready else None

    def _waits_for_parent(self, seq: Seq) -> bool:
        """Its parent runs, but has not computed yet what the two share."""
        return seq.parent is not None and seq.parent.row is not None and seq.parent.length < len(seq.tokens) - 1

    def _waits_for_prefix(self, seq: Seq, computing: list[Seq]) -> bool:
        """One of those is computing what this one begins with too: users of a new document who come at once need it computed once."""
        return seq.swapped is None and any(self.memory.may_soon_share(seq, other) for other in computing)

    def needs_parent(self) -> bool:
        """Whether some waiting sequence could take over blocks of a running one."""
        return any(seq.parent is not None and seq.parent.row is not None for seq in self.waiting)

    def leave(self, seq: Seq) -> None:
        """A running sequence gives up its row and blocks; the index may keep them."""
        self._give_up_row(seq)
        self.memory.end(seq)

    def preempt(self, seq: Seq, swap: bool) -> None:
        """A running sequence gives way, to run again from what is known of it; nothing of it may be under way."""
        self._give_up_row(seq)
        if not (swap and self.memory.swap_out(seq)):
            self.memory.end(seq)
        self.waiting.append(seq)

    def _give_up_row(self, seq: Seq) -> None:
        self.running.remove(seq)
        self._free_rows.append(seq.its_row)

    def victim(self) -> Seq | None:
        """The running sequence that gives way first: the youngest of the lowest priority. None where there is only one."""
        return max(self.running, key=lambda seq: (-seq.priority, seq.arrival)) if len(self.running) > 1 else None

    def plan(self) -> MixedPlan | RoundPlan | None:
        """What to compute next; the blocks for it are promised. None where there is nothing to compute, or no block to do it with."""
        prefilling = [seq for seq in self.running if not seq.decoding]
        decoding = [seq for seq in self.running if seq.decoding and seq.steps_left > 0]
        if prefilling:
            return self._plan_mixed(prefilling, decoding)
        return self._plan_round(decoding) if decoding else None

    @property
    def short_of_blocks(self) -> bool:
        """Whether a sequence has something to decode; where `plan` gives nothing all the same, blocks are what it lacks."""
        return any(seq.decoding and seq.steps_left > 0 for seq in self.running)

    def _promise(self, seqs: list[Seq], steps: int) -> bool:
        """Promises each sequence the blocks for so many more tokens, or nobody anything."""
        ledger, lengths = self.memory.ledger, {seq: seq.bound + min(steps, seq.steps_left) for seq in seqs}
        more = sum(ledger.promised(seq, length) - ledger.promised(seq, seq.bound) for seq, length in lengths.items())
        if not self.memory.make_room(more, self.running):
            return False
        for seq, length in lengths.items():
            seq.bound = length
        return True

    def _plan_round(self, seqs: list[Seq]) -> RoundPlan | None:
        # What a constrained sequence may choose depends on the token before.
        steps = 1 if any(seq.allowed_tokens is not None for seq in seqs) else self.sizes.steps
        limit = min(steps, max(seq.steps_left for seq in seqs))
        while limit and not self._promise(seqs, limit):
            limit //= 2
        if not limit:
            return None
        pieces = [Piece(seq, seq.its_row, 0, 0, False, min(limit, seq.steps_left)) for seq in seqs]
        limits = np.zeros(bucket(max(piece.row for piece in pieces) + 1, self.sizes.rows), np.int32)
        for piece in pieces:
            piece.seq.made_bound += piece.most
            limits[piece.row] = piece.most
        return RoundPlan(limits, bool(self.waiting), pieces)

    def _plan_mixed(self, prefilling: list[Seq], decoding: list[Seq]) -> MixedPlan | None:
        decoding = decoding[: self.sizes.tokens[-1] - 1]  # there is always room for a prompt
        if not self._promise(decoding, 1):
            return None
        room = self.sizes.tokens[-1] - len(decoding)
        counts = {seq: 1 for seq in decoding}
        for seq in prefilling:
            counts[seq] = min(room, len(seq.tokens) - seq.computed)
            room -= counts[seq]
        return self._batch({seq: count for seq, count in counts.items() if count})

    def _batch(self, counts: dict[Seq, int]) -> MixedPlan:
        num_seqs = self.sizes.rows[-1]
        tokens = np.full(bucket(sum(counts.values()), self.sizes.tokens), -1, np.int32)
        targets = np.full_like(tokens, -1)
        rows, pieces = np.zeros(num_seqs, np.int32), []
        known, samples = np.zeros((2, num_seqs), bool)
        start = 0
        for seq, count in sorted(counts.items(), key=lambda item: item[0].its_row):
            row, end = seq.its_row, seq.computed + count
            rows[row], known[row] = count, not seq.decoding
            samples[row] = seq.decoding or end == len(seq.tokens)
            if not seq.decoding:
                tokens[start : start + count] = seq.tokens[seq.computed : end]
                if seq.request.params.prompt_logprobs:
                    scored = seq.request.prompt[seq.computed + 1 : end + 1]
                    targets[start : start + len(scored)] = scored
                seq.computed = end
            pieces.append(Piece(seq, row, start, count, bool(known[row]), int(samples[row])))
            seq.made_bound += int(samples[row])
            seq.decoding |= bool(samples[row])
            start += count
        starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        return MixedPlan(Batch(*map(jnp.asarray, (tokens, starts, known, samples, targets))), pieces)
