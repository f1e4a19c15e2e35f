"""What an engine is doing and has done, in numbers."""

from typing import NamedTuple

__all__ = ["EngineStats"]


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
