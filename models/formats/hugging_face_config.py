"""A Hugging Face `config.json` read into a `ModelConfig`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.formats.families import FAMILIES, Family
from models.formats.json_file import read_json
from models.formats.rope import rope_factors

__all__ = ["read_config"]

# Settings that would change the result and that the decoder does not have: anything but these values is refused.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def read_config(file: Path) -> ModelConfig:
    """Reads and checks a `config.json`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is broken, or describes something that is not supported; the message names it.
    """
    config = read_json(file)
    try:
        return _model_config(config, _family(config))
    except KeyError as error:
        raise ValueError(f"{file}: {error.args[0]!r} is missing") from error
    # The other errors are values of the wrong kind: a string for a size, a list for the RoPE settings, no heads.
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{file}: {error}") from error


def _family(config: Mapping[str, Any]) -> Family:
    family = FAMILIES.get(config.get("model_type", ""))
    architectures = config.get("architectures") or ([family.architecture] if family else [])
    if family is None or family.architecture not in architectures:
        given = ", ".join(architectures) or config.get("model_type")
        supported = ", ".join(known.architecture for known in FAMILIES.values())
        raise ValueError(f"architecture {given} is not supported; supported: {supported}")
    return family


def _model_config(config: Mapping[str, Any], family: Family) -> ModelConfig:
    # Newer files hold everything about RoPE in one entry, older ones in two.
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    for key, value in _FIXED.items():
        given = config.get(key, rope.get(key))
        if given is not None and given != value:
            raise ValueError(f"{key} = {given!r} is not supported; supported: {value!r} or absent")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope_parameters of each layer type ({', '.join(rope)}) are not supported; supported: one set for all layers")
    theta = float(rope.get("rope_theta") or 10000.0)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    length = config["max_position_embeddings"]
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_length=length,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_factors=rope_factors({"original_max_position_embeddings": length, **rope}, head_dim, theta),
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        windows=family.windows(config),
    )
