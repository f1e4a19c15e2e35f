"""An engine's sizes and policies."""

import dataclasses

from jaxpage.buckets import SEQ_BUCKETS, TOKEN_BUCKETS
from jaxpage.config import CacheConfig
from jaxpage.engine.drafts import Speculation
from jaxpage.engine.policy import find_scheduling
from jaxpage.engine.scheduler import SchedulerSizes
from jaxpage.model import ModelSizes
from jaxpage.prefix import HashIndex, RadixIndex
from jaxpage.prefix.eviction import find_policy
from jaxpage.sampler_arrays import Features

__all__ = ["INDEXES", "EngineOptions"]

INDEXES: dict[str, type[HashIndex | RadixIndex] | None] = {"radix": RadixIndex, "hash": HashIndex, "none": None}
"""Prefix indexes by name."""

_PREEMPTION = ("recompute", "swap")
_FEATURES = Features(random=True, truncated=True, penalised=True, num_biases=16, num_stop_ids=8, num_logprobs=8)


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Sizes and policies of an engine.

    Attributes:
      num_blocks: blocks in the pool, the null block included.
      block_size: tokens a block holds.
      max_seqs: most sequences that run at a time.
      max_length: most tokens of a sequence; None: what the model's context holds.
      cache_dtype: dtype of keys and values.
      prefix_index: "radix" finds prefixes to the token, "hash" full blocks, "none" shares nothing.
      eviction: what the index lets go first: lru, lfu, fifo or priority.
      scheduling: who is admitted first: fcfs, longest-prefix or priority.
      max_passed_over: a waiting sequence goes first once so many that came later were admitted before it.
      preemption: who gives way is computed again ("recompute"), or kept in host memory while that lasts ("swap").
      swap_bytes: host memory for preempted sequences.
      spare_share: share of the pool that an admission leaves free for the sequences that run.
      tokens_per_pass: most tokens of a pass that computes prompts; decoding sequences take one each.
      steps_per_round: most tokens of a sequence between two looks of the host.
      features: what requests may use of the sampler. What is left out costs nothing.
      speculation: guess tokens ahead; None decodes them one by one.
      implementation: attention implementation, see `jaxpage.paged_attention`.
    """

    num_blocks: int
    block_size: int = 16
    max_seqs: int = 16
    max_length: int | None = None
    cache_dtype: str = "float32"
    prefix_index: str = "radix"
    eviction: str = "lru"
    scheduling: str = "fcfs"
    max_passed_over: int = 64
    preemption: str = "recompute"
    swap_bytes: int = 0
    spare_share: float = 0.01
    tokens_per_pass: int = 256
    steps_per_round: int = 16
    features: Features = _FEATURES
    speculation: Speculation | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        limits = {
            "num_blocks": (2, 2**31 - 1),
            "block_size": (1, 2**31 - 1),
            "max_seqs": (1, SEQ_BUCKETS[-1]),
            "max_length": (1, 2**31 - 1),
            "max_passed_over": (0, 2**31 - 1),
            "swap_bytes": (0, 2**63),
            "tokens_per_pass": (self.max_seqs + 1, TOKEN_BUCKETS[-1]),
            "steps_per_round": (1, 4096),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name == "max_length":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
        if not 0 <= self.spare_share < 1:
            raise ValueError(f"spare_share must be from 0 to below 1, got {self.spare_share!r}")
        if self.preemption not in _PREEMPTION:
            raise ValueError(f"preemption must be {' or '.join(_PREEMPTION)}, got {self.preemption!r}")
        if self.prefix_index not in INDEXES:
            raise ValueError(f"no prefix index {self.prefix_index!r}; there are: {', '.join(INDEXES)}")
        find_scheduling(self.scheduling)
        find_policy(self.eviction)

    def longest(self, sizes: ModelSizes) -> int:
        """Most tokens of a sequence of a model."""
        return min(self.max_length or sizes.max_length, sizes.max_length)

    def cache_config(self, sizes: ModelSizes) -> CacheConfig:
        """The cache of a model of some sizes."""
        return CacheConfig(
            num_layers=sizes.num_layers,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_seqs=self.max_seqs,
            max_blocks_per_seq=-(-self.longest(sizes) // self.block_size),
            dtype=self.cache_dtype,
        )

    def scheduler_sizes(self) -> SchedulerSizes:
        """What the scheduler needs of it."""
        return SchedulerSizes(
            rows=(*(size for size in SEQ_BUCKETS if size < self.max_seqs), self.max_seqs),
            tokens=(*(size for size in TOKEN_BUCKETS if size < self.tokens_per_pass), self.tokens_per_pass),
            steps=self.steps_per_round,
            spare_blocks=int(self.spare_share * self.num_blocks),
            max_passed_over=self.max_passed_over,
        )
