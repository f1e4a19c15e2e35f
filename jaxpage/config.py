"""Sizes of a KV cache."""

import dataclasses

import jax.numpy as jnp

__all__ = ["CacheConfig"]

_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
_SCALES = ("token", "tensor")
_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Sizes of a paged KV cache. Frozen and hashable, so it may be a static argument.

    Attributes:
      num_layers: layers that keep keys and values (L).
      num_kv_heads: key and value heads of a layer (K).
      head_dim: width of a head (D).
      num_blocks: blocks in the pool, the null block included (N).
      block_size: tokens a block holds (B).
      max_seqs: sequences the table has rows for (S).
      max_blocks_per_seq: blocks one sequence may own (M).
      dtype: "float32", "bfloat16" or "float16"; where the backend's layout has them also "int8" and "float8_e4m3fn".
      scales: of 8-bit dtypes. "token": one for each token and head, kept in the blocks. "tensor": none are kept, see `kv_scales` of
        `paged_attention`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    max_seqs: int
    max_blocks_per_seq: int
    dtype: str = "float32"
    scales: str = "token"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("dtype", "scales") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")
        if self.num_blocks < 2:
            raise ValueError("num_blocks must be at least 2: block 0 is the null block and is never handed out")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if self.scales not in _SCALES:
            raise ValueError(f"scales must be one of {', '.join(_SCALES)}, got {self.scales!r}")
        rows = self.num_blocks * self.block_size * self.num_kv_heads
        if rows > _INT32:
            raise ValueError(
                f"num_blocks * block_size * num_kv_heads is {rows}, beyond what int32 can number ({_INT32}); use fewer or smaller blocks"
            )

    @classmethod
    def contiguous(
        cls, *, num_layers: int, num_kv_heads: int, head_dim: int, max_seqs: int, max_length: int, dtype: str = "float32"
    ) -> "CacheConfig":
        """A cache that reserves `max_length` tokens for each of `max_seqs` sequences: one block a sequence.

        This is the naive system that paging is compared with. It has the same operations and runs through the same decoder.
        """
        return cls(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=max_seqs + 1,
            block_size=max_length,
            max_seqs=max_seqs,
            max_blocks_per_seq=1,
            dtype=dtype,
        )

    @property
    def scaled(self) -> bool:
        """Whether blocks hold a scale for each token and head."""
        return jnp.dtype(self.dtype).itemsize == 1 and self.scales == "token"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values, and of their scales, one token takes over all layers, without the padding of a backend's layout."""
        head = self.head_dim * jnp.dtype(self.dtype).itemsize + 2 * self.scaled
        return 2 * self.num_layers * self.num_kv_heads * head

    @property
    def pool_bytes(self) -> int:
        """Bytes of keys and values of the whole pool."""
        return self.num_blocks * self.block_size * self.bytes_per_token
