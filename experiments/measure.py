"""What benchmarks share: the sizes of the models they run, and timing in pairs."""

import statistics
import types
from collections.abc import Callable

from models import ModelConfig

__all__ = ["SIZES", "paired"]

_SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_length=8192,
    rope_theta=100000.0,
    tie_embeddings=True,
)

_TINY = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_length=8192,
    tie_embeddings=True,
)

SIZES = types.MappingProxyType({"smollm2-135m": _SMOLLM2_135M, "tiny": _TINY})
"""Models by name; the experiments give them random weights."""


def paired(first: Callable[[], float], second: Callable[[], float], pairs: int) -> tuple[float, float, list[float]]:
    """Medians of both and the sorted ratios second / first of runs taken in turn, after one run of each that does not count."""
    first(), second()
    both = [(first(), second()) for _ in range(pairs)]
    return statistics.median(a for a, _ in both), statistics.median(b for _, b in both), sorted(b / a for a, b in both)
