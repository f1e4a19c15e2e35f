"""Rows of `engine_bench`: decoding with drafts by prompt lookup against plain decoding, on repetitive text and with a real model."""

import functools
import statistics
import time
from typing import TYPE_CHECKING

from experiments.experiment import Point, Row
from experiments.measure import paired
from jaxpage import SamplingParams
from jaxpage.engine import Engine, EngineOptions, Speculation
from jaxpage.fetch import fetch_model
from jaxpage.programs import Programs
from jaxpage.sampler_arrays import Features
from models import LoadedModel, load_model

if TYPE_CHECKING:
    from experiments.engine_bench import EngineBench

__all__ = ["speculation_row"]

_TEXTS = (
    "Monday: bread, milk, eggs.\nTuesday: bread, milk, eggs.\nWednesday: bread, milk, eggs.\n",
    "The quick brown fox jumps over the lazy dog. " * 4,
    '{"name": "Ann", "city": "Oslo"}\n{"name": "Ben", "city": "Oslo"}\n{"name": "Cid", "city": "Oslo"}\n',
    "def add_one(x):\n    return x + 1\n\ndef add_two(x):\n    return x + 2\n\ndef add_three(x):\n    return x + 3\n\n",
)


@functools.lru_cache(maxsize=1)
def _model(name: str, dtype: str) -> LoadedModel:
    return load_model(fetch_model(name), dtype=dtype)


@functools.lru_cache(maxsize=1)
def _programs(config: "EngineBench") -> Programs:
    return Programs()


def _engine(config: "EngineBench", loaded: LoadedModel, seqs: int, longest: int, drafts: int) -> Engine:
    options = EngineOptions(
        num_blocks=seqs * (-(-longest // config.block_size) + 1) + 1,
        block_size=config.block_size,
        max_seqs=seqs,
        max_length=longest,
        cache_dtype=config.dtype,
        prefix_index="none",
        tokens_per_pass=config.tokens_per_pass,
        features=Features.of([SamplingParams(ignore_eos=True)], ()),
        speculation=Speculation(num_drafts=drafts) if drafts else None,
    )
    engine = Engine(loaded.decoder, options, programs=_programs(config))
    engine.warmup()
    return engine


def speculation_row(config: "EngineBench", point: Point) -> Row:
    """Whole greedy generations, prompts included, in turn. Where the model cannot be fetched the row only says why."""
    try:
        loaded = _model(config.speculation, config.dtype)
    except OSError as error:
        return {"left_out": " ".join(str(error).split())}
    batch = point["batch"]
    prompts = [loaded.tokenizer.encode(_TEXTS[number % len(_TEXTS)]) for number in range(batch)]
    longest = max(map(len, prompts)) + config.speculation_tokens
    params = SamplingParams(max_tokens=config.speculation_tokens, ignore_eos=True)
    outputs: dict[int, list[tuple[int, ...]]] = {}
    engines = {drafts: _engine(config, loaded, batch, longest, drafts) for drafts in (0, config.num_drafts)}

    def seconds(drafts: int) -> float:
        start = time.perf_counter()
        outputs[drafts] = [each.token_ids for each in engines[drafts].generate(prompts, params)]
        return time.perf_counter() - start

    plain, lookup, ratios = paired(lambda: seconds(0), lambda: seconds(config.num_drafts), config.repeats)
    stats = engines[config.num_drafts].stats()
    runs = config.repeats + 1
    decoded = stats.tokens - runs * batch  # the first token of each comes with the prompt
    return {
        "new_tokens": config.speculation_tokens,
        "num_drafts": config.num_drafts,
        "plain_tokens_per_s": batch * config.speculation_tokens / plain,
        "lookup_tokens_per_s": batch * config.speculation_tokens / lookup,
        "speedup": 1 / statistics.median(ratios),
        "kept_percent": 100 * stats.kept_drafts / max(stats.drafted_tokens, 1),
        "kept_per_step": stats.kept_drafts / max(decoded - stats.kept_drafts, 1),
        "same_tokens": outputs[0] == outputs[config.num_drafts],
    }
