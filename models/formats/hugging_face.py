"""Hugging Face folders: `config.json`, safetensors in one file or in shards, and the tokenizer files."""

from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from models.formats.common import LoadedModel, Tensor, fill_decoder, model_dtype
from models.formats.hugging_face_config import read_config
from models.formats.json_file import read_json
from models.tokenizer import Tokenizer

__all__ = ["detect", "load"]

_NAMES = {
    "embed": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "attention": "self_attn",
    "feed_forward": "mlp",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}
_TENSOR_TYPES = ("F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def detect(source: Path) -> bool:
    """Whether this is a folder with a Hugging Face configuration."""
    return (source / "config.json").is_file()


def load(source: Path, dtype: str) -> LoadedModel:
    """Loads such a folder.

    Raises:
      FileNotFoundError: a file that is needed is not there.
      ValueError: a file is broken or holds something that is not supported; the message names both.
    """
    wanted = model_dtype(dtype)
    config = read_config(source / "config.json")
    tokenizer = Tokenizer.load(source)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(source):
        tensors.update(_tensors(file))
    return LoadedModel(fill_decoder(config, tensors, _NAMES, wanted, source), tokenizer, source.resolve().name)


def _weight_files(source: Path) -> list[Path]:
    if (source / _SINGLE).is_file():
        return [source / _SINGLE]
    if not (source / _INDEX).is_file():
        raise FileNotFoundError(f"{source} holds no weights: expected {_SINGLE}, or {_INDEX} with its shards")
    shards = read_json(source / _INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{source / _INDEX}: 'weight_map' must say in which file each tensor is")
    files = [source / name for name in sorted(set(shards.values()))]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist, but {_INDEX} names it: fetch the missing shard")
    return files


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        content = safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or not a safetensors file ({error}): fetch it again") from error
    tensors = {}
    for name in content.keys():  # noqa: SIM118  (the handle has keys() but cannot be iterated)
        part = content.get_slice(name)
        if part.get_dtype() not in _TENSOR_TYPES:
            supported = ", ".join(_TENSOR_TYPES)
            raise ValueError(f"{file}: tensor {name!r} has type {part.get_dtype()}, which is not supported; supported: {supported}")
        tensors[name] = Tensor(file, tuple(part.get_shape()), partial[np.ndarray](content.get_tensor, name))
    return tensors
