"""What every checkpoint format shares: named tensors go in, a filled decoder comes out."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import ModelConfig
from models.decoder import Decoder
from models.tokenizer import Tokenizer

__all__ = ["LoadedModel", "Tensor", "abstract_decoder", "fill_decoder", "model_dtype"]

_DTYPES = {"float32": jnp.dtype(jnp.float32), "bfloat16": jnp.dtype(jnp.bfloat16)}

# Projections that the decoder keeps in one matrix and checkpoints keep apart: the rows of these, one after another.
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# Rotary frequencies that old checkpoints carry along. They follow from the configuration.
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")


class LoadedModel(NamedTuple):
    """A decoder with its weights, its tokenizer and what it is called."""

    decoder: Decoder
    tokenizer: Tokenizer
    name: str


class Tensor(NamedTuple):
    """One tensor of a checkpoint, read from its file only when it is needed."""

    file: Path
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def model_dtype(dtype: str) -> jnp.dtype:
    """The dtype of this name.

    Raises:
      ValueError: it is not one that a decoder can hold.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    return _DTYPES[dtype]


def abstract_decoder(config: ModelConfig, dtype: jnp.dtype) -> tuple[nnx.GraphDef, dict[tuple, nnx.Variable]]:
    """The structure of a decoder and, by path, its parameters without values; no weight is ever drawn."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))))
    return graph, dict(nnx.to_flat_state(state))


def fill_decoder(config: ModelConfig, tensors: Mapping[str, Tensor], names: Mapping[str, str], dtype: jnp.dtype, source: Path) -> Decoder:
    """Builds a decoder from the tensors of a checkpoint.

    Args:
      config: sizes and switches.
      tensors: every tensor of the checkpoint under the name it has there.
      names: what the checkpoint calls each step of a parameter's path; a step that is not listed keeps its name, one mapped to the
        empty string is left out.
      dtype: dtype of the weights.
      source: the file or folder, for errors.

    Raises:
      ValueError: a tensor is missing, left over or of the wrong shape.
    """
    graph, params = abstract_decoder(config, dtype)
    left = {name: tensor for name, tensor in tensors.items() if not _HARMLESS.search(name)}
    plan = {path: _take_parts(path, param.get_raw_value().shape, config, left, names, source) for path, param in params.items()}
    if config.tie_embeddings:
        _drop_tied_head(left, tensors, names)
    if left:
        name, tensor = next(iter(left.items()))
        raise ValueError(f"{tensor.file}: {len(left)} tensors have no place in this model, the first is {name!r}")
    filled = {path: param.replace(_stack(plan[path], dtype)) for path, param in params.items()}
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _take_parts(
    path: tuple, shape: tuple[int, ...], config: ModelConfig, left: dict[str, Tensor], names: Mapping[str, str], source: Path
) -> list[Tensor]:
    """Takes the tensors that make up one parameter out of `left`, with their shapes checked."""
    *module, last, leaf = path
    head, kv, wide = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    rows = {"q_proj": head, "k_proj": kv, "v_proj": kv, "gate_proj": wide, "up_proj": wide}
    parts = []
    for part in _STACKED.get(last, (last,)):
        name = _checkpoint_name((*module, part, leaf), names)
        if name not in left:
            raise ValueError(f"{source}: tensor {name!r} is missing")
        tensor = left.pop(name)
        wanted = (rows.get(part, shape[0]), *shape[1:])
        if tensor.shape != wanted:
            raise ValueError(f"{tensor.file}: tensor {name!r} has shape {tensor.shape}, the configuration asks for {wanted}")
        parts.append(tensor)
    return parts


def _checkpoint_name(path: tuple, names: Mapping[str, str]) -> str:
    steps = [names.get(str(step), str(step)) for step in path]
    return ".".join(step for step in steps if step)


def _drop_tied_head(left: dict[str, Tensor], tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Some checkpoints write a tied output projection out as well; it may go only if it says the same."""
    name = _checkpoint_name(("lm_head", "weight"), names)
    embedding = tensors[_checkpoint_name(("embed", "weight"), names)]
    head = left.pop(name, None)
    if head is not None and not (head.shape == embedding.shape and np.array_equal(head.read(), embedding.read())):
        raise ValueError(f"{head.file}: tensor {name!r} differs from the embedding that the configuration ties it to")


def _stack(parts: list[Tensor], dtype: jnp.dtype) -> jax.Array:
    # Concatenating copies even a single part: the weights must not alias a mapped file.
    return jnp.asarray(np.concatenate([part.read() for part in parts]).astype(dtype, copy=False))
