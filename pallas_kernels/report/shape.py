"""The sizes that a kernel is built for."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.targets import Target
from pallas_kernels.tpu.schedule import Chunk

__all__ = ["CONTEXT", "NUM_SEQS", "PREFILL_SEQS", "PREFILL_TOKENS", "Build", "Setting", "Shape", "TpuProgram"]

NUM_SEQS, CONTEXT = 64, 4096
"""Sequences of a decode step, and tokens of context of each."""
PREFILL_SEQS, PREFILL_TOKENS = 4, 512
"""Sequences of a prefill step, and the tokens at the end of its context that each computes."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The attention of a model: query heads, kv heads, head dimension, and the tokens a query sees (None: all)."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


class Setting(NamedTuple):
    """A case with its names looked up."""

    target: Target
    shape: Shape
    block_size: int
    kv_dtype: jnp.dtype

    @property
    def table_width(self) -> int:
        """Blocks of a context."""
        return CONTEXT // self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of a pool that holds all contexts, and the null block."""
        return NUM_SEQS * self.table_width + 1

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.shape.head_dim**-0.5

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, without padding."""
        return 2 * self.shape.num_kv_heads * self.shape.head_dim * self.kv_dtype.itemsize

    @property
    def token_flops(self) -> int:
        """FLOPs of one query's attention to one token: a product with the key and one with the value."""
        return 4 * self.shape.num_heads * self.shape.head_dim

    @property
    def scaled(self) -> bool:
        """Whether tokens are stored with a scale for each head."""
        return self.kv_dtype.itemsize == 1

    def table(self, num_seqs: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The block table and the lengths."""
        return jax.ShapeDtypeStruct((num_seqs, self.table_width), jnp.int32), jax.ShapeDtypeStruct((num_seqs,), jnp.int32)

    def queries(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        """Query vectors in the dtype that models compute in."""
        dtype = jnp.float32 if self.kv_dtype == jnp.float32 else jnp.bfloat16
        return jax.ShapeDtypeStruct((num_tokens, self.shape.num_heads, self.shape.head_dim), dtype)


class TpuProgram(NamedTuple):
    """A TPU kernel in the compiler's dump."""

    kernel: str
    """The name of the Pallas kernel."""
    tokens: float = 1
    """Tokens of a chunk; where a chunk holds some of the kv heads only, that share of its tokens."""
    chunk: Chunk | None = None
    """The chunk of an attention kernel; None: a kernel that only moves data, one token a turn of its loop."""


class Build(NamedTuple):
    """A call to compile, and what it moves and computes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    stored_bytes: float
    """Bytes that are copied from memory for each token, padding included."""
    queries: float = 1
    """Queries that a token is multiplied with when it has been copied; 0: a kernel that only moves data."""
    donate: tuple[int, ...] = ()
    program: TpuProgram | None = None
    """How to read what the TPU compiler dumps."""
    matrix_flops: float = 0
    """FLOPs of the matrix units for each token, padding included; on a TPU they are counted in the program."""
