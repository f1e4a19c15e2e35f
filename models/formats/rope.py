"""Scaling of the rotary frequencies, as one divisor for each frequency."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["linear_factors", "rope_factors"]

Factors = tuple[float, ...]


def linear_factors(factor: float, head_dim: int) -> Factors | None:
    """Position interpolation: every frequency is divided by the same factor (Chen et al., 2023)."""
    return None if factor == 1.0 else (float(factor),) * (head_dim // 2)


def _llama3_factors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> Factors:
    """Llama 3.1: long waves are stretched by `factor`, short ones stay, those in between are blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    factors = []
    for index in range(0, head_dim, 2):
        turns = context * theta ** (-index / head_dim) / (2 * math.pi)  # turns within the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)  # 1: a short wave, kept as it is
        factors.append(1.0 / (kept + (1.0 - kept) / factor))
    return tuple(factors)


_KINDS = {
    "default": lambda scaling, head_dim, theta: None,
    "linear": lambda scaling, head_dim, theta: linear_factors(scaling["factor"], head_dim),
    "llama3": _llama3_factors,
}


def rope_factors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> Factors | None:
    """Reads a Hugging Face `rope_scaling` or `rope_parameters` entry into `ModelConfig.rope_factors`.

    Raises:
      ValueError: the kind of scaling is not supported, or one of its values is missing.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    try:
        return _KINDS[kind](scaling, head_dim, theta)
    except KeyError as error:
        raise ValueError(f"rope type {kind!r} needs {error.args[0]!r}, which is missing") from error
