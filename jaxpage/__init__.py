"""jaxpage: paged attention in JAX, from block pools to a jitted decode loop."""

from jaxpage.attention import IMPLEMENTATIONS, debug_checks, interpret_kernels, paged_attention, query_positions, supports
from jaxpage.beam import Hypothesis, beam_search
from jaxpage.block_pool import BlockPool
from jaxpage.block_table import BlockTable
from jaxpage.completion import Completion, TokenLogprob
from jaxpage.config import CacheConfig
from jaxpage.decode import LENGTH, RUNNING, STOP, Decoded, DecodeState, decode_loop, decode_step, init_state, prefill, starved
from jaxpage.engine import Engine, EngineOptions, EngineStats, Speculation
from jaxpage.generate import BatchDecoder, Stats, Update, generate
from jaxpage.inspect import Usage, check_cache, usage
from jaxpage.kv_cache import KVCache, attach, fork, init_cache, release, reserve, truncate
from jaxpage.model import CausalModel
from jaxpage.sampler_arrays import Features, build_sampler
from jaxpage.sampling import Sampler, sample
from jaxpage.sampling_params import SamplingParams

__all__ = [
    "IMPLEMENTATIONS",
    "LENGTH",
    "RUNNING",
    "STOP",
    "BatchDecoder",
    "BlockPool",
    "BlockTable",
    "CacheConfig",
    "CausalModel",
    "Completion",
    "DecodeState",
    "Decoded",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "Features",
    "Hypothesis",
    "KVCache",
    "Sampler",
    "SamplingParams",
    "Speculation",
    "Stats",
    "TokenLogprob",
    "Update",
    "Usage",
    "attach",
    "beam_search",
    "build_sampler",
    "check_cache",
    "debug_checks",
    "decode_loop",
    "decode_step",
    "fork",
    "generate",
    "init_cache",
    "init_state",
    "interpret_kernels",
    "paged_attention",
    "prefill",
    "query_positions",
    "release",
    "reserve",
    "sample",
    "starved",
    "supports",
    "truncate",
    "usage",
]
