"""Which requests may run, how large a cache they need, and how many of them run together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpage.buckets import BLOCK_BUCKETS, ROW_BUCKETS, SEQ_BUCKETS, bucket
from jaxpage.config import CacheConfig
from jaxpage.model import ModelSizes
from jaxpage.sampling_params import SamplingParams

__all__ = ["Request", "admit", "check_requests", "check_sizes", "size_cache"]


class Request(NamedTuple):
    """A prompt to continue. `max_tokens` is what its parameters ask or, if less, what the context leaves."""

    prompt_index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int


def check_sizes(block_size: int, max_seqs: int, num_blocks: int | None) -> None:
    """Raises where no cache can have such sizes.

    Raises:
      ValueError: names the size and what is allowed.
    """
    for name, value in (("block_size", block_size), ("max_seqs", max_seqs)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if max_seqs > SEQ_BUCKETS[-1]:
        raise ValueError(f"max_seqs must be at most {SEQ_BUCKETS[-1]}, got {max_seqs}")
    if num_blocks is not None and num_blocks < 2:
        raise ValueError(f"num_blocks must be at least 2 (the null block included), got {num_blocks}")


def check_requests(prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], sizes: ModelSizes) -> list[Request]:
    """Requests of a batch.

    Raises:
      ValueError: a prompt is empty, longer than the context or holds an id outside the vocabulary; or `params` does not match.
    """
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(many) != len(prompts):
        raise ValueError(f"params must be one SamplingParams or one for each of the {len(prompts)} prompts, got {len(many)}")
    requests = []
    for index, (prompt, one) in enumerate(zip(prompts, many, strict=True)):
        if isinstance(prompt, str) or not isinstance(prompt, Sequence | np.ndarray):
            raise ValueError(f"prompt {index} must be a list of token ids, got {prompt!r}")
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty; a prompt needs at least one token")
        if len(prompt) > sizes.max_length:
            raise ValueError(f"prompt {index} has {len(prompt)} tokens, the model's context holds {sizes.max_length}")
        if not 0 <= min(prompt) <= max(prompt) < sizes.vocab_size:
            raise ValueError(f"prompt {index} holds a token id outside the vocabulary of {sizes.vocab_size}")
        if one.logprobs is not None and one.logprobs > sizes.vocab_size:
            raise ValueError(f"prompt {index} asks for logprobs of {one.logprobs} tokens, the vocabulary has {sizes.vocab_size}")
        for token in [*one.logit_bias, *one.stop_ids]:
            if not 0 <= token < sizes.vocab_size:
                raise ValueError(f"token id {token} in logit_bias or stop_ids is outside the vocabulary of {sizes.vocab_size}")
        # The last token produced is never written to the cache.
        room = sizes.max_length - len(prompt) + 1
        requests.append(Request(index, tuple(map(int, prompt)), one, min(one.max_tokens, room)))
    return requests


def size_cache(
    requests: Sequence[Request], sizes: ModelSizes, *, block_size: int, num_blocks: int | None, max_seqs: int, dtype: str
) -> CacheConfig:
    """A cache for the requests, in bucketed shapes.

    Args:
      requests: at least one.
      sizes: the model's.
      block_size: tokens a block holds.
      num_blocks: blocks in the pool, the null block included; None: as many as `max_seqs` requests may come to need.
      max_seqs: most sequences at a time.
      dtype: of keys and values.

    Raises:
      ValueError: `num_blocks` is too small for some prompt; says how many it needs.
    """
    for request in requests:
        need = _blocks(len(request.prompt), block_size) + 1
        if num_blocks is not None and need > num_blocks:
            raise ValueError(
                f"prompt {request.prompt_index} needs {need} blocks of {block_size} tokens (the null block included), "
                f"the pool has {num_blocks}"
            )
    together = min(len(requests), max_seqs)
    blocks = sorted(_blocks(len(request.prompt) + request.max_tokens - 1, block_size) for request in requests)
    return CacheConfig(
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        num_blocks=num_blocks if num_blocks is not None else bucket(sum(blocks[-together:]) + 1, BLOCK_BUCKETS),
        block_size=block_size,
        max_seqs=bucket(together, SEQ_BUCKETS),
        max_blocks_per_seq=bucket(blocks[-1], ROW_BUCKETS),
        dtype=dtype,
    )


def admit(requests: Sequence[Request], config: CacheConfig, max_seqs: int) -> list[Request]:
    """The next requests, in order and `max_seqs` at most, whose prompts fit the empty pool together."""
    batch: list[Request] = []
    free = config.num_blocks - 1
    for request in requests[:max_seqs]:
        free -= _blocks(len(request.prompt), config.block_size)
        if free < 0:
            break
        batch.append(request)
    return batch


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
