"""Users of one document who come at once, through the engine: memory, tokens computed, and how long they wait."""

import functools
import hashlib
import time
from typing import Literal

import numpy as np

from experiments.decode_step import decoder
from experiments.experiment import Row
from jaxpage import SamplingParams
from jaxpage.engine import Engine, EngineOptions
from jaxpage.fetch import fetch_model
from jaxpage.programs import Programs
from jaxpage.sampler_arrays import Features
from models import Decoder, load_model

__all__ = ["ModelName", "serve_users"]

ModelName = Literal["none", "tiny", "smollm2-135m"]

_OUTPUT = SamplingParams(max_tokens=24, ignore_eos=True)  # more than a round, so that memory is seen while they run
_BLOCK_SIZE = 16


@functools.lru_cache(maxsize=1)
def _model(name: str) -> Decoder:
    return decoder(name, "float32", 0) if name == "tiny" else load_model(fetch_model(name), dtype="float32").decoder


@functools.lru_cache(maxsize=1)
def _programs(name: str, length: int, users: int) -> Programs:
    """Compiled programs that all runs share, so that none compiles."""
    programs = Programs()
    engine = _engine(name, length, users, "none", programs)
    engine.warmup()
    engine.generate([[0] * length], _OUTPUT)  # the transfers of a first run
    return programs


def _engine(name: str, length: int, users: int, index: str, programs: Programs) -> Engine:
    longest = length + _OUTPUT.max_tokens
    options = EngineOptions(
        num_blocks=users * -(-longest // _BLOCK_SIZE) + users + 1,
        block_size=_BLOCK_SIZE,
        max_seqs=users,
        max_length=longest,
        prefix_index=index,
        features=Features.of([_OUTPUT], ()),
    )
    return Engine(_model(name), options, programs=programs)


def serve_users(name: str, document_tokens: int, own_tokens: int, users: int, most_users: int, index: str, seed: int) -> Row:
    """Serves users of one document, who all come at once.

    Args:
      name: the model.
      document_tokens: tokens that all prompts begin with.
      own_tokens: tokens that each adds.
      users: how many there are.
      most_users: how many the engine is made for; programs are compiled once for all numbers of users.
      index: "radix", "hash", or "none" to share nothing.
      seed: of the tokens.

    Returns:
      Memory at its fullest while they run, tokens, seconds, and a digest of all output tokens.
    """
    length = document_tokens + own_tokens
    engine = _engine(name, length, most_users, index, _programs(name, length, most_users))
    rng = np.random.default_rng(seed)
    document = rng.integers(0, 4096, document_tokens).tolist()
    start = time.perf_counter()
    for _ in range(users):
        engine.submit([*document, *rng.integers(0, 4096, own_tokens).tolist()], _OUTPUT)
    firsts: dict[int, float] = {}
    outputs: dict[int, tuple[int, ...]] = {}
    fullest = engine.usage()
    while engine.unfinished:
        for update in engine.step():
            firsts.setdefault(update.prompt_index, time.perf_counter() - start)
            if update.completion is not None:
                outputs[update.prompt_index] = update.completion.token_ids
        if engine.unfinished:
            fullest = max(fullest, engine.usage(), key=lambda usage: usage.blocks_used)
    return {
        "blocks_used": fullest.blocks_used,
        "kv_tokens": fullest.slots_used,
        "computed_tokens": engine.stats().prompt_tokens,
        "last_first_token_s": max(firsts.values()),
        "mean_first_token_s": sum(firsts.values()) / users,
        "outputs": hashlib.sha256(repr(sorted(outputs.items())).encode()).hexdigest()[:12],
    }
