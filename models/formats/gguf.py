"""GGUF files: one file with the sizes, the weights, often quantised, and the tokenizer."""

from pathlib import Path

import numpy as np

from models.formats.common import LoadedModel, Tensor, fill_decoder, model_dtype
from models.formats.gguf_config import read_config, read_family
from models.formats.gguf_file import read_gguf
from models.formats.gguf_tokenizer import read_tokenizer

__all__ = ["detect", "load"]

_NAMES = {
    "embed": "token_embd",
    "layers": "blk",
    "norm": "output_norm",
    "lm_head": "output",
    "attention": "",
    "feed_forward": "",
    "input_norm": "attn_norm",
    "post_norm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_ROPE_DIVISORS = "rope_freqs.weight"


def detect(source: Path) -> bool:
    """Whether this is a GGUF file, or a folder with GGUF files and no safetensors."""
    if source.is_dir():
        return any(source.glob("*.gguf")) and not any(source.glob("*.safetensors"))
    with source.open("rb") as file:
        return source.suffix == ".gguf" or file.read(4) == b"GGUF"


def load(source: Path, dtype: str) -> LoadedModel:
    """Loads a GGUF file, or the only one in a folder.

    Raises:
      ValueError: the file is broken or holds something that is not supported, or the folder has several; the message names it.
    """
    wanted = model_dtype(dtype)
    file = _only_file(source) if source.is_dir() else source
    metadata, tensors = read_gguf(file)
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    try:
        tied = _NAMES["lm_head"] + ".weight" not in tensors
        config = read_config(metadata, tied=tied, rope_divisors=None if divisors is None else divisors.read())
        tokenizer = read_tokenizer(metadata)
    except KeyError as error:
        raise ValueError(f"{file}: metadata key {error.args[0]!r} is missing") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if read_family(metadata).gguf_interleaves:
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        tensors = {name: _halved(name, tensor, heads) for name, tensor in tensors.items()}
    name = metadata.get("general.name") or file.stem
    return LoadedModel(fill_decoder(config, tensors, _NAMES, wanted, file), tokenizer, name)


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{folder} holds {len(files)} GGUF files ({', '.join(file.name for file in files)}): give the path of one")
    return files[0]


def _halved(name: str, tensor: Tensor, heads: dict[str, int]) -> Tensor:
    """Puts the rows of each query or key head in the decoder's order: the first halves of all rotary pairs, then the second halves."""
    count = heads.get(name.split(".")[-2]) if "." in name else None
    if count is None or tensor.shape[0] % (2 * count):  # rows that do not divide fail the check of shapes
        return tensor

    def read() -> np.ndarray:
        rows = tensor.read()
        return rows.reshape(count, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    return tensor._replace(read=read)
