"""GGUF metadata read into a `ModelConfig`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.config import ModelConfig
from models.formats.families import GGUF_FAMILIES, Family
from models.formats.gguf_file import Section
from models.formats.rope import linear_factors

__all__ = ["read_config", "read_family"]

# Settings that would change the result and that the decoder does not have: anything but these values is refused.
_FIXED = {
    "expert_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "attention.sliding_window_pattern": None,
    "attention.scale": None,
    "attention.causal": True,
    "logit_scale": None,
    "residual_scale": None,
    "embedding_scale": None,
}


def read_family(metadata: Mapping[str, Any]) -> Family:
    """The family of the architecture that the metadata names.

    Raises:
      ValueError: it is not supported.
    """
    name = metadata.get("general.architecture")
    if name not in GGUF_FAMILIES:
        raise ValueError(f"architecture {name!r} is not supported; supported: {', '.join(GGUF_FAMILIES)}")
    return GGUF_FAMILIES[name]


def read_config(metadata: Mapping[str, Any], *, tied: bool, rope_divisors: np.ndarray | None) -> ModelConfig:
    """Reads the sizes and switches of a model.

    Args:
      metadata: all keys of the file.
      tied: the file has no output projection.
      rope_divisors: the file's `rope_freqs.weight`.

    Raises:
      KeyError: a key that is needed is missing.
      ValueError: a key says something that is not supported; the message names it.
    """
    family = read_family(metadata)
    prefix = metadata["general.architecture"] + "."
    own = Section(metadata, prefix)
    for key, value in _FIXED.items():
        if own.get(key, value) != value:
            raise ValueError(f"{prefix}{key} = {own[key]!r} is not supported; supported: {value!r}")

    def number(key: str) -> int:
        if not isinstance(own[key], int) or own[key] < 1:
            raise ValueError(f"{prefix}{key} must be one positive integer for all layers, got {own[key]!r}")
        return own[key]

    heads = number("attention.head_count")
    head_dim = own.get("attention.key_length", number("embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise ValueError(f"{prefix}{key} = {own[key]!r} is not supported; supported: the width of a head, {head_dim}")
    layers = number("block_count")
    window = own.get("attention.sliding_window", 0)
    return ModelConfig(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv") if "attention.head_count_kv" in own else heads,
        head_dim=head_dim,
        max_length=number("context_length"),
        norm_eps=own["attention.layer_norm_rms_epsilon"],
        rope_theta=own.get("rope.freq_base", 10000.0),
        rope_factors=_rope_factors(own, head_dim, rope_divisors),
        tie_embeddings=tied,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        windows=(window,) * layers if window else None,
    )


def _rope_factors(own: Mapping[str, Any], head_dim: int, divisors: np.ndarray | None) -> tuple[float, ...] | None:
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"rope scaling type {kind!r} is not supported; supported: none, linear, and a rope_freqs.weight tensor")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0)) if kind == "linear" else 1.0
    linear = linear_factors(factor, head_dim)
    if divisors is None:
        return linear
    return tuple(float(divisor) * factor for divisor in divisors)
