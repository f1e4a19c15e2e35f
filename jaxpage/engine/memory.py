"""Where blocks of sequences come from and go to: pool, prefix index and host memory, always changed together."""

from collections.abc import Iterable, Sequence

from jaxtyping import Array, Bool

from jaxpage.engine.device import Device
from jaxpage.engine.ledger import BlockLedger
from jaxpage.engine.seq import Seq
from jaxpage.prefix import PrefixIndex

__all__ = ["Memory"]


class Memory:
    """Blocks on the device, the host's account of them, and what is kept of sequences that do not run.

    Args:
      device: rows and pool.
      index: finds and keeps prefixes; None shares none.
      swap_bytes: host memory for preempted sequences.

    Attributes:
      ledger: references of all blocks.
      swapped_bytes: host memory in use.
    """

    def __init__(self, device: Device, index: PrefixIndex | None, swap_bytes: int):
        self.index = index
        self.ledger = BlockLedger(device.config.num_blocks, device.config.block_size)
        self.swapped_bytes = 0
        self._swap_bytes = swap_bytes
        self._device = device
        self._attached: list[Bool[Array, ""]] = []

    def make_room(self, count: int, running: Iterable[Seq]) -> bool:
        """Whether `count` blocks are free, after the index has let go what it must."""
        running = list(running)
        while (short := count - self.ledger.free(running)) > 0:
            evicted = self.index.evict(short) if self.index is not None else []
            if not evicted:
                return False
            self._device.drop(evicted)
            self.ledger.drop(evicted)
        return True

    def hit(self, seq: Seq) -> int:
        """Tokens of a sequence that the index has."""
        if self.index is None or _wants_prompt_logprobs(seq):
            return 0
        return self.index.match(seq.tokens, seq.namespace).length

    def may_soon_share(self, seq: Seq, running: Seq) -> bool:
        """Whether a running sequence is about to fill a block of another one's tokens, which could then share it."""
        if self.index is None or not running.shareable or running.namespace != seq.namespace or _wants_prompt_logprobs(seq):
            return False
        start = running.length - running.length % self.ledger.block_size
        end = start + self.ledger.block_size
        if end > len(running.tokens) or end >= len(seq.tokens) or running.tokens[start:end] != seq.tokens[start:end]:
            return False
        return running.tokens[:start] == seq.tokens[:start]

    def start(self, seq: Seq, row: int, running: Iterable[Seq], spare: int) -> bool:
        """Gives a sequence a row and what is known of its tokens, and promises it the blocks of all of them.

        Returns:
          Whether there is room, with `spare` blocks left; if not, nothing has changed but the index, which may have let blocks go.
        """
        take = self._take_swapped if seq.swapped is not None else self._take_prefix
        return take(seq, row, list(running), spare)

    def _take_swapped(self, seq: Seq, row: int, running: list[Seq], spare: int) -> bool:
        swapped = seq.swapped
        assert swapped is not None
        if not self.make_room(self.ledger.blocks_for(len(seq.tokens)) + spare, running):
            return False
        seq.blocks = self._device.swap_in(row, swapped)
        self.ledger.hold(seq.blocks)
        self.ledger.fill[seq.blocks] = self.ledger.block_size
        self.ledger.fill[seq.blocks[-1]] -= -swapped.length % self.ledger.block_size
        self.swapped_bytes -= swapped.nbytes
        seq.swapped = None
        self._settle(seq, row, swapped.length)
        return True

    def _take_prefix(self, seq: Seq, row: int, running: list[Seq], spare: int) -> bool:
        match = None
        if self.index is not None and not _wants_prompt_logprobs(seq):
            match = self.index.match(seq.tokens, seq.namespace)
            self.index.lock(match)  # before anything is evicted for the same sequence
            seq.blocks = list(match.blocks)
            seq.shared_tail = match.tail % self.ledger.block_size != 0
        if not self.make_room(self.ledger.promised(seq, len(seq.tokens)) + spare, running):
            if match is not None and self.index is not None:
                self.index.unlock(match, used=False)
            seq.forget_row()
            return False
        if match is not None and match.blocks:
            self._attached.append(self._device.attach(row, match.blocks, match.length))
            self.ledger.hold(match.blocks)
        seq.match = match
        self._settle(seq, row, match.length if match is not None else 0)
        return True

    def fork(self, parent: Seq, seq: Seq, row: int, running: Iterable[Seq], spare: int) -> bool:
        """Makes a sequence a second owner of the blocks of its tokens but the last; `parent` has computed at least those.

        Nothing of the parent may be under way. Returns whether there is room, as `start` does.
        """
        length = len(seq.tokens) - 1
        seq.blocks = parent.blocks[: self.ledger.blocks_for(length)]
        seq.shared_tail = length % self.ledger.block_size != 0
        copies_more = seq.shared_tail and len(seq.blocks) == len(parent.blocks) and not parent.shared_tail
        if not self.make_room(self.ledger.promised(seq, len(seq.tokens)) + copies_more + spare, running):
            seq.forget_row()
            return False
        parent.shared_tail |= copies_more
        seq.shareable = parent.shareable
        self._device.fork(parent.its_row, row, length)
        self.ledger.hold(seq.blocks)
        self._settle(seq, row, length)
        return True

    def _settle(self, seq: Seq, row: int, length: int) -> None:
        seq.row, seq.length, seq.computed, seq.bound = row, length, length, len(seq.tokens)

    def learn(self, seq: Seq, blocks: Sequence[int], written: int) -> None:
        """Notes that a sequence has more tokens, and the blocks that they are in: new ones, or the copy of a shared one."""
        size = self.ledger.block_size
        first = seq.length // size
        seq.length += written
        seq.shared_tail = False
        for column, block in enumerate(blocks, first):
            if column == len(seq.blocks):
                seq.blocks.append(block)
                self.ledger.hold([block])
            elif seq.blocks[column] != block:
                self.ledger.hold([block])
                self.ledger.drop([seq.blocks[column]])
                seq.blocks[column] = block
            self.ledger.fill[block] = min(size, seq.length - column * size)

    def share(self, seq: Seq) -> None:
        """Offers a running sequence's full blocks to the index, and locks what the index has of it."""
        full = seq.length // self.ledger.block_size
        if self.index is None or not seq.shareable or full <= seq.inserted:
            return
        self._insert(seq, full * self.ledger.block_size)
        seq.inserted = full
        match = self.index.match([*seq.tokens[: full * self.ledger.block_size], 0], seq.namespace)
        self.index.lock(match, counted=False)
        if seq.match is not None:
            self.index.unlock(seq.match)
        seq.match = match

    def _insert(self, seq: Seq, length: int) -> None:
        assert self.index is not None
        blocks = seq.blocks[: self.ledger.blocks_for(length)]
        added = self.index.insert(seq.tokens[:length], blocks, seq.namespace, seq.priority)
        self._device.hold(added)
        self.ledger.hold(added)

    def end(self, seq: Seq) -> None:
        """Takes the row from a sequence; the index may keep its blocks."""
        if self.index is not None:
            if seq.shareable:
                # A shared tail may have been copied and freed by a pass that is under way.
                length = seq.length - seq.length % self.ledger.block_size if seq.shared_tail else seq.length
                self._insert(seq, length)
            if seq.match is not None:
                self.index.unlock(seq.match)
        self._device.release([seq.its_row])
        self.ledger.drop(seq.blocks)
        seq.forget_row()

    def swap_out(self, seq: Seq) -> bool:
        """Moves a sequence's blocks to the host and takes its row. False, and nothing is changed, where host memory does not hold them."""
        blocks = len(seq.blocks)
        if blocks == 0 or self.swapped_bytes + self._device.swap_nbytes(blocks) > self._swap_bytes:
            return False
        swapped, shareable = self._device.swap_out(seq.blocks, seq.length), seq.shareable
        self.end(seq)
        seq.swapped, seq.shareable = swapped, shareable
        self.swapped_bytes += swapped.nbytes
        return True

    def discard_swapped(self, seq: Seq) -> None:
        """Frees the host memory of a sequence that will not run again."""
        if seq.swapped is not None:
            self.swapped_bytes -= seq.swapped.nbytes
            seq.swapped = None

    def forget(self, seqs: Iterable[Seq]) -> None:
        """The weights have changed: the index forgets all, and what sequences have computed so far is shared with nobody new."""
        for seq in seqs:
            seq.match, seq.shareable = None, seq.length == 0 and seq.swapped is None
        if self.index is not None:
            forgotten = self.index.forget()
            self._device.drop(forgotten)
            self.ledger.drop(forgotten)

    def check_attached(self) -> None:
        """Waits for all prefixes to be in place.

        Raises:
          RuntimeError: the device refused one: index and pool disagree.
        """
        if not all(map(bool, self._attached)):
            raise RuntimeError("the pool refused a prefix that the index has: they disagree about which blocks are in use")
        self._attached.clear()


def _wants_prompt_logprobs(seq: Seq) -> bool:
    """A hit would skip the prompt's log-probabilities, so such a prompt is computed as a whole, once."""
    return seq.request.params.prompt_logprobs and len(seq.transcript.prompt_logprobs) < len(seq.request.prompt)
