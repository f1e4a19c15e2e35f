"""The engine's side of the device: one state that programs change in place, and small programs for pool and table."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpage import block_pool, decode
from jaxpage.block_pool import BlockPool
from jaxpage.block_table import BlockTable
from jaxpage.buckets import SWAP_BUCKETS, bucket
from jaxpage.config import CacheConfig
from jaxpage.engine import passes
from jaxpage.engine.drafts import Drafter
from jaxpage.engine.passes import Batch, Made
from jaxpage.engine.swap import Swapped, swap_in, swap_out
from jaxpage.kv_cache import KVCache, attach, fork, init_cache, release, reserve, truncate
from jaxpage.model import CausalModel
from jaxpage.programs import Call, Programs
from jaxpage.sampler_arrays import Features, build_sampler
from jaxpage.sampling import Sampler
from jaxpage.sampling_params import SamplingParams
from pallas_kernels import layout

__all__ = ["Device"]

_REFERENCES = 256  # blocks whose references change in one call


class Device:
    """Rows, pool and storage on the device. Calls return at once; what they change is there for every later call.

    Args:
      model: a causal model; a `Drafter` decodes speculatively.
      config: sizes of the cache.
      features: what requests may use of the sampler.
      eos_ids: token ids at which the model ends its text.
      steps_per_round: most tokens of a sequence in one call.
      backend: of the cache's layout, see `init_cache`.
      implementation: see `jaxpage.paged_attention`.
      programs: where compiled programs are kept.
    """

    def __init__(
        self,
        model: CausalModel,
        config: CacheConfig,
        features: Features,
        eos_ids: Sequence[int],
        steps_per_round: int,
        backend: str | None,
        implementation: str | None,
        programs: Programs,
    ):
        self.model = model
        self.config = config
        self.features = features
        self.eos_ids = tuple(eos_ids)
        self.steps_per_round = steps_per_round
        self.implementation = implementation
        self.programs = programs
        rows = jnp.zeros(config.max_seqs, jnp.int32)
        sampler = self._sampler([], [], [], config.max_seqs, [])
        self.state = decode.init_state(init_cache(config, backend), sampler, rows, rows > 0)
        if isinstance(model, Drafter):
            self.state = model.prepare(self.state, config, backend)

    def _sampler(self, params: list[SamplingParams], prompts: list, produced: list, num_seqs: int, max_tokens: list[int]) -> Sampler:
        return build_sampler(
            params,
            prompts,
            self.features,
            num_seqs=num_seqs,
            vocab_size=self.model.config.vocab_size,
            eos_ids=self.eos_ids,
            max_tokens=max_tokens,
            produced=produced,
        )

    def run_mixed(self, batch: Batch) -> Made:
        """See `passes.mixed_pass`."""
        self.state, made = self.programs.run_call(self._mixed_call(batch))
        return made

    def run_decode(self, limits: np.ndarray, until_end: bool) -> Made:
        """See `passes.decode_rows`."""
        self.state, made = self.programs.run_call(self._decode_call(limits, until_end))
        return made

    def _mixed_call(self, batch: Batch) -> Call:
        options = {"num_logprobs": self.features.num_logprobs, "implementation": self.implementation}
        return Call(passes.mixed_pass, (self.model, self.state, batch), (1,), options)

    def _decode_call(self, limits: np.ndarray, until_end: bool) -> Call:
        options = {
            "num_rows": len(limits),
            "num_steps": self.steps_per_round,
            "num_logprobs": self.features.num_logprobs,
            "implementation": self.implementation,
        }
        return Call(passes.decode_rows, (self.model, self.state, limits, np.bool_(until_end)), (1,), options)

    def warm_up(self, token_buckets: Sequence[int], row_buckets: Sequence[int], swaps: bool) -> None:
        """Compiles every program that a pass of these sizes, or a change between passes, needs."""
        starts, none = jnp.zeros(self.config.max_seqs + 1, jnp.int32), jnp.zeros(self.config.max_seqs, bool)
        empty = [jnp.full(size, -1, jnp.int32) for size in token_buckets]
        calls = [self._mixed_call(Batch(tokens, starts, none, none, tokens)) for tokens in empty]
        self.programs.prepare([*calls, *(self._decode_call(np.zeros(rows, np.int32), False) for rows in row_buckets)])
        # The small ones run, on a row that is not there and on the null block.
        nowhere = self.config.max_seqs
        self.place(nowhere, SamplingParams(), 1, [], [], -1)
        self.hold([0])
        self.drop([0])
        self.attach(nowhere, [], 0)
        self.fork(nowhere, nowhere, 0)
        self.release([])
        if self.features.constrained:
            self.set_allowed(nowhere, np.zeros(-(-self.model.config.vocab_size // 32), np.uint32))
        if swaps:
            for size in SWAP_BUCKETS[: SWAP_BUCKETS.index(bucket(self.config.max_blocks_per_seq, SWAP_BUCKETS)) + 1]:
                self.swap_in(0, self.swap_out([0] * size, 0))

    def place(self, row: int, params: SamplingParams, max_tokens: int, prompt: Sequence[int], produced: Sequence[int], token: int) -> None:
        """Gives a row to a sequence that has produced some tokens before; `token` is the one to decode from, or -1."""
        sampler = self._sampler([params], [prompt], [produced], 1, [max_tokens])
        history = None
        if self.state.history is not None:
            history = np.zeros(self.state.history.shape[1], np.int32)
            tokens = [*prompt, *produced][: history.size]
            history[: len(tokens)] = tokens
        numbers = (np.int32(len(produced)), np.int32(token))
        self.state = self.programs.run(passes.place, self.state, np.int32(row), sampler, *numbers, history, donate=(0,))

    def set_allowed(self, row: int, allowed: np.ndarray) -> None:
        """Sets the tokens that a row may choose next, as bits (see `sampling.Constraint`)."""
        sampler = self.programs.run(_allow, self.state.sampler, np.int32(row), allowed, donate=(0,))
        self.state = self.state._replace(sampler=sampler)

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each block: the index has it too."""
        self._change_references(block_pool.hold, blocks)

    def drop(self, blocks: Sequence[int]) -> None:
        """Takes a reference from each block: the index lets it go."""
        self._change_references(block_pool.drop, blocks)

    def _change_references(self, change: Callable[[BlockPool, Array], BlockPool], blocks: Sequence[int]) -> None:
        for start in range(0, len(blocks), _REFERENCES):
            some = np.zeros(_REFERENCES, np.int32)
            part = blocks[start : start + _REFERENCES]
            some[: len(part)] = part
            pool = self.programs.run(change, self.state.cache.pool, some, donate=(0,))
            self._set(self.state.cache._replace(pool=pool))

    def release(self, rows: Sequence[int]) -> None:
        """Ends the sequences of rows."""
        mask = np.zeros(self.config.max_seqs, bool)
        mask[list(rows)] = True
        self._change_table(_release, mask)
        self.state = self.state._replace(active=self.programs.run(_without, self.state.active, mask))

    def attach(self, row: int, blocks: Sequence[int], length: int) -> Bool[Array, ""]:
        """Puts a prefix into an empty row; see `jaxpage.attach`."""
        entries = np.zeros(self.config.max_blocks_per_seq, np.int32)
        entries[: len(blocks)] = blocks
        return self._change_table(_attach, np.int32(row), entries, np.int32(length))

    def fork(self, source: int, target: int, length: int) -> None:
        """Makes an empty row a second owner of another row's first tokens."""
        self._change_table(_fork, np.int32(source), np.int32(target), np.int32(length))

    def swap_nbytes(self, num_blocks: int) -> int:
        """Host memory that so many blocks take when they are swapped out."""
        return bucket(num_blocks, SWAP_BUCKETS) * sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(self.state.cache.storage))

    def swap_out(self, blocks: list[int], length: int) -> Swapped:
        """Copies blocks to the host; waits for them."""
        return swap_out(self.programs, self.state.cache.storage, blocks, length)

    def swap_in(self, row: int, swapped: Swapped) -> list[int]:
        """Puts swapped blocks into an empty row; waits for the ids of its new blocks."""
        lengths = np.zeros(self.config.max_seqs, np.int32)
        lengths[row] = swapped.length
        cache, ok = self.programs.run(_reserve, self.state.cache, lengths, donate=(0,))
        blocks = np.asarray(cache.table.blocks)[row, : -(-swapped.length // self.config.block_size)].tolist()
        if not np.asarray(ok)[row]:
            raise RuntimeError("the pool lacks blocks that the host's account has")
        self._set(cache._replace(storage=swap_in(self.programs, cache.storage, swapped, blocks)))
        return blocks

    def _set(self, cache: KVCache) -> None:
        self.state = self.state._replace(cache=cache)

    def _change_table(self, change: Callable, *args: np.ndarray | np.generic) -> Bool[Array, ""]:
        """Runs an operation that changes pool and table only. The storage, of which one layer tells the block size, stays where it is."""
        storage, pool, table = self.state.cache
        pool, table, ok = self.programs.run(change, pool, table, storage[0], *args, donate=(0, 1))
        self._set(KVCache(storage, pool, table))
        return ok


Tables = tuple[BlockPool, BlockTable, Bool[Array, ""]]


def _release(pool: BlockPool, table: BlockTable, storage: layout.Storage, mask: Bool[Array, " S"]) -> Tables:
    _, pool, table = release(KVCache((storage,), pool, table), mask)
    return pool, table, jnp.bool_(True)


def _attach(
    pool: BlockPool, table: BlockTable, storage: layout.Storage, row: Int[Array, ""], blocks: Int[Array, " M"], length: Int[Array, ""]
) -> Tables:
    (_, pool, table), ok = attach(KVCache((storage,), pool, table), row, blocks, length)
    return pool, table, ok


def _fork(
    pool: BlockPool, table: BlockTable, storage: layout.Storage, source: Int[Array, ""], target: Int[Array, ""], length: Int[Array, ""]
) -> Tables:
    cache = fork(KVCache((storage,), pool, table), source[None], target[None])
    _, pool, table = truncate(cache, cache.table.lengths.at[target].set(length))
    return pool, table, jnp.bool_(True)


def _reserve(cache: KVCache, lengths: Int[Array, " S"]) -> tuple[KVCache, Bool[Array, " S"]]:
    return reserve(cache, lengths)


def _without(active: Bool[Array, " S"], mask: Bool[Array, " S"]) -> Bool[Array, " S"]:
    return active & ~mask


def _allow(sampler: Sampler, row: Int[Array, ""], allowed: Array) -> Sampler:
    assert sampler.constraint is not None
    applies, words = sampler.constraint
    return sampler._replace(constraint=sampler.constraint._replace(applies=applies.at[row].set(True), allowed=words.at[row].set(allowed)))
