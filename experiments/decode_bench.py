"""Decode speed: the paged cache against a contiguous one, and against transformers.

Both caches run the same decoder and the same loop. Cache contents are random: a step's time does not depend on them, and a prefill of
32 x 1024 tokens would take longer than all that is measured. Blocks are handed out in shuffled order. Figures are medians; each ratio is
the median of the ratios of pairs that ran one after the other.
"""

import contextlib
import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpage
from experiments.measure import SMOLLM2_135M, paired
from experiments.peer import transformers_process, transformers_row
from experiments.runner import Row, markdown_table, results_folder, run_rows
from jaxpage.sampler_arrays import Features, build_sampler
from models import Decoder

__all__ = ["DecodeBench", "run"]


@dataclasses.dataclass(frozen=True)
class DecodeBench:
    """Decode step times of the paged cache against a contiguous one, on a decoder of SmolLM2-135M's sizes with random weights."""

    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """Dtypes of weights and cache."""
    batches: tuple[int, ...] = (1, 8, 32)
    """Sequences decoded at a time."""
    contexts: tuple[int, ...] = (128, 1024)
    """Tokens each sequence holds before the first step."""
    block_size: int = 16
    """Tokens a KV block holds."""
    steps: int = 8
    """Decode steps of one run."""
    pairs: int = 7
    """Runs of each side."""
    allocation_seqs: int = 256
    """Sequences of the allocation row; 0 leaves it out."""
    peer: Literal["none", "transformers"] = "none"
    """Also measure transformers' model.generate on the same work."""
    peer_python: str = "python3"
    """The Python that has torch and transformers."""
    peer_batches: tuple[int, ...] = (8, 32)
    """Batches of the peer rows: prompts of 128 tokens, 32 new ones each."""
    seed: int = 0
    """Seed of weights, cache contents and block order."""

    def __post_init__(self) -> None:
        for name in ("dtypes", "batches", "contexts", "block_size", "steps", "pairs"):
            value = getattr(self, name)
            if not value or (name != "dtypes" and min(value if isinstance(value, tuple) else (value,)) < 1):
                raise ValueError(f"{name} must be positive and not empty, got {value!r}")
        if unknown := set(self.dtypes) - {"float32", "bfloat16"}:
            raise ValueError(f"dtypes must be float32 or bfloat16, got {', '.join(unknown)}")


def run(config: DecodeBench) -> None:
    """Measures, writes results/decode_bench/<hash>/ and prints the tables."""
    folder = results_folder("decode_bench", config)
    points = len(config.dtypes) * len(config.batches) * len(config.contexts) + bool(config.allocation_seqs)
    points += len(config.dtypes) * len(config.peer_batches) * (config.peer != "none")
    rows = run_rows(folder, _rows(config), points)
    steps = [row for row in rows if row["row"] == "step"]
    text = f"Machine: {platform.machine()}, {os.cpu_count()} cores; jax {jax.__version__} on {jax.default_backend()}.\n\n"
    text += markdown_table(steps, ("dtype", "batch", "context", "contiguous_step_ms", "paged_step_ms", "ratio", "ratio_low", "ratio_high"))
    for kind in ("allocation", "peer"):
        chosen = [row for row in rows if row["row"] == kind]
        if chosen:
            text += "\n" + markdown_table(chosen, [column for column in chosen[0] if column != "row"])
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {folder}")


def _rows(config: DecodeBench) -> Iterator[Row]:
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(transformers_process(config.peer_python)) if config.peer == "transformers" else None
        for dtype in config.dtypes:
            model = Decoder(SMOLLM2_135M, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(config.seed))
            for batch in config.batches:
                for context in config.contexts:
                    yield _step_row(config, model, dtype, batch, context)
            if config.allocation_seqs and dtype == config.dtypes[0]:
                yield _allocation_row(config, model, dtype)
            if peer is not None:
                for batch in config.peer_batches:
                    yield transformers_row(
                        model, dtype, batch, peer, block_size=config.block_size, pairs=max(3, config.pairs // 3), seed=config.seed
                    )


def _start(config: DecodeBench, dtype: str, batch: int, context: int, *, contiguous: bool) -> jaxpage.DecodeState:
    """A batch whose sequences hold `context` tokens of random keys and values and have room for the steps."""
    length = context + config.steps
    model = SMOLLM2_135M
    sizes: dict[str, Any] = {"num_layers": model.num_layers, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    if contiguous:
        cache_config = jaxpage.CacheConfig.contiguous(**sizes, max_seqs=batch, max_length=length, dtype=dtype)
    else:
        width = -(-length // config.block_size)
        cache_config = jaxpage.CacheConfig(
            **sizes,
            num_blocks=batch * width + 1,
            block_size=config.block_size,
            max_seqs=batch,
            max_blocks_per_seq=width,
            dtype=dtype,
        )
    cache = jaxpage.init_cache(cache_config)
    rng = np.random.default_rng(config.seed)
    order = np.concatenate([rng.permutation(np.arange(1, cache_config.num_blocks)), [0]]).astype(np.int32)
    keys = iter(jax.random.split(jax.random.key(config.seed), 2 * cache_config.num_layers))
    storage = jax.tree.map(lambda array: jax.random.normal(next(keys), array.shape, array.dtype), cache.storage)
    cache = cache._replace(storage=storage, pool=cache.pool._replace(free=jnp.asarray(order)))
    cache, ok = jax.jit(jaxpage.reserve, donate_argnums=0)(cache, jnp.full(batch, context, jnp.int32))
    assert bool(ok.all())
    params = [jaxpage.SamplingParams(max_tokens=2**30, ignore_eos=True)] * batch
    sampler = build_sampler(
        params,
        [[0]] * batch,
        Features.of(params, ()),
        num_seqs=batch,
        vocab_size=SMOLLM2_135M.vocab_size,
        eos_ids=(),
        max_tokens=[2**30] * batch,
    )
    tokens = jnp.asarray(rng.integers(0, SMOLLM2_135M.vocab_size, batch), jnp.int32)
    return jaxpage.init_state(cache, sampler, tokens, jnp.ones(batch, bool))


def _rewound(state: jaxpage.DecodeState, context: int) -> jaxpage.DecodeState:
    """The state as it was before the steps; the blocks of the new tokens go back to the pool."""
    return state._replace(cache=jaxpage.truncate(state.cache, jnp.full_like(state.cache.table.lengths, context)))


def _stepper(config: DecodeBench, model: Decoder, state: jaxpage.DecodeState, context: int, implementation: str) -> Callable[[], float]:
    """A function that decodes the steps and returns the seconds one takes."""
    loop = jax.jit(lambda model, state: jaxpage.decode_loop(model, state, config.steps, implementation=implementation), donate_argnums=1)
    rewind = jax.jit(lambda state: _rewound(state, context), donate_argnums=0)
    held = [state]

    def measure() -> float:
        held[0] = jax.block_until_ready(rewind(held[0]))
        start = time.perf_counter()
        held[0], made, _ = jax.block_until_ready(loop(model, held[0]))
        seconds = (time.perf_counter() - start) / config.steps
        assert bool((made.tokens >= 0).all())
        return seconds

    return measure


def _step_row(config: DecodeBench, model: Decoder, dtype: str, batch: int, context: int) -> Row:
    contiguous, paged = (
        _stepper(config, model, _start(config, dtype, batch, context, contiguous=name == "contiguous"), context, name)
        for name in ("contiguous", "xla")
    )
    dense, ours, ratios = paired(contiguous, paged, config.pairs)
    return {
        "row": "step",
        "dtype": dtype,
        "batch": batch,
        "context": context,
        "contiguous_step_ms": dense * 1e3,
        "paged_step_ms": ours * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
    }


def _allocation_row(config: DecodeBench, model: Decoder, dtype: str) -> Row:
    """Block allocation alone, against whole steps that contain it."""
    seqs, context = config.allocation_seqs, config.contexts[0]
    state = _start(config, dtype, seqs, context, contiguous=False)

    def grow(cache: jaxpage.KVCache) -> jaxpage.KVCache:
        def step(_: Any, cache: jaxpage.KVCache) -> jaxpage.KVCache:
            return jaxpage.reserve(cache, cache.table.lengths + 1, max_new_blocks=1)[0]

        cache = jax.lax.fori_loop(0, config.steps, step, cache)
        return cache

    grow_all = jax.jit(grow, donate_argnums=0)
    rewind = jax.jit(lambda cache: jaxpage.truncate(cache, jnp.full_like(cache.table.lengths, context)), donate_argnums=0)
    held = [state.cache]

    def measure() -> float:
        held[0] = jax.block_until_ready(rewind(held[0]))
        start = time.perf_counter()
        held[0] = jax.block_until_ready(grow_all(held[0]))
        return (time.perf_counter() - start) / config.steps

    measure()
    allocation = statistics.median(measure() for _ in range(config.pairs))
    whole = _stepper(config, model, state._replace(cache=held[0]), context, "xla")
    whole()
    step = statistics.median(whole() for _ in range(3))
    return {
        "row": "allocation",
        "dtype": dtype,
        "seqs": seqs,
        "context": context,
        "allocation_ms": allocation * 1e3,
        "step_ms": step * 1e3,
        "share": allocation / step,
    }
