"""What a model must offer to be decoded; `models.Decoder` does."""

from typing import Protocol

from jaxtyping import Array, Float, Int

from jaxpage.kv_cache import KVCache

__all__ = ["CausalModel", "ModelSizes"]


class ModelSizes(Protocol):
    """The fields of a model's configuration that a cache is sized by."""

    @property
    def vocab_size(self) -> int:
        """Token ids (V)."""

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values (L)."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer (K)."""

    @property
    def head_dim(self) -> int:
        """Width of a head (D)."""

    @property
    def max_length(self) -> int:
        """Most tokens a sequence may hold."""


class CausalModel(Protocol):
    """A causal language model that keeps its keys and values in a paged cache. It is a pytree of arrays."""

    @property
    def config(self) -> ModelSizes:
        """Sizes, static."""

    def step(
        self,
        tokens: Int[Array, " T"],
        cache: KVCache,
        lengths: Int[Array, " S"],
        query_starts: Int[Array, " S+1"] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T hidden"], KVCache]:
        """Hidden states of new tokens, and the cache with them in it."""

    def logits(self, hidden: Float[Array, "T hidden"]) -> Float[Array, "T V"]:
        """Scores of every token id, float32."""
