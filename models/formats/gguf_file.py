"""Opening a GGUF file: its metadata and tensors, with errors that name the file."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from models.formats.common import Tensor

__all__ = ["GGUF_TENSOR_TYPES", "GGUFFile", "Section", "read_gguf"]

GGUF_TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS"),
)
"""Tensor types that can be dequantised."""


class GGUFFile(NamedTuple):
    """What a GGUF file holds."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


class Section(dict[str, Any]):
    """The metadata keys with one prefix, without it. A missing key is named in full by its KeyError."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        super().__init__({key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)})
        self.prefix = prefix

    def __missing__(self, key: str) -> Any:
        raise KeyError(self.prefix + key)


class _Reader(gguf.GGUFReader):
    """The library's reader on a plain view of the mapped file: it takes a million small slices, and slices of a memmap are slow."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = mapped.view(np.ndarray)


def read_gguf(file: Path) -> GGUFFile:
    """Reads the metadata and lists the tensors of a GGUF file.

    Raises:
      ValueError: the file is truncated, corrupt, one part of several, or holds a tensor type that is not supported.
    """
    try:
        # A broken header can hold any size; NumPy's complaint about one is part of the error below.
        with np.errstate(all="ignore"):
            reader = _Reader(file)
            metadata = {name: field.contents() for name, field in reader.fields.items()}
    # The reader checks nothing: a broken file shows as a value, index or key that makes no sense.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{file} is truncated or not a GGUF file ({type(error).__name__}: {error}): fetch it again") from error
    if reader.byte_order != "I":
        raise ValueError(f"{file} is written in the other byte order, which is not supported: convert it on this kind of machine")
    if metadata.get("split.count", 0) > 1:
        raise ValueError(f"{file} is one of {metadata['split.count']} parts, which is not supported: merge them with llama-gguf-split")
    return GGUFFile(metadata, {tensor.name: _tensor(file, tensor) for tensor in reader.tensors})


def _tensor(file: Path, tensor: gguf.ReaderTensor) -> Tensor:
    kind = tensor.tensor_type
    if kind.name not in GGUF_TENSOR_TYPES:
        supported = ", ".join(GGUF_TENSOR_TYPES)
        raise ValueError(f"{file}: tensor {tensor.name!r} has type {kind.name}, which is not supported; supported: {supported}")
    # GGUF counts dimensions from the fastest one.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return Tensor(file, shape, partial(gguf.quants.dequantize, tensor.data, kind))
