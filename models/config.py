"""What a decoder is made of, as data.

A family (Llama, Qwen2, Qwen3) is a set of values of `ModelConfig`, never a subclass: the decoder reads these fields and knows no
family names.
"""

import dataclasses

__all__ = ["ModelConfig"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder. Frozen and hashable, so it is static under `jax.jit`.

    Attributes:
      vocab_size: number of token ids (V).
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated feed-forward layer.
      num_layers: number of decoder layers (L).
      num_heads: number of query heads (H).
      num_kv_heads: number of key and value heads (K); divides `num_heads`.
      head_dim: width of one head (D).
      max_length: most tokens a sequence may hold (the trained context).
      norm_eps: epsilon of every RMS norm.
      rope_theta: base of the rotary frequencies.
      rope_factors: each rotary frequency is divided by its factor, head_dim / 2 of them; None leaves them as they are. This one form
        holds linear and Llama-3 scaling and the `rope_freqs` tensor of a GGUF file.
      tie_embeddings: the output projection is the embedding table.
      qkv_bias: the query, key and value projections have a bias (Qwen2).
      qk_norm: queries and keys pass an RMS norm over each head before RoPE (Qwen3).
      windows: sliding attention window of each layer in tokens, None for full attention; None for all layers full.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                raise ValueError(f"ModelConfig.{field.name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(f"rope_factors must hold head_dim / 2 = {self.head_dim // 2} values, got {len(self.rope_factors)}")
        if self.windows is not None and len(self.windows) != self.num_layers:
            raise ValueError(f"windows must hold one entry a layer ({self.num_layers}), got {len(self.windows)}")

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer in tokens, or None for full attention."""
        return None if self.windows is None else self.windows[layer]
