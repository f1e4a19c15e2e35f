"""The families as data: what makes a Llama, Mistral, Qwen2 or Qwen3 of the one decoder."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["FAMILIES", "GGUF_FAMILIES", "Family"]

Windows = tuple[int | None, ...] | None


class Family(NamedTuple):
    """What a family fixes, whatever its size.

    Attributes:
      architecture: its class in a Hugging Face `config.json`.
      windows: reads the sliding window of each layer from such a file.
      qkv_bias: see `ModelConfig`.
      qk_norm: see `ModelConfig`.
      gguf_interleaves: GGUF files hold the query and key rows of each head with the rotary halves interleaved.
    """

    architecture: str
    windows: Callable[[Mapping[str, Any]], Windows]
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_interleaves: bool = False


def _no_windows(config: Mapping[str, Any]) -> Windows:
    return None


def _every_layer(config: Mapping[str, Any]) -> Windows:
    window = config.get("sliding_window", 4096)
    return None if window is None else (window,) * config["num_hidden_layers"]


def _listed_layers(config: Mapping[str, Any]) -> Windows:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    if window is None:
        return None
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(config["num_hidden_layers"])
    ]
    by_kind = {"sliding_attention": window, "full_attention": None}
    for kind in kinds:
        if kind not in by_kind:
            raise ValueError(f"layer type {kind!r} is not supported; supported: {', '.join(by_kind)}")
    return tuple(by_kind[kind] for kind in kinds)


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _no_windows, gguf_interleaves=True),
    "mistral": Family("MistralForCausalLM", _every_layer),
    "qwen2": Family("Qwen2ForCausalLM", _listed_layers, qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", _listed_layers, qk_norm=True),
}
"""By `model_type` of a Hugging Face `config.json`."""

GGUF_FAMILIES = {name: FAMILIES[name] for name in ("llama", "qwen2", "qwen3")}
"""By `general.architecture` of a GGUF file, where Mistral is written as "llama"."""
